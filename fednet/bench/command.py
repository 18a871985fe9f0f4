"""`fednet bench`: what an argument names, run and printed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fednet.errors import ConfigError, unknown


def main(args: Any) -> int:
    """args.what: transport, round, scale, methods, curve or pack; of all but the first too
    args.workload, args.repeat and args.json; args.workers of those that run workers; args.method,
    args.half and args.replies of methods; args.clients and args.device of pack.
    """
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        for line in _lines(args, Path(folder)):
            print(line, flush=True)
    return 0


def _lines(args: Any, folder: Path) -> Iterator[str]:
    if args.what == "transport":
        from fednet.bench import transport

        yield from transport.main(folder)
        return
    if args.what == "methods":
        from fednet.bench import methods as halves

        found = []
        sizes = args.workload.split(",") if args.workload else list(halves.SIZES)
        for record in halves.bench(
            args.method.split(",") if args.method else None,
            sizes,
            [args.half] if args.half else ["server", "client"],
            args.replies,
            args.repeat,
        ):
            found.append(record)
            yield halves.line(record)
        _write(args.json, found)
        return
    if args.what == "pack":
        from fednet.bench import pack as packrate

        found = []
        for record in packrate.bench(
            args.workload.split(",") if args.workload else ["cnn"],
            args.clients,
            args.device,
            args.repeat,
        ):
            found.append(record)
            yield packrate.line(record)
        _write(args.json, found)
        return
    from fednet.bench import round as workloads

    known = workloads.SCALES if args.what == "scale" else workloads.WORKLOADS
    wanted = (
        args.workload.split(",")
        if args.workload
        else {"round": ["W1", "W2", "W3"], "curve": ["W2", "Q"]}.get(args.what, list(known))
    )
    measure, show = {
        "round": (workloads.bench, workloads.lines),
        "scale": (workloads.scale, workloads.scale_lines),
        "curve": (workloads.curve, workloads.curve_lines),
    }[args.what]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--workload: {unknown('workload', name, known)}")
    records = []
    for name in wanted:
        made = measure([name], args.repeat, folder, args.workers)
        records += made
        yield from show(made)
    _write(args.json, records)


def _write(file: str | None, records: list[dict[str, Any]]) -> None:
    if file:
        Path(file).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
