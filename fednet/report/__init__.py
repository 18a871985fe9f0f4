"""Reports, from run directories only: never from a live engine.

`finish(run_dir)` is what a run ends with; the rest are the commands `report`, `compare`, `figure`,
`verify`, `status`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednet.report.read import Run

__all__ = ["finish", "open_run"]


def open_run(path: str | Path) -> Run:
    """The run in that directory. Raises ConfigError where there is none."""
    from fednet.report import read

    return read.open_run(path)


def finish(run_dir: str | Path, figures: bool = True) -> dict[str, Any]:
    """Completes `summary.json` with the metrics and writes `figures/` and `report.html`. Returns
    the summary.

    May be called again: the same files come out. What the engine wrote into the summary stays.
    """
    from fednet.report import metrics, read

    run = read.open_run(run_dir)
    summary = metrics.complete(run)
    if figures:
        from fednet.report import condensed, page, plots

        condensed.draw(run.dir, run.dir / "figures" / "condensed.png")
        plots.save(run, run.dir / "figures")
        page.write([run], run.dir / "report.html")
    return summary
