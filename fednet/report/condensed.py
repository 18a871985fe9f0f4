"""A picture of FedDC's condensed images, which the clients send, and of the mean real images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fednet.descriptors import named
from fednet.report import style
from fednet.report.canvas import canvas, saved

if TYPE_CHECKING:
    import torch  # a page of a run without such images is made without it

# id -> x (n, c, h, w) model inputs, labels (n,)
ByClient: TypeAlias = "Mapping[int, tuple[torch.Tensor, torch.Tensor]]"
GAP = 2  # pixels between images
BLANK = 1.0  # white: no image of that class


def class_means(x: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    """(C, c, h, w): the mean real image of each class, NaN for a class without any. x: model
    inputs; y: (n,).
    """
    import torch

    return torch.stack(
        [
            x[y == c].mean(0) if bool((y == c).any()) else torch.full_like(x[0], torch.nan)
            for c in range(classes)
        ]
    )


def grid(
    images_by_client: ByClient,
    class_means: torch.Tensor,
    names: Sequence[str],
    path: str | Path,
    *,
    beside: ByClient | None = None,
    titles: tuple[str, str] = ("FedDC", "FedDC+"),
) -> Path:
    """Draws a row for each class: its real mean, then each client's condensed image of it; writes
    PNG, PDF or SVG.

    class_means: (C, c, h, w). names: of the C classes. beside: a second method's images, drawn in a
    panel of its own.
    """
    panels = [images_by_client] if beside is None else [images_by_client, beside]
    rows, widths = len(class_means), [1 + len(p) for p in panels]
    size, h, w = (1.2 + 0.62 * sum(widths), 0.8 + 0.62 * rows), *class_means.shape[-2:]
    with canvas(size, **style.FITTED, **{"axes.grid": False}) as figure:
        axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
        for axis, panel, title in zip(axes, panels, titles):
            axis.imshow(mosaic(panel, class_means), interpolation="nearest")
            axis.set_title(title)
            axis.set_xticks(
                [k * (w + GAP) + w / 2 for k in range(1 + len(panel))],
                ["mean", *map(str, sorted(panel))],
            )
            axis.set_yticks(
                [c * (h + GAP) + h / 2 for c in range(rows)],
                names if axis is axes[0] else [""] * rows,
            )
            axis.set_xlabel("client")
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
        return saved(figure, Path(path), dpi=150)


def mosaic(images_by_client: ByClient, class_means: torch.Tensor) -> np.ndarray:
    """(H, W, 3) in 0..1: classes downwards; the mean, then the clients in order of id, to the
    right.
    """
    classes, _, h, w = class_means.shape
    columns = [{c: m for c, m in enumerate(class_means) if not bool(m.isnan().any())}]
    for client in sorted(images_by_client):
        x, y = images_by_client[client]
        columns.append(dict(zip(y.tolist(), x)))
    out = np.full((classes * (h + GAP) - GAP, len(columns) * (w + GAP) - GAP, 3), BLANK)
    for k, column in enumerate(columns):
        for c, image in column.items():
            out[c * (h + GAP) : c * (h + GAP) + h, k * (w + GAP) : k * (w + GAP) + w] = shown(image)
    return out


def shown(image: torch.Tensor) -> np.ndarray:
    """(h, w, 3) in 0..1: each image stretched from its 1st to its 99th percentile, for condensed
    pixels know no bounds. One channel is drawn grey; of more than three, the first three.
    """
    pixels = image.detach().cpu().double().numpy()
    low, high = np.percentile(pixels, [1, 99])
    scaled = (
        np.clip((pixels - low) / (high - low), 0, 1) if high > low else np.full_like(pixels, 0.5)
    )
    return np.moveaxis(scaled[:3] if len(scaled) >= 3 else np.repeat(scaled[:1], 3, axis=0), 0, -1)


def draw(
    run_dir: Path,
    path: Path,
    beside: Path | None = None,
    most: int = 12,
    titles: tuple[str, str] = ("condensed images", ""),
) -> Path | None:
    """The picture of a run's condensed images (of `most` clients), beside those of another run;
    None where there are none.
    """
    means = run_dir / "condensed" / "means.safetensors"
    if not means.exists():
        return None
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file

    def images(folder: Path) -> ByClient:
        files = sorted(
            (folder / "condensed").glob("client-*.safetensors"),
            key=lambda p: int(p.stem.split("-")[1]),
        )[:most]
        return {
            int(f.stem.split("-")[1]): (both["x"], both["y"])
            for f in files
            for both in [load_file(named(f))]
        }

    with safe_open(named(means), "pt") as file:
        names = json.loads((file.metadata() or {})["names"])
        values = file.get_tensor("means")
    path.parent.mkdir(parents=True, exist_ok=True)
    return grid(
        images(run_dir),
        values,
        names,
        path,
        beside=images(beside) if beside is not None else None,
        titles=titles,
    )
