"""Sums of the books of small runs whose server is killed at each point of a round, and goes on.

    python -m tests.golden.books                     compare with books.json; status 1 if any differ
    python -m tests.golden.books --only small,async   compare the cases whose names begin so
    python -m tests.golden.books --write             replace the cases in books.json

All clients are in the server's process, so that they end with it and messages come in one order:
what is booked is the same each time. Takes about half a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("books.json")
BASE: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "participation": 1.0,
    "model": {"name": "mlp", "hidden": [16]},
    "data": {
        "dataset": "synthetic",
        "samples": 240,
        "shape": [1, 8, 8],
        "partition": {"scheme": "iid"},
    },
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.05, "portable": True},
    "report": False,
}
LARGE = {"name": "mlp", "hidden": [16384]}  # 5 MB, so two parts
KINDS: dict[str, dict[str, Any]] = {
    "small": {"algorithm": "scaffold"},
    "large": {"model": LARGE},
    "all": {"evaluate": {"clients": "all"}, "checkpoint": {"every": 2}},
    "virtual": {
        "link": {"clock": "virtual", "up_mbps": 8.0, "step_ms": 10.0},
        "participation": 0.75,
        "round": {"ask": 1.4},
    },
    "async": {
        "algorithm": "fedbuff",
        "schedule": {"mode": "async", "buffer": 2},
        "link": {"clock": "virtual", "step_ms": 5.0},
    },
}
POINTS = {
    "small": (
        "broadcasting",
        "receiving",
        "aggregating",
        "evaluating",
        "checkpointing",
        "recording",
        "between",
    ),
    "large": ("broadcasting", "spooling", "receiving"),
    "all": ("receiving", "evaluating"),
    "virtual": ("receiving", "recording"),
    "async": ("receiving", "checkpointing"),
}


def cases() -> dict[str, dict[str, Any]]:
    """By name: a configuration whose server is killed in round 2."""
    found = {}
    for kind, points in POINTS.items():
        changes = KINDS[kind]
        for point in points:
            crash = {"round": 2, "kind": "server_crash", "at": point}
            faults = {**changes.get("faults", {}), "schedule": [crash]}
            found[f"{kind}-{point}"] = {**BASE, **changes, "faults": faults}
    return found


def serve(changes: dict[str, Any], out: Path, resume: bool) -> None:
    """One server process's part in a run."""
    from fednet import config
    from fednet.launch.in_process import run_in_process
    from fednet.launch.start import Silent, open_directory
    from fednet.server.watch import ServerOptions

    with open_directory(config.from_mapping(changes), out, resume=resume) as (own, directory, _):
        run_in_process(own, directory, ServerOptions(Silent(), ["books"], "cpu"))


def sums(changes: dict[str, Any], out: Path) -> dict[str, str]:
    """What the run's books come to: "rows, bytes, raw bytes" by all that a row says of a payload.
    Messages that belong to no task are left out: their sizes depend on the process's number.
    """
    import tests.preloaded  # noqa: F401 - once, for all the processes that are forked
    from fednet.report import open_run

    fork = multiprocessing.get_context("fork")
    resume = False
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        process = fork.Process(target=serve, args=({**changes, "name": "run"}, out, resume))
        process.start()
        process.join()
        resume = True
        status = process.exitcode or 0
    if status:
        raise SystemExit(f"the server ended with status {status}")
    rows = Counter[str]()
    total = Counter[str]()
    raw = Counter[str]()
    for row in open_run(out / "run").lines("wire"):
        if row["client"] < 0:
            continue
        use = "useful" if row["useful"] else row.get("reason") or "spent"
        lost = " lost" if row.get("lost") else ""
        name = (
            f"server {row['incarnation']} round {row['round']} {row['direction']} "
            f"{row['purpose']} {row['type']} {'+'.join(sorted(row['kinds']))}: {use}{lost}"
        )
        rows[name] += row.get("messages") or 1
        total[name] += row["bytes"]
        raw[name] += row["raw_bytes"]
    useful = json.loads((out / "run" / "summary.json").read_text())["useful"]
    found = {name: f"{rows[name]}, {total[name]}, {raw[name]}" for name in sorted(rows)}
    return found | {"summary": json.dumps(useful, sort_keys=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="how the names of cases begin, with commas")
    parser.add_argument("--write", action="store_true", help="replace the cases in books.json")
    args = parser.parse_args()
    starts = tuple(args.only.split(","))
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = {}
    for name, changes in cases().items():
        if name.startswith(starts):
            with tempfile.TemporaryDirectory() as out:
                found[name] = sums(changes, Path(out))
            if args.write:
                known[name] = found[name]
                FILE.write_text(json.dumps(known, indent=1) + "\n")
    if args.write:
        return 0
    differ = [name for name, books in found.items() if books != known.get(name)]
    for name in differ:
        before = known.get(name, {})
        for row in sorted({*before, *found[name]}):
            if before.get(row) != found[name].get(row):
                print(f"{name}: {row}: {found[name].get(row)}, books.json has {before.get(row)}")
    print(f"{len(found) - len(differ)} of {len(found)} cases as in books.json")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
