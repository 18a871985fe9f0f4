"""The server's process: rounds, replies, checkpoints, books, and the thread that does its I/O.

Imported by `launch`, `tools` and `cli`; never by `client`, and it imports nothing of
`client`. Read in this order: process, synchronous, rounds, round, phases, asking, aggregation,
judging, asynchronous, io, inbox, books, checkpoint.
"""
