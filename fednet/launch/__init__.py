"""Starts a federation: the server alone, a server and workers on this machine, all in one process,
or workers over a Ray cluster.

Imported by `sweep`, `tools`, `papers` and `cli`; imports `server` and `client`.
Read in this order: start, supervisor, in_process, ray.
"""
