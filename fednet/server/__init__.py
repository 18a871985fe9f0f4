"""The server's process: rounds, exchanges, replies, checkpoints, and its I/O.

Imported by `launch`, `tools` and `cli`; never by `client`, and it imports nothing of
`client`. Read in this order: process, driver, rounds, exchanges, sources, schedule,
aggregation, evaluation, asynchronous, clients, io, inbox, decoding, checkpoint; for planned faults
faults, faulty_protocol.
"""
