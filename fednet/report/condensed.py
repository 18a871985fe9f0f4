"""Draws FedDC's condensed images, which the clients send, beside the mean real images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fednet.report.canvas import Figure, write

if TYPE_CHECKING:
    import torch  # a page of a run without such images is made without it
    from matplotlib.figure import Figure as MplFigure

# id -> x (n, c, h, w) model inputs, labels (n,)
ByClient: TypeAlias = "Mapping[int, tuple[torch.Tensor, torch.Tensor]]"
GAP = 2  # pixels between images


def draw(run_dir: Path, path: Path, title: str = "condensed images") -> Path | None:
    """Writes the images as PNG, PDF or SVG; returns None for a run without such images."""
    for figure in images(run_dir):
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(replace(figure, title=title), path)
    return None


def images(run_dir: Path, most: int = 12) -> Iterator[Figure]:
    """Yields a figure with a row for each class: its real mean, then the condensed image of it of
    each client (of the first `most`).
    """
    folder = run_dir / "condensed"
    if not (folder / "means.safetensors").exists():
        return
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(folder / "means.safetensors", "pt") as file:
        names = json.loads((file.metadata() or {})["names"])
        means = file.get_tensor("means")
    files = {int(f.stem.split("-")[1]): f for f in folder.glob("client-*.safetensors")}
    sent = {}
    for client in sorted(files)[:most]:
        found = load_file(files[client])
        sent[client] = found["x"], found["y"]

    rows, columns = len(means), 1 + len(sent)
    h, w = means.shape[-2:]

    def draw(figure: MplFigure) -> None:
        axis = figure.add_subplot()
        axis.imshow(mosaic(sent, means), interpolation="nearest")
        axis.grid(False)
        labels = ["mean", *map(str, sent)]
        axis.set_xticks([k * (w + GAP) + w / 2 for k in range(columns)], labels)
        axis.set_yticks([c * (h + GAP) + h / 2 for c in range(rows)], names)
        axis.set(xlabel="client", ylabel="class")
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)

    yield Figure(
        "condensed",
        "Condensed images, by client and class",
        "A row is a class: the mean of its real images, then the condensed image that each client "
        f"sent{'' if len(files) <= most else f' (of the first {most} clients)'}.",
        draw,
        size=(1.4 + 0.62 * columns, 1.0 + 0.62 * rows),
        left=0.5 + 0.075 * max(map(len, names)),
    )


def mosaic(images_by_client: ByClient, class_means: torch.Tensor) -> np.ndarray:
    """Returns (H, W, 4) in 0..1: classes downwards; the mean, then the clients in order of id, to
    the right. Between images, and where a client has none of a class, it is transparent.
    """
    classes, _, h, w = class_means.shape
    columns = [{c: m for c, m in enumerate(class_means) if not bool(m.isnan().any())}]
    for client in sorted(images_by_client):
        x, y = images_by_client[client]
        columns.append(dict(zip(y.tolist(), x)))
    out = np.full((classes * (h + GAP) - GAP, len(columns) * (w + GAP) - GAP, 4), 0.0)
    for k, column in enumerate(columns):
        for c, image in column.items():
            tile = out[c * (h + GAP) : c * (h + GAP) + h, k * (w + GAP) : k * (w + GAP) + w]
            tile[..., :3], tile[..., 3] = shown(image), 1.0
    return out


def shown(image: torch.Tensor) -> np.ndarray:
    """Returns (h, w, 3) in 0..1: the image stretched from its 1st to its 99th percentile, since
    condensed pixels have no bounds. One channel is drawn grey; of more than three, the first three.
    """
    pixels = image.detach().cpu().double().numpy()
    low, high = np.percentile(pixels, [1, 99])
    if high > low:
        pixels = np.clip((pixels - low) / (high - low), 0, 1)
    else:
        pixels = np.full_like(pixels, 0.5)
    colours = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, axis=0)
    return np.moveaxis(colours, 0, -1)
