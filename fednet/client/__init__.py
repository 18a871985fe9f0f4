"""A client's process: joining a server, preparing a run, doing its tasks, and how many at once on a
device.

Imported by `launch`, `tools` and `cli`; never by `server`, and it imports nothing of
`server`. Read in this order: join, preparing, loop, stages, worker, evaluation, faults,
slots, packs, round_lines, policy, books.
"""
