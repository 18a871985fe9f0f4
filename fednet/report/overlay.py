"""A table's curves in one figure: a column of panels for each setting, accuracy against rounds
above, against MB below.

Drawn from the rows of the curves' CSV alone, so that it can be drawn again where the runs are no
longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.descriptors import named
from fednet.plain import JsonMapping
from fednet.report import condensed, figures, style
from fednet.report.canvas import Figure, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from fednet.report.read import Run

BATCH = 512
XS = {"round": "round", "mb": "MB sent"}
PANEL = (2.7, 2.1)  # inches


def settings(rows: Sequence[JsonMapping]) -> dict[str, list[JsonMapping]]:
    """Rows by dataset and setting, as the text that stands above the panel."""
    found: dict[str, list[JsonMapping]] = {}
    for r in rows:
        words = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        found.setdefault(" ".join(w for w in words if w), []).append(r)
    return found


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


def measure(rows: Sequence[JsonMapping]) -> str:
    """What the curves show: personal accuracy where the table is about it."""
    return (
        "personal_accuracy"
        if any(r.get("personal_accuracy") is not None for r in rows)
        else "accuracy"
    )


LABELS = {
    "accuracy": "test accuracy, %",
    "personal_accuracy": "personal accuracy, %",
    "train_loss": "training loss",
}


def draw(
    rows: Sequence[JsonMapping], path: Path, said: str = "", y: str | None = None
) -> Path | None:
    """Writes the figure; None where no row has a value. said: a line above it, such as that it is
    no test of the paper. y: what is drawn, if not the accuracy.
    """
    y = measure(rows) if y is None else y
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
    write(Figure(path.stem, said, "", (), tuple, onto, size), [path])
    return path


def details(
    runs: Mapping[str, Run], folder: Path, name: str, said: str, classes: Sequence[str]
) -> list[Path]:
    """What stands beside one setting's curves, from the runs themselves, by method: who holds what,
    accuracy by class over the rounds for the methods `classes`, condensed images where a run has
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [(f"{name}-partition", f) for f in figures.partition(next(iter(runs.values())))]
    found += [
        (f"{name}-{m.lower()}-classes", f)
        for m in classes
        if m in runs
        for f in figures.class_accuracy(runs[m])
    ]
    written = [
        path
        for stem, figure in found
        for path in write(
            replace(figure, title=f"{figure.title}; {said}" if said else figure.title),
            [folder / f"{stem}.png"],
        )
    ]
    for run in runs.values():
        picture = condensed.draw(
            run.dir,
            folder / f"{name}-condensed.png",
            titles=(f"condensed images; {said}" if said else "condensed images", ""),
        )
        if picture is not None:
            return [*written, picture]
    return written


# -- local models ----------------------------------------------------------------------------------
def local_accuracy(run: Run) -> tuple[list[int], np.ndarray] | None:
    """(clients, accuracies): (clients, C) of each client's last local model on the whole test set,
    NaN for a class without test samples; None where the run left no local models.
    """
    import torch
    from safetensors.torch import load_file

    from fednet import config, data, models

    files = {
        int(p.stem.removeprefix("client-")): p
        for p in (run.dir / "personal").glob("client-*.safetensors")
    }
    settings = config.load(run.dir / "config.yaml")
    if not files or settings.data.dataset == "site":
        return None
    found = data.load(settings.data, settings.data.root, settings.seed)
    x, y = found.test
    if not found.classes or y.ndim != 1:
        return None
    shape, seed = found.input_shape, settings.seed
    total = torch.bincount(y, minlength=found.classes)
    rows = []
    for client in sorted(files):
        section = config.parts.model_of(settings, client)
        module = models.build(section, shape, found.classes, seed).eval()
        module.load_state_dict(load_file(named(files[client])))
        right = torch.zeros_like(total)
        with torch.no_grad():
            for start in range(0, len(y), BATCH):
                some = y[start : start + BATCH]
                guess = module(found.inputs(x[start : start + BATCH])).argmax(1)
                right += torch.bincount(some[guess == some], minlength=found.classes)
        rows.append((right / total).numpy())
    return sorted(files), np.stack(rows)


def draw_local(run: Run, path: Path, title: str) -> Path | None:
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

    write(Figure(path.stem, title, "", (), tuple, onto), [path])
    return path
