"""`fednet report`: one self-contained HTML page over one or several runs. No network, dark and
light.
"""

from __future__ import annotations

import base64
import html
import itertools
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from fednet.errors import ConfigError
from fednet.files import write_aside
from fednet.plain import JsonDict
from fednet.records import Summary, shown
from fednet.report import condensed, costs, metrics, tables
from fednet.report.drawing import canvas, details, figures, plots
from fednet.report.drawing.canvas import Drawn, Figure
from fednet.report.groups import Group, flat, group
from fednet.report.read import Run
from fednet.report.world import there

if TYPE_CHECKING:
    from jinja2 import Environment

ROWS = 200  # of the partition's table at most
Chart = Callable[[Figure], Markup]


def write(
    runs: Sequence[Run],
    out: str | Path,
    drawn: Mapping[str, Drawn] | None = None,
    said: str = "",
) -> Path:
    """Writes the page, aside and then into place. drawn: figures of a single run, by name, that
    need not be drawn again; said: what stands above all else. Raises ConfigError for no runs.
    """
    path = Path(out)
    text = render(runs, drawn, said)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, text)
    return path


def templates() -> Environment:
    """Where `page.jinja` and what other pages share with it are."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("fednet.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(
    runs: Sequence[Run],
    drawn: Mapping[str, Drawn] | None = None,
    said: str = "",
    again: int = 0,
) -> str:
    """The page as text. again: seconds after which what is not finished is asked for again, where
    somebody serves it.
    """
    if not runs:
        raise ConfigError("report: expected at least one run directory.")
    groups = group(runs)
    several = len(runs) > 1
    numbers = itertools.count()

    def chart(figure: Figure) -> Markup:
        known = (drawn or {}).get(figure.name)
        return canvas.inline(figure, known or canvas.draw(figure), f"f{next(numbers)}-")

    return (
        templates()
        .get_template("page.jinja")
        .render(
            title=_title(runs, groups),
            setting=figures.setting(runs),
            link=figures.link(runs),
            several=several,
            said=said,
            again=again,
            tiles=_tiles(runs[0]) if not several else [],
            live=[r.name for r in runs if not r.finished],
            comparison=_comparison(runs) if several else None,
            curves=_curves(groups, chart),
            axes=[figures.axis(x, told_by=clock) for x, clock in _axes(groups)],
            legend=_names(groups) if several else "",
            details=[_details(r, chart) for r in _shown(groups)],
            hidden=len(runs) - len(_shown(groups)),
            differences=figures.differences(runs) if several else {},
            names=[r.name for r in runs],
            side_by_side=_side_by_side(_shown(groups)),
        )
    )


def _title(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if len(runs) == 1:
        return runs[0].name
    if len(groups) < 5:
        return " vs ".join(dict.fromkeys(g.label for g in groups))
    return f"{len(groups)} methods"


def _names(groups: Sequence[Group]) -> Markup:
    """Buttons with a line as the series is drawn, which hide it and show it."""
    out = []
    for i, g in enumerate(groups):
        dash = " ".join(map(str, figures.DASHES[i % 8]))
        out.append(
            f'<button type="button" data-toggle="{i}" aria-pressed="true">'
            f'<svg viewBox="0 0 28 10" class="swatch"><path d="M0 5L28 5" stroke-width="2" '
            f'style="stroke:var(--c{i % 8})" stroke-dasharray="{dash}"/></svg>'
            f"{html.escape(f'{g.label} (n={len(g.runs)})')}</button>"
        )
    return Markup(f'<div class="legend">{"".join(out)}</div>')


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
    s = metrics.summary(run)
    curve = metrics.curve(run)
    tiles, a, (ending, of) = [], s["accuracy"], metrics.last(curve)
    if a["final"] is not None:
        tiles += [
            (_percent(a["final"]), "final global accuracy", f"after {curve[-1][0]} rounds"),
            (_percent(a["best"]), "best global accuracy", f"in round {a['best_round']}"),
            (_percent(ending), f"global, mean of the last {of}", "evaluated rounds"),
        ]
    if own := metrics.personal(run):
        drift = f", drift {_percent(own['drift'])}" if own["drift"] is not None else ""
        tiles.append(
            (
                _percent(own["pfl"]),
                f"{run.own_model} accuracy",
                f"worst tenth {_percent(own['worst_tenth'])}{drift}",
            )
        )
    b = s["bytes"]
    said = f"↓ {_size(b['down'])} ↑ {_size(b['up'])}, {_shares(run)}"
    tiles.append((_size(b["total"]), "communicated", said))
    return [*tiles, _time(s), _tasks(run)]


def _time(s: Summary) -> tuple[str, str, str]:
    """By the run's clock."""
    rounds = max(1, s["rounds"])
    if (virtual := s.get("seconds_virtual")) is not None:
        said = f"{virtual / rounds:.3g} virtual s a round; {_span(s['seconds'])} wall-clock"
        return _span(virtual), "virtual time", said
    return _span(s["seconds"]), "wall-clock", f"{s['seconds_per_round'] or 0:.3g} s a round"


def _tasks(run: Run) -> tuple[str, str, str]:
    """How many of those asked completed their task, so that their replies counted."""
    rounds = run.rounds
    asked, completed, dropped = (
        sum(len(r[name]) for r in rounds) for name in ("selected", "completed", "dropped")
    )
    said = f"{dropped} dropped"
    if (rest := asked - completed - dropped) > 0:
        said += f", {rest} in void rounds or not finished"
    void = sum(bool(r.void) for r in rounds)
    return f"{completed} / {asked}", "tasks completed", f"{said}, {void} void rounds"


def _shares(run: Run) -> str:
    """What of the bytes was no payload that was of use."""
    book = costs.ledger(run)
    total = book.sum() or 1
    nothing = sum(book.wasted.values())
    return f"{100 * nothing / total:.2g} % wasted, {100 * book.connection / total:.2g} % connection"


def _comparison(runs: Sequence[Run]) -> JsonDict:
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


def _curves(groups: Sequence[Group], chart: Chart) -> list[JsonDict]:
    """The overlaid curves: for each quantity that was recorded, a chart for each axis."""
    found = []
    for m in shown("page"):
        charts = [
            {"place": place, "svg": chart(f)}
            for place, (x, clock) in enumerate(_axes(groups))
            for f in plots.curve(groups, x, m.name, told_by=clock)
        ]
        if charts:
            found.append({"name": figures.titled(groups, m.name), "charts": charts})
    return found


def _axes(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """(axis, clock): each clock has seconds of its own."""
    clocks = figures.clocks(groups)
    of_seconds = [("seconds", clock) for clock in clocks]
    return [(x, clocks[0]) for x in figures.AXES if x != "seconds"] + of_seconds


def _details(run: Run, chart: Chart) -> JsonDict:
    """What is shown run by run."""
    notes = {"bytes": _bytes, "clients": _worst, "classes": _spread, "partition": _sizes}
    cards = [
        {"title": f.title, "svg": chart(f), "note": notes.get(f.name, lambda run: "")(run)}
        for f in details.of_run(run)
    ]
    said = run.summary.provenance or {}
    repeat = f"fednet run {shlex.quote(_from_here(run.dir / 'config.yaml'))}"
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "cards": cards,
        "condensed": _condensed(run),
        "world": there.tables(run),
        "table": _table(run),
        "provenance": {
            k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in flat(said).items()
        },
        "repeat": repeat,
        "config": (run.dir / "config.yaml").read_text(encoding="utf-8"),
        "model": run.summary.model_sha256,
    }


def _from_here(path: Path) -> str:
    """The path as a command in this directory takes it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _bytes(run: Run) -> str:
    """What a reader must know of the bytes by kind."""
    after = costs.ledger(run).sum(round=costs.AFTER)
    said = f"Beside these, {_size(after)} for the evaluation after the last round." if after else ""
    return " ".join(text for text in (said, _prediction(run)) if text)


def _prediction(run: Run) -> str:
    said = costs.predicted(run, run.summary.predicted)
    if not said:
        return ""
    off = sum(abs(v["difference"]) for way in said.values() for v in way.values())
    if off == 0:
        return "Useful payload bytes equal the prediction exactly."
    return f"Useful payload differs from the prediction by {off:,} bytes."


def _worst(run: Run) -> str:
    found = figures.client_accuracy(run)
    assert found is not None
    last = figures.last_of(found[3])
    return f"Mean {last.mean():.4f}, worst {last.min():.4f}; dashed: the mean over clients."


def _spread(run: Run) -> str:
    found = metrics.class_stability(run)
    assert found is not None
    return f"Class spread {100 * found['class_spread']:.2f} points, mean over rounds."


def _sizes(run: Run) -> str:
    assert run.counts is not None
    sizes = run.counts.sum(1)
    return (
        f"{sizes.sum():,} samples; the smallest client holds {sizes.min():,}, the largest "
        f"{sizes.max():,}."
    )


def _table(run: Run) -> JsonDict | None:
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
