"""`configs/papers/FIELD.md`: what the field's numbers come to: for each cell that several sources
have, or that was run here, their figures and ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from fednet import papers
from fednet.papers.mini import MINI
from fednet.papers.results import ranking, rendering, reproduction
from fednet.plain import JsonMapping

HEAD = """\
# What the field's numbers come to

Written by `fednet reproduce --results` from `results/` and the figures in
`fednet/papers/`; do not edit. What is said in prose stands in `remarks.yaml`. `±` is the
standard deviation over seeds; a figure of ours without it is of one seed.
"""
SOURCES = {  # of the printed figures, where that is not the paper that the table is named after
    "niidbench/mnist": "Flower",
    "niidbench/fmnist": "Flower",
}


def page(folder: Path) -> str:
    """FIELD.md, from the compact results in `folder`."""
    said = folder / "remarks.yaml"
    remarks = yaml.safe_load(said.read_text(encoding="utf-8")) if said.exists() else {}
    parts = [HEAD, *([prose] if (prose := str(remarks.get("field", "")).strip()) else [])]
    for paper in papers.FIELD:
        for name in (n for n in papers.with_results() if n.startswith(f"{paper}/")):
            lines = list(_table(name, folder / "results", remarks.get("elsewhere", [])))
            caption = papers.caption(name)
            parts += ["", f"## {name}", "", f"{caption[0].upper()}{caption[1:]}.", "", *lines]
            if not lines:
                parts.append(f"Not run here: `fednet reproduce {name} --plan`.")
    return "\n".join(parts).rstrip() + "\n"


def _table(name: str, books: Path, elsewhere: Sequence[JsonMapping]) -> Iterator[str]:
    """A line a source and a column of the table, the methods side by side."""
    cells = papers.cells(name)
    stem = name.replace("/", "-")
    ours = {
        scale: ranking.grouped(
            [r for r in reproduction.read_csv(path) if r["status"] == "done" and not r["changed"]]
        )
        for scale, suffix in (("full scale", ""), (MINI.partition(":")[0], "-mini"))
        if (path := books / f"{stem}{suffix}.csv").exists()
    }
    columns: dict[tuple[str, str, str], dict[str, float | None]] = {}
    for c in cells:
        column = (c.dataset, c.variant, c.heterogeneity)
        columns.setdefault(column, {})[c.method] = c.figure
    lines = []
    extra: dict[str, None] = {}
    for column, printed in columns.items():
        sources: list[tuple[str, Mapping[str, str]]] = [
            (_source(name), {m: _figure(v) for m, v in printed.items()})
        ]
        sources += [
            (str(e["source"]), {m: _figure(v) for m, v in e["values"].items()})
            for e in elsewhere
            if (e["table"], e["variant"], e["heterogeneity"]) == (name, *column[1:])
        ]
        for scale, found in ours.items():
            methods = found.get(column, {})
            if methods:
                sources.append((f"fednet, {scale}", _ours(methods)))
                extra |= dict.fromkeys(m for m in methods if m not in printed)
        if len(sources) > 1:
            where = " ".join(part for part in column if part)
            lines += [(where, source, values) for source, values in sources]
    if not lines:
        return
    known = [*dict.fromkeys(c.method for c in cells), *extra]
    shown = [m for m in known if any(m in values for _, _, values in lines)]
    yield "| cell | source | " + " | ".join(shown) + " |"
    yield "|---|---|" + "---:|" * len(shown)
    for where, source, values in lines:
        yield f"| {where} | {source} | " + " | ".join(values.get(m, "") for m in shown) + " |"


def _source(name: str) -> str:
    return SOURCES.get(name, papers.NAMES[name.partition("/")[0]])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _ours(methods: JsonMapping) -> dict[str, str]:
    out = {}
    for method, runs in methods.items():
        text = rendering.reading(runs, "ours", str(runs[0]["measure"] or ""))
        more = [
            f"{rendering.reading(runs, key, key.removeprefix('ours:'))} MB"
            for key in runs[0]
            if key.startswith("ours:mb_to_")
        ]
        out[method] = ", ".join([text, *(m for m in more if not m.startswith("never"))])
    return out
