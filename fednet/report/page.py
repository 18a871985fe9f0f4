"""`fednet report`: one self-contained HTML page over one or several runs. No network, dark and
light.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from fednet.errors import ConfigError
from fednet.files import write_aside
from fednet.report import condensed, figures, metrics, svg, tables
from fednet.report.groups import Group, flat, group
from fednet.report.read import Run

ROWS = 200  # of the partition's table at most


def write(runs: Sequence[Run], out: str | Path) -> Path:
    """Writes the page, aside and then into place. Raises ConfigError for no runs."""
    path = Path(out)
    text = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, text)
    return path


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    if not runs:
        raise ConfigError("report: expected at least one run directory.")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("fednet.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = group(runs)
    several = len(runs) > 1
    return env.get_template("page.jinja").render(
        title=runs[0].name
        if not several
        else " vs ".join(dict.fromkeys(g.label for g in groups))
        if len(groups) < 5
        else f"{len(groups)} methods",
        setting=figures.setting(runs[0]),
        link=figures.link(runs[0]),
        several=several,
        tiles=_tiles(runs[0]) if not several else [],
        live=[r.name for r in runs if not r.finished],
        comparison=_comparison(runs) if several else None,
        curves=_curves(groups),
        legend=svg.legend([f"{g.label} (n={len(g.runs)})" for g in groups], dashed=True)
        if several
        else "",
        details=[_details(r) for r in _shown(groups)],
        hidden=len(runs) - len(_shown(groups)),
        differences=figures.differences(runs) if several else {},
        names=[r.name for r in runs],
        side_by_side=_side_by_side(_shown(groups)),
    )


def _side_by_side(runs: Sequence[Run]) -> str | None:
    """The condensed images of the first two runs that sent any, in one picture, as a data URL."""
    pair = [r for r in runs if (r.dir / "condensed" / "means.safetensors").exists()][:2]
    if len(pair) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = condensed.draw(
            pair[0].dir,
            Path(folder) / "pair.png",
            beside=pair[1].dir,
            titles=(pair[0].algorithm, pair[1].algorithm),
        )
        return None if path is None else _data_url(path)


def _data_url(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _shown(groups: Sequence[Group]) -> list[Run]:
    """One run a group: the first seed stands for its group in what cannot be overlaid."""
    return [g.runs[0] for g in groups][:12]


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(value, what, note) of the numbers one wants first."""
    s = metrics.summarise(run)
    tiles, a = [], s["accuracy"]
    if a["final"] is not None:
        tiles += [
            (_percent(a["final"]), "final accuracy", f"after {len(run.rounds)} rounds"),
            (_percent(a["best"]), "best accuracy", f"in round {a['best_round']}"),
            (_percent(a["last10"]), "last-10 mean", "of evaluated rounds"),
        ]
    if own := metrics.personal(run):
        drift = f", drift {_percent(own['drift'])}" if own["drift"] is not None else ""
        tiles.append(
            (
                _percent(own["pfl"]),
                "personal accuracy",
                f"worst tenth {_percent(own['worst_tenth'])}{drift}",
            )
        )
    b = s["bytes"]
    waste = 100 * (1 - sum(b["useful"].values()) / b["total"]) if b["total"] else 0.0
    tiles.append(
        (
            _size(b["total"]),
            "communicated",
            f"↓ {_size(b['down'])} ↑ {_size(b['up'])}, {waste:.2g} % not useful",
        )
    )
    tiles.append(
        (_span(s["seconds"]), "wall-clock", f"{s['seconds_per_round'] or 0:.3g} s a round")
    )
    dropped = sum(len(r.dropped or ()) for r in run.rounds)
    asked = sum(len(r.selected or ()) for r in run.rounds)
    tiles.append(
        (
            f"{asked - dropped} / {asked}",
            "tasks completed",
            f"{dropped} dropped, {s['void_rounds']} void rounds",
        )
    )
    return tiles


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    best = [b[0] for r in runs if (b := metrics.best(metrics.curve(r)))]
    # What the least of them just reaches.
    target = int(100 * min(best)) / 100 if len(best) == len(runs) else 0.0
    made = tables.table(runs, [target] if target else [])
    rows = [
        [g.label, len(g.runs), *(c.text for c in cells)]
        for g, cells in zip(made.groups, made.cells)
    ]
    apart = [
        [
            f"{g.label} − {made.groups[0].label}",
            max((len(c.got) for c in cells), default=0),
            *(c.text for c in cells),
        ]
        for g, cells in zip(made.groups[1:], made.differences)
    ]
    return {
        "head": ["method", "n", *(c.title for c in made.columns)],
        "rows": rows,
        "differences": apart,
        "notes": made.notes,
    }


def _curves(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The overlaid curves: for each quantity that was recorded, a chart for each axis."""
    found = []
    for y, word in figures.VALUES.items():
        charts = []
        for x, label in figures.AXES.items():
            series = figures.curves(groups, x, y)
            if series:
                charts.append(
                    {"x": label, "svg": svg.lines(series, label, word, unit="loss" not in y)}
                )
        if charts:
            found.append({"name": word, "charts": charts})
    return found


def _details(run: Run) -> dict[str, Any]:
    """What is shown run by run."""
    cards = [
        c
        for c in (
            _bytes(run),
            _time(run),
            _participation(run),
            _clients(run),
            _clients_over_time(run),
            _classes(run),
            _partition(run),
        )
        if c
    ]
    said = run.summary.get("provenance", {})
    repeat = f"fednet run {run.name}/config.yaml"
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "cards": cards,
        "condensed": _condensed(run),
        "table": _table(run),
        "provenance": {
            k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in flat(said).items()
        },
        "repeat": repeat,
        "config": (run.dir / "config.yaml").read_text(encoding="utf-8"),
        "model": run.summary.get("model_sha256", ""),
    }


def _card(
    title: str, chart: Markup, legend: Markup | str = "", note: str = "", wide: bool = False
) -> dict[str, Any]:
    return {"title": title, "svg": chart, "legend": legend, "note": note, "wide": wide}


def _bytes(run: Run) -> dict[str, Any] | None:
    rounds, table = figures.bytes_by_kind(run)
    if not rounds:
        return None
    kinds = metrics.ledger(run).kinds
    colour = {k: i for i, k in enumerate(kinds)}
    mb = {way: {k: [n / 1e6 for n in v] for k, v in ks.items()} for way, ks in table.items()}
    said = metrics.predicted(run)
    note = ""
    if said:
        off = sum(abs(v["difference"]) for way in said.values() for v in way.values())
        note = (
            "Useful payload bytes equal the prediction exactly."
            if off == 0
            else f"Useful payload differs from the prediction by {off:,} bytes."
        )
    return _card(
        "Bytes a round, by kind",
        svg.stacked(
            rounds,
            mb["up"],
            mb["down"],
            "MB:  ↓ down   |   ↑ up",
            colour,
            words=(" up, MB", " down, MB"),
        ),
        svg.legend(kinds),
        note,
    )


def _time(run: Run) -> dict[str, Any] | None:
    rounds, table = figures.time_split(run)
    if not table:
        return None
    chart = svg.stacked(
        rounds, table, {}, "seconds a round", {p: i for i, p in enumerate(table)}, words=(", s", "")
    )
    return _card("Where the time goes", chart, svg.legend(list(table)))


def _participation(run: Run) -> dict[str, Any] | None:
    p = figures.participation(run)
    if not p.grid.size:
        return None
    f = svg.Frame(height=int(min(520, 110 + 11 * p.grid.shape[0])))
    first = svg.legend(["completed"])
    return _card(
        "Who took part",
        svg.participation(p.grid, p.rounds, p.reasons, f),
        Markup(first)
        + (
            svg.legend([f"dropped: {why}" for why in p.reasons], prefix="d")
            if p.reasons
            else Markup("")
        ),
        wide=True,
    )


def _clients(run: Run) -> dict[str, Any] | None:
    found = figures.client_accuracy(run)
    if found is None:
        return None
    which, clients, _, table = found
    last = figures.last_of(table)
    samples = {r.client: r.samples for r in run.clients}
    tips = [f"client {c}\n{v:.4f}, {samples.get(c)} samples" for c, v in zip(clients, last)]
    note = f"Mean {last.mean():.4f}, worst {last.min():.4f}; dashed: the mean over clients."
    return _card(
        f"Accuracy of the {which} model on each client's own test",
        svg.bars([str(c) for c in clients], last.tolist(), "client, best first", "accuracy", tips),
        "",
        note,
    )


def _clients_over_time(run: Run) -> dict[str, Any] | None:
    found = figures.client_accuracy(run)
    if found is None:
        return None
    which, clients, rounds, table = found
    chart = svg.heat(
        table,
        [str(t) for t in rounds],
        [str(c) for c in clients],
        "evaluated round",
        "client, best first",
        f"{which} accuracy",
    )
    return _card("The same, round by round", chart, RAMP, "Blank: not evaluated in that round.")


def _classes(run: Run) -> dict[str, Any] | None:
    found = figures.class_accuracy(run)
    if found is None:
        return None
    rounds, table = found
    spread = metrics.class_stability(run) or {"class_spread": float("nan")}
    chart = svg.heat(
        table,
        [str(t) for t in rounds],
        figures.class_names(run, len(table)),
        "evaluated round",
        "class",
        "accuracy",
        svg.Frame(height=int(min(520, 90 + 22 * len(table)))),
    )
    return _card(
        "Test accuracy by class",
        chart,
        RAMP,
        f"Class spread {100 * spread['class_spread']:.2f} points, mean over rounds.",
        wide=True,
    )


def _partition(run: Run) -> dict[str, Any] | None:
    counts = run.counts
    if counts is None or counts.ndim != 2 or not counts.size:
        return None
    names = figures.class_names(run, counts.shape[1])
    sizes = counts.sum(1)
    note = f"{sizes.sum():,} samples; the smallest client holds {sizes.min():,}, "
    note += f"the largest {sizes.max():,}."
    if counts.size > svg.MARKS:
        share = counts.T / max(1, counts.max())
        chart = svg.heat(
            share,
            [str(i) for i in range(len(counts))],
            names,
            "client",
            "class",
            f"share of {counts.max()} samples",
        )
        return _card("Who holds what", chart, "", note, wide=True)
    return _card(
        "Who holds what",
        svg.bubbles(counts, names, svg.Frame(height=int(min(480, 90 + 24 * counts.shape[1])))),
        "",
        note,
        wide=True,
    )


def _table(run: Run) -> dict[str, Any] | None:
    counts = run.counts
    if counts is None or counts.ndim != 2:
        return None
    rows = [
        (
            i,
            int(r.sum()),
            [int(v) for v in r],
            (run.partition_sha256[i][:12] if i < len(run.partition_sha256) else ""),
        )
        for i, r in enumerate(counts[:ROWS])
    ]
    return {
        "names": figures.class_names(run, counts.shape[1])[:40],
        "rows": [(i, n, v[:40], h) for i, n, v, h in rows],
        "left": max(0, len(counts) - ROWS),
    }


def _condensed(run: Run) -> list[tuple[str, str]]:
    """(name, data URL) of the condensed images that were drawn."""
    found = sorted((run.dir / "figures").glob("condensed*.png"))
    return [(p.stem, _data_url(p)) for p in found]


def _percent(v: float | None) -> str:
    return "–" if v is None or np.isnan(v) else f"{100 * v:.2f} %"


def _size(n: float) -> str:
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if n >= u[0]), (1.0, "B"))
    return f"{n / unit:.3g} {name}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


RAMP = Markup('<div class="legend"><span>0</span><i class="ramp"></i><span>1</span></div>')
