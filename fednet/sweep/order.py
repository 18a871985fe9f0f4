"""The order of the runs in a sweep's folder: the names in its file `.cells/order`. Reports read it,
without what a run needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fednet.files import write_aside


def append(folder: Path, names: Iterable[str]) -> None:
    """Writes these names down, after those of earlier commands."""
    every = dict.fromkeys([*_names(folder), *names])
    (folder / ".cells").mkdir(parents=True, exist_ok=True)
    write_aside(folder / ".cells" / "order", "".join(f"{name}\n" for name in every))


def finished_runs(folder: Path) -> list[Path]:
    """Returns the runs of a sweep's folder that are done, in the order of the sweep: `fednet
    compare` compares the others with the first. Last come those that the file of the order lacks:
    of two commands that begin at once, one may write over the other's names.
    """
    there = sorted(path.parent.name for path in (folder / ".cells").glob("*/config.yaml"))
    names = dict.fromkeys([*_names(folder), *there])
    return [folder / name for name in names if (folder / name / "summary.json").exists()]


def _names(folder: Path) -> list[str]:
    """Returns the names in the file of the order, also those of a damaged one."""
    path = folder / ".cells" / "order"
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []
