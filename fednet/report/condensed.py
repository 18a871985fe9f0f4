"""Draws FedDC's condensed images, which the clients send, beside the mean real images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.report.axes import set_names
from fednet.report.canvas import Figure

if TYPE_CHECKING:
    import torch  # a page of a run without such images is made without it
    from matplotlib.figure import Figure as MplFigure

GAP = 2  # pixels between images


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
    clients = sorted(files)[:most]
    columns = [{c: mean for c, mean in enumerate(means) if not bool(mean.isnan().any())}]
    for client in clients:
        sent = load_file(files[client])
        columns.append(dict(zip(sent["y"].tolist(), sent["x"])))
    h = means.shape[-2] + GAP
    w = means.shape[-1] + GAP
    # Between images, and where a client has none of a class, it is transparent.
    mosaic = np.zeros((len(means) * h - GAP, len(columns) * w - GAP, 4))
    for k, column in enumerate(columns):
        for c, image in column.items():
            tile = mosaic[c * h : c * h + h - GAP, k * w : k * w + w - GAP]
            tile[..., :3] = displayed_image(image)
            tile[..., 3] = 1.0

    yield Figure(
        "condensed",
        "Condensed images, by client and class",
        "A row is a class: the mean of its real images, then the condensed image that each client "
        f"sent{'' if len(files) <= most else f' (of the first {most} clients)'}.",
        partial(_draw, mosaic=mosaic, clients=clients, names=names),
        size=(1.4 + 0.62 * len(columns), 1.0 + 0.62 * len(means)),
        left=0.5 + 0.075 * max(map(len, names)),
    )


def _draw(fig: MplFigure, mosaic: np.ndarray, clients: Sequence[int], names: Sequence[str]) -> None:
    labels = ["mean", *map(str, clients)]
    axis = fig.add_subplot()
    axis.imshow(mosaic, interpolation="nearest")
    axis.grid(False)
    for of, length, texts in (
        (axis.yaxis, mosaic.shape[0], names),
        (axis.xaxis, mosaic.shape[1], labels),
    ):
        tile = (length + GAP) // len(texts)
        set_names(of, [k * tile + (tile - GAP) / 2 for k in range(len(texts))], texts)
    axis.set(xlabel="client", ylabel="class")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def displayed_image(image: torch.Tensor) -> np.ndarray:
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
