"""`fednet report`: one self-contained HTML page about one or several runs, without network access,
for light and dark.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.config import differing, flat
from fednet.files import write_aside
from fednet.ids import as_text
from fednet.plain import JsonDict, visible
from fednet.records import Event, metric, metrics_shown
from fednet.report import canvas, costs, curves, figures, groups, metrics, parallel, style, tables
from fednet.report.figures import size
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


def write(runs: Sequence[Run], out: str | Path) -> Path:
    """Writes the page aside and moves it into place."""
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
        finalize=_visible_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible_text(value: object) -> object:
    """What a page shows for a value: names and reasons come from others."""
    return visible(value) if type(value) is str else value


@canvas.uncollected()
def render(runs: Sequence[Run], again: int = 0) -> str:
    """Returns the page as text. again: seconds after which the page of a live run reloads, if it is
    served; 0: never.
    """
    found = groups.group(runs)
    several = len(runs) > 1
    firsts = [g.runs[0] for g in found][:RUNS]  # details are of the first seed of each group
    methods = list(dict.fromkeys(g.label for g in found))
    what = " vs ".join(methods) if len(methods) < 5 else f"{len(methods)} methods"
    names = (str(r.config.get("data", {}).get("dataset") or "unknown data") for r in runs)
    data = list(dict.fromkeys("the sites' own data" if n == "site" else n for n in names))
    axes = groups.comparable_costs(found)
    legend = [
        (f"{g.label} (n={len(g.runs)})", " ".join(str(d) for d in style.line(i)["dashes"] if d))
        for i, g in enumerate(found)
    ]
    with parallel.drawings() as draw:
        panes = []  # of each metric that was recorded, a chart for each axis
        for m in metrics_shown("page", (row for run in runs for row in run.rounds)):
            charts = [curves.curve(found, x, m.name) for x in axes]
            if shown := [(chart, draw(chart)) for chart in charts if chart is not None]:
                panes.append((groups.metric_label(found, m.name), shown))
        cards = [[(card, draw(card)) for card in figures.details(run)] for run in firsts]
        template = templates().get_template("page.jinja")
        values = {
            "title": f"{what} on {', '.join(data) if len(data) < 3 else f'{len(data)} datasets'}",
            "names": [r.name for r in runs],
            "setting": groups.setting(runs),
            "several": several,
            "again": again,
            "tiles": [] if several else _tiles(runs[0]),
            "live": [r.name for r in runs if not r.finished],
            "comparison": _comparison(runs) if several else None,
            "axes": [costs.axis(x, clock=found[0].clock) for x in axes],
            "legend": legend if several else [],
            "details": [_details(r) for r in firsts],
            "hidden": len(runs) - len(firsts),
            "runs": _runs(runs) if several else None,
        }
        # Now the drawings are needed.
        values["cards"] = [[(card, drawn()) for card, drawn in of] for of in cards]
        values["panes"] = [(name, [(c, drawn()) for c, drawn in charts]) for name, charts in panes]
    return template.render(values)


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Returns (value, name, note) of the numbers at the top of the page."""
    s = metrics.summary(run)
    book = costs.ledger(run)
    rounds = run.rounds
    curve = metrics.curve(run)
    tiles = []
    a = s["accuracy"]
    ending, of = metrics.last(curve)
    if a["final"] is not None:
        tiles += [
            (_percent(a["final"]), "final global accuracy", f"after {curve[-1][0]} rounds"),
            (_percent(a["best"]), "best global accuracy", f"in round {a['best_round']}"),
            (_percent(ending), "mean global accuracy", f"of the last {of} evaluated rounds"),
        ]
    elif loss := s["loss"]:
        measured = metrics.curve(run, "test_loss")[-1][0]
        tiles += [
            (f"{loss['final']:.4g}", "final test loss", f"after {measured} rounds"),
            (f"{loss['best']:.4g}", "best test loss", f"in round {loss['best_round']}"),
        ]
    if spread := metrics.personal_spread(run):
        own = metrics.accuracies(run)
        worst = _percent(spread["worst_tenth"])
        note = f"on clients' tests, all samples together; worst 10 % of clients: {worst}"
        if "balanced" in own:
            note += f"; class-balanced tests: {_percent(own['balanced'])}"
        tiles.append((_percent(own["personal"]), f"{run.own_model} accuracy", note))

    spent = s["bytes"]
    total = book.total() or 1
    wasted = f"{100 * sum(costs.wasted_bytes(run).values()) / total:.2g} % wasted"
    idle = f"{100 * book.by('use')[costs.CONNECTION] / total:.2g} % keep-alive"
    note = f"down {size(spent['down'])}, up {size(spent['up'])}; {wasted}, {idle}"
    tiles.append((size(spent["total"]), "sent in total", note))

    if (virtual := s.get("seconds_virtual")) is not None:  # by the run's clock
        pace = f"{virtual / max(1, s['rounds']):.3g} s per round"
        note = f"{pace}; computed in {_span(s['seconds'])}"
        tiles.append((_span(virtual), "virtual time", note))
    else:
        pace = f"{s['seconds_per_round'] or 0:.3g} s per round"
        tiles.append((_span(s["seconds"]), "wall-clock time", pace))

    # How many of the selected clients completed their task, so that their replies counted.
    selected, completed, dropped = (
        sum(len(r[name]) for r in rounds) for name in ("selected", "completed", "dropped")
    )
    parts = [f"{dropped} dropped"]
    if (rest := selected - completed - dropped) > 0:
        parts.append(f"{rest} not finished or in discarded rounds")
    if discarded := sum(bool(r.void) for r in rounds):
        parts.append(f"{discarded} discarded round{'' if discarded == 1 else 's'}")
    tiles.append((f"{completed} / {selected}", "tasks completed", ", ".join(parts)))
    return tiles


# -- several runs ----------------------------------------------------------------------------------
def _comparison(runs: Sequence[Run]) -> JsonDict:
    """Returns the table of several runs, with the highest target that all of them reach."""
    every = [metrics.best(metrics.curve(run)) for run in runs]
    best = [found[0] for found in every if found]
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
    aside = [key for key in groups.ASIDE if key != "seed"]
    settings = differing([run.config for run in runs], aside)
    y = metrics.accuracy_metric(runs)
    rows = []
    for i, run in enumerate(runs):
        values = metrics.curve(run, y)
        held = (found[i] for found in settings.values())
        accuracies = metrics.final(values), (metrics.best(values) or (None,))[0]
        spent = costs.ledger(run).total() / 1e6, sum(r.seconds or 0.0 for r in run.rounds)
        rows.append(
            [
                run.name,
                *("–" if value is None else groups.word(value) for value in held),
                *(_percent(v) for v in accuracies),
                *(f"{v:.3g}" if v < 1000 else f"{v:,.0f}" for v in spent),
            ]
        )
    results = ("final accuracy", "best accuracy", "MB", costs.axis("seconds"))
    return {
        "head": ["run", *settings, *results],
        "rows": rows,
        "note": f"One row per run, with the settings in which they differ. The accuracy is the "
        f"{metric(y).full_label()}. Click a heading to sort.",
    }


# -- run by run ------------------------------------------------------------------------------------
def _details(run: Run) -> JsonDict:
    provenance = flat(run.summary.provenance or {})
    config = run.dir / "config.yaml"
    # As a command in this directory takes it.
    path = config.relative_to(Path.cwd()) if config.is_relative_to(Path.cwd()) else config
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "timeline": _timeline(run),
        "provenance": {
            k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in provenance.items()
        },
        "repeat": f"fednet run {shlex.quote(str(path))}",
        "config": config.read_text(encoding="utf-8"),
        "model": run.summary.model_sha256,
    }


def _timeline(run: Run) -> JsonDict:
    """Returns who joined, left or was dropped, when and why, and when server processes began and
    ended. Of a long run, the last EVENTS of these.
    """
    began: float | None = None
    count = 0
    kept = deque[Event](maxlen=EVENTS)
    for event in run.lines("events"):
        if began is None:
            began = event.time
        if event.type in TIMELINE:
            count += 1
            kept.append(event)
    rows = []
    for event in kept:
        second = "" if event.time is None or began is None else f"{event.time - began:,.1f}"
        more = event.details
        who = as_text(more.get("clients") or ([event.client] if event.client >= 0 else []))
        causes = ("kind", "why", "reason", "text", "error")
        why = [str(more[key]) for key in causes if more.get(key)]
        places = ("host", "device", "incarnation")
        why += [f"{key} {more[key]}" for key in places if more.get(key)]
        rows.append((second, event.round or "", TIMELINE[event.type], who, ", ".join(why)))
    return {"rows": rows, "left": count - len(rows)}


# -- numbers as text -------------------------------------------------------------------------------
def _percent(v: float | None) -> str:
    return "–" if v is None or np.isnan(v) else f"{100 * v:.2f} %"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
