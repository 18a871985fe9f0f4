"""Writes the pages and pictures of this folder from the compact results in `results/`:

    python configs/papers/publish.py                             all of them again
    python configs/papers/publish.py --from runs feddpc/table2   first keeps what `fednet reproduce
        [--scale mini]                                           feddpc/table2 --out runs` has
                                                                 written there

    RESULTS.md     every table that was run: figures, and remarks of at most ten lines
    README.md      a picture and a line for each table: did the paper's order of methods hold
    FIELD.md       what several sources have for the same cells
    remarks.yaml   the remarks by table, and what other sources print
    taken.yaml     what the runs take where a paper is silent

and under results/PAPER-TABLE, of mini scale results/PAPER-TABLE-mini:

    .csv, -curves.csv     rows and curves
    .txt                  what was measured once for a table that has no runs
    .svg, -loss.svg       accuracy, training loss, against rounds and MB
    -sweep.svg            accuracy against the number in which the cells differ
    -chosen.json          settings that were searched for once, by cell: those tried, their
                          validation accuracy, the winner
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import order
import pictures
import yaml
from order import Row

from fednet import papers
from fednet.errors import ConfigError
from fednet.files import write_aside
from fednet.papers import rendering, results
from fednet.papers.mini import DESCRIPTION, MINI, mini
from fednet.plain import JsonDict, JsonMapping
from fednet.report.read import Run, open_run

HERE = Path(__file__).parent
NOTES = {"full": "", "mini": MINI}  # above what was run, by scale
POINTS = 100  # of a curve, in the compact results
LOSSES = (  # figures of the papers with panels of training loss
    *(f"feddpc/{t}" for t in ("table2", "figure3", "figure4", "figure5", "figure6")),
    *(f"fedrds/{t}" for t in ("table3", "figure4")),
    "fedrds/text_section43",
)
SHOWN = {  # the pictures from runs that the papers have too
    "fedabc/table1": ("-partition",),
    "fedabc/figure2": ("-local",),
    "feddc/table1": ("-partition", "-classes", "-condensed"),
    "feddc/figure2_text": ("-classes",),
}
BY_CLASS = ("FedAvg", "FedDC")  # whose accuracy by class is drawn


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Writes the pages of the papers' tables from the compact results."
    )
    parser.add_argument("tables", nargs="*", metavar="PAPER/TABLE", help="kept from --from first")
    parser.add_argument(
        "--from", dest="out", type=Path, metavar="DIR", help="where fednet reproduce wrote runs"
    )
    parser.add_argument("--scale", choices=["full", "mini"], default="full")
    args = parser.parse_args(words)
    if bool(args.tables) != bool(args.out):
        parser.error("give tables and --from DIR together, or neither")
    try:
        for name in args.tables:
            keep(name, args.scale, args.out, HERE)
        print(write(HERE))
    except ConfigError as wrong:
        print(f"publish.py: {wrong}", file=sys.stderr)
        return 2
    return 0


def stem(name: str, scale: str) -> str:
    """Returns the beginning of the names of a table's files."""
    return name.replace("/", "-") + ("-mini" if scale == "mini" else "")


def tables_of(paper: str) -> list[str]:
    return [name for name in papers.with_results() if name.startswith(f"{paper}/")]


def without_runs(paper: str, books: Path) -> dict[str, Path]:
    """Returns what the command printed for tables that have no runs, by table."""
    return {p.stem.replace("-", "/", 1): p for p in sorted(books.glob(f"{paper}-*.txt"))}


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


# -- the compact results ---------------------------------------------------------------------------
def keep(name: str, scale: str, out: Path, folder: Path) -> None:
    """Copies the rows, curves and pictures of a table's runs into the compact results; what is
    there of other cells and seeds stays. Of rows at changed settings those with fewer rounds alone
    are kept, under a name that says so. Raises ConfigError where there are none.
    """
    own = stem(name, scale)
    if not (out / f"{own}.csv").exists():
        raise ConfigError(
            f"{out / own}.csv: there is none; `fednet reproduce {name} --scale {scale} "
            f"--out {out} --gather` writes it."
        )
    books = folder / "results"
    books.mkdir(parents=True, exist_ok=True)
    rows = results.read_csv(out / f"{own}.csv")
    changed = {results.run_of(r) for r in rows if not _as_printed(r)}
    for suffix, columns in (("", results.FIXED), ("-curves", results.CURVE)):
        source, target = out / f"{own}{suffix}.csv", books / f"{own}{suffix}.csv"
        if source.exists():
            new = [r for r in results.read_csv(source) if results.run_of(r) not in changed]
            results.merge(target, thinned(new) if suffix else new, columns)
    draw_runs(name, scale, out, books / own)


def _as_printed(row: Row) -> bool:
    """Whether it was run at the paper's settings, or with fewer rounds of them."""
    changed = str(row["changed"] or "")
    return not changed or (changed.startswith("rounds=") and "," not in changed)


def thinned(rows: Sequence[Row]) -> list[Row]:
    """At most POINTS rows of a run, spread evenly over its rounds, with the first and the last."""
    out: list[Row] = []
    for own in results.by_run(rows).values():
        places = {round(i * (len(own) - 1) / (POINTS - 1)) for i in range(POINTS)}
        out += [own[i] for i in sorted(places)]
    return out


def draw_runs(name: str, scale: str, out: Path, folder: Path) -> None:
    """Writes the pictures that the paper has too, from the first seed's runs of each setting."""
    if name not in SHOWN:
        return
    note = NOTES[scale]
    runs_at = out / stem(name.partition("/")[0], scale)
    settings: dict[str, dict[str, Run]] = {}
    for cell in papers.cells(name):
        config = (mini(cell) if scale == "mini" else cell).config
        for run in sorted(runs_at.glob(f"{config['name']}-seed*"))[:1]:
            setting = order.setting(cell.column).lower().replace(" ", "-")
            if (run / "summary.json").exists():
                settings.setdefault(setting, {})[cell.method] = open_run(run)
    for setting, runs in settings.items():
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        if "-local" in SHOWN[name]:
            for method, run in runs.items():
                path = folder / f"{setting}-{method.lower()}-local.png"
                title = "; ".join(part for part in (method, note) if part)
                written += [p for p in [pictures.local_models(run, path, title)] if p]
        else:
            written += pictures.details(runs, folder, setting, note, BY_CLASS)
        for path in written:
            if path.stem.endswith(SHOWN[name]):
                shrink(path)
            else:
                path.unlink()


def shrink(picture: Path) -> None:
    """Saves the picture in 64 colours, which is enough for axes, bubbles and noise, and a third of
    its size.
    """
    from PIL import Image

    with Image.open(picture) as whole:
        small = whole.convert("RGB").quantize(64)
    small.save(picture, optimize=True)


def write(folder: Path) -> Path:
    """Writes the three pages and the pictures from the compact results in `folder`."""
    path = folder / "RESULTS.md"
    write_aside(path, results_page(folder))
    write_aside(folder / "README.md", gallery_page(folder))
    write_aside(folder / "FIELD.md", field_page(folder))
    return path


def remarks(folder: Path) -> JsonDict:
    path = folder / "remarks.yaml"
    if not path.exists():
        return {}
    found: JsonDict = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


# -- RESULTS.md ------------------------------------------------------------------------------------
def results_page(folder: Path) -> str:
    """RESULTS.md; draws the pictures of curves and sweeps."""
    books, notes = folder / "results", remarks(folder)
    parts = [
        "# The papers' tables, run",
        "",
        "Written by `configs/papers/publish.py` from the CSV files in `results/` and the remarks "
        "in `remarks.yaml`; do not edit. [taken.yaml](taken.yaml) has what the runs take where a "
        "paper is silent, `fednet/papers/PAPER.yaml` all settings and what is doubtful in print.",
        "",
        str(notes.get("preface", "")).strip(),
        "",
        *(f"- {line}" for line in rendering.LEGEND),
        "",
        capitalized(DESCRIPTION),
        "",
        *_overview(books),
    ]
    for key, title in papers.NAMES.items():
        parts += ["", f"## {title}", "", str(papers.paper(key)["title"])]
        # What is measured without runs, as the command printed it.
        for name, text in without_runs(key, books).items():
            printed = text.read_text(encoding="utf-8").rstrip()
            parts += ["", f"### {name}", "", *_remark(notes, name), "```", printed, "```"]
        for name in tables_of(key):
            parts += _section(name, books, notes)
    return "\n".join(parts).rstrip() + "\n"


def _remark(notes: JsonMapping, name: str) -> list[str]:
    text = str(notes.get(name, "")).strip()
    return [text, ""] if text else []


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
        full, small = _rows(name, books, "full"), _rows(name, books, "mini")
        found = [o for methods in rendering.grouped(full).values() if (o := order.order(methods))]
        pairs = f"{sum(o[0] for o in found)} of {sum(o[1] for o in found)}" if found else ""
        counts = [len(papers.cells(name)), _cells_run(full) or "", _cells_run(small) or ""]
        lines.append(f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} | {pairs} |")
    return lines


def _cells_run(rows: Sequence[Row]) -> int:
    """How many of the table's cells the rows are of; the cell of a run with fewer rounds is yet to
    be run.
    """
    found = set()
    for r in rows:
        whole = not str(r["changed"] or "").startswith("rounds=")
        if r.get("in_paper") != "no" and r["status"] == "done" and whole:
            method = order.plain(str(r["method"]))
            found.add(results.identity({**r, "method": method, "seed": 0, "changed": ""}))
    return len(found)


def _section(name: str, books: Path, notes: JsonMapping) -> list[str]:
    parts = ["", f"### {name}", "", capitalized(papers.caption(name)) + ".", ""]
    parts += _remark(notes, name)
    run: set[str] = set()
    for scale, note in NOTES.items():
        rows = _rows(name, books, scale)
        if not rows:
            continue
        run |= {str(r["dataset"]) for r in rows}
        if note:
            parts += [
                f"**{capitalized(note)}.** These runs compare the methods with each other "
                f"at this size, and nothing with the paper.",
                "",
            ]
        parts += [rendering.as_md(rows).rstrip()]
        parts += [f"- {line}" for line in order.notes(rows)]
        parts += _others(rows)
        own = stem(name, scale)
        curves = books / f"{own}-curves.csv"
        if curves.exists():
            points = results.read_csv(curves)
            drawn = [pictures.curves(points, books / f"{own}.svg", note)]
            if name in LOSSES:
                loss = books / f"{own}-loss.svg"
                drawn.append(pictures.curves(points, loss, note, "train_loss"))
            parts += ["", *(f"![{name}](results/{d.name})" for d in drawn if d is not None)]
        swept = pictures.sweep(rows, name, books / f"{own}-sweep.svg", note)
        parts += [f"![{name}](results/{swept.name})"] if swept is not None else []
        parts += [
            f"![{p.stem}](results/{own}/{p.name})" for p in sorted((books / own).glob("*.png"))
        ]
        parts.append("")
    missing = [d for d in dict.fromkeys(c.dataset for c in papers.cells(name)) if d not in run]
    if missing:
        parts.append(f"Not run here: {', '.join(missing)}.")
    return parts


def _others(rows: Sequence[Row]) -> list[str]:
    """A table of the further figures that the paper prints for these cells."""
    filled = dict.fromkeys(k for r in rows for k in r if r[k] is not None)
    names = [k.removeprefix("ours:") for k in filled if k.startswith("ours:")]
    if not names:
        return []
    head = ["setting", "method"]
    for n in names:
        head += [f"{n.replace('_', ' ')}, paper", "ours"]
    lines = []
    for column, methods in rendering.grouped(rows).items():
        for method, runs in methods.items():
            done = [r for r in runs if r["status"] == "done"]
            cells = []
            for n in names:
                # The first of a cell's measures has columns of its own.
                suffix = "" if runs[0]["measure"] == n else f":{n}"
                printed = runs[0].get(f"paper{suffix}")
                cells.append("" if printed is None else str(printed))
                cells.append(rendering.reading(done, f"ours{suffix}", n))
            lines.append(" | ".join([order.setting(column), method, *cells]))
    bar = ["---", "---", *["---:"] * 2 * len(names)]
    return ["", *(f"| {line} |" for line in (" | ".join(head), " | ".join(bar), *lines))]


def _rows(name: str, books: Path, scale: str) -> list[JsonDict]:
    """The rows in the order of the paper's table, whatever was run first; a column's own methods
    after the paper's.
    """
    path = books / f"{stem(name, scale)}.csv"
    if not path.exists():
        return []
    cells = papers.cells(name)
    columns = list(dict.fromkeys(c.column for c in cells))
    methods = list(dict.fromkeys(c.method for c in cells))

    def place(r: Row) -> tuple[int, int, str, int]:
        column = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        plain = order.plain(str(r["method"]))
        return (
            columns.index(column) if column in columns else len(columns),
            methods.index(plain) if plain in methods else len(methods),
            str(r["method"]),
            int(r["seed"]),
        )

    return sorted(results.read_csv(path), key=place)


# -- README.md -------------------------------------------------------------------------------------
GALLERY = """\
# The papers' tables, at a glance

Written by `configs/papers/publish.py` from `results/`; do not edit. [RESULTS.md](RESULTS.md) has
the tables, [FIELD.md](FIELD.md) what several sources say of the same cells.

Two methods differ *significantly* where two or more seeds were run of both and the 95 % interval
of their difference, seed by seed, excludes 0. **Confirmed**: no significant pair contradicts the
printed order. **Not confirmed**: at least half of them do. **Partly confirmed**: fewer than half.
**Inconclusive**: no numbers are printed, only one seed was run, or so few pairs are significant
that chance alone would give as many in more than one of twenty tables. Mini scale is a small
setting of our own, where only the order of methods can be compared.
"""


def gallery_page(folder: Path) -> str:
    """README.md, from the compact results in `folder`."""
    books = folder / "results"
    parts: list[str] = [GALLERY.rstrip()]
    left: list[str] = []
    for paper, title in papers.NAMES.items():
        lines: list[str] = []
        for name in tables_of(paper):
            if line := _line(name, books):
                lines.append(line)
            else:
                left.append(name)
        for name in without_runs(paper, books):
            lines.append(
                f"| | [{name}](RESULTS.md#{name.replace('/', '')}): {papers.no_runs()[name]}.<br>"
                "Measured, without runs. |"
            )
        if lines:
            parts += [f"\n## {title}\n", "| | |", "|---|---|", *lines]
    if left:
        parts += ["\n## Not run here\n", ", ".join(f"`fednet reproduce {n}`" for n in left) + "."]
    return "\n".join(parts).rstrip() + "\n"


def _done(name: str, books: Path) -> dict[str, list[JsonDict]]:
    """The rows of the runs that are done, by scale."""
    every = {s: [r for r in _rows(name, books, s) if r["status"] == "done"] for s in NOTES}
    return {scale: rows for scale, rows in every.items() if rows}


def _line(name: str, books: Path) -> str:
    """A table's picture, its verdict and the commands that run it again; "" if it was not run."""
    scales = _done(name, books)
    if not scales:
        return ""
    found = {scale: order.verdict(rows) for scale, rows in scales.items()}
    nothing = "inconclusive"
    word, at = next(((v.word, s) for s, v in found.items() if v.word != nothing), (nothing, ""))
    at = f" at {at} scale" if at == "mini" else ""
    said = "; ".join(v.said(s, _seeds(scales[s])) for s, v in found.items())
    shown = books / f"{stem(name, next(iter(scales)))}.svg"
    picture = f'<img src="results/{shown.name}" width="240">' if shown.exists() else ""
    anchor = name.replace("/", "").lower()
    caption = papers.caption(name).replace("|", "\\|")
    commands = "<br>".join(f"`{_command(name, s, rows)}`" for s, rows in scales.items())
    return (
        f"| {picture} | [{name}](RESULTS.md#{anchor}): {caption}.<br>**{word.capitalize()}**{at}"
        f" ({said}).<br>{commands} |"
    )


def _seeds(rows: Sequence[Row]) -> list[int]:
    return sorted({int(r["seed"]) for r in rows})


def _command(name: str, scale: str, rows: Sequence[Row]) -> str:
    """What runs these again."""
    every = dict.fromkeys(c.dataset for c in papers.cells(name))
    ran = dict.fromkeys(str(r["dataset"]) for r in rows)
    words = ["fednet reproduce", name]
    words += [f"--dataset {next(iter(ran))}"] if len(ran) == 1 < len(every) else []
    words += ["--scale mini"] if scale == "mini" else []
    seeds = ",".join(map(str, _seeds(rows)))
    return " ".join([*words, *([f"--seeds {seeds}"] if seeds != "0" else [])])


# -- FIELD.md --------------------------------------------------------------------------------------
FIELD = """\
# What the field's numbers come to

Written by `configs/papers/publish.py` from `results/`, the figures in `fednet/papers/` and
`remarks.yaml`; do not edit. `±` is the standard deviation over seeds; a figure of ours without it
is of one seed. [RESULTS.md](RESULTS.md) has the tables.
"""
SOURCES = {  # of the printed figures, where that is not the paper that the table is named after
    "niidbench/mnist": "Flower",
    "niidbench/fmnist": "Flower",
}


def field_page(folder: Path) -> str:
    """FIELD.md, from the compact results in `folder`."""
    notes = remarks(folder)
    parts = [FIELD]
    if prose := str(notes.get("field", "")).strip():
        parts.append(prose)
    for paper in papers.FIELD:
        for name in tables_of(paper):
            lines = list(_sources(name, folder / "results", notes.get("elsewhere", [])))
            caption = capitalized(papers.caption(name))
            parts += ["", f"## {name}", "", f"{caption}.", "", *lines]
            if not lines:
                parts.append(f"Not run here: `fednet reproduce {name} --plan`.")
    return "\n".join(parts).rstrip() + "\n"


def _sources(name: str, books: Path, elsewhere: Sequence[JsonMapping]) -> Iterator[str]:
    """A line a source and a column of the table, the methods side by side."""
    cells = papers.cells(name)
    paper = name.partition("/")[0]
    ours = {
        scale: rendering.grouped(r for r in rows if not r["changed"])
        for scale, rows in _done(name, books).items()
    }
    columns: dict[tuple[str, str, str], dict[str, float | None]] = {}
    for c in cells:
        columns.setdefault(c.column, {})[c.method] = c.figure
    lines = []
    extra: dict[str, None] = {}
    for column, printed in columns.items():
        sources: list[tuple[str, Mapping[str, str]]] = [
            (SOURCES.get(name, papers.NAMES[paper]), {m: _figure(v) for m, v in printed.items()})
        ]
        sources += [
            (str(e["source"]), {m: _figure(v) for m, v in e["values"].items()})
            for e in elsewhere
            if (e["table"], e["variant"], e["heterogeneity"]) == (name, *column[1:])
        ]
        for scale, found in ours.items():
            methods = found.get(column, {})
            if methods:
                sources.append((f"fednet, {scale} scale", _ours(methods)))
                extra |= dict.fromkeys(m for m in methods if m not in printed)
        if len(sources) > 1:
            where = order.setting(column)
            lines += [(where, source, values) for source, values in sources]
    if not lines:
        return
    known = [*dict.fromkeys(c.method for c in cells), *extra]
    shown = [m for m in known if any(m in values for _, _, values in lines)]
    yield "| cell | source | " + " | ".join(shown) + " |"
    yield "|---|---|" + "---:|" * len(shown)
    for where, source, values in lines:
        yield f"| {where} | {source} | " + " | ".join(values.get(m, "") for m in shown) + " |"


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


if __name__ == "__main__":
    raise SystemExit(main())
