"""Processes that tests start, end and look at: `fednet-server`, `fednet-client` and `fednet run` as
a user starts them, small enough to take seconds; and functions in processes forked by one that has
imported all they need, so that each starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from fednet.launch.parent import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "name=run",
    "clients=2",
    "participation=1.0",
    "rounds=2",
    "model={name: mlp, hidden: [8]}",
    "data={dataset: synthetic, samples: 200, shape: [1, 4, 4], classes: 4, partition: {scheme: "
    "iid}}",
)
WAIT_S = 180.0  # nothing is expected to take so long: it bounds a test that would hang
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.optim",
        "torch._dynamo",
        "fednet.training.hosts",
        "fednet.data.loading",
        "fednet.client.join",
        "fednet.server.rounds",
        "fednet.server.summary",
        "fednet.transport.zeromq.dealer",
        "fednet.transport.zeromq.router",
        *(f"fednet.cli.{module}" for module in ("main", "run", "server", "client")),
        "tests.federation",
    ]
)


def small(*sets: str) -> list[str]:
    """The words that set up a federation of two clients over made-up data."""
    return [w for s in (*SMALL, *sets) for w in ("--set", s)]


class Command(subprocess.Popen[str]):
    """`said` is what it has written so far."""

    said: Callable[[], str]


class Forked:
    """A function that runs in a process of its own; the methods are those of `subprocess.Popen`."""

    def __init__(self, work: Callable[..., int], log: Path, args: tuple[object, ...]) -> None:
        _warm()
        log.touch()  # what it said is asked for from now on
        self.process = CONTEXT.Process(target=_run, args=(work, log, *args))
        self.process.start()
        assert self.process.pid is not None
        self.pid, self.said = self.process.pid, log.read_text
        self.kill, self.terminate = self.process.kill, self.process.terminate
        self.send_signal = lambda number: os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    poll = returncode.fget  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process.name), timeout or 0)
        return self.returncode


class Rig:
    """A context in which processes run; what still runs at its end is killed, with all it started.
    On Linux they end with the process that has it, however that ends.

    `tmp` is where commands run and what is said is written: in `process-N.log`.
    """

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.all = tmp, list[Any]()  # of subprocess.Popen and Forked
        self.logs: list[Path] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has no group of its own
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.wait()

    def _log(self) -> Path:
        self.logs.append(self.tmp / f"process-{len(self.logs)}.log")
        return self.logs[-1]

    def output(self) -> str:
        """The ends of what its processes said, in the order of their starts."""
        return "".join(log.read_text()[-3000:] for log in self.logs if log.exists())

    def fork(self, work: Callable[..., int], *args: object) -> Any:
        """Starts `work(*args)`, a function of a module; what it returns is the exit status."""
        self.all.append(Forked(work, self._log(), args))
        return self.all[-1]

    def lose(self, process: Any) -> None:
        """Kills it, waits for its end, and forgets it: no test waits for what it returned."""
        process.kill()
        process.wait()
        self.all.remove(process)

    def start(self, module: str, *words: object, prefix: tuple[str, ...] = ()) -> Any:
        """`python -m fednet.cli.MODULE` in a session of its own, its output in a file: forked as
        all others are, or started anew by the command `prefix`.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNET_")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }
        own = [f"fednet.cli.{module}", *map(str, words)]
        if not prefix:
            return self.fork(command, own, self.tmp, environment)
        out = self._log()
        with out.open("w") as file:
            process = Command(
                [*prefix, sys.executable, "-m", *own],
                cwd=self.tmp,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        process.said = out.read_text
        self.all.append(process)
        return process

    def ended(self, process: Command) -> tuple[int, str]:
        """Waits for it. Returns (exit status, what it said)."""
        try:
            return process.wait(WAIT_S), process.said()
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {WAIT_S:g} s; it said:\n{process.said()}"
            ) from None

    def run(self, module: str, *words: object) -> tuple[int, str]:
        return self.ended(self.start(module, *words))


class Processes(Rig):
    """Those of one small federation, as commands."""

    def server(self, *words: object, sets: tuple[str, ...] = (), **more: Any) -> Command:
        return self.start(
            "server",
            *small(*sets),
            "--out",
            self.tmp,
            "--device",
            "cpu",
            "--bind",
            "tcp://127.0.0.1:0",
            *words,
            **more,
        )

    def client(self, ids: object, *words: object, **more: Any) -> Command:
        return self.start(
            "client",
            "--id",
            ids,
            "--run",
            self.tmp / "run",
            "--device",
            "cpu",
            "--state",
            self.tmp / f"state-{len(self.all)}",
            *words,
            **more,
        )


def until(true: Callable[[], Any], what: object, *watched: Command) -> Any:
    """What `true` returns, once that is something. Fails when one of `watched` ends before, or
    after `WAIT_S`, and says `what` was waited for.
    """
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        for process in watched:
            if process.poll() is not None:
                raise AssertionError(
                    f"{what}: a process ended with {process.returncode}:\n{process.said()}"
                )
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.005)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines that may still be written to."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def command(words: list[str], folder: Path, environment: dict[str, str]) -> int:
    """In the process that was forked: the module whose name is the first word, as a command."""
    for name in [name for name in os.environ if name.startswith("FEDNET_")]:
        del os.environ[name]
    os.environ.update(environment)  # what modules set as they were imported stays
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = words
    main: Callable[[], int] = importlib.import_module(words[0]).main
    return main()


def _warm() -> None:
    """Starts the server that forks, where its imports find this tree: it looks at the environment
    alone.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(work: Callable[..., int], output: Path, *args: Any) -> None:
    """In the process that was forked."""
    from fednet.errors import FednetError

    # The server that forked it ends with the tests, unless a process of its own holds this open.
    die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        status = work(*args)
    except FednetError as wrong:
        print(f"{work.__name__}: {wrong}", file=sys.stderr)
        status = wrong.exit_status
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
