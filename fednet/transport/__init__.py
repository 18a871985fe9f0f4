"""Sends frames: over ZeroMQ (`zeromq`), within one process (`inproc`), or like a slow link
(`shaped`). Read `base` first, which is what all of them offer.
"""
