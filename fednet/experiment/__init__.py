"""What server and clients of a run share: the experiment that its configuration describes, its
directory, clients' states, links, privacy. What only one of them uses is in its own folder.

Imported by `server`, `client` and all above them; imports only `algorithms`, `training` and below.
Read in this order: build, trial, rundir, lock, store, selection, links, evaluations, privacy,
determinism, placement.
"""
