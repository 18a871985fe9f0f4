"""A round of fednet, over real connections between real processes, beside its floor.

Floor and fednet are run in turn, several times, in one sitting, so that the ratio holds where the
machine's speed drifts.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from fednet.experiment import placement
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import aside, cell, environment, fednet, spread
from tests.bench.workloads import Workload


def bench(work: Workload, repeat: int, out: Path, workers: int | None = None) -> JsonDict:
    """Seconds a round of both, their ratio pair by pair, phases, memory, start-up."""
    workers = workers or placement.cores()
    floors, bares, ours, imports = [], [], [], []
    for k in range(repeat):
        imports.append(_import())
        floors.append(_floor(work, workers))
        bares.append(_bare(work, workers))
        ours.append(fednet(work, workers, out / f"{work.name}-{k}"))
    sums = [f + b["tcp_s"] + b["mean_s"] for f, b in zip(floors, bares)]
    own = ("server_cpu_s", "pss_mb", "first_task_s", "first_model_s", "utilisation")
    return {
        "workload": work.name,
        "what": work.text,
        "workers": workers,
        "repeat": repeat,
        "floor_s": spread(floors),
        "exchange_s": spread([b["tcp_s"] for b in bares]),
        "mean_s": spread([b["mean_s"] for b in bares]),
        "fednet_s": spread([o["seconds"] for o in ours]),
        "ratio": spread([o["seconds"] / f for f, o in zip(floors, ours)]),
        "ratio_to_sum": spread([o["seconds"] / s for s, o in zip(sums, ours)]),
        "import_s": spread(imports),
        "start_s": spread([o["first_task_s"] - i for i, o in zip(imports, ours)]),
        **{name: spread([o[name] for o in ours]) for name in own},
        "by_phase": {
            p: statistics.median(o["by_phase"].get(p, 0.0) for o in ours)
            for p in ours[0]["by_phase"]
        },
    }


def lines(r: JsonMapping) -> list[str]:
    phases = ", ".join(f"{p} {s:.3f}" for p, s in r["by_phase"].items())
    return [
        f"{r['workload']} {r['what']}",
        f"     floor {cell(r, 'floor_s')} s, fednet {cell(r, 'fednet_s')} s, "
        f"ratio {cell(r, 'ratio', 2)}",
        f"     floor + the same bytes over bare TCP {cell(r, 'exchange_s')} + float64 mean "
        f"{cell(r, 'mean_s')}: fednet is {cell(r, 'ratio_to_sum', 2)} times this sum; its "
        f"server's processor {cell(r, 'server_cpu_s')} s a round",
        f"     repeated {r['repeat']} times; memory {cell(r, 'pss_mb', 0)} MB; first task after "
        f"{cell(r, 'first_task_s', 1)} s, {cell(r, 'start_s', 1)} s more than `import torch` "
        f"alone; first model after {cell(r, 'first_model_s', 1)} s",
        f"     cores in use {r['utilisation']['median']:.0%}; {phases}",
    ]


def scale(work: Workload, repeat: int, out: Path, workers: int | None = None) -> JsonDict:
    """How a round and the server's memory grow; no floor."""
    workers = workers or placement.cores()
    runs = [fednet(work, workers, out / f"{work.name}-{k}") for k in range(repeat)]
    return {
        "workload": work.name,
        "what": work.text,
        "fednet_s": spread([r["seconds"] for r in runs]),
        "server_cpu_s": spread([r["server_cpu_s"] for r in runs]),
        "server_peak_mb": spread([r["server_peak_mb"] for r in runs]),
    }


def scale_line(r: JsonMapping) -> str:
    return (
        f"{r['workload']:7} {cell(r, 'fednet_s', 2)} s a round, of the server's processor "
        f"{cell(r, 'server_cpu_s')} s; its peak memory {cell(r, 'server_peak_mb', 0)} MB   "
        f"{r['what']}"
    )


def curve(work: Workload, repeat: int, out: Path, workers: int | None = None) -> JsonDict:
    """Seconds a round with and without CURVE, run in turn, and their ratio pair by pair; and the
    processor's seconds that all processes took for a round, which other work on the machine
    disturbs less.
    """
    runs = dict[bool, list[JsonDict]]()
    for k in range(2 * repeat):
        on = k % 4 in (1, 2)  # off, on, on, off: a machine that slows down favours neither
        folder = out / f"{work.name}-{k}"
        runs.setdefault(on, []).append(fednet(work, workers or placement.cores(), folder, on))
        shutil.rmtree(folder)
    record: JsonDict = {"workload": work.name, "what": work.text, "repeat": repeat}
    for figure in ("seconds", "cpu_s"):
        plain, encrypted = ([r[figure] for r in runs[on]] for on in (False, True))
        record[f"plain_{figure}"] = spread(plain)
        record[f"curve_{figure}"] = spread(encrypted)
        record[f"ratio_{figure}"] = spread([b / a for a, b in zip(plain, encrypted)])
    return record


def curve_lines(r: JsonMapping) -> list[str]:
    found = [f"{r['workload']:4} {r['what']}"]
    for figure, name in (("seconds", "s a round"), ("cpu_s", "s of the processor a round")):
        plain, on, ratio = (cell(r, f"{mode}_{figure}") for mode in ("plain", "curve", "ratio"))
        found.append(f"     {name}: plain {plain}, CURVE {on}, ratio {ratio}")
    return found


def _import() -> float:
    """Seconds in which a process imports torch: nothing that trains starts sooner."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment())
    return time.monotonic() - begun


def _floor(work: Workload, processes: int) -> float:
    """Median seconds a round."""
    job = {
        "processes": processes,
        "rounds": work.rounds,
        "model": dict(work.model),
        "shape": work.shape,
        "samples": work.samples,
        "batch_size": work.batch_size,
        "steps": work.steps,
        "per_round": work.per_round,
    }
    found = aside([sys.executable, "-m", "tests.bench.floor"], job)
    return statistics.median(found["seconds"])


def _bare(work: Workload, processes: int) -> dict[str, float]:
    """Median seconds a round in which the same payloads cross over TCP, and of their mean."""
    from fednet import models

    module = models.build(dict(work.model), tuple(work.shape), 10, 0)
    nbytes = 4 * sum(p.numel() for p in module.parameters())
    job = {
        "processes": processes,
        "rounds": work.rounds,
        "payloads": work.per_round,
        "nbytes": nbytes,
    }
    found = aside([sys.executable, "-m", "tests.bench.bare"], job)
    return {name: statistics.median(found[name]) for name in ("tcp_s", "mean_s")}
