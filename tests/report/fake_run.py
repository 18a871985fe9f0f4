"""Writes run directories as a finished run leaves them, without running anything.

The numbers are made up but consistent: the bytes of `rounds.jsonl` are the sums of `wire.jsonl`,
accuracies are counts over test samples, and two runs of one seed share partition, initial weights
and participants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fednet import config as configuration
from fednet import files
from fednet.report.read import Run, open_run

CLASSES = 10
TEST_PER_CLASS = 20  # so that an accuracy is a whole number of 1/200
STATE = 1000  # bytes of one model on the wire
ENVELOPE = 50


def sha(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def config(
    name: str, algorithm: dict[str, Any], seed: int, rounds: int, clients: int, **more: Any
) -> dict[str, Any]:
    asked = {"name": name, "seed": seed, "clients": clients, "algorithm": algorithm}
    whole = configuration.to_mapping(configuration.from_mapping(asked))
    return whole | {"rounds": rounds} | more


def write(
    path: Path,
    *,
    algorithm: str = "fedavg",
    options: dict[str, Any] | None = None,
    seed: int = 0,
    rounds: int = 8,
    clients: int = 6,
    accuracy: Sequence[float | None] | None = None,
    state: int = STATE,
    personalised: bool = False,
    drop: dict[int, dict[int, str]] | None = None,
    seconds: float = 2.0,
    share: float = 0.5,
    spend: Callable[[int, Sequence[int]], dict[str, int]] | None = None,
    **more: Any,
) -> Path:
    """A run directory at `path`. accuracy: a_t by round (None: not evaluated); drop: {round:
    {client: reason}}; share: of the clients, in a round. spend(round, clients): the bytes of that
    round by direction, whose rows the caller writes to wire.jsonl.
    """
    path.mkdir(parents=True)
    rng = np.random.default_rng([seed, 7])
    draw = np.random.default_rng(seed)
    # (clients, C)
    counts = np.stack(
        [draw.multinomial(120, draw.dirichlet(np.full(clients, 0.3))) for _ in range(CLASSES)],
        axis=1,
    )
    chosen = [
        sorted(draw.choice(clients, max(1, int(clients * share)), replace=False).tolist())
        for _ in range(rounds)
    ]
    if accuracy is None:
        accuracy = [
            round(0.85 - 0.6 * 0.7 ** (t + 1) + 0.02 * rng.standard_normal(), 3)
            for t in range(rounds)
        ]
    own = {"name": algorithm, **(options or {})}
    whole = config(path.name, own, seed, rounds, clients, **more)
    (path / "config.yaml").write_text(yaml.safe_dump(whole))
    partition = {
        "classes": CLASSES,
        "clients": clients,
        "samples": counts.sum(1).tolist(),
        "samples_by_class": counts.tolist(),
        "sha256": [sha(seed, "part", i) for i in range(clients)],
    }
    (path / "partition.json").write_text(json.dumps(partition))
    right = (TEST_PER_CLASS * np.eye(CLASSES, dtype=int)).tolist()
    confusion = {"model": "global", "tested_on": "server", "counts": right}
    summary = {
        "model_sha256": sha(algorithm, seed, rounds),
        "confusion": confusion if any(a is not None for a in accuracy) else None,
        "provenance": {"command": ["fednet", "run", f"{path.name}.yaml"], "host": "lab"},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    wire = []
    lines = []
    people = []
    wire += [
        row(0, i, "up", "connection", {}, 64, useful=False, purpose="connection")
        for i in range(clients)
    ]
    for t in range(1, rounds + 1):
        cohort = chosen[t - 1]
        gone = {i: why for i, why in (drop or {}).get(t, {}).items() if i in cohort}
        done = [i for i in cohort if i not in gone]
        if spend is not None:
            spent = spend(t, cohort)
        else:
            here = messages(t, cohort, done, state)
            wire += here
            spent = dict.fromkeys(("up", "down"), 0)
            for w in here:
                spent[w["direction"]] += w["bytes"]
        a = accuracy[t - 1]
        by_class: tuple[list[int] | None, list[int] | None] = (None, None)
        judged: list[dict[str, Any]] = []
        if a is not None:
            total = round(a * CLASSES * TEST_PER_CLASS)
            by_class = (
                [total // CLASSES + (c < total % CLASSES) for c in range(CLASSES)],
                [TEST_PER_CLASS] * CLASSES,
            )
            for i in done:
                n = 10 + i
                right = {"global": (round(a * n), n)}
                if personalised:
                    right |= {
                        "personal": (min(n, round(a * n) + i), n),
                        "balanced": (round(a * 100), 100),
                    }
                scores = {}
                for k, (c, m) in right.items():
                    scores |= {f"accuracy_{k}": c / m, f"correct_{k}": c, f"tested_{k}": m}
                judged.append(
                    {
                        "round": t,
                        "client": i,
                        "samples": int(counts[i].sum()),
                        "test_samples": n,
                        "train_loss": 2.0 / t,
                        "steps": 4,
                        **scores,
                        "seconds": 0.5 + 0.1 * i,
                        "host": "lab",
                        "device": "cpu",
                    }
                )
        people += judged
        means = {
            k: sum(p[f"correct_{k}"] for p in judged) / sum(p[f"tested_{k}"] for p in judged)
            for k in ("global", "personal", "balanced")
            if judged and f"tested_{k}" in judged[0]
        }
        lines.append(
            {
                "round": t,
                "selected": cohort,
                "completed": done,
                "dropped": {str(i): why for i, why in gone.items()},
                "void": not done,
                "seconds": seconds,
                "seconds_by_phase": {
                    "train": seconds * 0.7,
                    "evaluate": seconds * 0.2,
                    "fold": seconds * 0.1,
                },
                "resources": {
                    "server": {"busy_s": seconds / 4, "memory_mb": 200.0 + t},
                    "clients": {"busy_s": seconds / 2, "memory_mb": 500.0 + t},
                    "GPU 0": {"busy_s": seconds / 8, "memory_mb": 900.0},
                },
                "train_loss": 2.0 / t,
                "test_loss": None if a is None else 1 - a,
                "test_accuracy": a,
                "correct_by_class": by_class[0],
                "total_by_class": by_class[1],
                "client_accuracy": means or None,
                "bytes_up": spent["up"],
                "bytes_down": spent["down"],
                "model_sha256": sha(algorithm, seed, t),
                "tensor_sha256": {
                    "0.weight": sha(algorithm, seed, t, "w"),
                    "0.bias": sha(algorithm, seed, t, "b"),
                },
                "clients_sha256": sha(algorithm, seed, t, "clients"),
            }
        )
    if spend is None:
        jsonl(path / "wire.jsonl", wire)
    jsonl(path / "rounds.jsonl", lines)
    jsonl(path / "clients.jsonl", people)
    jsonl(
        path / "events.jsonl",
        [
            {"round": 0, "client": i, "type": "join", "bytes": 64, "elapsed": 0.1}
            for i in range(clients)
        ],
    )
    return path


def opened(path: Path, **more: Any) -> Run:
    """The run that `write` makes of the same arguments."""
    return open_run(write(path, **more))


def messages(
    t: int, cohort: Sequence[int], done: Sequence[int], state: int
) -> list[dict[str, Any]]:
    """The rows of a round: a task for each client, the replies of those who are done, and the
    heartbeats of one.
    """
    found = []
    for i in cohort:
        found.append(row(t, i, "down", "task", {"state": state}, ENVELOPE))
        if i in done:
            found.append(row(t, i, "up", "reply", {"state": state, "statistics": 24}, ENVELOPE))
    beats = {"useful": False, "purpose": "connection", "count": 2}
    found.append(row(t, cohort[0], "up", "heartbeat", {}, 20, **beats))
    return found


def row(
    t: int,
    client: int,
    direction: str,
    type: str,
    kinds: dict[str, int],
    envelope: int,
    useful: bool = True,
    purpose: str = "train",
    **more: Any,
) -> dict[str, Any]:
    whole = sum(kinds.values()) + envelope
    return {
        "round": t,
        "client": client,
        "direction": direction,
        "type": type,
        "kinds": kinds,
        "envelope": envelope,
        "bytes": whole,
        "raw_bytes": sum(kinds.values()),
        "useful": useful,
        "purpose": purpose,
        "incarnation": 1,
        "phase": 0,
        "attempt": 1,
        **more,
    }


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(map(files.line, rows)))
