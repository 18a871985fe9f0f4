"""What the files of a run hold: a type for the rows of each, and a table of a round's numbers.

    rounds.jsonl  Round     clients.jsonl  Client     wire.jsonl  Wire
    events.jsonl  Event     summary.json   Summary      checkpoint/manifest.json  `manifest`

The server writes these rows and `fednet.report` reads them. A reader ignores a field that it does
not know, and a field that a line leaves out has its default: runs of older and of newer versions
can be read. A number that is to be shown is one line of `METRICS`; the live line of a round, the
page, `compare`, `figure --y` and the trackers all go by that table.
"""

from fednet.records.rows import FILES, JUDGED, Client, Event, Round, Row, Summary, Wire
from fednet.records.table import COSTS, METRICS, Metric, mb, metric, names, percent, said, shown

__all__ = [
    "COSTS",
    "FILES",
    "JUDGED",
    "METRICS",
    "Client",
    "Event",
    "Metric",
    "Round",
    "Row",
    "Summary",
    "Wire",
    "mb",
    "metric",
    "names",
    "percent",
    "said",
    "shown",
]
