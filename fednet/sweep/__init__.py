"""Many runs: a grid of settings, shared by as many processes as are started; used by `fednet sweep`
and `fednet reproduce`.

Imported by `papers` and `cli`.
Read in this order: grid, order, cells.
"""
