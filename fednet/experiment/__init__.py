"""What both sides of a run share: what is built from its configuration, its directory, faults,
links, privacy, state files.

Imported by `server`, `client` and all above them; imports only `algorithms`, `training` and below.
Read in this order: build, rundir, store, selection, faults, links, clock, privacy, determinism,
placement, memory.
"""
