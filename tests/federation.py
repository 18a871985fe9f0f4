"""Real processes of one small federation: started, killed, started again; and what must be true of
what they leave.

    with Federation(tmp_path, algorithm="scaffold") as fed:
        fed.client("0-3"); fed.server(); fed.finish()
        fed.hashes()    # [(round, model_sha256, clients_sha256), ...]
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fednet import config as configuration
from tests.processes import Rig, lines, until

METHODS_WITH_STATE = ("scaffold", "moon", "fedrds", "fedper", "fedrod", "lgfedavg", "fedrep")


def settings(**changes: Any) -> dict[str, Any]:
    """Four clients of which all take part, a model of two thousand weights, three rounds."""
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
        merged = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        base[key] = (
            {**base[key], **value}
            if merged
            else {"name": value}
            if key == "algorithm" and not isinstance(value, Mapping)
            else value
        )
    return base


class Federation(Rig):
    """One run's directory under `out`, and the processes that work on it."""

    def __init__(self, out: Path, **changes: Any) -> None:
        super().__init__(out)
        self.out = out
        self.mapping = settings(**changes)
        self.path = out / self.mapping["name"]
        out.mkdir(parents=True, exist_ok=True)
        self.last: Any = None  # the last server, or supervisor

    def __str__(self) -> str:
        return f"events: {self.events()[-5:]}\n{self.output()}"

    # -- processes ---------------------------------------------------------------------------------
    def server(
        self,
        resume: bool = False,
        bind: str = "tcp://127.0.0.1:*",
        limit: int | None = None,
        network: tuple[int, Mapping[Any, Any]] | None = None,
        **changes: Any,
    ) -> Any:
        """limit: the largest size in bytes of a file that it can write, as on a disk that is full
        then. network: a seed, and the probability by kind of what the network does to a message, or
        what it does to the server's messages by number.
        """
        self.last = self.fork(serve, self.mapping | changes, self.out, resume, bind, limit, network)
        return self.last

    def client(self, ids: str, server: str | None = None, state: Path | None = None) -> Any:
        return self.fork(client, ids, self.path, server, state or self.path / "state")

    def supervisor(
        self, workers: int = 2, resume: bool = False, until_s: float | None = None, **changes: Any
    ) -> Any:
        """`fednet run`, less the figures."""
        self.last = self.fork(supervise, self.mapping | changes, self.out, workers, resume, until_s)
        return self.last

    def status(self, process: Any = None) -> int:
        """Waits for a process's end, of the last server if none is given."""
        return self.ended(process or self.last)[0]

    def finish(self) -> None:
        """Waits for the last server, starting it anew each time that a planned crash has ended it;
        then for the rest.
        """
        while (status := self.status()) == -signal.SIGKILL:
            self.server(resume=True)
        assert status == 0, f"{status}; {self}"
        for process in self.all:
            self.status(process)

    def until(self, true: Callable[[], Any]) -> Any:
        """Waits for something to become true, and returns it."""
        return until(true, self)

    # -- what they leave ---------------------------------------------------------------------------
    def lines(self, name: str) -> list[dict[str, Any]]:
        return lines(self.path / name)

    def rounds(self) -> list[dict[str, Any]]:
        return self.lines("rounds.jsonl")

    def events(self, type: str = "") -> list[dict[str, Any]]:
        return [e for e in self.lines("events.jsonl") if type in ("", e["type"])]

    def hashes(self) -> list[tuple[int, str, str]]:
        return [(r["round"], r["model_sha256"], r["clients_sha256"]) for r in self.rounds()]

    def faults(self) -> list[tuple[int, int, str]]:
        return [(e["round"], e["client"], e["kind"]) for e in self.events("fault")]

    def check(self, killed: int = 0) -> None:
        """Of a finished run: every round once, no temporary file, one whole checkpoint, the books
        agree. killed: clients that were, each of which may have taken the row of a reply just sent
        with it.
        """
        assert [r["round"] for r in self.rounds()] == list(range(1, len(self.rounds()) + 1))
        left = [p for p in self.path.rglob("*") if p.name.startswith(("round-", "."))]
        assert not left, left
        files = json.loads((self.path / "checkpoint" / "manifest.json").read_text())["files"]
        assert {p.name for p in (self.path / "checkpoint").glob("state-*")} == set(files.values())
        seen = [
            (c["round"], c["client"], c.get("final", False)) for c in self.lines("clients.jsonl")
        ]
        assert len(seen) == len(set(seen)), "a line of clients.jsonl is there twice"
        missing = unbooked(self)
        assert len(missing) <= 2 * killed, missing


def unbooked(fed: Federation) -> list[dict[str, Any]]:
    """The useful replies in the server's book that no client's has with the same bytes by kind."""
    sent = {
        _row(r)
        for path in fed.path.glob("state/*/wire*.jsonl")
        for r in map(json.loads, path.read_text().splitlines())
        if r["direction"] == "up"
    }
    return [
        row
        for row in fed.lines("wire.jsonl")
        if row["direction"] == "up" and row["useful"] and _row(row) not in sent
    ]


def _row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        row["round"],
        row["client"],
        row["phase"],
        row["attempt"],
        row["type"],
        tuple(sorted(row["kinds"].items())),
    )


# -- in the processes ------------------------------------------------------------------------------
def _bad_network(seed: int, chances: Mapping[Any, Any]) -> None:
    """From now on this process's servers have one."""
    from fednet import seeds
    from fednet.transport.zeromq import router
    from tests.transport import faulty

    sound = router.ZmqServer
    plan = (
        faulty.Script({("down", at): faulty.Fault(kind) for at, kind in chances.items()})
        if isinstance(next(iter(chances)), int)
        else faulty.Chances(seeds.rng(seed, "network"), chances, delay_s=0.2)
    )
    router.ZmqServer = lambda *a, **k: faulty.FaultyServer(  # type: ignore[assignment,misc]
        sound(*a, **k), plan, time.monotonic, seeds.rng(seed, "bytes")
    )


def serve(
    mapping: dict[str, Any],
    out: Path,
    resume: bool,
    bind: str,
    limit: int | None,
    network: tuple[int, Mapping[Any, Any]] | None,
) -> int:
    from fednet.launch import start

    if limit is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if network is not None:
        _bad_network(*network)
    config = configuration.from_mapping(mapping, where="the test")
    return start.serve(
        config,
        start.Launch(out, start.Silent(), lambda run: None, ["test"], "cpu", resume),
        bind=bind,
    )


def client(ids: str, run: Path, server: str | None, state: Path) -> int:
    from fednet.client import join
    from fednet.client.policy import Policy

    ended = join.main(
        join.Options(
            ids,
            Policy(faults=True),
            server=server,
            run=None if server else run,
            state=state,
        )
    )
    return max(0, ended)  # to leave is no failure


def supervise(
    mapping: dict[str, Any], out: Path, workers: int, resume: bool, until_s: float | None
) -> int:
    from fednet import loading
    from fednet.launch import start

    loading.load_parts([Path(name) for name in mapping.get("load", ())])
    config = configuration.from_mapping(mapping, where="the test")
    return start.run_command(
        config,
        start.Launch(out, start.Silent(), lambda run: None, ["test"], "cpu", resume, until_s),
        workers=workers,
    )
