"""Start, stop and kill the processes of a small federation, and compare what their runs leave.

    with Federation(tmp_path, algorithm="scaffold") as fed:
        fed.begin("0-1", "2-3")  # two client processes and a server
        fed.until(lambda: fed.events("fault"))
        fed.last.kill()
        fed.server(resume=True)
        fed.finish()
        assert fed.hashes() == undisturbed(algorithm="scaffold")

Processes are `fednet-server`, `fednet-client` and `fednet run`, as a user starts them. They are
forked by a server that has imported all they need, so that each starts in some hundredths of a
second.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

from fednet.capacity import die_with_parent
from tests.books import each

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 180.0  # nothing takes so long: it ends a test that would hang
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
COLD = multiprocessing.get_context("spawn")


# -- any processes ---------------------------------------------------------------------------------
class Rig:
    """Processes in a context. Those that still run at its end are killed, with all they started.
    If the tests are killed, they end too.

    tmp: the folder in which commands run; their output is in its files `process-N.log`.
    context: what starts them; with `COLD` each has an interpreter of its own, which has imported
    nothing before.
    """

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.context: BaseContext = CONTEXT
        self.all = list[Forked]()
        self.logs = list[Path]()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has no group of its own
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.wait()

    def fork(self, work: Callable[..., int], *args: object) -> Forked:
        """Start `work(*args)`, a function of a module. What it returns is the exit status."""
        self.all.append(Forked(work, self._log(), args, self.context))
        return self.all[-1]

    def start(
        self, module: str, *words: object, before: Callable[[], object] | None = None
    ) -> Forked:
        """Start the command `fednet.cli.MODULE` in a session of its own.

        before: a function of a module that the new process calls first.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNET_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        own = [f"fednet.cli.{module}", *map(str, words)]
        return self.fork(_command, own, self.tmp, environment, before)

    def ended(self, process: Any) -> tuple[int, str]:
        """Wait for its end. Return its exit status and its output."""
        return process.wait(), process.said()

    def run(self, module: str, *words: object) -> tuple[int, str]:
        return self.ended(self.start(module, *words))

    def lose(self, process: Any) -> None:
        """Kill it and forget it: its exit status is not looked at."""
        process.kill()
        process.wait()
        self.all.remove(process)

    def output(self) -> str:
        """Return the ends of the processes' outputs, in the order of their starts."""
        return "".join(log.read_text()[-3000:] for log in self.logs if log.exists())

    def _log(self) -> Path:
        self.logs.append(self.tmp / f"process-{len(self.logs)}.log")
        return self.logs[-1]


class Forked:
    """A function in a process of its own. `said` returns its output so far."""

    def __init__(
        self, work: Callable[..., int], log: Path, args: tuple[object, ...], context: BaseContext
    ) -> None:
        with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
            forkserver.ensure_running()  # it imports from this tree: it looks here alone
        log.touch()
        self.process = context.Process(target=_forked, args=(work, log, *args))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.said = log.read_text
        self.kill = self.process.kill
        self.terminate = self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, limit_s: float = WAIT_S) -> int:
        """Return its exit status, when it has ended."""
        self.process.join(limit_s)
        status = self.poll()
        assert status is not None, f"runs after {limit_s:g} s; it said:\n{self.said()}"
        return status


def _forked(work: Callable[..., int], output: Path, *args: Any) -> None:
    """In the new process."""
    # The server that forked it ends with the tests, unless a process of its own holds this open.
    die_with_parent()
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive is not None:
        os.close(alive)
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        status = work(*args)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _command(
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    before: Callable[[], object] | None,
) -> int:
    """In the new process: the module whose name is the first word, as a command."""
    for name in [name for name in os.environ if name.startswith("FEDNET_")]:
        del os.environ[name]
    os.environ.update(environment)  # what modules set as they were imported stays
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = words
    if before is not None:
        before()
    main: Callable[[], int] = importlib.import_module(words[0]).main
    return main()


def until(true: Callable[[], Any], what: object, *watched: Any) -> Any:
    """Wait until `true` returns something, and return it. Fail if one of the processes `watched`
    ends before, or after `WAIT_S`, and say `what` was waited for.
    """
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        for process in watched:
            status = process.poll()
            assert status is None, f"{what}: a process ended with {status}:\n{process.said()}"
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.01)
    return found


def port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON lines that may still be written to; of a book, a
    row for each message.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines()]
    return each(found) if path.name.startswith("wire") else found


# -- a federation of four clients ------------------------------------------------------------------
def settings(**changes: Any) -> dict[str, Any]:
    """Four clients, which all take part; a model of two thousand weights; three rounds."""
    base: dict[str, Any] = {
        "name": "run",
        "rounds": 3,
        "clients": 4,
        "participation": 1.0,
        "model": {"name": "mlp", "hidden": [16]},
        "data": {
            "dataset": "synthetic",
            "samples": 240,
            "shape": [1, 8, 8],
            "partition": {"scheme": "iid"},
        },
        "train": {"epochs": 1, "batch_size": 16, "lr": 0.05},
        "round": {"lost": {"closed": 3.0, "silent": 10.0}, "join": 30.0},
        "report": False,
    }
    if changes.get("algorithm") in ("fedrds", "fedpdc"):
        base["data"]["public"] = {"samples": 40}
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            base[key] = {**base[key], **value}
        elif key == "algorithm" and not isinstance(value, Mapping):
            base[key] = {"name": value}
        else:
            base[key] = value
    return base


def planned(kind: str, *, client: int = 1, round: int = 2, **more: Any) -> dict[str, Any]:
    """Return `faults` that plan one."""
    return {"schedule": [{"round": round, "client": client, "kind": kind, **more}]}


def crashes(*points: tuple[int, str]) -> dict[str, Any]:
    """Return `faults` by which the server kills itself at these points of rounds."""
    return {"schedule": [{"round": r, "kind": "server_crash", "at": at} for r, at in points]}


class Federation(Rig):
    """One run's directory under `out`, and the processes that work on it."""

    def __init__(self, out: Path, **changes: Any) -> None:
        super().__init__(out)
        self.out = out
        self.mapping = settings(**changes)
        self.path = out / self.mapping["name"]
        out.mkdir(parents=True, exist_ok=True)
        self.last: Any = None  # the last server, or `fednet run`

    def __str__(self) -> str:
        return f"events: {self.events()[-5:]}\n{self.output()}"

    # -- processes
    def server(self, *words: object, bind: str = "tcp://127.0.0.1:*", **more: Any) -> Any:
        """Start a server. resume, before: see `_host`; other names are changes of the settings."""
        self.last = self._host(("server",), "--bind", bind, *words, **more)
        return self.last

    def supervisor(self, workers: int = 2, *words: object, **more: Any) -> Any:
        """Start `fednet run`, with the same arguments. workers: 0 is one process for all."""
        where = ("--workers", workers) if workers else ("--in-process",)
        self.last = self._host(("main", "run"), *where, *words, **more)
        return self.last

    def _host(
        self,
        command: tuple[str, ...],
        *words: object,
        resume: bool = False,
        before: Callable[[], object] | None = None,
        **changes: Any,
    ) -> Any:
        config = self.tmp / f"config-{len(self.logs)}.yaml"
        config.write_text(json.dumps(self.mapping | changes))
        also = ("--resume",) if resume else ()
        place = ("--out", self.out, "--device", "cpu", "--quiet")
        return self.start(*command, config, *place, *also, *words, before=before)

    def client(
        self,
        ids: str,
        *words: object,
        server: str | None = None,
        state: Path | None = None,
        before: Callable[[], object] | None = None,
    ) -> Any:
        where = ("--server", server) if server else ("--run", self.path)
        own = ["--state", state or self.path / "state", "--device", "cpu"]
        if "--policy" not in words:  # it says itself whether faults are allowed
            own.append("--faults")
        return self.start("client", "--id", ids, *where, *own, *words, before=before)

    def begin(self, *ids: str, **more: Any) -> Any:
        """Start a client process for each of `ids`, and the server."""
        for own in ids:
            self.client(own)
        return self.server(**more)

    def status(self, process: Any = None) -> int:
        """Wait for a process's end, of the last server if none is given."""
        return self.ended(process or self.last)[0]

    def finish(self) -> None:
        """Wait for the last server, and start it again each time that a planned crash ends it;
        then for the others.
        """
        while (status := self.status()) == -signal.SIGKILL:
            self.server(resume=True)
        assert status == 0, f"{status}; {self}"
        for process in self.all:
            self.status(process)

    def stop(self) -> None:
        """Stop a server that would go on for ever."""
        self.last.send_signal(signal.SIGTERM)
        assert self.status() == 4, self.output()

    def until(self, true: Callable[[], Any]) -> Any:
        return until(true, self)

    # -- what they leave
    def lines(self, name: str) -> list[dict[str, Any]]:
        return lines(self.path / name)

    def rounds(self) -> list[dict[str, Any]]:
        return self.lines("rounds.jsonl")

    def completed(self) -> list[list[int]]:
        return [r["completed"] for r in self.rounds()]

    def events(self, type: str = "") -> list[dict[str, Any]]:
        return [e for e in self.lines("events.jsonl") if type in ("", e["type"])]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    def hashes(self) -> list[tuple[int, str, str]]:
        return [(r["round"], r["model_sha256"], r["clients_sha256"]) for r in self.rounds()]

    def faults(self) -> list[tuple[int, int, str]]:
        return [(e["round"], e["client"], e["kind"]) for e in self.events("fault")]

    def replies(self, client: int, round: int = 2) -> list[dict[str, Any]]:
        """Return the rows of wire.jsonl for a client's replies in a round."""
        wanted = ("reply", client, round)
        rows = self.lines("wire.jsonl")
        return [r for r in rows if (r["type"], r["client"], r["round"]) == wanted]

    def check(self, killed: int = 0) -> None:
        """Check a finished run: every round once, no temporary file, one whole checkpoint, and
        each useful reply is on record at its client too.

        killed: clients that were, each of which may have lost the row of a reply just sent, and
        left the state of the last round that it was writing: those of others go with the next one.
        """
        last = len(self.rounds())
        assert [r["round"] for r in self.rounds()] == list(range(1, last + 1))
        left = [p for p in self.path.rglob("*") if p.name.startswith(("round-", "."))]
        if killed:
            writing = set(self.path.glob(f"state/*/client-*/.{last}-*.safetensors.*"))
            left = [p for p in left if p not in writing]
        assert not left, left
        files = json.loads((self.path / "checkpoint" / "manifest.json").read_text())["files"]
        assert {p.name for p in (self.path / "checkpoint").glob("state-*")} == set(files.values())
        rows = self.lines("clients.jsonl")
        seen = [(c["round"], c["client"], c.get("final", False)) for c in rows]
        assert len(seen) == len(set(seen)), "a line of clients.jsonl is there twice"
        own = [r for path in self.path.glob("state/*/wire*.jsonl") for r in lines(path)]
        sent = {_of_reply(r) for r in own if r["direction"] == "up"}
        useful = [r for r in self.lines("wire.jsonl") if r["direction"] == "up" and r["useful"]]
        missing = [r for r in useful if _of_reply(r) not in sent]
        assert len(missing) <= 2 * killed, missing


def _of_reply(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("round", "client", "phase", "attempt", "type")
    return *(row[name] for name in names), tuple(sorted(row["kinds"].items()))


def finished(out: Path, *ids: str, **changes: Any) -> Federation:
    """Return a run with a client process for each of `ids`, when it has ended."""
    with Federation(out, **changes) as fed:
        fed.begin(*ids or ("0-1", "2-3"))
        fed.finish()
    return fed


def in_process(out: Path, **changes: Any) -> Federation:
    """Return the same run in this one process."""
    import fednet

    fed = Federation(out, **changes)
    fednet.run(fed.mapping, in_process=True, out=out, quiet=True)
    return fed


def undisturbed(**changes: Any) -> list[tuple[int, str, str]]:
    """Return the hashes of a run in one process in which nothing happens."""
    return _undisturbed(json.dumps(changes))


@functools.cache
def _undisturbed(changes: str) -> list[tuple[int, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return in_process(Path(folder), **json.loads(changes)).hashes()


# -- a federation of two clients, by commands ------------------------------------------------------
SMALL = (
    "name=run",
    "clients=2",
    "participation=1.0",
    "rounds=2",
    "model={name: mlp, hidden: [8]}",
    "data={dataset: synthetic, samples: 200, shape: [1, 4, 4], classes: 4, partition: {scheme: "
    "iid}}",
)


def small(*sets: str) -> list[str]:
    """Return the words that set up a federation of two clients on synthetic data."""
    return [w for s in (*SMALL, *sets) for w in ("--set", s)]


class Processes(Rig):
    """The processes of that federation."""

    def server(self, *words: object, sets: tuple[str, ...] = (), **more: Any) -> Any:
        place = ("--out", self.tmp, "--device", "cpu", "--bind", "tcp://127.0.0.1:0")
        return self.start("server", *small(*sets), *place, *words, **more)

    def client(self, ids: object, *words: object, **more: Any) -> Any:
        own = ("--state", self.tmp / f"state-{len(self.all)}", "--device", "cpu")
        return self.start("client", "--id", ids, "--run", self.tmp / "run", *own, *words, **more)
