"""Tools for a user: is this machine ready (doctor), does my own part keep the rules (check), what
does a method send (costs).

Imported by `cli` alone.
Read in any order.
"""
