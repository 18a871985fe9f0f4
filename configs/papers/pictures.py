"""Pictures of the papers' tables: curves, sweeps, who holds what, and clients' local models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet import config, models
from fednet.data import loading
from fednet.papers import rendering
from fednet.plain import JsonMapping
from fednet.report import condensed, figures, style
from fednet.report.canvas import Figure, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from fednet.report.read import Run

XS = {"round": "round", "mb": "MB sent"}
PANEL = (2.7, 2.1)  # inches
LABELS = {
    "accuracy": "global accuracy, %",
    "personal_accuracy": "personal accuracy, %",
    "train_loss": "training loss",
}


# -- curves ----------------------------------------------------------------------------------------
def settings(rows: Sequence[JsonMapping]) -> dict[str, list[JsonMapping]]:
    """Rows by dataset and setting, as the text above the panel."""
    found: dict[str, list[JsonMapping]] = {}
    for r in rows:
        words = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        found.setdefault(" ".join(w for w in words if w), []).append(r)
    return found


def measure(rows: Sequence[JsonMapping]) -> str:
    """Returns what a table's curves show: personal accuracy where every method has one, since the
    table is about it then.
    """
    personal = {r["method"] for r in rows if r.get("personal_accuracy") is not None}
    whole = all(r["method"] in personal for r in rows)
    return "personal_accuracy" if rows and whole else "accuracy"


def means(rows: Sequence[JsonMapping], x: str, y: str) -> list[tuple[float, float]]:
    """(x, y): means over seeds, at the rounds that every seed was evaluated in."""
    seeds = {r["seed"] for r in rows}
    by_round: dict[int, list[JsonMapping]] = {}
    for r in rows:
        if r.get(y) is not None:
            by_round.setdefault(int(r["round"]), []).append(r)
    return [
        (math.fsum(float(r[x]) for r in rs) / len(rs), math.fsum(float(r[y]) for r in rs) / len(rs))
        for _, rs in sorted(by_round.items())
        if len(rs) == len(seeds)
    ]


def curves(
    rows: Sequence[JsonMapping], path: Path, note: str = "", y: str | None = None
) -> Path | None:
    """Writes a table's curves as one figure, from the rows of their CSV: a column of panels for
    each setting, against rounds above, against MB below. None where no row has a value. note: a
    line above the figure, such as that it is no test of the paper. y: what is drawn, if not the
    accuracy.
    """
    if y is None:
        y = measure(rows)
    shown = {k: rs for k, rs in settings(rows).items() if any(r.get(y) is not None for r in rs)}
    if not shown:
        return None
    methods = list(dict.fromkeys(str(r["method"]) for rs in shown.values() for r in rs))

    def onto(fig: MplFigure) -> None:
        axes = fig.subplots(len(XS), len(shown), squeeze=False, sharey="col")
        for column, (title, rs) in enumerate(shown.items()):
            for line, (x, label) in enumerate(XS.items()):
                ax = axes[line][column]
                for place, name in enumerate(methods):
                    points = means([r for r in rs if r["method"] == name], x, y)
                    if points:
                        ax.plot(
                            *zip(*points),
                            markevery=max(1, len(points) // 6),
                            markersize=3,
                            linewidth=1.1,
                            label=name,
                            **style.line(place),
                        )
                ax.set_xlabel(label)
                if column == 0:
                    ax.set_ylabel(LABELS[y])
                if line == 0:
                    ax.set_title(title, fontsize=8)
        handles = {text: h for ax in axes.flat for h, text in zip(*ax.get_legend_handles_labels())}
        fig.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=max(2, int(max(4.5, PANEL[0] * len(shown)) / 1.7)),
            fontsize=7,
            handlelength=3,
        )

    size = (max(4.5, PANEL[0] * len(shown)), PANEL[1] * len(XS) + 0.9)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(Figure(path.stem, note, "", onto, size), path)
    return path


# -- sweeps ----------------------------------------------------------------------------------------
SWEPT: dict[
    str, dict[str, tuple[str, float | None, str]]
    # table -> number -> (its name on the axis, what a cell that does not name it has, kind of axis)
] = {
    "fedrds/figure5": {"E": ("local epochs", None, "log")},
    "fedrds/figure7": {"sigma": ("sigma", None, "log")},
    "fedrds/figureA1": {
        "beta": ("beta, shared fraction", None, "linear"),
        "alpha": ("alpha, each client's part of it", None, "linear"),
    },
    "feddpc/figure7": {"lambda": ("lambda", 1.0, "linear")},
}
NUMBER = re.compile(r"(\w+)=(-?[0-9.]+)")
Points = dict[str, list[tuple[float, float]]]


def points(rows: Sequence[JsonMapping], table: str, number: str) -> Points:
    """Line's label -> [(number, mean of the measure over seeds)], by number; a line of one point is
    left out.
    """
    absent = SWEPT[table][number][1]
    found: dict[str, dict[float, list[JsonMapping]]] = {}
    for r in rows:
        if r["status"] != "done" or r["ours"] is None:
            continue
        text = f"{r['method']} {r['variant'] or ''}"
        value = dict(NUMBER.findall(text)).get(number, absent)
        if value is None:
            continue
        fixed = re.sub(rf"\b{number}=\S+", "", f"{r['dataset']} {r['heterogeneity']} {text}")
        found.setdefault(" ".join(fixed.split()), {}).setdefault(float(value), []).append(r)
    means = {
        label: sorted((x, rendering.mean(rs, "ours") or 0.0) for x, rs in by.items())
        for label, by in found.items()
    }
    return {label: line for label, line in means.items() if len(line) > 1}


def sweep(rows: Sequence[JsonMapping], table: str, path: Path, note: str = "") -> Path | None:
    """Writes what the measure is over the number in which a figure's cells differ; None where the
    table sweeps nothing, or there are no two points.
    """
    drawn = {
        number: lines for number in SWEPT.get(table, {}) if (lines := points(rows, table, number))
    }
    if not drawn:
        return None

    def onto(fig: MplFigure) -> None:
        axes = fig.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
        for ax, (number, lines) in zip(axes, drawn.items(), strict=True):
            label, _, kind = SWEPT[table][number]
            for k, (name, line) in enumerate(lines.items()):
                ax.plot(
                    *zip(*line),
                    markersize=4,
                    linewidth=1.2,
                    label=name,
                    **style.line(k),
                )
            ax.set_xscale(kind)
            ax.set_xlabel(label)
            ax.legend(fontsize=6)
        axes[0].set_ylabel("best global accuracy, %")

    write(Figure(path.stem, note, "", onto, (max(4.5, 3.2 * len(drawn)), 2.9)), path)
    return path


# -- from the runs themselves ----------------------------------------------------------------------
def details(
    runs: Mapping[str, Run], folder: Path, name: str, note: str, classes: Sequence[str]
) -> list[Path]:
    """Writes, for one setting and its runs by method: who holds what, accuracy by class over the
    rounds for the methods `classes`, condensed images where a run has them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [(f"{name}-partition", f) for f in figures.partition(next(iter(runs.values())))]
    found += [
        (f"{name}-{m.lower()}-classes", f)
        for m in classes
        if m in runs
        for f in figures.class_accuracy(runs[m])
    ]
    written = []
    for stem, figure in found:
        title = f"{figure.title}; {note}" if note else figure.title
        written.append(write(replace(figure, title=title), folder / f"{stem}.png"))
    for run in runs.values():
        for figure in condensed.images(run.dir):
            title = f"condensed images; {note}" if note else "condensed images"
            path = folder / f"{name}-condensed.png"
            return [*written, write(replace(figure, title=title), path)]
    return written


BATCH = 512


def local_accuracy(run: Run) -> tuple[list[int], np.ndarray] | None:
    """(clients, accuracies): (clients, C) of each client's last local model on the whole test set,
    NaN for a class without test samples; None where the run left no local models.
    """
    import torch
    from safetensors.torch import load_file

    files = {
        int(p.stem.removeprefix("client-")): p
        for p in (run.dir / "personal").glob("client-*.safetensors")
    }
    settings = config.load(run.dir / "config.yaml")
    if not files or settings.data.dataset == "site":
        return None
    found = loading.load(settings.data, settings.data.root, settings.seed)
    x, y = found.test
    if not found.classes or y.ndim != 1:
        return None
    shape = found.input_shape
    seed = settings.seed
    total = torch.bincount(y, minlength=found.classes)
    rows = []
    for client in sorted(files):
        section = config.parts.model_of(settings, client)
        module = models.build(section, shape, found.classes, seed).eval()
        module.load_state_dict(load_file(files[client]))
        right = torch.zeros_like(total)
        with torch.no_grad():
            for start in range(0, len(y), BATCH):
                some = y[start : start + BATCH]
                guess = module(found.inputs(x[start : start + BATCH])).argmax(1)
                right += torch.bincount(some[guess == some], minlength=found.classes)
        rows.append((right / total).numpy())
    return sorted(files), np.stack(rows)


def local_models(run: Run, path: Path, title: str) -> Path | None:
    """Writes the picture, a line a client and a column a class; None where there is none to
    draw.
    """
    found = local_accuracy(run)
    if found is None:
        return None
    clients, rates = found

    def onto(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        image = ax.imshow(rates, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        ax.grid(False)
        ax.set(xlabel="class", ylabel="client")
        ax.set_yticks(range(len(clients)), [str(c) for c in clients], fontsize=6)
        fig.colorbar(image, label="test accuracy of the local model")

    write(Figure(path.stem, title, "", onto), path)
    return path
