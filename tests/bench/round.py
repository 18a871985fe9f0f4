"""A round of fednet, over real connections between real processes, beside its floor; what CURVE
costs; and one workload in every way.

Yardsticks and fednet are run in turn, several times, in one sitting, so that the ratio holds where
the machine's speed drifts.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fednet.errors import FednetError
from fednet.experiment import placement
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import ENVIRONMENT, FLOOR, aside, cell, fednet, spread, yardstick
from tests.bench.workloads import Workload

PFL = str(Path(__file__).with_name("peer_pfl.py"))
BLAZEFL = str(Path(__file__).with_name("peer_blazefl.py"))


def bench(work: Workload, repeat: int, out: Path, workers: int | None = None) -> JsonDict:
    """Seconds a round of both, their ratio pair by pair, phases, memory, start-up."""
    workers = workers or placement.cores()
    floors = []
    tcp = []
    means = []
    ours = []
    imports = []
    for k in range(repeat):
        imports.append(_import())
        floors.append(yardstick(FLOOR, work, processes=workers)["seconds"])
        bare = _bare(work, workers)
        tcp.append(bare["tcp_s"])
        means.append(bare["mean_s"])
        ours.append(fednet(work, out / f"{work.name}-{k}", workers))
    sums = map(sum, zip(floors, tcp, means))
    own = ("server_cpu_s", "pss_mb", "first_task_s", "first_model_s", "utilisation")
    return {
        "workload": work.name,
        "what": work.text,
        "workers": workers,
        "repeat": repeat,
        "floor_s": spread(floors),
        "exchange_s": spread(tcp),
        "mean_s": spread(means),
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


def _import() -> float:
    """Seconds in which a process imports torch: nothing that trains starts sooner."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=ENVIRONMENT)
    return time.monotonic() - begun


def _bare(work: Workload, processes: int) -> dict[str, float]:
    """Median seconds a round in which the same payloads cross over TCP, and of their mean."""
    from fednet import models  # imports torch

    module = models.build(dict(work.model), tuple(work.shape), 10, 0)
    nbytes = 4 * sum(p.numel() for p in module.parameters())
    shape = {"processes": processes, "payloads": work.per_round, "nbytes": nbytes}
    words = [sys.executable, "-m", "tests.bench.bare"]
    found = aside(words, {**shape, "rounds": work.rounds})
    return {name: statistics.median(found[name]) for name in ("tcp_s", "mean_s")}


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
    runs = [fednet(work, out / f"{work.name}-{k}", workers) for k in range(repeat)]
    own = ("seconds", "server_cpu_s", "server_peak_mb", "server_pss_mb", "client_pss_mb")
    return {
        "workload": work.name,
        "what": work.text,
        "payload_mb": runs[0]["payload_mb"],
        **{name: spread([r[name] for r in runs]) for name in own},
    }


def scale_lines(r: JsonMapping) -> list[str]:
    return [
        f"{r['workload']:7} {cell(r, 'seconds', 2)} s a round, of the server's processor "
        f"{cell(r, 'server_cpu_s')} s; its peak memory {cell(r, 'server_peak_mb', 0)} MB   "
        f"{r['what']}",
        f"        PSS at most {cell(r, 'server_pss_mb', 0)} MB in the server, and "
        f"{cell(r, 'client_pss_mb', 0)} in a worker; a client is sent {r['payload_mb']:.1f} MB",
    ]


def curve(work: Workload, repeat: int, out: Path, workers: int | None = None) -> JsonDict:
    """Seconds a round with and without CURVE, run in turn, and their ratio pair by pair; and the
    processor's seconds that all processes took for a round, which other work on the machine
    disturbs less.
    """
    runs = dict[bool, list[JsonDict]]()
    for k in range(2 * repeat):
        on = k % 4 in (1, 2)  # off, on, on, off: a machine that slows down favours neither
        folder = out / f"{work.name}-{k}"
        made = fednet(work, folder, workers or placement.cores(), curve=on)
        runs.setdefault(on, []).append(made)
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


def ways(
    work: Workload, repeat: int, folder: Path, peers: Mapping[str, str], seconds: float
) -> Iterator[JsonDict]:
    """A record for each run of the workload in each way on this machine's processor, in turn. One
    that fails, or takes more than `seconds`, costs no other. peers: for each of the packages "pfl"
    and "blazefl" that is measured, a Python that has it.
    """
    cores = placement.cores()
    loop = functools.partial(yardstick, FLOOR, work, seconds, processes=cores)
    found: dict[str, Callable[[Path], JsonDict]] = {
        "fednet in process": lambda own: fednet(work, own, None, seconds=seconds),
        f"fednet over TCP, {cores} workers": lambda own: fednet(work, own, cores, seconds=seconds),
        "plain loop": lambda own: loop(channels_last=False),
        "plain loop, channels last": lambda own: loop(channels_last=True),
    }
    if "pfl" in peers:
        pfl = functools.partial(yardstick, (peers["pfl"], PFL), work, seconds, untimed=2)
        found["pfl"] = lambda own: pfl(device="cpu", threads=cores, tf32=False)
    if "blazefl" in peers:
        blazefl = functools.partial(yardstick, (peers["blazefl"], BLAZEFL), work, seconds)
        several = {"processes": cores, "untimed": 1}
        found[f"blazefl, {cores} processes"] = lambda own: blazefl(in_threads=False, **several)
        found[f"blazefl, {cores} threads"] = lambda own: blazefl(in_threads=True, **several)
    for turn in range(repeat):
        for name, way in found.items():
            record: JsonDict = {"workload": work.name, "way": name, "turn": turn}
            try:
                record |= way(folder / f"{turn}-{name}")
            except (FednetError, OSError) as broken:
                record["failed"] = str(broken)[-1500:]
            yield record


def ways_lines(records: Sequence[JsonMapping]) -> Iterator[str]:
    """The table: a line a way, beside the faster of the plain loops."""
    by_way: dict[str, list[JsonMapping]] = {}
    for record in records:
        by_way.setdefault(record["way"], []).append(record)
    done = {way: [r for r in own if "seconds" in r] for way, own in by_way.items()}
    medians = {
        way: statistics.median(r["seconds"] for r in own) for way, own in done.items() if own
    }
    plain = [median for way, median in medians.items() if way.startswith("plain")]
    for way, own in done.items():
        if not own:
            yield f"{way:28} not measured: {by_way[way][0]['failed']}"
            continue
        text = f"{way:28} {cell({way: spread([r['seconds'] for r in own])}, way)} s a round"
        if plain:
            text += f", {medians[way] / min(plain):.2f} of the plain loop"
        if "cpu_s" in own[0]:
            text += f"; {statistics.median(r['cpu_s'] for r in own):.2f} s of processor"
        if "pss_mb" in own[0]:
            text += f"; {statistics.median(r['pss_mb'] for r in own):.0f} MB"
        yield text
