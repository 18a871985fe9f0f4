"""Robust aggregation rules, and attacks of malicious clients, as functions of the replies' vectors.

`rules` has the rules, `attacks` what malicious clients send, `stack` replaces a sum in a method's
accumulator. Nothing here does I/O or knows of rounds; the server's aggregation and the client's
task use it. Read it in that order.
"""
