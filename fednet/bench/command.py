"""`fednet bench`: what an argument names, run and printed."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fednet.bench.family import machine
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict

Measured = Iterator[tuple[JsonDict, Iterable[str]]]  # a record, and its lines


def main(args: argparse.Namespace) -> int:
    """args.what: transport, round, scale, curve, pack, replies, secagg or network; of all
    but the first too args.repeat and args.json, and of those that have workloads args.workload;
    args.workers of those that run workers; args.clients and args.device of pack; args.connections
    of replies; args.clients, args.dropout and args.machines of secagg.
    """
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        lines = {"network": _network, "secagg": _secagg}.get(args.what, _lines)
        for line in lines(args, Path(folder)):
            print(line, flush=True)
    return 0


def _lines(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    if args.what == "transport":
        from fednet.bench import transport

        yield from transport.main(folder)
        return
    found: list[JsonDict] = []
    known = {"pack": _pack, "replies": _replies}
    for record, text in known.get(args.what, _workloads)(args, folder):
        found.append(record)
        yield from text
    _write(args.json, found)


def _pack(args: argparse.Namespace, folder: Path) -> Measured:
    from fednet.bench import pack

    sizes = ["cnn"] if args.workload is None else args.workload.split(",")
    clients, *more = args.clients or [10]
    if more:
        raise ConfigError(f"--clients {clients},{more[0]}: pack measures one number of them.")
    for record in pack.bench(sizes, clients, args.device, args.repeat):
        yield record, [pack.line(record)]


def _replies(args: argparse.Namespace, folder: Path) -> Measured:
    from fednet.bench import replies

    for record in replies.bench(args.connections or replies.SIZES, args.repeat, folder):
        yield record, replies.lines([record])


def _workloads(args: argparse.Namespace, folder: Path) -> Measured:
    from fednet.bench import curve, workloads
    from fednet.bench import round as rounds

    known = workloads.SCALES if args.what == "scale" else workloads.WORKLOADS
    wanted = (
        args.workload.split(",")
        if args.workload is not None
        else {"round": ["W1", "W2", "W3"], "curve": ["W2", "Q"]}.get(args.what, list(known))
    )
    measure, show = {
        "round": (rounds.bench, rounds.lines),
        "scale": (rounds.scale, rounds.scale_lines),
        "curve": (curve.curve, curve.curve_lines),
    }[args.what]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--workload: {unknown('workload', name, known)}")
    for name in wanted:
        (record,) = measure([name], args.repeat, folder, args.workers)
        yield record, show([record])


def _secagg(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    from fednet.bench import secagg
    from fednet.experiment import placement

    records = []
    sizes = args.clients or [10, 50, 200]
    if min(sizes) < 3:
        raise ConfigError(
            f"--clients {min(sizes)}: expected at least 3: a sum of fewer hides too little of each."
        )
    yield secagg.HEAD
    for record in secagg.bench(sizes, args.dropout):
        records.append(record)
        yield secagg.line(record)
    for record in [] if args.machines else secagg.real(folder, args.workers or placement.cores()):
        records.append(record)
        yield secagg.line(record)
    _write(args.json, records)


def _network(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """args.part, args.setting, args.latency, args.loss, args.limit, args.jobs, args.picture and
    args.json.
    """
    from fednet.bench.network import cell as cells
    from fednet.bench.network import sweep

    parts = args.part or sweep.PARTS
    for part in parts:
        if part not in sweep.PARTS:
            raise ConfigError(f"--part: {unknown('part', part, sweep.PARTS)}")
    latencies, losses = args.latency or sweep.LATENCIES, args.loss or sweep.LOSSES
    settings = {"default": [False], "wide": [True], "both": [False, True]}[args.setting]
    wanted = [c for wide in settings for c in sweep.grid(wide, parts, latencies, losses)]
    records = []
    for cell, result in sweep.sweep(wanted, folder, args.limit, args.jobs):
        records.append(cells.record(cell, result))
        yield cells.line(cell, result)
        _write(args.json, records)  # after each cell: a map takes an hour
    if args.picture:
        yield f"drawn: {sweep.picture(records, args.picture)}"


def _write(file: Path | None, records: list[JsonDict]) -> None:
    if file is not None:
        file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
