"""`fednet serve DIR`: one long-lived process that works through a queue of runs, and a page about
them.

Imported by `cli`; imports `launch`, `report` and below. Read in this order: queue, runner, http,
page.
"""
