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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fednet.cli import values
from fednet.cli.common import Parser, run_guarded
from fednet.errors import ConfigError, unknown
from fednet.experiment import placement
from fednet.plain import JsonDict
from tests.bench import against, books, card, round, secagg
from tests.bench.run import machine
from tests.bench.workloads import WORKLOADS

Shown = Iterator[tuple[JsonDict, list[str]]]  # each record, and its lines


def _known(option: str, names: Sequence[str], known: Collection[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option}: {unknown(option, name, known)}")
    return names


def _against(args: argparse.Namespace, runs: Mapping[str, against.Work]) -> Shown:
    """Each of these, by what it is called, in this version and in that of a commit."""
    with against.tree(args.against) as other:
        for what, work in runs.items():
            about = {"what": what, "commit": args.against}
            measure = partial(against.measured, work=work)
            record = against.compare(measure, other, args.repeat, about)
            yield record, list(against.lines(record))


def _round(args: argparse.Namespace, folder: Path) -> Shown:
    """Also scale and curve."""
    measure, lines, names = {
        "round": (round.bench, round.lines, ["W1", "W2", "W3"]),
        "scale": (round.scale, round.scale_lines, ["P8", "P32", "P128", "N100", "N1000", "N10000"]),
        "curve": (round.curve, round.curve_lines, ["W2", "Q"]),
    }[args.what]
    names = _known("workload", args.workload or names, WORKLOADS)
    if args.what != "curve" and args.against:
        workers = args.workers or placement.cores()
        yield from _against(
            args, {f"{n}, {workers} workers": ("run", n, workers, {}) for n in names}
        )
        return
    for name in names:
        record = measure(WORKLOADS[name], args.repeat, folder, args.workers)
        yield record, lines(record)


def _ways(args: argparse.Namespace, folder: Path) -> Shown:
    names = _known("workload", args.workload or ["W6"], WORKLOADS)
    if args.against:
        if args.pfl or args.blazefl or args.limit:
            raise ConfigError(
                "--against runs fednet alone, to its end: no --pfl, --blazefl, --limit."
            )
        runs: dict[str, against.Work] = {}
        changes = {"rounds": args.rounds}
        if args.cohort:
            changes["per_round"] = args.cohort
        for name in names:
            runs[f"{name}, two workers"] = ("run", name, 2, changes)
            runs[f"{name}, in one process"] = ("run", name, None, changes)
        yield from _against(args, runs)
        return
    pythons = {"pfl": args.pfl, "blazefl": args.blazefl}
    peers = {name: python for name, python in pythons.items() if python}
    for name in names:
        work = WORKLOADS[name]
        work = replace(work, rounds=args.rounds, per_round=args.cohort or work.per_round)
        found: list[JsonDict] = []
        for record in round.ways(work, args.repeat, folder / name, peers, args.limit or 600.0):
            found.append(record)
            yield record, list(round.ways_lines([record]))
        print(f"{name}: {work.text}", *round.ways_lines(found), sep="\n")


def _card(args: argparse.Namespace, folder: Path) -> Shown:
    parts = _known("part", args.part or list(card.PARTS), card.PARTS)
    for record in card.bench(args.device or "cuda:0", parts, folder, args.limit or 500.0):
        yield record, card.lines(record)


def _pack(args: argparse.Namespace, folder: Path) -> Shown:
    (clients,) = args.clients or [10]
    names = _known("workload", args.workload or ["cnn"], WORKLOADS)
    if args.against:
        if args.device:
            raise ConfigError("--against runs whole rounds on the processor: without --device.")
        yield from _against(
            args, {f"{n}, {clients} clients in one pack": ("pack", n, clients, {}) for n in names}
        )
        return

    from tests.bench import pack  # imports torch

    for name in names:
        record = pack.bench(name, clients, args.device or "auto", args.repeat)
        yield record, [pack.line(record)]


def _replies(args: argparse.Namespace, folder: Path) -> Shown:
    from tests.bench import replies  # imports torch

    if args.against:
        sizes = args.connections or [500]
        yield from _against(args, {f"{n} connections": ("replies", "", n, {}) for n in sizes})
        return
    for record in replies.bench(args.connections or replies.SIZES, args.repeat, folder):
        yield record, [replies.line(record)]


def _books(args: argparse.Namespace, folder: Path) -> Shown:
    for record in books.bench(args.clients or [10_000], args.rounds, args.repeat, folder):
        yield record, [books.line(record)]


def _secagg(args: argparse.Namespace, folder: Path) -> Shown:
    print(secagg.HEAD, flush=True)
    for record in secagg.bench(args.clients or [10, 50, 200], args.dropout or [0.0, 0.1, 0.3]):
        yield record, [secagg.line(record)]


def _whole_numbers(text: str) -> list[int]:
    """`10,50`."""
    return [values.at_least_one(piece) for piece in text.split(",")]


OPTIONS: dict[str, dict[str, Any]] = {
    "workload": {"type": values.names, "metavar": "NAME,..."},
    "workers": {"type": values.at_least_one, "metavar": "W", "help": "processes [one a core]"},
    "repeat": {
        "type": values.at_least_one,
        "default": 3,
        "metavar": "R",
        "help": "how often fednet and its yardstick are run in turn [3]",
    },
    "rounds": {"type": values.at_least_one, "default": 3, "metavar": "N"},
    "cohort": {"type": values.at_least_one, "metavar": "N", "help": "clients a round"},
    "pfl": {"metavar": "PYTHON", "help": "beside pfl-research: a Python that has the package pfl"},
    "blazefl": {"metavar": "PYTHON", "help": "beside BlazeFL: a Python that has blazefl 2.0"},
    "against": {
        "metavar": "COMMIT",
        "help": "beside that version of fednet, run in turn: ratios instead of floors",
    },
    "limit": {"type": values.seconds, "metavar": "T", "help": "of a run, or of all parts"},
    "device": {"metavar": "D", "help": "cpu, cuda or cuda:0"},
    "part": {"type": values.names, "metavar": "P,...", "help": ", ".join(card.PARTS)},
    "clients": {"type": _whole_numbers, "metavar": "N,..."},
    "connections": {"type": _whole_numbers, "metavar": "N,..."},
    "dropout": {
        "type": values.numbers,
        "metavar": "SHARE,...",
        "help": "share of the clients that is lost before their vectors arrive [0,0.1,0.3]",
    },
    "json": {"type": values.new_file("json"), "metavar": "FILE.json", "help": "the figures"},
}
BENCHMARKS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], Shown], str]] = {
    "round": (
        "seconds and memory of a round (W1 to W8) beside the floor",
        _round,
        "workload workers repeat against",
    ),
    "scale": (
        "the server's memory by payload (P8 to P128) and clients",
        _round,
        "workload workers repeat against",
    ),
    "curve": ("what CURVE encryption costs", _round, "workload workers repeat"),
    "ways": (
        "one workload in every way, beside pfl-research (W6) and BlazeFL (W8)",
        _ways,
        "workload rounds cohort pfl blazefl limit repeat against",
    ),
    "card": ("all that is measured on a GPU", _card, "device part limit"),
    "pack": (
        "several clients trained as one",
        _pack,
        "workload clients device repeat against",
    ),
    "replies": ("small replies a second, by connections", _replies, "connections repeat against"),
    "books": ("size of the books, and seconds of a report", _books, "clients rounds repeat"),
    "secagg": ("secure aggregation: bytes and seconds", _secagg, "clients dropout"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (text, _, options) in BENCHMARKS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        for option in (*options.split(), "json"):
            verb.add_argument(f"--{option}", **OPTIONS[option])
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:  # argparse has said why
        return int(done.code or 0)
    return run_guarded("python -m tests.bench", lambda: _measure(args), None, argv is None)


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
