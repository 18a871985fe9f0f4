"""`fednet bench`: what a round, a method, a transport and a pack cost, each beside its floor in the
same run.

Imported by `cli` alone.
Read in this order: command, round, floor, bare, methods, transport, pack.
"""
