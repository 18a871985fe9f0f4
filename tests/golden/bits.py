"""Hashes of the results of small runs: every method, and every part that changes bits.

    python -m tests.golden.bits                      compare with bits.json; status 1 if any differ
    python -m tests.golden.bits --only fedavg,moon   compare these cases alone
    python -m tests.golden.bits --half 0             compare every second case; 1: the others
    python -m tests.golden.bits --write              replace the cases in bits.json

All runs are in one process with `train.portable`, so that x86-64 processors with AVX2 agree if they
have the same release of torch. Takes about two minutes of one core. A commit that means to change
results replaces the cases and says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fednet import registry

FILE = Path(__file__).with_name("bits.json")
BASE = {
    "rounds": 3,
    "clients": 6,
    "participation": 0.5,
    "train.epochs": 1,
    "train.batch_size": 16,
    "train.lr": 0.02,
    "train.momentum": 0.9,
    "train.portable": True,
    "report": False,
}
PUBLIC = {"data.public.samples": 50}
VIRTUAL = {"schedule.mode": "async", "link.clock": "virtual", "link.step_ms": 5}

# What a method needs besides its name.
OPTIONS: dict[str, dict[str, Any]] = {
    "fedsgd": {"train.momentum": 0},
    "fedcm": {"train.momentum": 0},
    "fedpdc": PUBLIC,
    "feddf": PUBLIC,
    "fedmd": PUBLIC,
    "fedrds": {"data.public.fraction": 0.1},
    "feddc": {"algorithm.iterations": 5},
    "feddcplus": {"algorithm.iterations": 5},
    "fedbn": {"model": {"name": "mlp", "norm": "batch"}},
    "fedbuff": VIRTUAL,
    "fedasync": VIRTUAL | {"schedule.buffer": 1},
    "ca2fl": VIRTUAL,
}
PARTS: dict[str, dict[str, Any]] = {
    "up-topk-int8": {"wire": {"up": {"state": ["topk(0.1)", "int8"]}}},
    "up-ef-sign": {"wire": {"up": {"state": ["ef", "sign"]}}},
    "up-powersgd": {"wire": {"up": {"state": ["powersgd(2)"]}}},
    "up-ef21-topk": {"wire": {"up": {"state": ["ef21", "topk(0.1)"]}}},
    "up-diana-randk": {"wire": {"up": {"state": ["diana(0.1)", "randk(0.1)"]}}},
    "up-qsgd": {"wire": {"up": {"state": ["qsgd(4)"]}}},
    "down-delta-topk": {"wire": {"down": {"state": ["delta", "topk(0.1)"]}}},
    "secagg": {"privacy.secagg": {"protocol": "secagg"}},
    "secaggplus": {"privacy.secagg": {"protocol": "secagg+"}},
    "secagg-dropouts": {
        "privacy.secagg": {"protocol": "secagg"},
        "rounds": 4,
        "participation": 1.0,
        "faults.random": {"drop_before_sending": 0.15},
    },
    "median": {"aggregation.rule": "median"},
    "krum": {"aggregation.rule": "krum"},
    "signflip-median": {
        "aggregation.rule": "median",
        "faults.malicious": {"clients": 0.3, "attack": "sign_flip"},
    },
    "unequal": {
        "rounds": 6,
        "clients": 12,
        "data.partition": {"scheme": "dirichlet", "alpha": 0.1},
        "seed": 3,
    },
    "scaffold-steps": {
        "algorithm": "scaffold",
        "train.epochs": 2,
        "train.weight_decay": 0.001,
        "rounds": 5,
    },
    "dropouts": {
        "algorithm": "scaffold",
        "rounds": 5,
        "faults.random": {"drop_before_training": 0.2, "drop_before_sending": 0.2},
    },
    "markov": {"rounds": 6, "availability": {"model": "markov", "up": 0.5, "down": 0.3}},
    "clip": {"privacy.clip": 0.5},
    "adam": {"train.optimizer": "adam", "train.momentum": 0, "train.lr": 0.001},
    "cosine": {"train.schedule": "cosine"},
}


def cases() -> dict[str, dict[str, Any]]:
    """Each case's name and its configuration, over BASE."""
    methods = registry.algorithm.names()
    return {name: {"algorithm.name": name, **OPTIONS.get(name, {})} for name in methods} | PARTS


def result(name: str, options: dict[str, Any], out: str) -> list[str]:
    """[model, clients' states, accuracy, personal accuracies] at the end of that run."""
    import fednet

    run = fednet.run(
        None, set={**BASE, **options, "name": name}, in_process=True, out=out, quiet=True
    )
    last = run.rounds[-1]
    personal = json.dumps(run.summary.get("personal"))
    return [last.model_sha256, last.clients_sha256, repr(last.test_accuracy), personal]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every second case, from this one")
    parser.add_argument("--write", action="store_true", help="replace the cases in bits.json")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(cases())
    if args.half is not None:
        wanted = wanted[args.half :: 2]
    import torch

    known = json.loads(FILE.read_text())
    found = {}
    with tempfile.TemporaryDirectory() as out:
        for name in wanted:
            found[name] = result(name, cases()[name], out)
    if args.write:
        # In the file's order, so that a commit shows the cases that it replaces and no others.
        there = [name for name in known["bits"] if name in cases()]
        names = dict.fromkeys([*there, *cases()])
        bits = {name: found.get(name, known["bits"].get(name)) for name in names}
        FILE.write_text(json.dumps({"torch": torch.__version__, "bits": bits}, indent=1) + "\n")
        return 0
    differ = [name for name in wanted if found[name] != known["bits"].get(name)]
    for name in differ:
        print(f"{name}: {found[name]}, bits.json has {known['bits'].get(name)}")
    print(f"{len(wanted) - len(differ)} of {len(wanted)} cases as in bits.json")
    if known["torch"] != torch.__version__:
        print(f"bits.json was made with torch {known['torch']}, this is {torch.__version__}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
