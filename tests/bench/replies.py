"""How many small replies a second a server takes, and what each costs of its processor, by the
number of connections.

A server as `fednet-server` starts it, whose clients (see `idle`) train nothing: each answers at
once by the same payload. All that a round asks of the server is in the figures: its tasks, its
books, the fold, the checkpoint and the records.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fednet import config as configuration
from fednet.errors import CannotGoOn
from fednet.experiment import build as experiments
from fednet.files import read_lines, read_record
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import cell, environment, spread

SIZES = (100, 500, 2000, 5000)  # connections
REPLIES = 12_000  # of a run, at least, that are timed
FIRST = 2  # rounds that are not
PATIENCE_S = 120.0  # for a server to listen


def config(clients: int, rounds: int) -> JsonDict:
    """All clients take part in each round; a model of 2,410 parameters; nothing is judged."""
    return {
        "name": "replies",
        "rounds": rounds,
        "clients": clients,
        "participation": 1.0,
        "model": {"name": "mlp", "hidden": [32]},
        "train": {"epochs": 1, "batch_size": 64, "lr": 0.01},
        "data": {
            "dataset": "synthetic",
            "samples": 2 * clients,
            "shape": [64],
            "client_test": "none",
            "partition": {"scheme": "iid"},
        },
        "evaluate": {"every": 0, "clients": "none"},
        "checkpoint": {"best": False},
        "report": False,
    }


def rounds_of(clients: int) -> int:
    """So that `REPLIES` are timed, and three rounds at least."""
    return FIRST + max(3, -(-REPLIES // clients)) + 1


def bench(sizes: Sequence[int], repeat: int, out: Path) -> Iterator[JsonDict]:
    """One record a number of connections; the runs of all take turns."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for k in range(repeat):
        for size in sizes:
            found[size].append(measure(size, out / f"{size}-{k}"))
    for size, runs in found.items():
        yield {
            "connections": size,
            "repeat": repeat,
            **{name: spread([run[name] for run in runs]) for name in runs[0]},
        }


def measure(clients: int, folder: Path) -> dict[str, float]:
    """One run: replies a second; milliseconds of the server's processor for each, and of the
    clients'.
    """
    folder.mkdir(parents=True)
    rounds = rounds_of(clients)
    mapping = config(clients, rounds)
    text = folder / "config.yaml"
    text.write_text(json.dumps(mapping), encoding="utf-8")
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "fednet.cli.server", str(text), "--quiet"),
            *("--bind", "tcp://127.0.0.1:0", "--out", str(folder)),
        ],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        job = {**_listening(server, folder), **_reply(mapping), "first": 0, "clients": clients}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(job, file)
            file.flush()
            idle = subprocess.run(
                [sys.executable, "-m", "tests.bench.idle", file.name],
                capture_output=True,
                text=True,
                check=False,
                env=environment(),
            )
        if idle.returncode:
            raise CannotGoOn(f"the clients failed: {idle.stderr.strip().splitlines()[-1]}")
        server.wait(PATIENCE_S)
    finally:
        server.kill()
        server.communicate()
    _complete(folder / "replies", clients)
    made = json.loads(idle.stdout)
    (began, before), (ended, after) = made["rounds"][FIRST], made["rounds"][-1]
    replies = clients * (len(made["rounds"]) - 1 - FIRST)
    return {
        "a_second": replies / (ended - began),
        "server_ms": 1e3 * (after - before) / replies,
        "clients_ms": 1e3 * made["cpu_s"] / (clients * rounds),
    }


def _complete(directory: Path, clients: int) -> None:
    """Raises CannotGoOn where a client is missing in a round: the figures would be of another
    federation.
    """
    for row in read_lines(directory / "rounds.jsonl"):
        if len(row["completed"]) != clients:
            raise CannotGoOn(
                f"{len(row['completed'])} of {clients} clients completed round {row['round']}: the "
                f"server lost the others ({next(iter(row['dropped'].values()), '')})."
            )


def _listening(server: subprocess.Popen[str], folder: Path) -> JsonDict:
    """Where the server is, once it listens."""
    place, until = folder / "replies" / "server.json", time.monotonic() + PATIENCE_S
    while not place.exists():
        if server.poll() is not None or time.monotonic() > until:
            said = server.stderr.read() if server.poll() is not None and server.stderr else ""
            raise CannotGoOn(f"the server did not start: {said.strip()}")
        time.sleep(0.05)
    record = read_record(place, "start it anew")
    host, _, port = record["address"].removeprefix("tcp://").rpartition(":")
    return {"host": host, "port": int(port), "pid": record["pid"]}


def _reply(mapping: JsonMapping) -> JsonDict:
    """What every client answers: the initial model, as if one step on one sample had left it as it
    was.
    """
    import msgspec

    from fednet.wire.payload import Run

    built = experiments.build(configuration.from_mapping(dict(mapping), "bench replies"))
    x = built.setting.initial.select(built.shared)
    # FedAvg's, which has these two fields.
    up: Any = built.algorithm.exchanges[0].up
    encoded = built.up.encode(up(x=x, run=Run(1, 1, 2.0)))
    return {
        "layout": built.digest,
        "form": msgspec.to_builtins(list(encoded.form)),
        "body": bytes(encoded.body.whole()).hex(),
        "check": encoded.body.check().hex(),
    }


def line(record: JsonMapping) -> str:
    return (
        f"{record['connections']:6} connections, {record['repeat']} runs: "
        f"{cell(record, 'a_second', 0)} replies a second; the server's processor "
        f"{cell(record, 'server_ms')} ms a reply, the clients' {cell(record, 'clients_ms')} ms"
    )
