"""`configs/papers/RESULTS.md`: every table that was run, from the compact results beside it.

    DIR/results/PAPER-TABLE.txt     a table measured without runs, as the command printed it
    DIR/remarks.yaml                what there is to say, by paper
    DIR/RESULTS.md                  written anew from these each time; so are README.md (`gallery`)
                                    and FIELD.md (`field`)

and under DIR/results/PAPER-TABLE, of mini scale DIR/results/PAPER-TABLE-mini:

    .csv, -curves.csv     rows and curves, as `fednet reproduce --results DIR` deposits them
    .svg                  accuracy against rounds and MB
    -sweep.svg            accuracy against the number in which the cells differ
    -chosen.json          what a search tried, by cell: its points, their validation accuracy, the
                          winner
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from fednet import papers
from fednet.files import write_aside
from fednet.papers import settled
from fednet.papers.job import Reproduction
from fednet.papers.mini import MINI, SAID
from fednet.papers.results import field, gallery, ranking, rendering, reproduction, sweeps
from fednet.papers.results.publish import LOSSES
from fednet.plain import JsonDict, JsonMapping
from fednet.report import overlay

# Of the pictures beside a table, those that the paper has too.
SHOWN = {
    "fedabc/table1": ("-partition",),
    "fedabc/figure2": ("-local",),
    "feddc/table1": ("-partition", "-classes", "-condensed"),
    "feddc/figure2_text": ("-classes",),
}
POINTS = 100  # of a curve, in the compact results


def deposit(job: Reproduction, out: Path, folder: Path) -> None:
    """The table's rows and curves into the compact results; what stands there for other cells and
    seeds stays. What an earlier command ran in the same folder with another `--set` is not kept.
    """
    books = folder / "results"
    books.mkdir(parents=True, exist_ok=True)
    rows = out / f"{job.stem}.csv"
    changed = (
        {
            reproduction.run_of(r)
            for r in reproduction.read_csv(rows)
            if (r["changed"] or "") != job.changed
        }
        if rows.exists()
        else set()
    )
    for suffix, columns in (("", reproduction.FIXED), ("-curves", reproduction.CURVE)):
        source, target = out / f"{job.stem}{suffix}.csv", books / f"{job.stem}{suffix}.csv"
        if source.exists():
            new = [
                r for r in reproduction.read_csv(source) if reproduction.run_of(r) not in changed
            ]
            reproduction.merge(target, thinned(new) if suffix else new, columns)
    tried = out / f"{job.stem}-chosen.json"
    if tried.exists():
        reproduction.add(books / tried.name, json.loads(tried.read_text(encoding="utf-8")))
    for picture in sorted((out / job.stem).glob("*.png")):
        if picture.stem.endswith(SHOWN.get(job.table, ())):
            (books / job.stem).mkdir(exist_ok=True)
            shrink(picture, books / job.stem / picture.name)


def shrink(picture: Path, target: Path) -> None:
    """The picture in 64 colours, which is enough for axes, bubbles and noise, and a third of its
    size.
    """
    from PIL import Image

    with Image.open(picture) as whole:
        whole.convert("RGB").quantize(64).save(target, optimize=True)


def thinned(rows: Sequence[JsonMapping]) -> list[JsonMapping]:
    """At most POINTS rows of a run, spread evenly over its rounds, with the first and the last."""
    by_run: dict[tuple[str, ...], list[JsonMapping]] = {}
    for r in rows:
        by_run.setdefault(reproduction.identity(r), []).append(r)
    out: list[JsonMapping] = []
    for rs in by_run.values():
        n = len(rs)
        places = (
            range(n)
            if n <= POINTS
            else sorted({round(i * (n - 1) / (POINTS - 1)) for i in range(POINTS)})
        )
        out += [rs[i] for i in places]
    return out


def write(folder: Path) -> Path:
    """RESULTS.md, the pages beside it and the figures, from the compact results in `folder`."""
    books = folder / "results"
    said = folder / "remarks.yaml"
    remarks: JsonDict = yaml.safe_load(said.read_text(encoding="utf-8")) if said.exists() else {}
    parts = [
        "# The papers' tables, run",
        "",
        "Written by `fednet reproduce --results` from the CSV files in `results/`; do not edit. "
        "What the sections say in prose stands in "
        "`remarks.yaml`.",
        "",
        str(remarks.get("preface", "")).strip(),
        "",
        SAID[0].upper() + SAID[1:],
        "",
        *_overview(books),
    ]
    for paper, title in papers.NAMES.items():
        parts += [
            "",
            f"## {title}",
            "",
            str(papers.paper(paper)["title"]),
            "",
            str(remarks.get(paper, "")).strip(),
            "",
            *settled.lines(paper),
            "",
            " ".join(
                [
                    "Doubtful in print:",
                    *(f"{slip[0].upper()}{slip[1:]}." for slip in papers.paper(paper)["anomalies"]),
                ]
            ),
        ]
        # What is measured without runs, as the command printed it.
        for text in sorted(books.glob(f"{paper}-*.txt")):
            parts += [
                "",
                f"### {text.stem.replace('-', '/', 1)}",
                "",
                "```",
                text.read_text(encoding="utf-8").rstrip(),
                "```",
            ]
        for name in (n for n in papers.with_results() if n.startswith(f"{paper}/")):
            parts += _table(name, books)
    path = folder / "RESULTS.md"
    write_aside(path, "\n".join(parts).rstrip() + "\n")
    write_aside(folder / "README.md", gallery.page(folder))
    write_aside(folder / "FIELD.md", field.page(folder))
    return path


def _overview(books: Path) -> list[str]:
    """A line a table: how many cells were run, at which scale, and how far the order of methods
    agrees.
    """
    lines = [
        "| table | cells | full scale | mini scale | pairs of methods in the paper's order (full "
        "scale) |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name in papers.with_results():
        cells = papers.cells(name)
        full, small = (_rows(name, books, scale) for scale in ("full", "mini"))
        counts = [
            len(
                {
                    reproduction.identity(
                        {
                            **r,
                            "method": reproduction.plain(str(r["method"])),
                            "seed": 0,
                            "changed": "",
                        }
                    )
                    for r in rows
                    if r["in_paper"] == "yes"
                    and r["status"] == "done"
                    # Of a run cut short the cell is yet to be run.
                    and not str(r["changed"] or "").startswith("rounds=")
                }
            )
            for rows in (full, small)
        ]
        found = [o for methods in ranking.grouped(full).values() if (o := ranking.order(methods))]
        pairs = f"{sum(o[0] for o in found)} of {sum(o[1] for o in found)}" if found else ""
        lines.append(f"| {name} | {len(cells)} | {counts[0] or ''} | {counts[1] or ''} | {pairs} |")
    return lines


def _table(name: str, books: Path) -> list[str]:
    paper, _, table = name.partition("/")
    caption = papers.caption(name)
    parts = [
        "",
        f"### {name}",
        "",
        *([caption[0].upper() + caption[1:] + ".", ""] if caption else []),
    ]
    run: set[str] = set()
    for scale in ("full", "mini"):
        rows = _rows(name, books, scale)
        if not rows:
            continue
        run |= {str(r["dataset"]) for r in rows}
        if scale == "mini":
            parts += [
                f"**{MINI[0].upper() + MINI[1:]}.** These runs compare the methods with each "
                f"other at this size, and nothing with the paper.",
                "",
            ]
        parts += [rendering.as_md(rows, scale_said=True).rstrip(), *_others(rows)]
        stem = f"{paper}-{table}" + ("-mini" if scale == "mini" else "")
        curves = books / f"{stem}-curves.csv"
        if curves.exists():
            points, said = reproduction.read_csv(curves), MINI if scale == "mini" else ""
            drawn = [overlay.draw(points, books / f"{stem}.svg", said)]
            if name in LOSSES:
                drawn.append(overlay.draw(points, books / f"{stem}-loss.svg", said, "train_loss"))
            parts += ["", *(f"![{name}](results/{d.name})" for d in drawn if d is not None)]
        swept = sweeps.draw(
            rows, name, books / f"{stem}-sweep.svg", MINI if scale == "mini" else ""
        )
        parts += [f"![{name}](results/{swept.name})"] if swept is not None else []
        parts += [
            f"![{p.stem}](results/{stem}/{p.name})" for p in sorted((books / stem).glob("*.png"))
        ]
        parts.append("")
    missing = [d for d in dict.fromkeys(c.dataset for c in papers.cells(name)) if d not in run]
    if missing:
        parts.append(f"Not run here: {', '.join(missing)}.")
    return parts


def _others(rows: Sequence[JsonMapping]) -> list[str]:
    """The further figures that the paper prints for these cells."""
    names = list(
        dict.fromkeys(
            k.removeprefix("ours:")
            for r in rows
            for k in r
            if k.startswith("ours:") and r[k] is not None
        )
    )
    if not names:
        return []
    head = [
        "setting",
        "method",
        *(text for n in names for text in (f"{n.replace('_', ' ')}, paper", "ours")),
    ]
    lines = []
    for column, methods in ranking.grouped(rows).items():
        for method, runs in methods.items():
            done = [r for r in runs if r["status"] == "done"]
            # The first of a cell's measures has columns of its own.
            own = {n: "" if runs[0]["measure"] == n else ":" + n for n in names}
            cells = [
                t
                for n in names
                for t in (
                    "" if runs[0].get(f"paper{own[n]}") is None else str(runs[0][f"paper{own[n]}"]),
                    rendering.reading(done, f"ours{own[n]}", n),
                )
            ]
            lines.append(" | ".join([" ".join(p for p in column if p), method, *cells]))
    bar = ["---", "---", *["---:"] * 2 * len(names)]
    return ["", *(f"| {line} |" for line in (" | ".join(head), " | ".join(bar), *lines))]


def _rows(name: str, books: Path, scale: str) -> list[JsonDict]:
    """The rows in the order of the paper's table, whatever was run first; a column's own methods
    after the paper's.
    """
    path = books / (name.replace("/", "-") + ("-mini" if scale == "mini" else "") + ".csv")
    if not path.exists():
        return []
    cells = papers.cells(name)
    columns = list(dict.fromkeys((c.dataset, c.variant, c.heterogeneity) for c in cells))
    methods = list(dict.fromkeys(c.method for c in cells))

    def place(r: JsonMapping) -> tuple[int, int, str, int]:
        column = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        return (
            columns.index(column) if column in columns else len(columns),
            methods.index(plain)
            if (plain := reproduction.plain(str(r["method"]))) in methods
            else len(methods),
            str(r["method"]),
            int(r["seed"]),
        )

    return sorted(reproduction.read_csv(path), key=place)
