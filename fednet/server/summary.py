"""The end of a run: summary.json and model.safetensors."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fednet import __version__, loading
from fednet.config import Config
from fednet.files import plain, write_json
from fednet.records import Round, Summary
from fednet.report import metrics, open_run
from fednet.server.exports import keep_class_means, keep_personal, save_model
from fednet.server.hashes import model_hashes
from fednet.server.rounds import Rounds


def finish(
    rounds: Rounds,
    experiment: Any,
    directory: Path,
    command: Sequence[str],
    switches: Mapping[str, Any],
) -> Summary:
    """Writes the models; returns what the server says of the run."""
    config, progress = rounds.config, rounds.progress
    model = rounds.newest(rounds.server)
    if model is not None:
        save_model(
            directory / "model.safetensors", experiment.state_dict(model), about(rounds, model)
        )
    keep_class_means(directory, experiment)
    keep_personal(directory, progress.run, progress.versions, experiment, model)
    rounds.directory.flush()
    rounds.accounts.spent(progress.round, progress)  # the last evaluation
    last = next(reversed(open_run(directory).rounds), Round())
    return Summary(
        name=config.name,
        useful=progress.useful,
        predicted=progress.predicted if experiment.foretold else None,
        predicted_is="a bound" if bounded(experiment) else "exact",
        stopped=progress.stopped or None,
        model_sha256=model_hashes(rounds.method, rounds.server)[0],
        clients_sha256=last.clients_sha256,
        refused=rounds.io.protocol.refused,
        privacy=_privacy(config, last.algorithm) if config.privacy.clip is not None else None,
        provenance={
            **provenance(config, command, switches, str(rounds.host.device)),
            "data_sha256": _data_digest(experiment),
        },
    )


def write(directory: Path, summary: Summary) -> Summary:
    """Writes summary.json with the run's metrics, once its last byte is on record."""
    summary.set(**metrics.summarise(open_run(directory), summary.predicted))
    text = msgspec.json.encode(summary.line(), enc_hook=plain)  # what is no number becomes null
    write_json(directory / "summary.json", msgspec.json.decode(text))
    return msgspec.json.decode(text, type=Summary)


def bounded(experiment: Any) -> bool:
    """Whether a lossless compressor makes sizes depend on the values, so that a prediction is an
    upper bound.
    """
    return any(
        c.lossless is not None
        for codec in (experiment.up, experiment.down)
        for c in codec.chains.values()
    )


def about(rounds: Rounds, model: Any) -> dict[str, str]:
    """What model.safetensors says of itself: which tensors are trained, where only a part of the
    model is shared; over which inputs BatchNorm's statistics were measured.
    """
    found = {}
    if not rounds.method.has_global:
        found["trained"] = " ".join(model.layout.names)
    if rounds.calibrated_by:
        found["batch_norm"] = f"measured over the {rounds.calibrated_by} inputs"
    return found


def _privacy(config: Any, last: Mapping[str, Any]) -> dict[str, Any]:
    """What was spent by the last round; epsilon is null where there was no noise: clipping alone
    promises nothing.
    """
    return {
        "epsilon": last.get("epsilon"),
        "epsilon_sampled": last.get("epsilon_sampled"),
        "delta": config.privacy.delta,
        "clip": config.privacy.clip,
        "noise": config.privacy.noise,
        "where": config.privacy.where,
    }


def _data_digest(experiment: Any) -> str | None:
    """SHA-256 over the training labels and the clients' index lists: two runs with the same have
    the same data division.
    """
    if experiment.federation is None:
        return None
    whole = hashlib.sha256(experiment.data.train[1].numpy().tobytes())
    for client in range(experiment.federation.clients):
        whole.update(bytes.fromhex(experiment.federation.sha256(client)))
    return whole.hexdigest()


def provenance(
    config: Config, command: Sequence[str], switches: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """What repeats a run: versions, host, device, switches, the user's own files."""
    import torch

    return {
        "command": list(command),
        "fednet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": device,
        "cuda": torch.version.cuda,
        "git": _git(),
        "code_sha256": loading.loaded(),
        "determinism": dict(switches),
    }


def _git() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    asked = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None
