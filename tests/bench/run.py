"""One run of a workload or of a yardstick, its processes watched from outside, and the machine."""

from __future__ import annotations

import compileall
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
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import yaml

from fednet.errors import CannotGoOn
from fednet.experiment import placement
from fednet.files import read_lines
from fednet.plain import JsonDict, JsonMapping
from fednet.proc import memory_bytes, processor_seconds
from tests.bench.workloads import Workload

# How often processes are looked at: what they take together.
LOOK_S = 0.5
# The first rounds are not timed, nor the last: memory is looked at then. A look takes them and us
# some 20 ms of the processor; with five a second, a tenth of W2's round was the looking.
UNTIMED = 2
WATCHED = 4
# fednet is run as pip installs it: its files are compiled.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)


def machine() -> str:
    """What figures are of: processor, cores that this process may use, memory, versions, the date,
    and how many others wanted the processor in the last minute.
    """
    about = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else platform.machine()}, {placement.cores()} cores, "
        f"{memory:.0f} GiB; {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}; "
        f"{datetime.date.today()}, load {os.getloadavg()[0]:.1f}"
    )


def compile_files(clone: Path) -> None:
    """Compiles fednet's files in a clone, as pip does: else each process of a run would, or the
    first one of all runs.
    """
    compileall.compile_dir(clone / "fednet", quiet=2)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def cell(record: JsonMapping, name: str, digits: int = 3) -> str:
    """A spread as text."""
    s = record[name]
    return f"{s['median']:.{digits}f} [{s['min']:.{digits}f} {s['max']:.{digits}f}]"


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def pss_bytes(pids: Sequence[int]) -> int:
    return sum(memory_bytes(pid, "smaps_rollup", "Pss") for pid in pids)


def fednet(
    work: Workload,
    folder: Path,
    workers: int | None,
    *,
    curve: bool = False,
    device: str = "cpu",
    train: JsonMapping | None = None,
    untimed: int = UNTIMED,
    seconds: float = math.inf,
) -> JsonDict:
    """One run, its rounds timed by the end of each, but for the first `untimed` and the last.

    workers: None for one process. train: further keys of that section. seconds: after so many it is
    stopped, and the rounds that there are count.
    """
    compile_files(Path(__file__).parents[2])
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "bench.yaml"
    timed = work.rounds + untimed
    config.write_text(yaml.safe_dump(work.config(timed + WATCHED, curve, train)))
    words = [sys.executable, "-m", "fednet.cli.main", "run", str(config), "--out", str(folder)]
    words += ["--quiet", "--device", device]
    words += ["--in-process"] if workers is None else ["--workers", str(workers)]
    begun = time.time()
    process = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    run = folder / "bench"

    def done() -> int:
        file = run / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    pss = 0
    peak = 0
    looks = list[tuple[float, float, float]]()
    server = server_pss = client_pss = 0
    try:
        while process.poll() is None and time.time() < begun + seconds:
            everyone = list(family(process.pid))
            own = 0.0
            if (run / "server.json").exists():
                server = json.loads((run / "server.json").read_text())["pid"]
                peak = max(peak, memory_bytes(server, "status", "VmHWM"))
                own = processor_seconds(server)
            if not untimed <= done() < timed:
                each = {pid: pss_bytes([pid]) for pid in everyone}
                pss = max(pss, sum(each.values()))
                del each[process.pid]
                server_pss = max(server_pss, each.pop(server, 0))
                if server:
                    client_pss = max([client_pss, *each.values()])
            looks.append((time.time(), sum(map(processor_seconds, everyone)), own))
            time.sleep(LOOK_S)
    finally:
        process.kill()  # where this ends before: its own processes end with it
        process.wait()
    late = time.time() > begun + seconds
    if process.returncode and not (late and done() > untimed + 2):
        raise CannotGoOn(
            f"the run of {work.name} failed{f' after {seconds:.0f} s' if late else ''}: "
            f"{(process.stderr.read() if process.stderr else '').strip()}"
        )
    events = list(read_lines(run / "events.jsonl"))
    rounds = list(read_lines(run / "rounds.jsonl"))[untimed:timed]
    ends = [e["time"] for e in events if e["type"] == "round"][:timed]
    each = [b - a for a, b in itertools.pairwise(ends[untimed - 1 :])]
    looks = [look for look in looks if ends[untimed - 1] <= look[0] <= ends[-1]]
    spent = own = 0.0  # processor seconds a second, of all and of the server
    if len(looks) > 1:
        began, all_before, own_before = looks[0]
        ended, all_after, own_after = looks[-1]
        spent = (all_after - all_before) / (ended - began)
        own = (own_after - own_before) / (ended - began)
    ready = next(e["time"] for e in events if e["type"] == "ready")
    return {
        "seconds": statistics.median(each),
        "server_cpu_s": own * statistics.mean(each),
        "pss_mb": pss / 1e6,
        "server_pss_mb": server_pss / 1e6,
        "client_pss_mb": client_pss / 1e6,
        "payload_mb": rounds[-1]["bytes_down"] / work.per_round / 1e6,
        "server_peak_mb": peak / 1e6,
        "first_task_s": ready - begun,
        "first_model_s": ends[0] - begun,
        "by_phase": {
            phase: statistics.median(r["seconds_by_phase"].get(phase, 0.0) for r in rounds)
            for phase in rounds[-1]["seconds_by_phase"]
        },
        "utilisation": spent / placement.cores(),
        "cpu_s": spent * statistics.mean(each),
    }


def aside(words: Sequence[str], job: JsonMapping, limit_s: float = math.inf) -> JsonDict:
    """Run a yardstick, a program that reads its job from a file and prints its figures. Return
    them, and what its processes took. Raises CannotGoOn if it fails, or takes longer.
    """
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        json.dump(job, file)
        file.flush()
        begun = time.monotonic()
        pss = 0
        cpu = 0.0
        process = subprocess.Popen([*words, file.name], stdout=out, stderr=err, env=ENVIRONMENT)
        try:
            while process.poll() is None:
                members = list(family(process.pid))
                pss = max(pss, pss_bytes(members))
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


def yardstick(
    words: Sequence[str], work: Workload, limit_s: float = math.inf, **more: object
) -> JsonDict:
    """Run the plain loop or pfl-research on a workload; `seconds` is the median of its rounds.
    more: other keys of the job.
    """
    found = aside(words, {**asdict(work), **more}, limit_s)
    return {**found, "seconds": statistics.median(found["seconds"])}


FLOOR = (sys.executable, "-m", "tests.bench.floor")
