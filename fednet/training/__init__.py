"""Local training: the one loop of gradient descent with its hooks, what a method's halves are
given, evaluation by counts.

Imported by `algorithms` and all above; imports only `data`, `models`, `wire` and below.
Read in this order: loop, optimizers, hosts, evaluation, scratch, packed, tasks.
"""
