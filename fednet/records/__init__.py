"""The files of a run: a type for the rows of each, how to read them, and a table of the numbers of
a round.

    rounds.jsonl   Round      events.jsonl              Event
    clients.jsonl  Client     summary.json              Summary
    wire.jsonl     Wire       checkpoint/manifest.json  `manifest`

The server writes these rows and `fednet.report` reads them. A reader ignores a field that it does
not know, and a field that a line leaves out has its default. Each number that is shown is a line of
`METRICS`: the console, the page, `compare`, `figure --y` and the trackers use that table.
"""

from fednet.records.rows import EVALUATED_MODELS, FILES, Client, Event, Round, Row, Summary, Wire
from fednet.records.table import (
    COSTS,
    METRICS,
    Metric,
    known,
    line_parts,
    mb,
    metric,
    percent,
    shown,
)

__all__ = [
    "COSTS",
    "FILES",
    "EVALUATED_MODELS",
    "METRICS",
    "Client",
    "Event",
    "Metric",
    "Round",
    "Row",
    "Summary",
    "Wire",
    "known",
    "line_parts",
    "mb",
    "metric",
    "percent",
    "shown",
]
