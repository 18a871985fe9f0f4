"""All that is measured on one GPU, in one command, the figures that matter most first.

Each part is a process of its own with a time limit, so that one that fails costs no other; records
are written as they come. With `--device cpu` every part runs at a tiny size, to try the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednet.plain import JsonDict, JsonMapping
from tests.bench.round import PFL
from tests.bench.run import FLOOR, family, fednet, yardstick
from tests.bench.workloads import WORKLOADS, Workload
from tests.processes import ROOT

TF32 = {"precision": "tf32"}
PACKED = {**TF32, "pack": 50}
FEDDC: dict[str, JsonDict] = {
    "bf16, channels last": {"precision": "bf16", "memory_format": "channels_last"},
    "tf32": TF32,
    "bf16": {"precision": "bf16"},
}
LOG = "pytest.log"
RUN_S = 60.0  # of one run or yardstick, at most


# -- the parts: each yields its records ------------------------------------------------------------
def checks(device: str, folder: Path) -> Iterator[JsonDict]:
    """Tests of tests/gpu, several at a time, but the one that needs the card for itself."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-v", "-n", "10", "-p", "no:cacheprovider", "-p", "tests.bench.card"]
    words += ["tests/gpu", "-m", "gpu", "-k", "not card_full"]
    with (folder / LOG).open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    yield {"status": done.returncode, **_outcomes(folder)}


def pytest_runtest_logreport(report: Any) -> None:
    """pytest calls this: why a test failed is in the log at once."""
    if report.failed:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)


def _outcomes(folder: Path) -> JsonDict:
    """What the tests' log has so far."""
    log = folder / LOG
    text = log.read_text().splitlines() if log.exists() else []
    failed = [line for line in text if line.startswith(("FAILED", "ERROR", "E  "))]
    passed, broken = (sum(f" {word} " in line for line in text) for word in ("PASSED", "FAILED"))
    return {"passed": passed, "not_passed": broken, "last": text[-1:], "failures": failed[:60]}


def engine(device: str, folder: Path) -> Iterator[JsonDict]:
    """W6 in one process: packed, and one client after another; the kernels of the packed training
    alone.
    """
    yield _w6(device, folder, "packed 50, tf32", 40, PACKED, untimed=8)
    if device != "cpu":
        yield _kernels_of("pfl", 50, device, TF32, "together", "packed 50, tf32")
    yield _w6(device, folder, "one after another, tf32", 4, TF32)


def tcp(device: str, folder: Path) -> Iterator[JsonDict]:
    """W6 over TCP: workers that share the card."""
    for workers in (2, 4):
        pack = 50 // workers + 1
        name = f"over TCP, {workers} workers, packed {pack}, tf32"
        train = {**PACKED, "pack": pack}
        yield _w6(device, folder, name, 16, train, workers=workers, untimed=6)


def others(device: str, folder: Path) -> Iterator[JsonDict]:
    """The plain loop and pfl-research on W6."""
    work = replace(_work(device), rounds=1 if device == "cpu" else 4)
    peer = (sys.executable, PFL)
    job = {"device": device, "processes": 1, "threads": 1, "untimed": 2, "channels_last": False}
    for words, name, tf32 in ((FLOOR, "plain loop, tf32", True), (peer, "pfl, fp32", False)):
        with _recorded(name, {}) as record:
            record |= yardstick(words, work, RUN_S, **job, tf32=tf32)
        yield record


def feddc(device: str, folder: Path) -> Iterator[JsonDict]:
    """FedDC's Table 1: ten clients of 5,000 samples, one epoch, in every form; and the kernels that
    take longest.
    """
    for name, train in FEDDC.items():
        if device != "cpu":
            yield _kernels_of("feddc", 1, device, train, "apart", name)
        yield _trained("feddc", device, {**train, "graphs": True}, ["apart", "beside"], name)


def sizes(device: str, folder: Path) -> Iterator[JsonDict]:
    """Ten clients of three sizes: one after another, at once in streams, packed."""
    train = {**TF32, "graphs": True}
    for size in ("cnn", "convnet"):
        yield _trained(size, device, train, ["apart", "beside", "together"], size)
    yield _trained("resnet18", device, train, ["apart", "beside"], "resnet18")


# In this order, and the most seconds that each may take.
PARTS: dict[str, tuple[float, Callable[[str, Path], Iterator[JsonDict]]]] = {
    "engine": (90, engine),
    "checks": (150, checks),
    "feddc": (60, feddc),
    "tcp": (75, tcp),
    "others": (45, others),
    "sizes": (60, sizes),
}


# -- what parts have in common ---------------------------------------------------------------------
@contextlib.contextmanager
def _recorded(name: str, train: JsonMapping, **more: object) -> Iterator[JsonDict]:
    """Yield a record, in which an error of what is done with it is written."""
    record: JsonDict = {"name": name, "train": dict(train), **more}
    try:
        yield record
    except Exception as broken:
        record["failed"] = f"{type(broken).__name__}: {broken}"[-2000:]


def _work(device: str) -> Workload:
    if device == "cpu":
        return replace(WORKLOADS["W6"], per_round=4, clients=8, samples=20)
    return WORKLOADS["W6"]


def _w6(
    device: str,
    folder: Path,
    name: str,
    rounds: int,
    train: JsonMapping,
    workers: int | None = None,
    untimed: int = 2,
) -> JsonDict:
    if device == "cpu":
        rounds = 1
        untimed = 2
        train = {**train, **({"pack": 4} if "pack" in train else {})}
    work = replace(_work(device), rounds=rounds)
    how = {"device": device, "train": train, "untimed": untimed, "seconds": RUN_S}
    with _recorded(name, train) as record:
        record |= fednet(work, folder / name, workers, **how)
    shutil.rmtree(folder / name, ignore_errors=True)
    return record


def _kernels_of(
    size: str, m: int, device: str, train: JsonMapping, form: str, name: str
) -> JsonDict:
    """The kernels of m clients' training, those that take longest in all first."""
    from torch.profiler import ProfilerActivity, profile

    from tests.bench import pack

    with _recorded(name, train, size=size) as record:
        work = getattr(pack.Clients(size, m, device, train), form)
        record["untimed_ms"] = [1e3 * work() for _ in range(3)]
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            record["profiled_ms"] = 1e3 * work()
        kernels = sorted(found.key_averages(), key=lambda k: -k.self_device_time_total)
        record["kernels_ms"] = sum(k.self_device_time_total for k in kernels) / 1e3
        record["longest"] = [
            [k.key[:90], k.count, round(k.self_device_time_total / 1e3, 2)] for k in kernels[:20]
        ]
    return record


def _trained(
    size: str, device: str, train: JsonMapping, forms: Sequence[str], name: str
) -> JsonDict:
    """Milliseconds of each form of training ten clients: the median of three after two."""
    import torch

    from tests.bench import pack

    clients = 10
    times = 3
    if device == "cpu":
        clients = 2
        times = 1
        WORKLOADS[size] = replace(WORKLOADS[size], samples=8, batch_size=4)
    with _recorded(name, train, size=size, clients=clients) as record:
        made = pack.Clients(size, clients, device, train)
        for form in forms:
            way = getattr(made, form)
            for _ in range(2):  # the first chooses kernels, the second captures graphs
                way()
            record[f"{form}_ms"] = 1e3 * statistics.median(way() for _ in range(times))
        made.pool.shutdown()
        if device != "cpu":
            record["peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
            torch.cuda.reset_peak_memory_stats(device)
    return record


# -- one after the other ---------------------------------------------------------------------------
def bench(device: str, names: Sequence[str], folder: Path, limit_s: float) -> Iterator[JsonDict]:
    """All parts in turn, each in a process of its own, and the card's utilisation and memory by
    part, twice a second. limit_s: seconds for all of them.
    """
    end = time.monotonic() + limit_s
    looks: list[tuple[float, float]] = []  # of the part that runs: percent, MB

    def look() -> None:
        words = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "-lms", "500"]
        words.append("--format=csv,noheader,nounits")
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                used, held = line.strip().split(", ")[:2]
                if used.isdigit():
                    looks.append((float(used), float(held)))

    if shutil.which("nvidia-smi"):
        threading.Thread(target=look, daemon=True).start()
    for name in names:
        left = end - time.monotonic()
        if left < 5:
            yield {"part": name, "failed": "no time was left"}
            continue
        looks.clear()
        yield from _apart(name, device, folder, min(PARTS[name][0], left))
        percent = [used for used, _ in looks]
        held = [held for _, held in looks]
        yield {"part": name, "card": {"gpu_percent": percent, "gpu_mb": held}}


def _apart(name: str, device: str, folder: Path, seconds: float) -> Iterator[JsonDict]:
    words = [sys.executable, "-m", "tests.bench.card", name, device, str(folder / name)]
    begun = time.monotonic()
    log = folder / f"{name}.err"
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        late = threading.Event()

        def stop() -> None:
            late.set()
            for pid in reversed(list(family(process.pid))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                yield {"part": name, "at_s": round(time.monotonic() - begun, 1), **json.loads(line)}
        process.wait()
        timer.cancel()
    if process.returncode:
        why = f"stopped after {seconds:.0f} s" if late.is_set() else log.read_text()[-2000:]
        yield {"part": name, "failed": why, **_outcomes(folder / name)}


def lines(record: JsonMapping) -> list[str]:
    if "card" in record:
        return []
    shown = ("train", "last", "failed", "failures", "longest", "by_phase")
    return [
        json.dumps(
            {k: v for k, v in record.items() if k in shown or not isinstance(v, (dict, list))}
        )
    ]


def main(name: str, device: str, folder: str) -> None:
    """A part in this process; its records are printed."""
    for record in PARTS[name][1](device, Path(folder)):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
