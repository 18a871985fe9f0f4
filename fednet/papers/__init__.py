"""Tables of papers: their cells as runs, and what is printed for them.

`PAPER.yaml` describes a paper: FedPDC, FedABC, FedDC, FedDPC and FedRDS, and those that the field
compares with: NIID-Bench, McMahan et al., PFLlib, FedSMU, GAS. `tables` reads them;
`cells("feddpc/table2")` is every combination of method, dataset and heterogeneity, with the whole
configuration of its run and the figures that the paper prints for it. Then `job` (what the command
line asks for) and `mini`, `reproduce`, `results` and `rendering`; `plan`, `search` and `notation`
are what else the command does.
"""

from fednet.papers.tables import FIELD as FIELD
from fednet.papers.tables import NAMES as NAMES
from fednet.papers.tables import Cell as Cell
from fednet.papers.tables import caption as caption
from fednet.papers.tables import cells as cells
from fednet.papers.tables import grid as grid
from fednet.papers.tables import lay as lay
from fednet.papers.tables import no_runs as no_runs
from fednet.papers.tables import paper as paper
from fednet.papers.tables import table as table
from fednet.papers.tables import with_results as with_results
