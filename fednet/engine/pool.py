"""Runs of a table, J processes at a time, each run in one process of its own with one thread.

On one machine that is the fastest per core: a run in a single process sends nothing through a socket, and needs no core
beside its own. What is done is left alone, what was cut short is resumed, what another process is at is left to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednet import config as configuration
from fednet.engine import claims
from fednet.engine.sweep import STOP_S, Stop
from fednet.errors import ConfigError, Stopped

LOOK_S = 0.2
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Task:
    """A run to be made: `config` is its whole configuration; the directory is `folder` / its name."""

    config: dict[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def books(self) -> Path:
        return self.folder / ".cells"


@dataclass
class Running:
    task: Task
    claim: claims.Claim
    process: subprocess.Popen[bytes]
    sha256: str
    beat: float


def state(task: Task, sha256: str) -> str:
    """done | failed | to do | begun. Raises ConfigError where the run is another configuration's."""
    done, failed = (task.books / f"{task.name}.{word}" for word in ("done", "failed"))
    for mark, word in ((done, "done"), (failed, "failed")):
        if mark.exists():
            if mark.read_text(encoding="utf-8").split()[0] != sha256:
                raise ConfigError(f"{task.run} was run under another configuration; give another --out.")
            return word
    return "begun" if task.run.exists() else "to do"


def why(task: Task) -> str:
    """The last line that a failed run printed."""
    said = (task.books / f"{task.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return said[-1] if said else "it said nothing"


def work(tasks: Sequence[Task], jobs: int, device: str, *, load: Sequence[str] = (), sets: Sequence[str] = (),
         told: Callable[[Task, str], None] = lambda task, state: None) -> dict[str, str]:
    """Runs what is not done yet. Returns each task's state by name; a failed run (diverged, say) is not tried again.

    told(task, state) is called when a run has ended. Raises Stopped on SIGTERM, SIGUSR1 or Ctrl-C, once the runs have
    saved what they have; the same call goes on.
    """
    hashes = {t.name: _digest(t, load, sets) for t in tasks}
    for task in tasks:
        state(task, hashes[task.name])
    waiting = _each_once(tasks)
    running: list[Any] = []
    queue: list[Task] = list(waiting)
    with Stop() as stop:
        try:
            while queue or running:
                while queue and len(running) < jobs and not stop.asked:
                    task = queue.pop(0)
                    begun = _begin(task, hashes[task.name], device, load, sets)
                    if begun is not None:
                        running.append(begun)
                if stop.asked:
                    _stop(running)
                    raise Stopped("the runs were stopped; the same command goes on.", stop.asked == signal.SIGINT)
                for one in list(running):
                    if one.process.poll() is not None:
                        running.remove(one)
                        told(one.task, _settle(one))
                    elif time.monotonic() - one.beat > claims.BEAT_S:
                        one.claim.beat()
                        one.beat = time.monotonic()
                time.sleep(LOOK_S)
        except BaseException:  # nothing may leave a run behind that no claim speaks for
            for one in running:
                one.process.kill()
                one.process.wait()
            raise
    return {t.name: state(t, hashes[t.name]) for t in tasks}


def _each_once(tasks: Sequence[Task]) -> Iterator[Task]:
    seen = set()
    for task in tasks:
        if task.run not in seen:
            seen.add(task.run)
            yield task


def _digest(task: Task, load: Sequence[str], sets: Sequence[str]) -> str:
    """SHA-256 of what the run was asked to be: its configuration as given, `--set`s, and the user's own files; writes the
    configuration down. Defaults are left out: a new key of a later fednet does not make a finished run another one."""
    task.books.mkdir(parents=True, exist_ok=True)
    path = task.books / f"{task.name}.yaml"
    text = configuration.to_yaml(configuration.from_mapping(task.config, str(path)))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    if sets:
        configuration.load(path, sets, load)  # what is wrong with them is said before anything starts
    whole = hashlib.sha256(json.dumps([task.config, list(sets)], sort_keys=True).encode())
    for file in load:
        whole.update(Path(file).read_bytes())
    return whole.hexdigest()


def _begin(task: Task, sha256: str, device: str, load: Sequence[str], sets: Sequence[str]) -> Running | None:
    if state(task, sha256) in ("done", "failed"):
        return None
    held = claims.claim(task.books, task.name)
    if held is None:
        return None
    if state(task, sha256) in ("done", "failed"):  # by the one that held it until now
        held.release()
        return None
    words = [sys.executable, "-m", "fednet.cli.cellrun", str(task.books / f"{task.name}.yaml"), str(task.folder), device]
    words += [w for file in load for w in ("--load", file)] + [w for text in sets for w in ("--set", text)]
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    with (task.books / f"{task.name}.log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                                   start_new_session=True)
    held.add(process.pid)
    return Running(task, held, process, sha256, time.monotonic())


def _settle(one: Running) -> str:
    status = one.process.returncode
    word = {0: "done", 4: "begun", 130: "begun"}.get(status, "failed")
    if status < 0:  # killed from outside: nothing that the configuration is to blame for
        word = "begun"
    if word != "begun":
        mark = one.task.books / f"{one.task.name}.{word}"
        aside = one.task.books / f".{mark.name}.{os.getpid()}"
        aside.write_text(f"{one.sha256} {status}\n", encoding="utf-8")
        os.replace(aside, mark)
    one.claim.release()
    return word


def _stop(running: Sequence[Running]) -> None:
    for one in running:
        one.process.terminate()
    until = time.monotonic() + STOP_S
    for one in running:
        try:
            one.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        _settle(one)
    if isinstance(running, list):
        running.clear()


def state_now(task: Task) -> str:
    """done | failed | begun | to do, whatever configuration it was."""
    for word in ("done", "failed"):
        if (task.books / f"{task.name}.{word}").exists():
            return word
    return "begun" if task.run.exists() else "to do"
