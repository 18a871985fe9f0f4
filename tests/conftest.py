"""For all tests: one thread a process, also in the processes that tests start.

Several test processes with several threads each wait for one another in turns on a machine with few
cores.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
