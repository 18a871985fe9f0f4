"""The end of a run: summary.json and model.safetensors."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fednet import __version__, loading
from fednet.config import Config
from fednet.files import read_lines, write_json
from fednet.server.exports import keep_class_means, keep_personal, save_model
from fednet.server.hashes import model_hashes
from fednet.server.rounds import Rounds


def finish(
    rounds: Rounds,
    experiment: Any,
    directory: Path,
    command: Sequence[str],
    switches: Mapping[str, Any],
    files: Sequence[str],
) -> dict[str, Any]:
    """Writes model.safetensors and summary.json; returns the summary."""
    config, progress = rounds.config, rounds.progress
    model = rounds.method.global_model(rounds.server)
    if model is not None:
        save_model(directory / "model.safetensors", model)
    keep_class_means(directory, experiment)
    keep_personal(directory, progress.run, progress.versions)
    rounds.directory.flush()
    rounds.accounts.spent(progress.round, progress)  # the last evaluation
    records = list(read_lines(directory / "rounds.jsonl"))
    clients = list(read_lines(directory / "clients.jsonl"))
    curve = [
        (r["round"], r["test_accuracy"]) for r in records if r.get("test_accuracy") is not None
    ]
    summary: dict[str, Any] = {
        "name": config.name,
        "algorithm": config.algorithm.name,
        "rounds": progress.round,
        "accuracy": {
            "final": curve[-1][1] if curve else None,
            "best": progress.best,
            "best_round": progress.best_round or None,
            "last10": sum(a for _, a in curve[-10:]) / len(curve[-10:]) if curve else None,
        },
        "bytes": {**progress.totals, "total": sum(progress.totals.values())},
        "useful": progress.useful,
        "predicted": progress.predicted if experiment.foretold else None,
        "predicted_is": "a bound" if bounded(experiment) else "exact",
        "stopped": progress.stopped or None,
        "seconds": progress.seconds,
        "seconds_virtual": progress.virtual or None,
        "model_sha256": model_hashes(rounds.method, rounds.server)[0],
        "clients_sha256": records[-1]["clients_sha256"] if records else None,
        "personal": final_scores(clients),
        "refused": rounds.io.protocol.refused,
        **({"privacy": _privacy(config, records)} if config.privacy.clip is not None else {}),
        "provenance": {
            **provenance(config, command, switches, str(rounds.host.device)),
            "data_sha256": _data_digest(experiment),
        },
    }
    write_json(directory / "summary.json", summary)
    return summary


def bounded(experiment: Any) -> bool:
    """Whether a lossless compressor makes sizes depend on the values, so that a prediction is an
    upper bound.
    """
    return any(
        c.lossless is not None
        for codec in (experiment.up, experiment.down)
        for c in codec.chains.values()
    )


def final_scores(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy pooled over all clients at the last evaluation, by what was judged (Eq. 7 and 8 of
    FedABC).
    """
    found = {}
    # A run given more rounds has been judged before.
    last = max((line["round"] for line in lines if line.get("final")), default=0)
    for name in ("global", "personal", "balanced", "finetuned", "finetuned_balanced"):
        rows = [
            line
            for line in lines
            if line.get("final") and line["round"] == last and line.get(f"tested_{name}")
        ]
        if rows:
            found[name] = sum(r[f"correct_{name}"] for r in rows) / sum(
                r[f"tested_{name}"] for r in rows
            )
    return found


def _privacy(config: Any, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was spent by the last round; epsilon is null where there was no noise: clipping alone
    promises nothing.
    """
    last = records[-1]["algorithm"] if records else {}
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
