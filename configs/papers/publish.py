"""Writes the pages and pictures of this folder from the compact results in `results/`:

    python configs/papers/publish.py                             all of them again
    python configs/papers/publish.py --from runs feddpc/table2   first keeps what `fednet reproduce
        [--scale mini]                                           feddpc/table2 --out runs` has
                                                                 written there

    RESULTS.md     every table that was run: figures, and remarks of at most ten lines
    README.md      a line for each claim of a paper: what was run, what came out, what is open
    FIELD.md       what several sources have for the same cells
    claims.yaml    the claims, and what is open
    remarks.yaml   the remarks by table, and what other sources print
    rows.yaml      what the rows are that stand beside a table's methods
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
    are kept, under a name that says so, and those whose change rows.yaml names, as its row. Raises
    ConfigError where there are none.
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
    beside = {
        (row["of"], row["set"]): method
        for method, row in labels(folder).get(name, {}).items()
        if "set" in row
    }
    kept: dict[tuple[str, ...], JsonDict | None] = {}  # by run: what its rows change
    for r in rows:
        if _as_printed(r):
            kept.setdefault(results.run_of(r), {})
        elif method := beside.get((r["method"], r["changed"])):
            printed = dict.fromkeys(k for k in r if k.startswith("paper"))  # of another row
            own_row = {"method": method, "in_paper": "no", "changed": None, **printed}
            kept.setdefault(results.run_of(r), own_row)
        else:
            kept[results.run_of(r)] = None
    for suffix, columns in (("", results.FIXED), ("-curves", results.CURVE)):
        source = out / f"{own}{suffix}.csv"
        target = books / f"{own}{suffix}.csv"
        if source.exists():
            new = []
            for r in results.read_csv(source):
                change = kept.get(results.run_of(r))
                if change is not None:
                    new.append({**r, **{k: v for k, v in change.items() if k in r or not suffix}})
            results.merge(target, thinned(new) if suffix else new, columns)
    if any(_as_printed(r) for r in rows):
        draw_runs(name, scale, out, books / own)


def labels(folder: Path) -> JsonDict:
    """Returns what rows.yaml says of rows, by table and by the name in the method column."""
    path = folder / "rows.yaml"
    if not path.exists():
        return {}
    found: JsonDict = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


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
    books = folder / "results"
    notes = remarks(folder)
    parts = [
        "# The papers' tables, run",
        "",
        "Written by `configs/papers/publish.py` from the CSV files in `results/` and the remarks "
        "in `remarks.yaml`; do not edit. [taken.yaml](taken.yaml) has what the runs take where a "
        "paper is silent, [rows.yaml](rows.yaml) how to run the rows that are not methods of a "
        "table, `fednet/papers/PAPER.yaml` all settings and what is doubtful in print.",
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
    """A line a table: how many cells were run, at which scale; of a figure that shows the runs of
    another table, under either name.
    """
    lines = ["| table | cells | full scale | mini scale |", "| --- | ---: | ---: | ---: |"]
    for name in papers.with_results():
        full, small = (_cells_run(_shown_rows(name, books, scale)) or "" for scale in NOTES)
        cells = str(len(papers.cells(name)))
        if (shown := _shown_by(name)) is not None:
            cells += f" of {shown}"
        lines.append(f"| {name} | {cells} | {full} | {small} |")
    return lines


def _shown_by(name: str) -> str | None:
    """Returns the table whose runs are those of this figure."""
    shown = papers.table(name).get("shown_by")
    return None if shown is None else f"{name.partition('/')[0]}/{shown}"


def _shown_rows(name: str, books: Path, scale: str) -> list[JsonDict]:
    """Returns the table's rows; of a figure without any, those of the table that it shows."""
    rows = _rows(name, books, scale)
    shown = _shown_by(name)
    if rows or shown is None:
        return rows
    datasets = {cell.dataset for cell in papers.cells(name)}
    return [r for r in _rows(shown, books, scale) if r["dataset"] in datasets]


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
    if (shown := _shown_by(name)) is not None:
        parts += [f"The same runs as [{shown}](#{shown.replace('/', '').lower()}).", ""]
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
        if any(r["status"] == "done" for r in rows):
            parts += ["Run again: " + ", ".join(f"`{c}`" for c in _commands(name, scale, rows)), ""]
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
    for scale in NOTES:
        run |= {str(r["dataset"]) for r in _shown_rows(name, books, scale) if r["status"] == "done"}
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
    for column, methods in rendering.group_by_column(rows).items():
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
    said = labels(books.parent).get(name, {})

    def place(r: Row) -> tuple[int, int, str, int]:
        column = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        plain = order.plain(str(r["method"]))
        return (
            columns.index(column) if column in columns else len(columns),
            methods.index(plain) if plain in methods else len(methods),
            str(r["method"]),
            int(r["seed"]),
        )

    rows = sorted(results.read_csv(path), key=place)
    return [{**r, "label": said.get(rendering.method_label(r), {}).get("label")} for r in rows]


# -- README.md -------------------------------------------------------------------------------------
HEAD = """\
# What the papers claim, and what came out here

Written by `configs/papers/publish.py` from `results/` and `claims.yaml`; do not edit.
[RESULTS.md](RESULTS.md) has the tables, pictures and commands, [FIELD.md](FIELD.md) what several
sources say of the same cells.

A claim is tested by differences, seed by seed: of the paper's own method and each baseline that it
prints apart, in each setting, or of those that the line names. A difference is *significant* where
two or more seeds were run and its 95 % interval excludes 0. Pairs of baselines are counted apart.

- "5 of 10 pairs, 2 against": five are significant as printed, two are significant the other way.
- **Confirmed**: all are significant as printed. **Partly confirmed**: some are, and fewer are
  against. **Not confirmed**: at least as many are against. **Inconclusive**: one seed, or no more
  significant differences than chance gives in one of twenty tables.
- *Full scale* has the setting of the paper, as far as it states it. *Mini scale* is a small setting
  of our own ([RESULTS.md](RESULTS.md) describes it): it compares methods with each other, and is no
  test of the paper's numbers.
- *CPU*: two cores of an AMD EPYC. *GPU*: one NVIDIA H100.
"""
WORDS = ("confirmed", "partly confirmed", "not confirmed", "inconclusive")
SMALL = " at mini scale"
HARDWARE = {"cpu": "CPU", "cuda": "GPU"}


def gallery_page(folder: Path) -> str:
    """README.md, from the compact results and the claims in `folder`."""
    claims: JsonDict = yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8"))
    books = folder / "results"
    summary = [
        f"| paper | {' | '.join(WORDS)} |",
        "|---|" + "---|" * len(WORDS),
    ]
    parts = list[str]()
    for paper, title in papers.NAMES.items():
        own = claims[paper]
        lines = [_claim(claim, books) for claim in own["claims"]]
        verdicts = [verdict for verdict, _ in lines]
        counts = [_count(verdicts, word) for word in WORDS]
        anchor = title.lower().replace(" ", "-").replace(".", "")
        summary.append(f"| [{title}](#{anchor}) | {' | '.join(counts)} |")
        parts += [
            f"\n## {title}\n",
            *([f"*{papers.paper(paper)['title']}*\n"] if paper not in papers.FIELD else []),
            "| the paper says | what was run | what came out | what is open |",
            "|---|---|---|---|",
            *(line for _, line in lines),
        ]
        if more := str(own.get("more", "")).strip():
            parts += ["", more]
    return "\n".join([HEAD.rstrip(), "", *summary, *parts]).rstrip() + "\n"


def _count(verdicts: Sequence[str], word: str) -> str:
    """Returns how many claims have this verdict: "3, 2 of them at mini scale"."""
    full = verdicts.count(word)
    small = verdicts.count(f"{word}{SMALL}")
    if full and small:
        return f"{full + small}, {small} of them{SMALL}"
    if small:
        return f"{small}{SMALL}"
    return str(full or "")


def _claim(claim: JsonMapping, books: Path) -> tuple[str, str]:
    """Returns the verdict of a claim, and its line: its words, what was run for it, the verdict,
    and what is open.
    """
    name = str(claim["table"])
    ran = []
    found = []
    word = "inconclusive"
    at = ""
    if "ran" in claim:  # without runs
        ran = [str(claim["ran"])]
        word = str(claim["verdict"])
    for scale, rows in _done(name, books).items() if "ran" not in claim else ():
        if "contrasts" in claim:
            counts, texts, rows = order.contrasted(rows, claim["contrasts"])
            said = f"{counts.said('differences')}: {'; '.join(texts)}"
        else:
            counts, others = order.counted(rows)
            own = order.own_method(rows)
            said = counts.said(f"pairs with {own}" if own else "pairs")
            if others.pairs:
                said += f" (and {others.said('pairs of baselines')})"
            rows = [r for r in rows if not r["label"]]
        if not rows:
            continue
        ran.append(_ran(scale, rows))
        found.append(f"{capitalized(scale)}: {said}.")
        if word == "inconclusive" and counts.word != word:
            word = counts.word
            at = SMALL if scale == "mini" else ""
    anchor = name.replace("/", "").lower()
    line = (
        f"| {str(claim['says']).strip()} [{name.partition('/')[2]}](RESULTS.md#{anchor}) "
        f"| {'<br>'.join(ran) or 'not run'} "
        f"| {' '.join([f'**{capitalized(word)}**{at}.', *found, *_sentence(claim, 'found')])} "
        f"| {' '.join(_sentence(claim, 'open'))} |"
    )
    return f"{word}{at}", line


def _sentence(claim: JsonMapping, key: str) -> list[str]:
    """Returns the claim's sentence under this key, if it has one."""
    return [str(claim[key]).strip()] if key in claim else []


def _ran(scale: str, rows: Sequence[Row]) -> str:
    """Scale, datasets, seeds and hardware of these runs: "full: MNIST, 3 seeds, CPU"."""
    datasets = ", ".join(dict.fromkeys(str(r["dataset"]) for r in rows))
    many = [
        len({r["seed"] for r in runs})
        for methods in rendering.group_by_column(rows).values()
        for runs in methods.values()
    ]
    least = min(many)
    most = max(many)
    seeds = f"{least} to {most} seeds" if least < most else f"{most} seed{'s' * (most > 1)}"
    devices = {str(r["device"]).partition(":")[0] for r in rows if r["device"]}
    return f"{scale}: {datasets}, {seeds}, {' and '.join(HARDWARE[d] for d in sorted(devices))}"


def _done(name: str, books: Path) -> dict[str, list[JsonDict]]:
    """The rows of the runs that are done, by scale."""
    every = {s: [r for r in _rows(name, books, s) if r["status"] == "done"] for s in NOTES}
    return {scale: rows for scale, rows in every.items() if rows}


def _commands(name: str, scale: str, rows: Sequence[Row]) -> list[str]:
    """What runs these again: the seeds of most methods, then those of a few."""
    done = [r for r in rows if r["status"] == "done" and not r["label"]]
    every = dict.fromkeys(c.dataset for c in papers.cells(name))
    ran = dict.fromkeys(str(r["dataset"]) for r in done)
    words = ["fednet reproduce", name]
    words += [f"--dataset {next(iter(ran))}"] if len(ran) == 1 < len(every) else []
    words += ["--scale mini"] if scale == "mini" else []
    seeds: dict[frozenset[int], list[tuple[tuple[str, ...], str]]] = {}
    for column, methods in rendering.group_by_column(done).items():
        for method, runs in methods.items():
            seeds.setdefault(frozenset(int(r["seed"]) for r in runs), []).append((column, method))
    most = max(seeds, key=lambda own: len(seeds[own]))
    commands = [" ".join(words) + (f" --seeds {_listed(most)}" if most != {0} else "")]
    for own, cells in seeds.items():
        if not own <= most:
            settings = dict.fromkeys(order.setting(column[1:]) for column, _ in cells)
            only = ",".join(dict.fromkeys(method for _, method in cells))
            few = [*words, f'--only "{only}"', f"--seeds {_listed(own - most)}"]
            few += [f'--setting "{next(iter(settings))}"'] if len(settings) == 1 else []
            commands.append(" ".join(few))
    return commands


def _listed(seeds: frozenset[int]) -> str:
    return ",".join(map(str, sorted(seeds)))


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
        scale: rendering.group_by_column(r for r in rows if not r["changed"])
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
