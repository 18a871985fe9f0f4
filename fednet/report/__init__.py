"""Reports, from run directories only: never from a live engine.

`finish(run_dir)` is called at the end of a run; the rest are the commands `report`, `compare`,
`figure`, `verify`, `status`.
"""

from __future__ import annotations

from pathlib import Path

from fednet.report.read import open_run

__all__ = ["finish", "open_run"]


def finish(run_dir: str | Path) -> None:
    """Writes `report.html`. May be called again: the same file comes out."""
    from fednet.report import page

    run = open_run(run_dir)
    page.write([run], run.dir / "report.html")
