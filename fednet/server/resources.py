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

from fednet.proc import memory_bytes, processor_seconds

MB = 1e6


class Resources:
    """Measures the server's process, the client processes on its machine and, with `gpus`, the GPUs
    that this process may use, as nvidia-smi reports them twice a second.
    """

    def __init__(self, gpus: bool) -> None:
        self._host = socket.gethostname()
        self._began = time.monotonic()
        self._processor: dict[int, float] = {}  # seconds until the last call, by process
        self._reports: dict[str, list[tuple[float, float]]] = {}  # by GPU: busy, 0..1, and MB
        self._process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi") if gpus else None
        if program is not None:
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

    def since(self, processes: Iterable[tuple[str, int]]) -> dict[str, dict[str, float]]:
        """Returns what the server, the clients and each GPU took since the last call. `busy_s`:
        seconds of processor time, or in which the GPU was busy; `memory_mb`: the most that a
        process had so far, or what is in use on the GPU. processes: host and process id of those
        of the clients.
        """
        server = os.getpid()
        clients = {pid for host, pid in processes if host == self._host} - {server}
        found = {}
        for name, pids in (("server", {server}), ("clients", clients)):
            busy = 0.0
            memory = 0
            for pid in pids:
                seconds = processor_seconds(pid)
                busy += max(0.0, seconds - self._processor.get(pid, 0.0))
                self._processor[pid] = seconds
                memory += memory_bytes(pid, "status", "VmHWM")
            if pids:
                found[name] = {"busy_s": round(busy, 3), "memory_mb": memory / MB}
        now = time.monotonic()
        for name, reports in list(self._reports.items()):
            new = list(reports)
            # The last one stays: a round may be shorter than half a second.
            del reports[: len(new) - 1]
            share, memory_mb = (statistics.fmean(column) for column in zip(*new))
            found[name] = {"busy_s": round(share * (now - self._began), 3), "memory_mb": memory_mb}
        self._began = now
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
