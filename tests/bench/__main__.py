"""Benchmarks for developers, each beside its yardstick in the same run.

    python -m tests.bench round --workload W1,W2     one benchmark; --help lists its options
    python -m tests.bench                            the list

docs/benchmarks.md describes the yardsticks and has the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fednet.cli import values
from fednet.cli.common import Parser, guarded
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict
from tests.bench import card, round, secagg, ways
from tests.bench.run import machine
from tests.bench.workloads import SCALES, WORKLOADS

Shown = Iterator[tuple[JsonDict, list[str]]]  # each record, and its lines
Part = TypeVar("Part")


def _whole_numbers(text: str) -> list[int]:
    """`10,50`."""
    return [values.at_least_one(piece) for piece in text.split(",")]


def _chosen(names: list[str], known: Mapping[str, Part], option: str = "--workload") -> list[Part]:
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: {unknown(option[2:], name, known)}")
    return [known[name] for name in names]


def _round(args: argparse.Namespace, folder: Path) -> Shown:
    for work in _chosen(args.workload or ["W1", "W2", "W3"], WORKLOADS):
        record = round.bench(work, args.repeat, folder, args.workers)
        yield record, round.lines(record)


def _scale(args: argparse.Namespace, folder: Path) -> Shown:
    for work in _chosen(args.workload or list(SCALES), SCALES):
        record = round.scale(work, args.repeat, folder, args.workers)
        yield record, [round.scale_line(record)]


def _curve(args: argparse.Namespace, folder: Path) -> Shown:
    for work in _chosen(args.workload or ["W2", "Q"], WORKLOADS):
        record = round.curve(work, args.repeat, folder, args.workers)
        yield record, round.curve_lines(record)


def _ways(args: argparse.Namespace, folder: Path) -> Shown:
    found: list[JsonDict] = []
    for work in _chosen(args.workload or ["W6"], WORKLOADS):
        work = replace(work, rounds=args.rounds, per_round=args.cohort or work.per_round)
        for record in ways.bench(work, args.repeat, folder, args.pfl, args.limit or 600.0):
            found.append(record)
            yield record, list(ways.lines([record]))
        print(f"{work.name}: {work.text}", *ways.lines(found), sep="\n")


def _card(args: argparse.Namespace, folder: Path) -> Shown:
    parts = args.part or list(card.PARTS)
    _chosen(parts, card.PARTS, "--part")
    device = args.device or "cuda:0"
    for record in card.bench(device, parts, folder, args.limit or 500.0):
        yield record, list(card.lines(record))


def _pack(args: argparse.Namespace, folder: Path) -> Shown:
    from tests.bench import pack  # imports torch

    sizes = args.workload or ["cnn"]
    _chosen(sizes, pack.SIZES)
    (clients,) = args.clients or [10]
    for size in sizes:
        record = pack.bench(size, clients, args.device or "auto", args.repeat)
        yield record, [pack.line(record)]


def _replies(args: argparse.Namespace, folder: Path) -> Shown:
    from tests.bench import replies  # imports torch

    for record in replies.bench(args.connections or replies.SIZES, args.repeat, folder):
        yield record, [replies.line(record)]


def _secagg(args: argparse.Namespace, folder: Path) -> Shown:
    print(secagg.HEAD, flush=True)
    for record in secagg.bench(args.clients or [10, 50, 200], args.dropout or [0.0, 0.1, 0.3]):
        yield record, [secagg.line(record)]


OPTIONS: dict[str, dict[str, Any]] = {
    "--workload": {"type": values.names("W1,W2"), "metavar": "NAME,..."},
    "--workers": {"type": values.at_least_one, "metavar": "W", "help": "processes [one a core]"},
    "--repeat": {
        "type": values.at_least_one,
        "default": 3,
        "metavar": "R",
        "help": "how often fednet and its yardstick are run in turn [3]",
    },
    "--rounds": {"type": values.at_least_one, "default": 3, "metavar": "N"},
    "--cohort": {"type": values.at_least_one, "metavar": "N", "help": "clients a round"},
    "--pfl": {"metavar": "PYTHON", "help": "a Python that has the package pfl [this one]"},
    "--limit": {"type": values.seconds, "metavar": "T", "help": "of a run, or of all parts"},
    "--device": {"metavar": "D", "help": "cpu, cuda or cuda:0"},
    "--part": {"type": values.names("W1,W2"), "metavar": "P,...", "help": ", ".join(card.PARTS)},
    "--clients": {"type": _whole_numbers, "metavar": "N,..."},
    "--connections": {"type": _whole_numbers, "metavar": "N,..."},
    "--dropout": {
        "type": values.numbers,
        "metavar": "SHARE,...",
        "help": "share of the clients that is lost before their vectors arrive [0,0.1,0.3]",
    },
    "--json": {"type": values.new_file("json"), "metavar": "FILE.json", "help": "the figures"},
}
WHOLE_RUNS = ("--workload", "--workers", "--repeat")
BENCHMARKS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], Shown], tuple[str, ...]]] = {
    "round": ("seconds and memory of a round (W1 to W6) beside the floor", _round, WHOLE_RUNS),
    "scale": ("the server's memory by payload (P8 to P128) and clients", _scale, WHOLE_RUNS),
    "curve": ("what CURVE encryption costs", _curve, WHOLE_RUNS),
    "ways": (
        "one workload in every way, beside pfl-research",
        _ways,
        ("--workload", "--rounds", "--cohort", "--pfl", "--limit", "--repeat"),
    ),
    "card": ("all that is measured on a GPU", _card, ("--device", "--part", "--limit")),
    "pack": (
        "several clients trained as one",
        _pack,
        ("--workload", "--clients", "--device", "--repeat"),
    ),
    "replies": ("small replies a second, by connections", _replies, ("--connections", "--repeat")),
    "secagg": ("secure aggregation: bytes and seconds", _secagg, ("--clients", "--dropout")),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (text, _, options) in BENCHMARKS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        for option in (*options, "--json"):
            verb.add_argument(option, **OPTIONS[option])
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:  # argparse has said why
        return int(done.code or 0)
    return guarded("python -m tests.bench", lambda: _measure(args), None, argv is None)


def _measure(args: argparse.Namespace) -> int:
    print(machine(), flush=True)
    records = []
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        for record, lines in BENCHMARKS[args.what][1](args, Path(folder)):
            print(*lines, sep="\n", flush=True)
            records.append(record)
            if args.json:  # after each: some take an hour
                args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
