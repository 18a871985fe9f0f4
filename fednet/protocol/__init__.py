"""Who says what when, at both ends of a connection: state machines without I/O, which are told the
time. `server` and `client` are the two; who runs them is in `fednet.server` and `fednet.client`.

Read `server`, then `workers` and `tasks`; then `client`. `transfers` is shared by both.
"""
