"""The server's process: rounds, exchanges, replies, checkpoints, books, and its I/O.

Imported by `launch`, `tools` and `cli`; never by `client`, and it imports nothing of
`client`. Read in this order: process, driver, rounds, exchanges, aggregation,
evaluation, asynchronous, clients, io, inbox, checkpoint.
"""
