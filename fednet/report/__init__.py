"""Reports, from run directories only: never from a live engine.

`finish(run_dir)` is called at the end of a run; the rest are the commands `report`, `compare`,
`figure`, `verify`, `status`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednet.report.read import Run

__all__ = ["finish", "open_run"]


def open_run(path: str | Path) -> Run:
    """Returns the run in that directory. Raises ConfigError if there is none."""
    from fednet.report import read

    return read.open_run(path)


def finish(run_dir: str | Path) -> None:
    """Writes `report.html`. May be called again: the same file comes out."""
    from fednet.report import page, read

    run = read.open_run(run_dir)
    page.write([run], run.dir / "report.html")
