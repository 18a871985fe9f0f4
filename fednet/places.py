"""Where things are written if nobody says where."""

from __future__ import annotations

import os
from pathlib import Path


def runs() -> Path:
    """The folder of runs: FEDNET_OUT, else `runs` in the working directory."""
    return Path(os.environ.get("FEDNET_OUT") or "runs")
