"""What a run's report says of the world: what it took to an accuracy, who was there, what bytes
were spent for nothing, and what it would have used on real devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fednet.plain import JsonDict
from fednet.report import metrics
from fednet.report.costs import cost, ledger, seconds_key
from fednet.report.drawing import figures, marks
from fednet.report.drawing.canvas import Figure
from fednet.report.read import Run
from fednet.world.energy import estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

TARGETS = tuple(k / 100 for k in (50, 60, 70, 75, 80, 85, 90, 95, 97, 99))
COUNTED_WHOLE = (
    "On the virtual clock a reply that came after its round had closed is counted whole, though a "
    "real link would have carried only a part of it by then."
)
LAST = 4  # of the targets that were reached, so many


def to_accuracy(run: Run) -> list[dict[str, float]]:
    """The highest targets that were reached: accuracy, rounds, mb and seconds to the first round
    that was there.
    """
    curve = metrics.curve(run)
    found = [(a, t) for a in TARGETS if (t := metrics.reached(curve, a)) is not None][-LAST:]
    if not found:
        return []
    mb, seconds = cost(run, "mb"), cost(run, "seconds")
    return [
        {"accuracy": a, "rounds": float(t), "mb": mb[t], "seconds": seconds[t]} for a, t in found
    ]


def wasted(run: Run) -> dict[str, int]:
    """Bytes of payloads, and of what fetched them, that were of no use, or whose round was done
    again, by reason, the largest first.
    """
    return dict(sorted(ledger(run).wasted.items(), key=lambda item: (-item[1], item[0])))


def estimates(run: Run) -> JsonDict | None:
    """Energy and CO2e; None where nothing says what the devices are."""
    devices, link = run.config.get("devices") or {}, run.config.get("link") or {}
    if devices.get("trace") is None:
        return None
    carrier = link.get("trace") or link.get("profile")
    up, down = (sum(getattr(r, f"bytes_{way}") for r in run.rounds) for way in ("up", "down"))
    training = math.fsum(r.training_s or 0.0 for r in run.rounds)
    return estimate(carrier, up, down, training, float(devices.get("watts") or 3.0))


def summarised(run: Run) -> JsonDict:
    """The part of `summary.json`; what does not apply is left out."""
    found = {"to_accuracy": to_accuracy(run), "wasted": wasted(run), "estimates": estimates(run)}
    return {name: value for name, value in found.items() if value}


def tables(run: Run) -> list[JsonDict]:
    """The tables for the page, each as (title, head, rows, note)."""
    made: list[JsonDict] = []
    if reached := to_accuracy(run):
        clock = figures.CLOCKS[seconds_key(run)]
        made.append(
            {
                "title": "What it took to an accuracy",
                "head": ("global accuracy", "rounds", "MB", f"seconds, {clock}"),
                "rows": [
                    (f"{100 * r['accuracy']:g} %", f"{r['rounds']:g}", _short(r["mb"]), _short(s))
                    for r in reached
                    for s in [r["seconds"]]
                ],
                "note": "To the first evaluated round at or above it; MB of all messages.",
            }
        )
    if lost := wasted(run):
        note = "Payloads that were of no use, or of rounds done again, and what fetched them."
        if seconds_key(run) == "seconds_virtual":
            note += " " + COUNTED_WHOLE
        made.append(
            {
                "title": "Bytes spent for nothing",
                "head": ("why", "MB"),
                "rows": [(why, _short(n / 1e6)) for why, n in lost.items()],
                "note": note,
            }
        )
    if used := estimates(run):
        joules = used["joules"]
        made.append(
            {
                "title": "Energy and CO2e: estimates",
                "head": ("of", "kJ"),
                "rows": [(what, _short(j / 1e3)) for what, j in joules.items()],
                "note": f"In all {used['kwh']:.3g} kWh and {used['co2e_g']:.3g} g CO2e. By stated "
                f"constants (fednet/world/energy.py), not measured: {used['watts']:g} W a device, "
                f"links by {used['carrier']}.",
            }
        )
    return made


def who_was_there(run: Run) -> Iterator[Figure]:
    """How many were there, were asked and completed in each round, where a trace in seconds says
    who is there.
    """
    rows = [r for r in run.rounds if r.here is not None]
    if not rows:
        return
    counts = {
        "there": [r.here or 0 for r in rows],
        "asked": [len(r.selected) for r in rows],
        "completed": [len(r.completed) for r in rows],
    }
    rounds = [r.round for r in rows]

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for i, (_, values) in enumerate(counts.items()):
            ax.plot(rounds, values, color=figures.COLOURS[i], linestyle=("-", "--", ":")[i])
        ax.set(xlabel="round", ylabel="clients", ylim=(0, None))
        marks.whole(ax.xaxis)
        marks.legend(ax, [(figures.COLOURS[i], name, "") for i, name in enumerate(counts)])

    yield Figure(
        "there",
        "Who was there",
        ("round", *counts),
        lambda: zip(rounds, *counts.values()),
        draw,
        legend=len(counts),
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
