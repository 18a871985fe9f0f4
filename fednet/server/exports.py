"""What a run leaves to look at beside its records: condensed images, and the personal models where
clients keep one.

Condensed images are kept as they came, the newest of each client. Personal models never cross the
wire: they are copied only where the clients' state lies beside the run, as under `fednet run`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from fednet.algorithms.state import read_state
from fednet.experiment.store import Local
from fednet.files import write_aside
from fednet.tensors import Tensors
from fednet.wire.payload import Payload, Samples

FOLDER = "condensed"


def keep_condensed(directory: Path, client: int, up: Payload) -> None:
    """Writes condensed/client-K.safetensors (x, y) from a reply that holds condensed images."""
    for name, field in up.fields.items():
        samples = getattr(up, name)
        if (
            field.kind == "condensed"
            and isinstance(samples, Samples)
            and isinstance(samples.x, torch.Tensor)
            and samples.x.dim() == 4
        ):
            folder = directory / FOLDER
            folder.mkdir(exist_ok=True)
            save_file(
                {"x": samples.x.contiguous(), "y": samples.y.contiguous()},
                folder / f"client-{client}.safetensors",
            )


def keep_class_means(directory: Path, experiment: Any) -> None:
    """Writes condensed/means.safetensors, the mean real image of each class, (C, c, h, w) as model
    inputs.
    """
    folder = directory / FOLDER
    if not folder.is_dir() or experiment.federation is None:
        return
    data, means = experiment.data, []
    for c in range(data.classes):
        x = data.train[0][data.train[1] == c]
        means.append(
            data.inputs(x).mean(0) if len(x) else torch.full(experiment.input_shape, float("nan"))
        )
    save_file(
        {"means": torch.stack(means).contiguous()},
        folder / "means.safetensors",
        metadata={"names": json.dumps(list(data.names or map(str, range(data.classes))))},
    )


def keep_personal(directory: Path, run_id: str, versions: dict[int, str]) -> None:
    """Writes personal/client-K.safetensors: each client's last local model, whole."""
    state = directory / "state" / run_id
    for client, version in sorted(versions.items()):
        path = state / f"client-{client}" / f"{version}.local.safetensors"
        if path.exists():
            (directory / "personal").mkdir(exist_ok=True)
            save_model(
                directory / "personal" / f"client-{client}.safetensors", read_state(path, Local).x
            )


def save_model(path: Path, model: Tensors) -> None:
    """Plain named tensors, as any PyTorch user would expect of model.safetensors."""
    write_aside(path, save({name: value.detach().cpu().clone() for name, value in model.items()}))
