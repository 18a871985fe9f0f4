"""The server's process: rounds, phases, spool, checkpoints, accounts, and the thread that does its
I/O.

Imported by `launch`, `tools` and `cli`; never by `client`, and it imports nothing of
`client`. Read in this order: process, rounds, round, phases, io_thread, peers, spool,
checkpoint, results.
"""
