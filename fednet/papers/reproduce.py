"""`fednet reproduce`: the runs behind a table of a paper, and the paper's figure beside ours.

    OUT/PAPER/NAME-seedS/              a run, shared by the tables that stand on the same runs
    OUT/PAPER/search/                  the runs of a search for hyper-parameters; what was chosen
    OUT/PAPER-TABLE.{csv,md,txt,html}  the table
    OUT/PAPER-TABLE-curves.csv, OUT/PAPER-TABLE/    curves and figures

Of mini scale all of these have `-mini` in their name. Runs of one seed are paired: partition,
initial weights and participants follow from the seed, not from the method.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednet import loading, papers
from fednet.config.tree import compose
from fednet.errors import ConfigError, unknown
from fednet.experiment.rundir import writable
from fednet.files import write_aside
from fednet.papers import measures, reproduction
from fednet.papers import mini as small
from fednet.papers.cell import Cell
from fednet.papers.choices import variants
from fednet.papers.mini import SAID, mini
from fednet.registry import algorithm
from fednet.report import metrics, overlay, page
from fednet.report.read import Run, open_run
from fednet.sweep import claims, pool
from fednet.sweep.pool import Task

# Measures that want every client judged.
PERSONAL = ("pfl_accuracy", "drift_accuracy", "solo_accuracy", "points_gained")
MINI = "mini scale: not the paper's setting"  # above every figure of such runs
# Whose accuracy by class is drawn: Figures 2 and 5 of FedDC.
BY_CLASS = dict.fromkeys(("feddc/table1", "feddc/figure2_text"), ("FedAvg", "FedDC"))
MEASURED = {"feddpc/table1": "measured"}  # with no runs behind it
# Keys that tell the table's runs apart.
OWN = {
    "seed": "--seeds says with which seeds a table is run",
    "name": "a run's name says which cell it is",
    **dict.fromkeys(
        ("algorithm", "algorithm.name"),
        "each cell has its own method; --add puts another beside them, and "
        "--set algorithm.KEY=VALUE changes a key of them",
    ),
}
LOOKS = 20  # evaluations in a run of which only the end is in the table


def main(args: argparse.Namespace) -> int:
    loading.load_parts([Path(f) for f in args.load])
    if args.list:
        print(listing())
        return 0
    if args.table is None and args.results is not None:
        from fednet.papers.record import write

        if not any((args.results / "results").glob("*.csv")):
            raise ConfigError(
                f"--results {args.results}: no compact results in {args.results / 'results'}; "
                f"name a table, whose runs are then kept there."
            )

        print(write(args.results))
        return 0
    if args.table is None:
        raise ConfigError(
            "fednet reproduce: expected PAPER/TABLE, such as feddpc/table2; --list shows them."
        )
    if args.table.lower() == "feddpc/table1":
        return _measure(args)
    if args.results is not None and pool.changes(args.set):
        raise ConfigError(
            "--results keeps what was run at the papers' settings; leave out --set, or --results."
        )
    job = plan(args)
    if args.grid or args.search:
        from fednet.papers.search import grids

        grids(args, job)  # what is wrong with them is said before anything starts
    for folder, flag in ((args.out, "--out"), (args.results, "--results")):
        if folder is not None:
            writable(folder, flag)  # said before hours of runs, not after them
    if args.plan:
        from fednet.papers.forecast import forecast

        print(forecast(job, args.out, args.device, args.jobs, args.set))
        return 0
    say = (lambda text: None) if args.quiet else (lambda text: print(text, flush=True))
    if job.scale == "mini":
        say(SAID[0].upper() + SAID[1:])
    if args.search:
        from fednet.papers.search import searched

        job = searched(job, args, say)
    tasks = [t for _, _, t in job.runs(args.out)]
    states = [pool.state(t, pool.digest(t, args.load, args.set)) for t in tasks]
    if args.gather and not {"done", "failed", "edited"} & set(states):
        raise ConfigError(
            f"--gather: none of the {len(tasks)} runs of {job.table} in {job.folder(args.out)} is "
            f"done."
        )
    count, refused = [states.count("done")], []

    def told(task: Task, state: str) -> None:
        count[0] += (state == "done") - (state == "changed")
        if state == "refused":
            refused.append(task.name)
        said = {
            "done": lambda: _line(job, task),
            "changed": lambda: "its files were changed after it ended; it is done again",
            "edited": lambda: (
                "your own file was edited, or it failed under another configuration; it is done "
                "again"
            ),
            "held": lambda: (
                f"another process is at it ({_holder(task)}); the same command gathers it later"
            ),
            "torn": lambda: f"cannot be resumed, it is done again: {pool.why(task)}",
        }
        came = said[state]() if state in said else f"{state}: {pool.why(task)}"
        text = f"[{count[0]}/{len(tasks)}] {task.name}: {came}"
        if args.quiet and state in ("refused", "failed"):
            print(text, file=sys.stderr)
        say(text)

    try:
        if not args.gather:
            pool.work(tasks, args.jobs, args.device, load=args.load, sets=args.set, told=told)
    finally:
        written = publish(job, args.out)  # also of what was done before a stop
    failed = [t for t in tasks if pool.state_now(t) == "failed"]
    if failed and not args.gather:
        say(
            f"{len(failed)} of these runs failed, and are left at that; to have one tried again, "
            f"remove its mark: {failed[0].books / failed[0].name}.failed"
        )
    if written and not args.quiet:
        print((args.out / f"{job.stem}.txt").read_text(encoding="utf-8"))
        print("\n".join(str(p) for p in written))
    if args.results is not None:
        from fednet.papers.record import deposit, write

        deposit(job, args.out, args.results)
        say(str(write(args.results)))
    return pool.REFUSED if refused else 0


def _measure(args: argparse.Namespace) -> int:
    """FedDPC's Table 1, which no runs stand behind."""
    from fednet.papers.record import write
    from fednet.papers.servercost import report

    of_runs = (
        "gather",
        "dataset",
        "only",
        "add",
        "open",
        "seeds",
        "setting",
        "search",
        "grid",
        "set",
    )
    if said := next((name for name in of_runs if getattr(args, name)), None):
        raise ConfigError(
            f"--{said}: {args.table} has no runs behind it; it is measured whole, by the command "
            f"without --{said}."
        )
    if args.plan:
        print(
            "no runs: the server's half of each method is measured when it is asked for, in a "
            "minute or two."
        )
        return 0
    if args.results is not None:
        writable(args.results / "results", "--results")
    text = report()
    print(text)
    if args.results is not None:
        write_aside(args.results / "results" / "feddpc-table1.txt", text + "\n")
        print(write(args.results))
    return 0


# -- what there is ---------------------------------------------------------------------------------
def listing() -> str:
    """Every table and text figure of the five papers, with what its runs are."""
    lines = []
    for name in papers.results():
        cells = papers.cells(name)
        caption = papers.caption(name).partition("; class")[0]
        datasets = dict.fromkeys(str(c.config["data"]["dataset"]) for c in cells)
        lines.append((name, f"{len(cells):3d} cells", ", ".join(datasets), caption))
    lines += [
        (name, MEASURED.get(name, "  no runs"), "", f"prints {what}")
        for name, what in papers.NO_RUNS.items()
    ]
    wide = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(part.ljust(w) for part, w in zip(line, wide)), line[3]]) for line in lines
    )


# -- what is to be run -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """The cells asked for, and how. added: names of methods that are not in the paper; chosen:
    cell's name -> settings that a search chose; changed: what `--set` changed.
    """

    table: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    scale: str
    added: frozenset[str] = frozenset()
    chosen: Mapping[str, Mapping[str, Any]] | None = None
    changed: str = ""

    @property
    def stem(self) -> str:
        return self.table.replace("/", "-") + ("-mini" if self.scale == "mini" else "")

    def folder(self, out: Path) -> Path:
        return out / (self.cells[0].paper + ("-mini" if self.scale == "mini" else ""))

    def runs(self, out: Path) -> list[tuple[Cell, int, Task]]:
        """By seed, so that what is cut short has whole comparisons."""
        return [
            (
                c,
                s,
                Task(
                    {**c.config, "name": f"{c.config['name']}-seed{s}", "seed": s}, self.folder(out)
                ),
            )
            for s in self.seeds
            for c in self.cells
        ]


def plan(args: argparse.Namespace) -> Job:
    """The job that the command line asks for. Raises ConfigError for names that are not there."""
    for text in args.set:
        if why := OWN.get(text.partition("=")[0].strip()):
            raise ConfigError(f"--set {text}: {why}.")
    cells = [c for c in papers.cells(args.table) if args.search or not c.by_search]
    name = f"{cells[0].paper}/{cells[0].table}"
    if args.dataset:
        known = {_plain(k): k for c in cells for k in (c.dataset, str(c.config["data"]["dataset"]))}
        if _plain(args.dataset) not in known:
            raise ConfigError(
                unknown("dataset", args.dataset, list(dict.fromkeys(c.dataset for c in cells)))
            )
        cells = [
            c
            for c in cells
            if _plain(args.dataset) in (_plain(c.dataset), _plain(str(c.config["data"]["dataset"])))
        ]
    if args.setting:
        # Whole words: E1 is not E10.
        cells = [c for c in cells if f" {args.setting} " in f" {c.variant} {c.heterogeneity} "]
        if not cells:
            there = dict.fromkeys(
                f"{c.variant} {c.heterogeneity}".strip()
                + (" (with --search)" if c.by_search else "")
                for c in papers.cells(name)
            )
            raise ConfigError(
                f"--setting {args.setting}: no cell of {name} has that in its setting; they are "
                f"{', '.join(there)}."
            )
    wanted: list[str] | None = None
    if args.only:
        known = {_plain(c.method): c.method for c in cells}
        for method in args.only:
            if _plain(method) not in known:
                raise ConfigError(unknown("method", method, list(dict.fromkeys(known.values()))))
        wanted = [known[_plain(m)] for m in args.only]
    columns: dict[tuple[str, str, str], Cell] = {}
    # the first, which trains as the paper says: a later one may be of no federation, or an ablation
    # with other data
    for c in cells:
        columns.setdefault((c.dataset, c.variant, c.heterogeneity), c)
    added = dict(own_method(text) for text in args.add)
    own = {c.name: c.method for c in papers.cells(name)}
    chosen = [c for c in cells if wanted is None or c.method in wanted]
    if wanted is not None:  # what they are measured against has to run too
        against = {(c.dataset, c.variant, c.heterogeneity, c.versus) for c in chosen if c.versus}
        chosen += [
            c
            for c in cells
            if c not in chosen and (c.dataset, c.variant, c.heterogeneity, c.method) in against
        ]
    for label, mapping in added.items():
        for c in columns.values():
            other = c.swapped(label, mapping)
            if other.name in own:
                raise ConfigError(
                    f"--add {label}: {own[other.name]} of {name} has runs of that name; to tell "
                    f"them apart write out one of "
                    f"its keys, as in '{{name: {mapping['name']}, KEY: VALUE}}'."
                )
            chosen.append(
                replace(
                    other,
                    grids={k: v for k, v in c.grids.items() if not k.startswith("algorithm.")},
                )
            )
    runs = {c.name for c in chosen}  # a table of ablations has some of the choices itself
    opened = [v for c in chosen for v in variants(c) if v.name not in runs] if args.open else []
    chosen += opened
    if args.scale == "mini":
        chosen = [mini(c) for c in chosen]
    chosen = [replace(c, config=_evaluated(c, args.scale)) for c in chosen]
    return Job(
        name,
        tuple(chosen),
        tuple(args.seeds or [0]),
        args.scale,
        frozenset([*added, *(c.method for c in opened if c.name not in own)]),
        changed=", ".join(pool.changes(args.set)),
    )


def own_method(text: str) -> tuple[str, dict[str, Any]]:
    """`--add mine` or `--add '{name: mine, mu: 0.1}'` as (label, the algorithm's mapping)."""
    value = compose(text, f"--add {text}", one_place=True).plain()
    mapping = {"name": value} if isinstance(value, str) else value
    if not isinstance(mapping, dict) or not isinstance(mapping.get("name"), str):
        raise ConfigError(
            f"--add {text}: expected a method's name, or '{{name: mine, key: value}}'."
        )
    algorithm.get(mapping["name"])  # an unknown name is answered before anything starts
    return "-".join(
        [mapping["name"], *(f"{k}{v}" for k, v in mapping.items() if k != "name")]
    ), mapping


def _evaluated(cell: Cell, scale: str) -> dict[str, Any]:
    """The cell's configuration with no more evaluation than its figures need.

    A table of the global model's accuracy needs no client's judgement, and every round's: best
    accuracy, and the round of it, are over rounds. A table of personal accuracy needs all clients
    at the end, and in between a curve's points.
    """
    rounds = int(cell.config["rounds"])
    personal = any(m in PERSONAL for m in cell.figures) and cell.paper != "fedrds"
    looks = (
        small.PERSONAL_LOOKS
        if scale == "mini" and personal
        else small.LOOKS
        if scale == "mini"
        else LOOKS
        if personal
        else rounds
    )
    section = {"every": max(1, rounds // looks), "clients": "auto" if personal else "none"}
    return papers.lay(
        cell.config,
        {"evaluate": section, "checkpoint": {"every": max(1, rounds // LOOKS), "best": False}},
    )


def _plain(text: str) -> str:
    return "".join(ch for ch in text.lower() if ch.isalnum() or ch == "+")


# -- what came of it -------------------------------------------------------------------------------
def rows(
    job: Job, out: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[tuple[str, int], Run]]:
    """(table's rows, curves, runs). What is not done has a row that says so."""
    runs = job.runs(out)
    found = {(c.name, s): open_run(t.run) for c, s, t in runs if pool.state_now(t) == "done"}
    made, curves = [], []
    for cell, seed, task in runs:
        state, run = pool.state_now(task), found.get((cell.name, seed))
        versus = next(
            (
                c
                for c in job.cells
                if reproduction.plain(c.method) == cell.versus
                and (c.dataset, c.variant, c.heterogeneity)
                == (cell.dataset, cell.variant, cell.heterogeneity)
            ),
            None,
        )
        other = None if versus is None else found.get((versus.name, seed))
        made.append(
            reproduction.row(
                cell,
                seed,
                job.scale,
                run,
                in_paper=reproduction.plain(cell.method) not in job.added,
                versus=other,
                status=_status(task, state),
                changed=job.changed,
                hyperparameters=(job.chosen or {}).get(cell.name),
            )
        )
        if run is not None:
            curves += reproduction.curves(cell, seed, run)
    return made, curves, found


def _status(task: Task, state: str) -> str:
    """As it stands in the table."""
    if state == "failed":
        return f"failed: {pool.why(task) or 'it said nothing'}"
    if state == "begun":
        path = task.run / "rounds.jsonl"
        ended = path.read_bytes().count(b"\n") if path.exists() else 0
        return f"not run: {ended} of {task.config['rounds']} rounds so far" if ended else "not run"
    if state == "changed":
        return "not run: its files were changed after it ended"
    return (
        state if state == "done" else f"not run: {said}" if (said := pool.why(task)) else "not run"
    )


def publish(job: Job, out: Path) -> list[Path]:
    """Writes the table in every form. What is not drawn for want of a run is left out."""
    made, curves, runs = rows(job, out)
    if all(str(r["status"]).startswith("not run") for r in made):
        return []
    table, points = out / f"{job.stem}.csv", out / f"{job.stem}-curves.csv"
    reproduction.merge(table, made, reproduction.FIXED)  # other parts of the table stay
    reproduction.merge(points, curves, reproduction.CURVE)
    whole = reproduction.read_csv(table)
    written = [table, points, out / f"{job.stem}.txt", out / f"{job.stem}.md"]
    for path, text in zip(
        written[2:], (reproduction.as_text(whole) + "\n", reproduction.as_md(whole))
    ):
        write_aside(path, text)
    curves = reproduction.read_csv(points)
    said = MINI if job.scale == "mini" else ""
    drawn = [overlay.draw(curves, out / f"{job.stem}.svg", said)]
    if job.table in papers.LOSSES:
        drawn.append(overlay.draw(curves, out / f"{job.stem}-loss.svg", said, "train_loss"))
    return [*written, *(path for path in drawn if path is not None), *pages(job, out, runs)]


def pages(job: Job, out: Path, runs: Mapping[tuple[str, int], Run]) -> list[Path]:
    """For each setting a page with all its methods laid over each other, and pictures of the first
    seed's runs.
    """
    settings: dict[str, dict[tuple[str, int], Run]] = {}
    for cell, seed, _ in job.runs(out):
        if (cell.name, seed) in runs:
            name = (
                "-".join(w for w in (cell.dataset, cell.variant, cell.heterogeneity) if w)
                .lower()
                .replace(" ", "-")
            )
            settings.setdefault(name, {})[cell.method, seed] = runs[cell.name, seed]
    made: list[Path] = []
    for name, shown in settings.items():
        path = page.write(list(shown.values()), out / job.stem / f"{name}.html")
        if job.scale == "mini":
            text = path.read_text(encoding="utf-8")
            path.write_text(
                re.sub(
                    r"(<body[^>]*>)",
                    rf"\1<p><strong>{SAID[0].upper() + SAID[1:]}</strong></p>",
                    text,
                    count=1,
                ),
                encoding="utf-8",
            )
        first = {m: run for (m, s), run in shown.items() if s == job.seeds[0]} or {
            m: run for (m, _), run in shown.items()
        }
        made += [
            path,
            *overlay.details(
                first,
                out / job.stem,
                name,
                MINI if job.scale == "mini" else "",
                BY_CLASS.get(job.table, ()),
            ),
        ]
    return made


def _holder(task: Task) -> str:
    return claims.holder(task.books, task.name) or "it has just ended"


def _line(job: Job, task: Task) -> str:
    run, cell = (
        open_run(task.run),
        next(c for c in job.cells if task.name.rpartition("-seed")[0] == c.config["name"]),
    )
    values = {name: measures.measured(name, run) for name in cell.figures}
    said = [
        f"{name} {value:.2f}"
        + ("" if cell.figures[name] is None else f" (paper {cell.figures[name]})")
        for name, value in values.items()
        if value is not None
    ]
    return ", ".join(
        [
            *said,
            f"{metrics.cost(run, 'mb')[len(run.rounds)]:.1f} MB",
            f"{run.summary['seconds']:.0f} s",
        ]
    )
