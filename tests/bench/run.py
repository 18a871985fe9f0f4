"""One run of a workload or of a yardstick, its processes watched from outside, and the machine."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from fednet.errors import CannotGoOn
from fednet.experiment import placement
from fednet.files import read_lines
from fednet.plain import JsonDict, JsonMapping
from fednet.server.resources import memory_bytes, processor_seconds
from tests.bench.workloads import Workload

# How often processes are looked at: what they take together.
LOOK_S = 0.5
# The first rounds are not timed, nor the last: memory is looked at then. A look takes them and us
# some 20 ms of the processor; with five a second, a tenth of W2's round was the looking.
UNTIMED = 2
WATCHED = 4


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def machine() -> str:
    """What figures are of: processor, cores that this process may use, memory, versions, the date,
    and how many others wanted the processor in the last minute.
    """
    about = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (about.read_text().splitlines() if about.exists() else [])
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else platform.machine()}, {placement.cores()} cores, "
        f"{memory:.0f} GiB; {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}; "
        f"{datetime.date.today()}, load {os.getloadavg()[0]:.1f}"
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def cell(record: JsonMapping, name: str, digits: int = 3) -> str:
    """A spread as text."""
    s = record[name]
    return f"{s['median']:.{digits}f} [{s['min']:.{digits}f} {s['max']:.{digits}f}]"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def fednet(
    work: Workload,
    workers: int,
    folder: Path,
    curve: bool = False,
    *,
    in_process: bool = False,
    device: str = "cpu",
    train: JsonMapping | None = None,
    untimed: int = UNTIMED,
    seconds: float = math.inf,
) -> JsonDict:
    """One run, its rounds timed by the end of each, but for the first `untimed` and the last.
    train: further keys of that section. seconds: after so many it is stopped, and the rounds that
    there are count.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "bench.yaml"
    timed = work.rounds + untimed
    config.write_text(yaml.safe_dump(work.config("bench", timed + WATCHED, curve, train)))
    words = [
        sys.executable,
        "-m",
        "fednet.cli.main",
        "run",
        str(config),
        "--out",
        str(folder),
        "--quiet",
        "--device",
        device,
        *(["--in-process"] if in_process else ["--workers", str(workers)]),
    ]
    begun = time.time()
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    pss, peak, used = _watched(process, folder, timed, untimed, begun + seconds)
    late = time.time() > begun + seconds
    if process.returncode and not (late and _done(folder) > untimed + 2):
        raise CannotGoOn(
            f"the run of {work.name} failed{f' after {seconds:.0f} s' if late else ''}: "
            f"{(process.stderr.read() if process.stderr else '').strip()}"
        )
    run = next(
        p
        for p in sorted(folder.glob("bench*"), key=lambda p: p.stat().st_mtime, reverse=True)
        if p.is_dir()
    )
    events = list(read_lines(run / "events.jsonl"))
    rounds = list(read_lines(run / "rounds.jsonl"))[:timed]
    ends = [e["time"] for e in events if e["type"] == "round"][:timed]
    phases = {
        p: statistics.median(r["seconds_by_phase"].get(p, 0.0) for r in rounds[untimed:])
        for p in rounds[-1]["seconds_by_phase"]
    }
    each = [b - a for a, b in itertools.pairwise(ends[untimed - 1 :])]
    looks = [look for look in used if ends[untimed - 1] <= look[0] <= ends[-1]]
    spent, own = (
        (looks[-1][k] - looks[0][k]) / (looks[-1][0] - looks[0][0]) if len(looks) > 1 else 0.0
        for k in (1, 2)
    )
    ready = next(e["time"] for e in events if e["type"] == "ready")
    return {
        "seconds": statistics.median(each),
        "server_cpu_s": own * statistics.mean(each),
        "pss_mb": pss / 1e6,
        "server_peak_mb": peak / 1e6,
        "first_task_s": ready - begun,
        "first_model_s": ends[0] - begun,
        "by_phase": phases,
        "utilisation": spent / placement.cores(),
        "cpu_s": spent * statistics.mean(each),
    }


def _watched(
    process: subprocess.Popen[str], folder: Path, timed: int, untimed: int, end: float
) -> tuple[int, int, list[tuple[float, float, float]]]:
    """Waits until a run has ended; returns (PSS of all its processes, the server's resident memory,
    both at the peak; processor seconds of all, and of the server, by the time). timed: rounds
    after which nothing is timed any more; untimed: those before; end: when it is
    stopped.
    """
    pss, peak, used = 0, 0, list[tuple[float, float, float]]()
    try:
        while process.poll() is None and time.time() < end:
            servers, all = list(_server(folder)), list(family(process.pid))
            if not untimed <= _done(folder) < timed:
                pss = max(pss, sum(memory_bytes(pid, "smaps_rollup", "Pss") for pid in all))
            peak = max(peak, *(memory_bytes(pid, "status", "VmHWM") for pid in servers), 0)
            cpu = sum(map(processor_seconds, all)), sum(map(processor_seconds, servers))
            used.append((time.time(), *cpu))
            time.sleep(LOOK_S)
    finally:
        process.kill()  # where this ends before: its own processes end with it
        process.wait()
    return pss, peak, used


def _server(folder: Path) -> Iterator[int]:
    """The server's process, once its run has one."""
    for file in folder.glob("*/server.json"):
        yield json.loads(file.read_text())["pid"]


def _done(folder: Path) -> int:
    """The rounds that its run has done."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*/rounds.jsonl"))


def aside(words: Sequence[str], job: JsonMapping, limit_s: float = math.inf) -> JsonDict:
    """Runs a yardstick, a program that reads its job from a file and prints its figures; returns
    them, and what its processes took. Raises CannotGoOn if it fails, or takes longer.
    """
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        json.dump(job, file)
        file.flush()
        begun, pss, cpu = time.monotonic(), 0, 0.0
        process = subprocess.Popen(
            [*words, file.name], stdout=out, stderr=err, env=environment(), text=True
        )
        try:
            while process.poll() is None:
                members = list(family(process.pid))
                pss = max(pss, sum(memory_bytes(pid, "smaps_rollup", "Pss") for pid in members))
                cpu = max(cpu, sum(map(processor_seconds, members)))
                if time.monotonic() - begun > limit_s:
                    raise CannotGoOn(f"it took more than {limit_s:.0f} s")
                time.sleep(LOOK_S)
        finally:
            process.kill()
            process.wait()
        err.seek(0)
        out.seek(0)
        if process.returncode:
            raise CannotGoOn((err.read().strip().splitlines() or ["it failed"])[-1])
        figures: JsonDict = json.loads(out.read().strip().splitlines()[-1])
    return {**figures, "pss_mb": pss / 1e6, "run_cpu_s": cpu}
