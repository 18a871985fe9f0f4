"""Small whole runs for tests: in this process, or in processes of their own, without figures and
report.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fednet import config as configuration
from fednet.launch import start
from fednet.server.watch import ServerOptions
from tests.processes import Processes, lines

SMALL = {
    "name": "r",
    "rounds": 2,
    "clients": 3,
    "participation": 1.0,
    "algorithm": {"name": "fedavg"},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "data": {
        "dataset": "synthetic",
        "samples": 60,
        "shape": [12],
        "classes": 3,
        "partition": {"scheme": "iid"},
    },
    "evaluate": {"clients": "none"},
    "checkpoint": {"best": False},
}


def site_data(folder: Path, *clients: int, n: int = 20, **more) -> dict:
    """Writes the data of these clients' sites: n samples of two classes, or other arrays. Returns
    the section `data`.
    """
    for client in clients:
        place = folder / f"client-{client}"
        place.mkdir(parents=True, exist_ok=True)
        x = np.random.default_rng(client).random((n, 4), dtype=np.float32)
        y = np.arange(n) % 2
        arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **more}
        np.savez(place / "data.npz", **arrays)
    return {"dataset": "site", "shape": [4], "classes": 2, "root": str(folder)}


def merged(base: dict, changes: dict) -> dict:
    """Mappings merge; one with a `name`, or of data at the sites, replaces the one before it, as do
    other values.
    """
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        both = both and "name" not in value and value.get("dataset") != "site"
        out[key] = merged(out[key], value) if both else value
    return out


def small(**changes):
    return configuration.from_mapping(merged(SMALL, changes), where="the test")


def run(out: Path, *, resume: bool = False, callback=None, **changes) -> Path:
    """A run in this process; returns its directory."""
    opened = start.open_directory(small(**changes), out, resume)
    with opened as (config, directory, finished):
        if not finished:
            root = Path(config.data.root) if config.data.root else None
            how = ServerOptions(start.Silent(), ["test"], "cpu", root, callback=callback)
            start.run_in_process(config, directory, how)
    return directory


def processes(out: Path, *, workers: int = 2, **changes) -> Path:
    """The same in a server process and worker processes."""
    text = out / "config.yaml"
    out.mkdir(parents=True, exist_ok=True)
    text.write_text(configuration.to_yaml(small(report=False, **changes)), encoding="utf-8")
    with Processes(out) as all_of_it:
        words = (text, "--out", out, "--workers", workers, "--device", "cpu", "--quiet")
        status, said = all_of_it.run("main", "run", *words)
    assert status == 0, said
    return out / str(changes.get("name", SMALL["name"]))


class Killed(BaseException):
    """Ends a run where it stands."""


def lost(*which: tuple[int, int]) -> dict:
    """Faults that lose the replies of these (round, client)."""
    return {
        "schedule": [{"round": t, "client": c, "kind": "drop_before_sending"} for t, c in which]
    }


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def hashes(directory: Path) -> list[tuple[str, str]]:
    return [(r["model_sha256"], r["clients_sha256"]) for r in lines(directory / "rounds.jsonl")]
