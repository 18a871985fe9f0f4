"""What a run takes on the server's machine: processor time, memory, and the use of GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

MB = 1e6


class Resources:
    """Measures the server's process, the client processes on its machine and, with `gpus`, the
    machine's GPUs.
    """

    def __init__(self, gpus: bool) -> None:
        self._host, self._began = socket.gethostname(), time.monotonic()
        self._processor: dict[int, float] = {}  # seconds until the last call, by process
        self._gpus = GPUs() if gpus else None

    def since(self, processes: Iterable[tuple[str, int]]) -> dict[str, dict[str, float]]:
        """Returns what the server, the clients and each GPU took since the last call. `busy_s`:
        seconds of processor time, or in which the GPU was busy; `memory_mb`: the most that a
        process had so far, or what is in use on the GPU. processes: host and process id of those
        of the clients.
        """
        server = os.getpid()
        here = {pid for host, pid in processes if host == self._host}
        found = {"server": self._of({server})}
        if here - {server}:
            found["clients"] = self._of(here - {server})
        now = time.monotonic()
        if self._gpus is not None:
            for name, (busy, memory_mb) in self._gpus.since().items():
                busy_s = round(busy * (now - self._began), 3)
                found[name] = {"busy_s": busy_s, "memory_mb": memory_mb}
        self._began = now
        return found

    def _of(self, pids: Iterable[int]) -> dict[str, float]:
        busy, memory = 0.0, 0
        for pid in pids:
            seconds = processor_seconds(pid)
            busy += max(0.0, seconds - self._processor.get(pid, 0.0))
            self._processor[pid] = seconds
            memory += memory_bytes(pid, "status", "VmHWM")
        return {"busy_s": round(busy, 3), "memory_mb": memory / MB}

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()


class GPUs:
    """The GPUs that this process may use, as nvidia-smi reports them twice a second."""

    def __init__(self) -> None:
        self._reports: dict[str, list[tuple[float, float]]] = {}  # busy, 0..1, and MB
        self._process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if program is None:
            return
        words = [program, "--query-gpu=index,utilization.gpu,memory.used"]
        words += ["--format=csv,noheader,nounits", "-lms", "500"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            words += ["-i", visible]
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            values = [word.strip() for word in line.split(",")]
            if len(values) == 3 and all(word.isdigit() for word in values):  # not [N/A]
                index, percent, mib = map(int, values)
                report = percent / 100, mib * 2**20 / MB
                self._reports.setdefault(f"GPU {index}", []).append(report)

    def since(self) -> dict[str, tuple[float, float]]:
        """Returns, by GPU, the mean of the reports since the last call, and of the last before it:
        a round may be shorter than half a second.
        """
        found = {}
        for name, reports in list(self._reports.items()):
            new = list(reports)
            del reports[: len(new) - 1]
            busy, memory_mb = (statistics.fmean(column) for column in zip(*new))
            found[name] = busy, memory_mb
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def processor_seconds(pid: int) -> float:
    """Returns user and system time of a process so far; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, file: str, name: str) -> int:
    """Returns a number of a process: `Pss` of smaps_rollup (proportional set size), `VmHWM` of
    status (peak resident); 0 for one that has ended.
    """
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
