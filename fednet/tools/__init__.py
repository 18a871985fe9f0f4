"""Tools for users: whether this machine is ready (doctor), whether their own parts work (check),
and what a method sends (costs).

Imported by `cli` alone.
"""
