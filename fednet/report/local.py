"""Accuracy by class of the clients' local models, from the models that a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.descriptors import named
from fednet.report.drawing.canvas import Figure, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from fednet.report.read import Run

BATCH = 512


def table(run: Run) -> tuple[list[int], np.ndarray] | None:
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
        module.load_state_dict(
            load_file(named(files[client])), strict=settings.model.trainable == "*"
        )
        right = torch.zeros_like(total)
        with torch.no_grad():
            for start in range(0, len(y), BATCH):
                some = y[start : start + BATCH]
                guess = module(found.inputs(x[start : start + BATCH])).argmax(1)
                right += torch.bincount(some[guess == some], minlength=found.classes)
        rows.append((right / total).numpy())
    return sorted(files), np.stack(rows)


def draw(run: Run, path: Path, title: str) -> Path | None:
    """Writes the picture, a line a client and a column a class; None where there is none to
    draw.
    """
    found = table(run)
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

    write(Figure(path.stem, title, (), tuple, onto), [path])
    return path
