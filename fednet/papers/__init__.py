"""Tables of papers: their cells as runs, and what is printed for them.

`PAPER.yaml` describes a paper: FedPDC, FedABC, FedDC, FedDPC and FedRDS, and those that the field
compares with: NIID-Bench, McMahan et al., PFLlib, FedSMU, GAS. `tables` reads them;
`cells("feddpc/table2")` is every combination of method, dataset and heterogeneity, with the whole
configuration of its run and the figures that the paper prints for it. Then `job` (what the command
line asks for), `reproduce`, and `results`.
"""

from fednet.papers.tables import (
    FIELD,
    NAMES,
    Cell,
    caption,
    cells,
    lay,
    no_runs,
    paper,
    table,
    with_results,
)

__all__ = [
    "FIELD",
    "NAMES",
    "Cell",
    "caption",
    "cells",
    "lay",
    "no_runs",
    "paper",
    "table",
    "with_results",
]
