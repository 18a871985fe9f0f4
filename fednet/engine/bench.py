"""`fednet bench`: what an argument names, run and printed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fednet.errors import ConfigError, unknown


def main(args: Any) -> int:
    """args.what: transport, round, scale or curve; args.workload, args.repeat, args.workers, args.json of all but the first."""
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        for line in _lines(args, Path(folder)):
            print(line, flush=True)
    return 0


def _lines(args: Any, folder: Path) -> Iterator[str]:
    if args.what == "transport":
        from fednet.engine import reckoning

        yield from reckoning.main(folder)
        return
    from fednet.engine import workloads

    known = workloads.SCALES if args.what == "scale" else workloads.WORKLOADS
    wanted = args.workload.split(",") if args.workload else {"round": ["W1", "W2", "W3"], "curve": ["W2", "Q"]}.get(args.what, list(known))
    measure, show = {"round": (workloads.bench, workloads.lines), "scale": (workloads.scale, workloads.scale_lines),
                     "curve": (workloads.curve, workloads.curve_lines)}[args.what]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--workload: {unknown('workload', name, known)}")
    records = []
    for name in wanted:
        made = measure([name], args.repeat, folder, args.workers)
        records += made
        yield from show(made)
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
