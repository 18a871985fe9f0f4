"""What the cells of every table make, compared with the list in cells.json.

The list has for each table the number of its cells and a digest: of the configurations of their
runs and of their mini scale, and of the figures that the paper prints for them.
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


def made() -> dict[str, str]:
    """Table -> number and digest of its cells: of all their fields and those of their mini scale.
    The order of cells and of figures counts, that of a configuration's keys does not.
    """
    found = {}
    for table in papers.with_results():
        cells = papers.cells(table)
        fields = [
            {**dataclasses.asdict(one), "figures": list(one.figures.items())}
            for cell in cells
            for one in (cell, mini(cell))
        ]
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        found[table] = f"{len(cells)} {digest[:12]}"
    return found


def test_every_table_makes_the_cells_that_the_list_says():
    assert made() == json.loads(LIST.read_text(encoding="utf-8"))


if __name__ == "__main__":
    LIST.write_text(json.dumps(made(), indent=0) + "\n", encoding="utf-8")
