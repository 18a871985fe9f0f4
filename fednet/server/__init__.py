"""The server's process: rounds, phases, spool, checkpoints, accounts, and the thread that does its
I/O.

Imported by `launch`, `bench`, `tools` and `cli`; never by `client`, and it imports nothing of
`client`. Read in this order: process, rounds, phases, io_thread, hearing, spool, checkpoint,
summary.
"""
