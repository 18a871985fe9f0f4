"""`fednet report`: one self-contained HTML page about one or several runs, without network access,
for light and dark.
"""

from __future__ import annotations

import html
import itertools
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from fednet.errors import ConfigError
from fednet.files import write_aside
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.records import Event, Summary, metric, shown
from fednet.report import canvas, costs, figures, groups, metrics, style, tables
from fednet.report.canvas import Figure
from fednet.report.figures import size
from fednet.report.groups import Group
from fednet.report.read import Run

if TYPE_CHECKING:
    from jinja2 import Environment

RUNS = 12  # with details at most
EVENTS = 300  # of the timeline at most
# The events of the timeline, in words.
TIMELINE = {
    "started": "the server started",
    "joined": "joined",
    "rejoined": "joined again",
    "left": "left",
    "superseded": "was replaced by another process",
    "away": "lost the connection",
    "back": "is connected again",
    "dropped": "was dropped from the round",
    "failed": "failed",
    "late": "replied too late",
    "restarted": "had lost its state and began again",
    "blamed": "broke secure aggregation",
    "refused": "was refused",
    "fault": "planned fault",
    "stopped": "the run stopped",
}
Chart = Callable[[Figure], JsonDict]


def write(runs: Sequence[Run], out: str | Path) -> Path:
    """Writes the page aside and moves it into place. Raises ConfigError for no runs."""
    path = Path(out)
    text = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, text)
    return path


def templates() -> Environment:
    """Returns the templates in this folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("fednet.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(runs: Sequence[Run], again: int = 0) -> str:
    """Returns the page as text. again: seconds after which the page of a live run reloads, if it is
    served; 0: never.
    """
    if not runs:
        raise ConfigError("report: expected at least one run directory.")
    found = groups.group(runs)
    several = len(runs) > 1
    firsts = [g.runs[0] for g in found][:RUNS]  # details are of the first seed of each group
    numbers = itertools.count()

    def chart(figure: Figure) -> JsonDict:
        svg = canvas.inline(figure, f"f{next(numbers)}-")
        return {"title": figure.title, "note": figure.note, "svg": svg}

    return (
        templates()
        .get_template("page.jinja")
        .render(
            title=_title(runs, found),
            names=[r.name for r in runs],
            setting=groups.setting(runs),
            several=several,
            again=again,
            tiles=[] if several else _tiles(runs[0]),
            live=[r.name for r in runs if not r.finished],
            comparison=_comparison(runs) if several else None,
            curves=_curves(found, chart),
            axes=[costs.axis(x, clock=found[0].clock) for x in _axes(found)],
            legend=_legend(found) if several else "",
            details=[_details(r, chart) for r in firsts],
            hidden=len(runs) - len(firsts),
            runs=_runs(runs) if several else None,
        )
    )


# -- above: what it is, and the most important numbers ---------------------------------------------
def _title(runs: Sequence[Run], found: Sequence[Group]) -> str:
    """Returns the methods and the data."""
    methods = list(dict.fromkeys(g.label for g in found))
    what = " vs ".join(methods) if len(methods) < 5 else f"{len(methods)} methods"
    data = list(dict.fromkeys(groups.dataset(r) for r in runs))
    return f"{what} on {', '.join(data)}" if len(data) < 3 else f"{what} on {len(data)} datasets"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Returns (value, name, note) of the numbers at the top of the page."""
    s = metrics.summary(run)
    curve = metrics.curve(run)
    tiles, a, (ending, of) = [], s["accuracy"], metrics.last(curve)
    if a["final"] is not None:
        tiles += [
            (_percent(a["final"]), "final global accuracy", f"after {curve[-1][0]} rounds"),
            (_percent(a["best"]), "best global accuracy", f"in round {a['best_round']}"),
            (_percent(ending), "mean global accuracy", f"of the last {of} evaluated rounds"),
        ]
    if own := metrics.personal(run):
        note = f"on clients' tests; worst 10 % of clients: {_percent(own['worst_tenth'])}"
        if own["drift"] is not None:
            note += f"; class-balanced tests: {_percent(own['drift'])}"
        tiles.append((_percent(own["pfl"]), f"{run.own_model} accuracy", note))
    return [*tiles, _sent(run, s), _time(s), _tasks(run)]


def _sent(run: Run, s: Summary) -> tuple[str, str, str]:
    spent, book = s["bytes"], costs.ledger(run)
    total = book.sum() or 1
    wasted = f"{100 * sum(book.wasted.values()) / total:.2g} % wasted"
    idle = f"{100 * book.connection / total:.2g} % keep-alive"
    note = f"down {size(spent['down'])}, up {size(spent['up'])}; {wasted}, {idle}"
    return size(spent["total"]), "sent in total", note


def _time(s: Summary) -> tuple[str, str, str]:
    """By the run's clock."""
    rounds = max(1, s["rounds"])
    if (virtual := s.get("seconds_virtual")) is not None:
        note = f"{virtual / rounds:.3g} s per round; computed in {_span(s['seconds'])}"
        return _span(virtual), "virtual time", note
    return _span(s["seconds"]), "wall-clock time", f"{s['seconds_per_round'] or 0:.3g} s per round"


def _tasks(run: Run) -> tuple[str, str, str]:
    """How many of the selected clients completed their task, so that their replies counted."""
    rounds = run.rounds
    selected, completed, dropped = (
        sum(len(r[name]) for r in rounds) for name in ("selected", "completed", "dropped")
    )
    parts = [f"{dropped} dropped"]
    if (rest := selected - completed - dropped) > 0:
        parts.append(f"{rest} not finished or in discarded rounds")
    if discarded := sum(bool(r.void) for r in rounds):
        parts.append(f"{discarded} discarded round{'' if discarded == 1 else 's'}")
    return f"{completed} / {selected}", "tasks completed", ", ".join(parts)


def _comparison(runs: Sequence[Run]) -> JsonDict:
    """Returns the table of several runs, with the highest target that all of them reach."""
    best = [b[0] for r in runs if (b := metrics.best(metrics.curve(r)))]
    target = int(100 * min(best)) / 100 if len(best) == len(runs) else 0.0
    made = tables.table(runs, [target] if target else [])
    head, *rows = tables.grid(made)
    return {
        "head": head,
        "rows": rows[: len(made.groups)],
        "differences": rows[len(made.groups) :],
        "notes": made.notes,
    }


def _runs(runs: Sequence[Run]) -> JsonDict:
    """Returns a table of runs: the settings in which they differ, and their results."""
    settings = {
        k: v for k, v in groups.differing(runs).items() if k == "seed" or not groups.aside(k)
    }
    y = metrics.measured(runs)
    results = ("final accuracy", "best accuracy", "MB", costs.axis("seconds"))
    rows = []
    for i, run in enumerate(runs):
        values = metrics.curve(run, y)
        found = (metrics.final(values), (metrics.best(values) or (None,))[0])
        spent = costs.ledger(run).total() / 1e6, sum(r.seconds or 0.0 for r in run.rounds)
        cells = [
            run.name,
            *("–" if held[i] is None else groups.word(held[i]) for held in settings.values()),
        ]
        cells += [_percent(v) for v in found]
        rows.append([*cells, *(_short(v) for v in spent)])
    return {
        "head": ["run", *settings, *results],
        "rows": rows,
        "note": f"One row per run, with the settings in which they differ. The accuracy is the "
        f"{metric(y).titled()}. Click a heading to sort.",
    }


# -- curves ----------------------------------------------------------------------------------------
def _curves(found: Sequence[Group], chart: Chart) -> list[JsonDict]:
    """For each metric that was recorded, a chart for each axis."""
    made = []
    for m in shown("page", (row for g in found for run in g.runs for row in run.rounds)):
        charts = [
            {"place": place, **chart(f)}
            for place, x in enumerate(_axes(found))
            for f in figures.curve(found, x, m.name)
        ]
        if charts:
            made.append({"name": groups.titled(found, m.name), "charts": charts})
    return made


def _axes(found: Sequence[Group]) -> list[str]:
    """Returns the units of the x axis: no seconds if they are by different clocks."""
    return [x for x in costs.COSTS if x != "seconds" or len(groups.clocks(found)) == 1]


def _legend(found: Sequence[Group]) -> Markup:
    """Returns a button for each group, with its line, which hides it and shows it again."""
    out = []
    for place, g in enumerate(found):
        dashes = style.line(place)["dashes"]
        dash = "" if dashes[0] is None else " ".join(map(str, dashes))
        out.append(
            f'<button type="button" data-toggle="{place}" aria-pressed="true">'
            f'<svg viewBox="0 0 28 10" class="swatch"><path d="M0 5L28 5" stroke-width="2" '
            f'style="stroke:var(--c{place % 8})" stroke-dasharray="{dash}"/></svg>'
            f"{html.escape(f'{g.label} (n={len(g.runs)})')}</button>"
        )
    return Markup(f'<div class="legend">{"".join(out)}</div>')


# -- run by run ------------------------------------------------------------------------------------
def _details(run: Run, chart: Chart) -> JsonDict:
    provenance = groups.flat(run.summary.provenance or {})
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "cards": [chart(f) for f in figures.details(run)],
        "timeline": _timeline(run),
        "provenance": {
            k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in provenance.items()
        },
        "repeat": f"fednet run {shlex.quote(_from_here(run.dir / 'config.yaml'))}",
        "config": (run.dir / "config.yaml").read_text(encoding="utf-8"),
        "model": run.summary.model_sha256,
    }


def _timeline(run: Run) -> JsonDict:
    """Returns who joined, left or was dropped, when and why, and when server processes began and
    ended. Of a long run, the last EVENTS of these.
    """
    began: float | None = None
    count, kept = 0, deque[tuple[object, ...]](maxlen=EVENTS)
    for event in run.lines("events"):
        if began is None:
            began = event.time
        if event.type in TIMELINE:
            count += 1
            second = "" if event.time is None or began is None else f"{event.time - began:,.1f}"
            kept.append((second, event.round or "", TIMELINE[event.type], *_who_and_why(event)))
    return {"rows": list(kept), "left": count - len(kept)}


def _who_and_why(event: Event) -> tuple[str, str]:
    more = event.details
    clients = more.get("clients") or ([event.client] if event.client >= 0 else [])
    why = [str(more[key]) for key in ("kind", "why", "reason", "text", "error") if more.get(key)]
    why += [f"{key} {more[key]}" for key in ("host", "device", "incarnation") if more.get(key)]
    return as_text(clients), ", ".join(why)


def _from_here(path: Path) -> str:
    """Returns the path as a command in this directory takes it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# -- numbers as text -------------------------------------------------------------------------------
def _percent(v: float | None) -> str:
    return "–" if v is None or np.isnan(v) else f"{100 * v:.2f} %"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
