"""The files of a run: a type for the rows of each, how to read them, and a table of the numbers of
a round.

    rounds.jsonl   Round      events.jsonl              Event
    clients.jsonl  Client     summary.json              Summary
    wire.jsonl     Messages   checkpoint/manifest.json  `manifest`

The server writes these rows and `fednet.report` reads them. A reader ignores a field that it does
not know, and a field that a line leaves out has its default. Each number that is shown is a line of
`METRICS`: the console, the page, `compare`, `figure --y` and the trackers use that table.
"""

from fednet.records.rows import EVALUATED_MODELS as EVALUATED_MODELS
from fednet.records.rows import FILES as FILES
from fednet.records.rows import Client as Client
from fednet.records.rows import Event as Event
from fednet.records.rows import Messages as Messages
from fednet.records.rows import Round as Round
from fednet.records.rows import Summary as Summary
from fednet.records.rows import Wire as Wire
from fednet.records.table import COSTS as COSTS
from fednet.records.table import METRICS as METRICS
from fednet.records.table import Metric as Metric
from fednet.records.table import all_metrics as all_metrics
from fednet.records.table import line_parts as line_parts
from fednet.records.table import mb as mb
from fednet.records.table import metric as metric
from fednet.records.table import metrics_shown as metrics_shown
from fednet.records.table import percent as percent
