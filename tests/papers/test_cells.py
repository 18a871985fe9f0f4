"""What every cell of every table makes, compared with the list in cells.json.

The list was written before the tables became YAML. It has a digest for each cell: of the
configuration of its run and of its mini scale, and of the figures that the paper prints for it.
`python -m tests.papers.test_cells` writes it again; a change of a digest is a change of a run, and
needs a reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from fednet import papers
from fednet.papers.mini import mini

LIST = Path(__file__).parent / "cells.json"


def digest(cell: papers.Cell) -> str:
    """A digest of all fields of the cell and its mini scale; the order of figures counts, that of a
    configuration's keys does not.
    """
    fields = [
        {**dataclasses.asdict(one), "figures": list(one.figures.items())}
        for one in (cell, mini(cell))
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def made() -> dict[str, dict[str, str]]:
    """Table -> name of the cell's run -> digest, in the order of the runs."""
    return {t: {c.name: digest(c) for c in papers.cells(t)} for t in papers.with_results()}


def test_every_cell_makes_what_the_list_says():
    listed = json.loads(LIST.read_text(encoding="utf-8"))
    found = made()
    assert {t: list(cells) for t, cells in found.items()} == {
        t: list(cells) for t, cells in listed.items()
    }
    other = [
        f"{table} {name}"
        for table, cells in found.items()
        for name, value in cells.items()
        if value != listed[table][name]
    ]
    assert other == []
    assert sum(map(len, listed.values())) == 631


if __name__ == "__main__":
    LIST.write_text(json.dumps(made(), indent=0) + "\n", encoding="utf-8")
