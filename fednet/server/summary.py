"""The end of a run: summary.json and model.safetensors."""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fednet import __version__, loading
from fednet.descriptors import reaching
from fednet.experiment import determinism
from fednet.experiment.build import Experiment
from fednet.files import write_json
from fednet.plain import JsonDict, JsonMapping, plain
from fednet.records import Round, Summary, reading
from fednet.report import metrics, open_run
from fednet.server.evaluation import model_hashes
from fednet.server.exports import keep_adapters, keep_class_means, keep_personal, save_model
from fednet.server.rounds import Rounds


def finish(rounds: Rounds, command: Sequence[str], switches: JsonMapping) -> Summary:
    """Writes the models; returns the server's part of the summary."""
    config = rounds.config
    progress = rounds.progress
    evaluator = rounds.evaluator
    experiment = rounds.setup.experiment
    server = rounds.carried.server
    files = rounds.records.files
    directory = files.path
    model = evaluator.newest(server)
    check = None
    if model is not None:
        about = {}
        if not rounds.method.has_global:  # clients share only a part of the model
            about["trained"] = " ".join(model.layout.names)
        if evaluator.measured_over:
            about["batch_norm"] = f"measured over the {evaluator.measured_over} inputs"
        named = experiment.state_dict(model)
        check = save_model(directory / "model.safetensors", named, about)
        keep_adapters(directory, experiment, model)
    keep_class_means(directory, experiment)
    gone = keep_personal(directory, progress.run, progress.versions, experiment, model, server)
    for client, reason in gone.items():
        files.event("no_personal", progress.round, client, reason=reason)
    files.flush()
    rounds.take_tally(progress.round)  # the last evaluation
    lines = open_run(directory).rounds
    last = next(reversed(lines), Round())
    # Compressors may make sizes depend on the values.
    chains = [c for codec in (experiment.up, experiment.down) for c in codec.chains.values()]
    spent = None
    if config.privacy.clip is not None:
        # Of the last round. epsilon is null without noise: clipping alone gives no guarantee.
        spent = {
            "epsilon": last.algorithm.get("epsilon"),
            "epsilon_sampled": last.algorithm.get("epsilon_sampled"),
            "delta": config.privacy.delta,
            "clip": config.privacy.clip,
            "noise": config.privacy.noise,
            "where": config.privacy.where,
        }
    # How many counts of an evaluation are not zero depends on the model.
    counted = experiment.setting.more and config.evaluate.clients == "auto"
    exact = all(chain.fixed for chain in chains) and not counted
    return Summary(
        name=config.name,
        useful=progress.useful,
        predicted=progress.predicted if experiment.predictable else None,
        predicted_is="exact" if exact else "a bound",
        own_model=evaluator.own_model,
        metrics=next((r.metrics for r in reversed(lines) if r.metrics), None),
        client_metrics=progress.client_metrics or None,
        confusion=progress.confusion or None,
        stopped=progress.stopped or None,
        model_sha256=model_hashes(rounds.method, server)[0],
        model_check=check,
        base_sha256=experiment.sha256 or None,
        clients_sha256=last.clients_sha256,
        refused=rounds.clients.io.protocol.refused,
        privacy=spent,
        provenance=provenance(experiment, command, switches, str(rounds.setup.host.device)),
    )


def write(directory: Path, summary: Summary) -> Summary:
    """Writes summary.json with the run's metrics, after its last byte was recorded."""
    summary.set(**metrics.summarise(open_run(directory), summary.predicted))
    summary.records = reading.contents(directory)
    text = msgspec.json.encode(summary.line(), enc_hook=plain)  # what is no number becomes null
    write_json(directory / "summary.json", msgspec.json.decode(text))
    return msgspec.json.decode(text, type=Summary)


def provenance(
    experiment: Experiment, command: Sequence[str], switches: JsonMapping, device: str
) -> JsonDict:
    """What it takes to repeat a run: versions, host, device, switches, the user's own files, and
    the SHA-256 of all samples and the clients' lists of them: two runs with the same one used the
    same data, divided in the same way.
    """
    import torch

    commit = None
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and shutil.which("git"):  # else it is an installed package
        words = ["git", "-C", str(root), "rev-parse", "HEAD"]
        asked = reaching(lambda: subprocess.run(words, capture_output=True, text=True, check=False))
        commit = asked.stdout.strip() or None
    data = None
    if experiment.federation is not None:
        whole = hashlib.sha256(experiment.federation.data.sha256().encode())
        for client in range(experiment.federation.clients):
            whole.update(bytes.fromhex(experiment.federation.sha256(client)))
        data = whole.hexdigest()
    return {
        "command": list(command),
        "fednet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "platform": reaching(platform.platform),
        "processor": determinism.processor(),
        "device": device,
        "cuda": torch.version.cuda,
        "git": commit,
        "code_sha256": loading.loaded_files(),
        "determinism": dict(switches),
        "data_sha256": data,
    }
