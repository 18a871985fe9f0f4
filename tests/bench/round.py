"""A round of fednet, over real connections between real processes, beside its floor.

Floor and fednet are run in turn, several times, in one sitting, so that the ratio holds where the
machine's speed drifts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fednet.errors import CannotGoOn
from fednet.experiment import placement
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import environment, fednet, spread, torch_version
from tests.bench.workloads import SCALES, WORKLOADS, Workload


def scale(
    names: Sequence[str], repeat: int, out: Path, workers: int | None = None
) -> list[JsonDict]:
    """How a round and the server's memory grow: one record a workload, no floor."""
    records = []
    for name in names:
        work = SCALES[name]
        runs = [
            fednet(work, workers or placement.cores(), out / f"{name}-{k}") for k in range(repeat)
        ]
        records.append(
            {
                "workload": name,
                "what": work.text,
                "torch": torch_version(),
                "fednet_s": spread([r["seconds"] for r in runs]),
                "server_cpu_s": spread([r["server_cpu_s"] for r in runs]),
                "server_peak_mb": spread([r["server_peak_mb"] for r in runs]),
            }
        )
    return records


def scale_lines(records: Sequence[JsonMapping]) -> Iterator[str]:
    for r in records:
        yield (
            f"{r['workload']:7} {r['fednet_s']['median']:8.2f} s a round, of the server's "
            f"processor {r['server_cpu_s']['median']:6.3f} s; "
            f"its peak memory {r['server_peak_mb']['median']:6.0f} MB   {r['what']}"
        )


def bench(
    names: Sequence[str], repeat: int, out: Path, workers: int | None = None
) -> list[JsonDict]:
    """One record a workload: seconds a round of both, their ratio pair by pair, phases, memory,
    start-up.
    """
    return [_pairs(WORKLOADS[n], repeat, out, workers or placement.cores()) for n in names]


def _pairs(work: Workload, repeat: int, out: Path, workers: int) -> JsonDict:
    floors, bares, ours, imports = [], [], [], []
    for k in range(repeat):
        imports.append(_import())
        floors.append(_floor(work, workers))
        bares.append(_bare(work, workers))
        ours.append(fednet(work, workers, out / f"{work.name}-{k}"))
    ratios = [o["seconds"] / f for f, o in zip(floors, ours)]
    sums = [f + b["tcp_s"] + b["mean_s"] for f, b in zip(floors, bares)]
    return {
        "exchange_s": spread([b["tcp_s"] for b in bares]),
        "mean_s": spread([b["mean_s"] for b in bares]),
        "ratio_to_sum": spread([o["seconds"] / s for s, o in zip(sums, ours)]),
        "workload": work.name,
        "what": work.text,
        "workers": workers,
        "repeat": repeat,
        "torch": torch_version(),
        "floor_s": spread(floors),
        "fednet_s": spread([o["seconds"] for o in ours]),
        "ratio": spread(ratios),
        "server_cpu_s": spread([o["server_cpu_s"] for o in ours]),
        "pss_mb": spread([o["pss_mb"] for o in ours]),
        "import_s": spread(imports),
        "first_task_s": spread([o["first_task_s"] for o in ours]),
        "start_s": spread([o["first_task_s"] - i for i, o in zip(imports, ours)]),
        "first_model_s": spread([o["first_model_s"] for o in ours]),
        "utilisation": spread([o["utilisation"] for o in ours]),
        "by_phase": {
            p: statistics.median(o["by_phase"].get(p, 0.0) for o in ours)
            for p in ours[0]["by_phase"]
        },
    }


def _import() -> float:
    """Seconds in which a process imports torch: nothing that trains starts sooner."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment())
    return time.monotonic() - begun


def _floor(work: Workload, processes: int) -> float:
    """Median seconds a round."""
    return _aside(
        "floor",
        work,
        {
            "processes": processes,
            "rounds": work.rounds,
            "model": dict(work.model),
            "shape": work.shape,
            "samples": work.samples,
            "batch_size": work.batch_size,
            "steps": work.steps,
            "per_round": work.per_round,
        },
    )["seconds"]


def _bare(work: Workload, processes: int) -> dict[str, float]:
    """Median seconds a round in which the same payloads cross over TCP, and of their mean."""
    from fednet import models

    nbytes = 4 * sum(
        p.numel() for p in models.build(dict(work.model), tuple(work.shape), 10, 0).parameters()
    )
    return _aside(
        "bare",
        work,
        {
            "processes": processes,
            "rounds": work.rounds,
            "payloads": work.per_round,
            "nbytes": nbytes,
        },
    )


def _aside(what: str, work: Workload, job: JsonDict) -> dict[str, float]:
    """Runs one of the things fednet is measured against, in a process of its own; the median of
    each of its figures.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", f"tests.bench.{what}", file.name],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
    if done.returncode:
        raise CannotGoOn(
            f"the {what} of {work.name} failed: {done.stderr.strip().splitlines()[-1]}"
        )
    return {name: statistics.median(values) for name, values in json.loads(done.stdout).items()}


def lines(records: Sequence[JsonMapping]) -> Iterator[str]:
    """The table, a line a workload."""
    head = f"{'floor s':>18} {'fednet s':>18} {'ratio':>18} {'PSS MB':>8}  first task, model s"
    yield f"{'':4} {head}"
    for r in records:

        def cell(key: str, digits: int = 3) -> str:
            s = r[key]  # noqa: B023
            return f"{s['median']:.{digits}f} [{s['min']:.{digits}f} {s['max']:.{digits}f}]"

        yield (
            f"{r['workload']:4} {cell('floor_s'):>18} {cell('fednet_s'):>18} "
            f"{cell('ratio', 2):>18} {r['pss_mb']['median']:8.0f} "
            f"{r['first_task_s']['median']:11.1f} {r['first_model_s']['median']:7.1f}"
        )
        yield (
            f"     floor {r['floor_s']['median']:.3f} + the same bytes over bare TCP "
            f"{cell('exchange_s')} + float64 mean {r['mean_s']['median']:.3f}: fednet is "
            f"{cell('ratio_to_sum', 2)} times this sum; its server's processor "
            f"{cell('server_cpu_s')} s a round"
        )
        yield (
            f"     repeated {r['repeat']} times; memory {cell('pss_mb', 0)} MB; first task after "
            f"{cell('first_task_s', 1)} s, {cell('start_s', 1)} s more than `import torch` alone; "
            f"first model after {cell('first_model_s', 1)} s"
        )
        yield f"     cores in use {r['utilisation']['median']:.0%}; " + ", ".join(
            f"{p} {s:.3f}" for p, s in r["by_phase"].items()
        )
