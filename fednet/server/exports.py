"""Files that a run leaves beside its records: models, condensed images, personal models.

Of each client the newest condensed images are kept. Personal models never cross the wire: they are
copied only where the clients' states are in the run's directory, as under `fednet run`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from fednet.algorithms.state import State, check_of, file_of
from fednet.errors import StateAbsent
from fednet.experiment.build import Experiment
from fednet.experiment.store import ClientStore
from fednet.files import write_aside
from fednet.models import adapters
from fednet.tensors import Tensors
from fednet.training.hosts import ClientHost
from fednet.training.setting import Splits
from fednet.wire.payload import Samples

FOLDER = "condensed"


def keep_condensed(directory: Path, client: int, images: Samples) -> None:
    """Writes condensed/client-K.safetensors (x, y)."""
    assert isinstance(images.x, torch.Tensor)
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    save_model(folder / f"client-{client}.safetensors", {"x": images.x, "y": images.y})


def keep_class_means(directory: Path, experiment: Experiment) -> None:
    """Writes condensed/means.safetensors, the mean real image of each class, (C, c, h, w) as model
    inputs.
    """
    folder = directory / FOLDER
    if not folder.is_dir() or experiment.federation is None:
        return
    data = experiment.federation.data
    means = list[torch.Tensor]()
    for c in range(data.classes or 0):
        x = data.train[0][data.train[1] == c]
        # Images are condensed, and an image is one tensor.
        known = data.inputs(x) if len(x) else torch.full((1, *experiment.input_shape), math.nan)
        means.append(cast(torch.Tensor, known).mean(0))
    save_model(
        folder / "means.safetensors",
        {"means": torch.stack(means)},
        {"names": json.dumps(list(data.names or map(str, range(data.classes or 0))))},
    )


def keep_personal(
    directory: Path,
    run_id: str,
    versions: Mapping[int, str],
    experiment: Experiment,
    shared: Tensors | None,
    server: State | None = None,
) -> dict[int, str]:
    """Writes personal/client-K.safetensors for each client that keeps a local model: all of the
    model that it is evaluated with. Where tensors stand beside the model (FedRoD's P-head), the
    file has them too (`p_head.weight`) and names them in its metadata, or says that they lack.

    shared: the newest shared part; server: the server's state, which has what else clients share.
    Returns the clients whose local model is missing, and why.
    """
    state = directory / "state" / run_id
    method = experiment.algorithm
    gone = dict[int, str]()
    if not state.is_dir():
        return gone
    store = ClientStore(state, method.Client)
    scratch_of = functools.cache(lambda setting: experiment.scratch(setting=setting))
    none = torch.zeros((0, *experiment.input_shape)), torch.zeros(0, dtype=torch.int64)
    nothing = Splits(none, none)
    latest = experiment.config.evaluate.shared == "latest"
    for client, version in sorted(versions.items()):
        try:
            local = store.local(client, version)
            if local is None:
                continue
            record = store.load(client, version)
        except StateAbsent as absent:
            gone[client] = str(absent)
            continue
        setting = experiment.setting_of(client)
        initial = setting.initial
        scratch = scratch_of(setting)
        host = ClientHost(setting, scratch, client, 1, splits=nothing, rest=record.own(initial))
        own = method.init_client(initial) if record.algorithm is None else record.algorithm
        whole = local
        if latest and not method.has_global:
            whole = local.merge(shared)
        if latest and server is not None:
            own = method.with_latest(own, server)
        personal = method.personal_model(own, whole, host)
        beside = dict(method.beside(own))
        about: dict[str, str] = {}
        if isinstance(personal, Tensors):
            whole = host.complete(personal)
        elif beside:
            about["beside"] = " ".join(beside)
        else:
            added = f"{type(method).__name__}.personal_model"
            about["lacks"] = f"what {added} adds to the local model"
        named = experiment.state_dict(whole, setting)
        named |= {name: value.detach().to("cpu").clone() for name, value in beside.items()}
        (directory / "personal").mkdir(exist_ok=True)
        save_model(directory / "personal" / f"client-{client}.safetensors", named, about)
    return gone


def keep_adapters(directory: Path, experiment: Experiment, x: Tensors) -> None:
    """Writes adapters/, a folder as the package peft reads it: what of x was trained, unmerged."""
    section = experiment.config.model.adapters
    if section is None:
        return
    folder = directory / "adapters"
    names = x.layout.names
    beside = [name for name in names if name.rpartition(".")[2] not in adapters.LEAVES]
    module = experiment.holding(x)
    folder.mkdir(exist_ok=True)
    about = adapters.peft_config(module, section.rank, section.alpha, beside)
    config, tensors = (folder / name for name in adapters.FILES)
    write_aside(config, json.dumps(about, indent=1).encode())
    save_model(tensors, adapters.to_peft(module, beside))


def save_model(
    path: Path, named: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None
) -> str:
    """Writes named tensors to a safetensors file. about: its metadata. The digest of everything is
    added to it and returned.
    """
    tensors = {n: v.contiguous() for n, v in named.items()}
    beside = dict(about or {})
    check = check_of(json.dumps(beside, sort_keys=True), tensors)
    write_aside(path, file_of(tensors, {**beside, "check": check}))
    return check
