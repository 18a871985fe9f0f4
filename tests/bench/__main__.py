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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fednet.cli import values
from fednet.cli.common import Parser, guarded
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict
from tests.bench.family import machine


# -- round, scale, curve: whole runs of a workload -------------------------------------------------
def _shares(text: str) -> list[float]:
    """`0,0.1`: shares from 0 to below 1."""
    found = values.numbers(text)
    if not all(0 <= share < 1 for share in found):
        raise argparse.ArgumentTypeError(f"expected shares from 0 to below 1, got {text!r}")
    return found


def _counts(most: int) -> Callable[[str], list[int]]:
    """`10,50`."""
    one = values.count(most)
    return lambda text: [one(piece) for piece in text.split(",")]


def _round_options(parser: argparse.ArgumentParser) -> None:
    _workload_options(parser, "W1 to W6 [W1,W2,W3]")


def _scale_options(parser: argparse.ArgumentParser) -> None:
    _workload_options(parser, "P8 to P128 (payload), N100 to N10000 (clients) [all]")


def _curve_options(parser: argparse.ArgumentParser) -> None:
    _workload_options(parser, "W1 to W6, Q [W2,Q]")


def _workload_options(parser: argparse.ArgumentParser, names: str) -> None:
    parser.add_argument("--workload", metavar="NAME,...", help=names)
    parser.add_argument(
        "--workers",
        type=values.count(1000),
        metavar="W",
        help="worker processes, of fednet and of the floor [one a core]",
    )
    _repeat(parser)


def _round(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import round, workloads

    for name in _chosen(args.workload, ["W1", "W2", "W3"], workloads.WORKLOADS):
        (record,) = round.bench([name], args.repeat, folder, args.workers)
        _print(round.lines([record]))
        yield record


def _scale(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import round, workloads

    for name in _chosen(args.workload, list(workloads.SCALES), workloads.SCALES):
        (record,) = round.scale([name], args.repeat, folder, args.workers)
        _print(round.scale_lines([record]))
        yield record


def _curve(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import curve, workloads

    for name in _chosen(args.workload, ["W2", "Q"], workloads.WORKLOADS):
        (record,) = curve.curve([name], args.repeat, folder, args.workers)
        _print(curve.curve_lines([record]))
        yield record


def _chosen(given: str | None, default: list[str], known: Mapping[str, object]) -> list[str]:
    names = default if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--workload: {unknown('workload', name, known)}")
    return names


# -- ways: one workload in every way ---------------------------------------------------------------
def _ways_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default="W6", metavar="NAME", help="W6 or another of round")
    parser.add_argument("--rounds", type=values.count(1000), default=3, metavar="N")
    parser.add_argument(
        "--cohort", type=values.count(1000), metavar="N", help="clients a round [the workload's]"
    )
    parser.add_argument(
        "--pfl", metavar="PYTHON", help="a Python that has the package pfl [this one]"
    )
    parser.add_argument(
        "--limit", type=values.seconds, default=600.0, metavar="T", help="of a run [10m]"
    )
    _repeat(parser)


def _ways(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import ways, workloads

    (name,) = _chosen(args.workload, ["W6"], workloads.WORKLOADS)
    work, found = workloads.WORKLOADS[name], []
    work = replace(work, rounds=args.rounds, per_round=args.cohort or work.per_round)
    for record in ways.bench(work, args.repeat, folder, args.pfl, args.limit):
        found.append(record)
        _print(ways.lines([record]))
        yield record
    print(f"{work.name}: {work.text}")
    _print(ways.lines(found))


# -- card: all that is measured on a GPU -----------------------------------------------------------
def _card_options(parser: argparse.ArgumentParser) -> None:
    from tests.bench import card

    parser.add_argument("--device", default="cuda:0", metavar="D", help="cuda:0, or cpu to try it")
    parser.add_argument(
        "--part", type=values.names("W1,W2"), metavar="P,...", help=f"{', '.join(card.PARTS)} [all]"
    )
    parser.add_argument(
        "--limit", type=values.seconds, default=500.0, metavar="T", help="of all parts [500s]"
    )


def _card(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import card

    parts = args.part or list(card.PARTS)
    for part in parts:
        if part not in card.PARTS:
            raise ConfigError(f"--part: {unknown('part', part, card.PARTS)}")
    for record in card.bench(args.device, parts, folder, args.limit):
        _print(card.lines(record))
        yield record


# -- pack: several clients trained as one ----------------------------------------------------------
def _pack_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default="cnn", metavar="NAME,...", help="cnn, mlp, ... [cnn]")
    parser.add_argument("--clients", type=values.count(10_000), default=10, metavar="N")
    parser.add_argument("--device", default="auto", metavar="D", help="cpu, cuda or cuda:0 [auto]")
    _repeat(parser)


def _pack(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import pack

    for record in pack.bench(args.workload.split(","), args.clients, args.device, args.repeat):
        _print([pack.line(record)])
        yield record


# -- replies: small replies of many connections ----------------------------------------------------
def _replies_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connections",
        type=_counts(20_000),
        metavar="N,...",
        help="clients, each with a connection of its own [100,500,2000,5000]",
    )
    _repeat(parser)


def _replies(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import replies

    for record in replies.bench(args.connections or replies.SIZES, args.repeat, folder):
        _print(replies.lines([record]))
        yield record


# -- secagg: bytes and seconds of masked sums ------------------------------------------------------
def _secagg_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=_counts(10_000), default=[10, 50, 200], metavar="N,...")
    parser.add_argument(
        "--dropout",
        type=_shares,
        default=[0.0, 0.1, 0.3],
        metavar="SHARE,...",
        help="share of the clients that is lost before their vectors arrive [0,0.1,0.3]",
    )


def _secagg(args: argparse.Namespace, folder: Path) -> Iterator[JsonDict]:
    from tests.bench import secagg

    if min(args.clients) < 3:
        raise ConfigError(f"--clients {min(args.clients)}: expected at least 3.")
    print(secagg.HEAD, flush=True)
    for record in secagg.bench(args.clients, args.dropout):
        _print([secagg.line(record)])
        yield record


Options = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace, Path], Iterator[JsonDict]]  # prints; yields its records
BENCHMARKS: dict[str, tuple[str, Options, Run]] = {
    "round": ("seconds and memory of a round, beside the floor", _round_options, _round),
    "scale": ("the server's memory by payload and clients", _scale_options, _scale),
    "curve": ("what CURVE encryption costs", _curve_options, _curve),
    "ways": ("one workload in every way, beside pfl-research", _ways_options, _ways),
    "card": ("all that is measured on a GPU", _card_options, _card),
    "pack": ("several clients trained as one", _pack_options, _pack),
    "replies": ("small replies a second, by connections", _replies_options, _replies),
    "secagg": ("secure aggregation: bytes and seconds", _secagg_options, _secagg),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (text, options, _) in BENCHMARKS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        options(verb)
        verb.add_argument(
            "--json",
            type=values.new_file("json"),
            metavar="FILE.json",
            help="write the figures there too",
        )
    try:
        args = parser.parse_args(words)
    except SystemExit as done:  # argparse has said why
        return int(done.code or 0)
    return guarded("python -m tests.bench", lambda: _measure(args), None, argv is None)


def _measure(args: argparse.Namespace) -> int:
    print(machine(), flush=True)
    records = []
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        for record in BENCHMARKS[args.what][2](args, Path(folder)):
            records.append(record)
            if args.json:  # after each: some take an hour
                args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _repeat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat",
        type=values.count(1000),
        default=3,
        metavar="R",
        help="how often fednet and its yardstick are run in turn [3]",
    )


if __name__ == "__main__":
    sys.exit(main())
