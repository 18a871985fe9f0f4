"""The end of a run: summary.json and model.safetensors."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fednet import __version__, loading
from fednet.config import Config
from fednet.experiment import determinism
from fednet.experiment.build import Experiment
from fednet.files import write_json
from fednet.plain import JsonDict, JsonMapping, plain
from fednet.records import Round, Summary, reading
from fednet.report import metrics, open_run
from fednet.server.evaluation import Evaluator, model_hashes
from fednet.server.exports import keep_adapters, keep_class_means, keep_personal, save_model
from fednet.server.rounds import Rounds
from fednet.tensors import Tensors


def finish(rounds: Rounds, command: Sequence[str], switches: JsonMapping) -> Summary:
    """Writes the models; returns the server's part of the summary."""
    experiment, directory = rounds.experiment, rounds.directory.path
    config, progress = rounds.config, rounds.progress
    server, evaluator = rounds.carried.server, rounds.evaluator
    model = evaluator.newest(server)
    check = None
    if model is not None:
        named = experiment.state_dict(model)
        check = save_model(directory / "model.safetensors", named, about(evaluator, model))
        keep_adapters(directory, experiment, model)
    keep_class_means(directory, experiment)
    gone = keep_personal(directory, progress.run, progress.versions, experiment, model, server)
    for client, reason in gone.items():
        rounds.directory.event("no_personal", progress.round, client, reason=reason)
    rounds.directory.flush()
    rounds.take_tally(progress.round)  # the last evaluation
    lines = open_run(directory).rounds
    last = next(reversed(lines), Round())
    return Summary(
        name=config.name,
        useful=progress.useful,
        predicted=progress.predicted if experiment.predictable else None,
        predicted_is="a bound" if bounded(experiment) else "exact",
        own_model=evaluator.own_model,
        metrics=next((r.metrics for r in reversed(lines) if r.metrics), None),
        client_metrics=progress.client_metrics or None,
        confusion=progress.confusion or None,
        stopped=progress.stopped or None,
        model_sha256=model_hashes(rounds.method, server)[0],
        model_check=check,
        base_sha256=experiment.sha256 or None,
        clients_sha256=last.clients_sha256,
        refused=rounds.io.protocol.turn.refused,
        privacy=_privacy(config, last.algorithm) if config.privacy.clip is not None else None,
        provenance={
            **provenance(command, switches, str(rounds.host.device)),
            "data_sha256": _data_digest(experiment),
        },
    )


def write(directory: Path, summary: Summary) -> Summary:
    """Writes summary.json with the run's metrics, after its last byte was recorded."""
    summary.set(**metrics.summarise(open_run(directory), summary.predicted))
    summary.records = reading.contents(directory)
    text = msgspec.json.encode(summary.line(), enc_hook=plain)  # what is no number becomes null
    write_json(directory / "summary.json", msgspec.json.decode(text))
    return msgspec.json.decode(text, type=Summary)


def bounded(experiment: Experiment) -> bool:
    """Whether a compressor makes sizes depend on the values, so that a prediction is an upper
    bound.
    """
    return any(
        not c.fixed for codec in (experiment.up, experiment.down) for c in codec.chains.values()
    )


def about(evaluator: Evaluator, model: Tensors) -> dict[str, str]:
    """The metadata of model.safetensors: which tensors are trained, where clients share only a part
    of the model; over which inputs BatchNorm's statistics were measured.
    """
    found = {}
    if not evaluator.method.has_global:
        found["trained"] = " ".join(model.layout.names)
    if evaluator.calibrated_by:
        found["batch_norm"] = f"measured over the {evaluator.calibrated_by} inputs"
    return found


def _privacy(config: Config, last: JsonMapping) -> JsonDict:
    """The privacy spent by the last round. epsilon is null without noise: clipping alone gives no
    guarantee.
    """
    return {
        "epsilon": last.get("epsilon"),
        "epsilon_sampled": last.get("epsilon_sampled"),
        "delta": config.privacy.delta,
        "clip": config.privacy.clip,
        "noise": config.privacy.noise,
        "where": config.privacy.where,
    }


def _data_digest(experiment: Experiment) -> str | None:
    """SHA-256 over all samples and the clients' index lists: two runs with the same digest used the
    same data, divided in the same way.
    """
    if experiment.federation is None:
        return None
    whole = hashlib.sha256(experiment.federation.data.sha256().encode())
    for client in range(experiment.federation.clients):
        whole.update(bytes.fromhex(experiment.federation.sha256(client)))
    return whole.hexdigest()


def provenance(command: Sequence[str], switches: JsonMapping, device: str) -> JsonDict:
    """What it takes to repeat a run: versions, host, device, switches, the user's own files."""
    import torch

    return {
        "command": list(command),
        "fednet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": determinism.processor(),
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
