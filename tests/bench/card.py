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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import family
from tests.bench.ways import Plan, ways
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


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured, and the seconds it may take. run(device, folder) prints nothing and yields
    records.
    """

    seconds: float
    run: Callable[[str, Path], Iterator[JsonDict]]


# -- the parts -------------------------------------------------------------------------------------
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
    passed = sum(" PASSED " in line for line in text)
    failed = [line for line in text if line.startswith(("FAILED", "ERROR", "E  "))]
    broken = sum(" FAILED " in line for line in text)
    return {"passed": passed, "not_passed": broken, "last": text[-1:], "failures": failed[:60]}


def engine(device: str, folder: Path) -> Iterator[JsonDict]:
    """W6 in one process: packed, where its time goes, and one client after another. The packed
    training alone, and its kernels.
    """
    plan = _plan(device, 40, PACKED, untimed=8)
    yield _one(plan, "fednet in process", folder / "packed", "packed 50, tf32")
    if device != "cpu":
        yield _kernels_of("pfl", 50, device, TF32, "together", "packed 50, tf32")
    yield _sampled(plan.work, device, folder / "sampled", dict(plan.train or {}))
    plan = _plan(device, 4, TF32)
    yield _one(plan, "fednet in process", folder / "apart", "one after another, tf32")


def _sampled(work: Workload, device: str, folder: Path, train: JsonDict) -> JsonDict:
    """Where the threads of a run in this process are, 200 times a second, after its third round.
    main, workers: by function, with all that it calls, how many of them were in it in a look.
    """
    import fednet

    main, workers, looks = Counter[str](), Counter[str](), 0
    own, rounds, over = threading.get_ident(), list[Any](), threading.Event()

    def look() -> None:
        nonlocal looks
        while not over.wait(0.005):
            if len(rounds) < 3:
                continue
            looks += 1
            for thread, frame in sys._current_frames().items():
                names = [f"{Path(f.f_code.co_filename).stem}.{f.f_code.co_name}" for f in up(frame)]
                if thread == own:
                    main.update(set(names))
                elif names[0] != "threading.wait" and "tasks._do" in names:
                    workers.update(set(names))

    def up(frame: Any) -> Iterator[Any]:
        while frame is not None:
            yield frame
            frame = frame.f_back

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    config = {**work.config("sampled", 15, train=train), "report": False}
    fednet.run(
        config, in_process=True, out=folder, device=device, callback=rounds.append, quiet=True
    )
    over.set()
    thread.join()

    def shares(found: Counter[str]) -> JsonDict:
        return {name: round(n / looks, 3) for name, n in found.most_common(70) if n > 0.01 * looks}

    return {
        "way": "sampled",
        "train": train,
        "round_s": statistics.median(r.seconds for r in rounds[3:]),
        "main": shares(main),
        "workers": shares(workers),
    }


def tcp(device: str, folder: Path) -> Iterator[JsonDict]:
    """W6 over TCP: workers that share the card."""
    for workers in (2, 4):
        pack = 50 // workers + 1
        plan = _plan(device, 16, {**PACKED, "pack": pack}, untimed=6, workers=(workers,))
        way = f"fednet over TCP, {workers} workers"
        yield _one(plan, way, folder / str(workers), f"{way}, packed {pack}, tf32")


def others(device: str, folder: Path) -> Iterator[JsonDict]:
    """The plain loop and pfl-research on W6."""
    for way, train in (("plain loop", TF32), ("pfl", {})):
        plan = _plan(device, 4, train)
        yield _one(plan, way, folder / way, f"{way}, {train.get('precision', 'fp32')}")


def feddc(device: str, folder: Path) -> Iterator[JsonDict]:
    """FedDC's Table 1: ten clients of 5,000 samples, one epoch, in every form; and the kernels that
    take longest.
    """
    for name, train in FEDDC.items():
        if device != "cpu":
            yield _kernels_of("feddc", 1, device, train, "apart", name)
        train = {**train, "graphs": True}
        yield _trained("feddc", 10, device, train, ["apart", "beside"], name)


def _kernels_of(
    size: str, m: int, device: str, train: JsonMapping, form: str, name: str
) -> JsonDict:
    """The kernels of m clients' training, those that take longest in all first."""
    from torch.profiler import ProfilerActivity, profile

    from tests.bench import pack

    record: JsonDict = {"size": size, "train": dict(train), "name": name}
    try:
        clients = pack.Clients(size, m, device, train)
        work = getattr(clients, form)
        record["untimed_ms"] = [1e3 * work() for _ in range(3)]
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            record["profiled_ms"] = 1e3 * work()
        kernels = sorted(found.key_averages(), key=lambda k: -k.self_device_time_total)
        record["kernels_ms"] = sum(k.self_device_time_total for k in kernels) / 1e3
        record["longest"] = [
            [k.key[:90], k.count, round(k.self_device_time_total / 1e3, 2)] for k in kernels[:20]
        ]
    except Exception as broken:
        record["failed"] = f"{type(broken).__name__}: {broken}"[-2000:]
    return record


def sizes(device: str, folder: Path) -> Iterator[JsonDict]:
    """Ten clients of three sizes: one after another, at once in streams, packed."""
    for size in ("cnn", "convnet", "resnet18"):
        forms = ["apart", "beside", "together"] if size != "resnet18" else ["apart", "beside"]
        yield _trained(size, 10, device, {**TF32, "graphs": True}, forms)


PARTS: dict[str, Part] = {
    "engine": Part(90, engine),
    "checks": Part(150, checks),
    "feddc": Part(60, feddc),
    "tcp": Part(75, tcp),
    "others": Part(45, others),
    "sizes": Part(60, sizes),
}


# -- what parts have in common ---------------------------------------------------------------------
def _plan(device: str, rounds: int, train: JsonMapping, untimed: int = 2, **more: object) -> Plan:
    work = replace(WORKLOADS["W6"], rounds=rounds)
    if device == "cpu":
        work = replace(work, rounds=1, per_round=4, clients=8, samples=20)
        train = {**train, **({"pack": 4} if "pack" in train else {})}
        untimed = 2
    return Plan(work, device, train=train, untimed=untimed, seconds=60.0, **more)  # type: ignore[arg-type]


def _one(plan: Plan, way: str, folder: Path, name: str) -> JsonDict:
    record: JsonDict = {"way": name, "train": dict(plan.train or {})}
    try:
        record |= ways(plan)[way](folder)
    except Exception as broken:
        record["failed"] = str(broken)[-2000:]
    shutil.rmtree(folder, ignore_errors=True)
    return record


def _trained(
    size: str, m: int, device: str, train: JsonMapping, forms: list[str], name: str = ""
) -> JsonDict:
    """Milliseconds of each form of training m clients of a size: the median of three after two."""
    import torch

    from tests.bench import pack

    record: JsonDict = {"size": size, "clients": m, "train": dict(train), "name": name}
    if device == "cpu":
        m = 2
        pack.SIZES[size] = replace(pack.SIZES[size], samples=8, batch_size=4)
    try:
        clients = pack.Clients(size, m, device, train)
        for form in forms:
            way = getattr(clients, form)
            for _ in range(2):  # the first chooses kernels, the second captures graphs
                way()
            times = sorted(way() for _ in range(1 if device == "cpu" else 3))
            record[f"{form}_ms"] = 1e3 * statistics.median(times)
        clients.pool.shutdown()
        if device != "cpu":
            record["peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
            torch.cuda.reset_peak_memory_stats(device)
    except Exception as broken:
        record["failed"] = f"{type(broken).__name__}: {broken}"[-2000:]
    return record


class Meter:
    """Utilisation and memory of the GPU over time, twice a second, with the part of that time."""

    def __init__(self) -> None:
        self.part = ""
        self.looks: list[tuple[float, str, float, float]] = []
        self._program = shutil.which("nvidia-smi")
        if self._program is not None:
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        words = [str(self._program), "--query-gpu=utilization.gpu,memory.used"]
        words += ["--format=csv,noheader,nounits", "-lms", "500"]
        begun = time.monotonic()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                used, held = line.split("\n")[0].split(", ")[:2]
                if used.isdigit():
                    at = round(time.monotonic() - begun, 1)
                    self.looks.append((at, self.part, float(used), float(held)))

    def of(self, part: str) -> JsonDict:
        mine = [look for look in self.looks if look[1] == part]
        if not mine:
            return {}
        return {
            "gpu_percent": [look[2] for look in mine],
            "gpu_mb": [look[3] for look in mine],
            "gpu_percent_mean": round(statistics.mean(look[2] for look in mine), 1),
        }


def bench(device: str, names: list[str], folder: Path, limit_s: float) -> Iterator[JsonDict]:
    """All parts in turn, each in a process of its own. limit_s: seconds for all of them."""
    end, meter = time.monotonic() + limit_s, Meter()
    for name in names:
        left = end - time.monotonic()
        if left < 5:
            yield {"part": name, "failed": "no time was left"}
            continue
        meter.part = name
        yield from _apart(name, device, folder, min(PARTS[name].seconds, left))
        yield {"part": name, "card": meter.of(name)}


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
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield {"part": name, "at_s": round(time.monotonic() - begun, 1), **json.loads(line)}
        process.wait()
        timer.cancel()
    if process.returncode:
        why = f"stopped after {seconds:.0f} s" if late.is_set() else log.read_text()[-2000:]
        yield {"part": name, "failed": why, **_outcomes(folder / name)}


def lines(record: JsonMapping) -> Iterator[str]:
    if "card" in record:
        return
    told = {
        k: round(v, 4) if isinstance(v, float) else v
        for k, v in record.items()
        if not isinstance(v, (dict, list))
        or k in ("train", "last", "failed", "failures", "longest", "by_phase")
    }
    yield json.dumps(told)


def main(name: str, device: str, folder: str) -> None:
    """A part in this process; its records are printed."""
    for record in PARTS[name].run(device, Path(folder)):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
