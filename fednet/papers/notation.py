"""`fednet reproduce feddpc/table1`: the costs that a paper prints in O notation, beside what the
methods declare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fednet.papers.tables import NAMES, paper
from fednet.plain import JsonMapping, align
from fednet.registry import algorithm

if TYPE_CHECKING:
    from fednet.algorithms.base import Algorithm

HEAD = (
    "method",
    "client, paper",
    "server, paper",
    "passes",
    "down",
    "up",
    "server keeps",
    "client keeps",
)
LEGEND = """\
|w|: the d parameters of a model. Down, up: what a participant gets and sends in a round; a run
counts these bytes, and `fednet check` tests that they are the declared ones. Passes: over a
participant's samples in a round of one local epoch. Keeps: between rounds."""


def costs(name: str) -> str | None:
    """Returns the table as text; None if `name` is no table of costs."""
    key, _, title = name.lower().partition("/")
    table = paper(key)["tables"].get(title, {}) if key in NAMES else {}
    if "algorithms" not in table:
        return None
    columns = table["columns"]
    client = columns.index("total_local")
    server = columns.index("total_server")
    lines = [HEAD]
    for method, printed in table["rows"].items():
        made = _build_method(table["algorithms"][method])
        passes = 1 + sum(exchange.label == "gradient" for exchange in made.exchanges)
        declared = (str(passes), *made.sends(), *made.keeps())
        lines.append((method, printed[client], printed[server], *declared))
    return "\n".join([*align(lines), "", LEGEND])


def _build_method(options: JsonMapping) -> Algorithm:
    kind = algorithm.get(str(options["name"]))
    own = {key: value for key, value in options.items() if key != "name"}
    method: Algorithm = kind(msgspec.convert(own, kind.Config))
    return method
