"""What server and clients of a run share: the experiment that its configuration describes, its
directory, clients' states, planned faults, links, privacy.

Imported by `server`, `client` and all above them; imports only `algorithms`, `training` and below.
Read in this order: build, trial, rundir, lock, store, selection, candidates, faults,
links, clock, evaluations, privacy, determinism, placement.
"""
