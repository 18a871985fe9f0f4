"""However many messages a server reads in one wake-up, the run is the same: replies that come
together go through each step together.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednet.files import digest
from fednet.launch import start
from fednet.server.endpoint import Endpoint
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions
from fednet.transport.base import Event, Opened, Received
from fednet.wire import messages as m
from fednet.wire.frames import decode_from_server, encode
from fednet.wire.payload import LocalRun, pack_number
from tests.rooms import lines, small

CLIENTS = 9


class Crowd:
    """A transport, and behind it a process for each client: each trains nothing, and answers with
    what it was sent and some noise. A wake-up brings `together` messages at most. One answers with
    a value that is no number, one with bytes that are not those of its digest, one twice.
    """

    address = "tcp://127.0.0.1:1"

    def __init__(self, together: int) -> None:
        self._together = together
        self.layout = ""  # the digest of the model that is trained
        self._coming: list[Event] = []
        for client in range(CLIENTS):
            self._coming.append(Opened(self._conn(client)))
            self._say(client, m.Join(worker=f"w{client}", ids=[client]))

    def _conn(self, client: int) -> bytes:
        return b"\0" + client.to_bytes(4, "big")

    def _say(self, client: int, message: m.Message, *body: bytes) -> None:
        self._coming.append(Received(self._conn(client), (encode(message), *body)))

    def poll(self, timeout_s: float | None) -> list[Event]:
        most = self._together if self.layout else 0  # nobody can connect before it listens
        found = self._coming[:most]
        del self._coming[:most]
        if not found and timeout_s:
            time.sleep(min(timeout_s, 0.002))
        return found

    def send(self, conn: bytes, frames: Any) -> bool:
        message, body = decode_from_server([bytes(frame) for frame in frames])
        client = int.from_bytes(conn[1:], "big")
        if isinstance(message, m.Welcome):
            self._say(client, m.Ready(run=message.run, inc=message.inc, layout=self.layout))
        elif isinstance(message, m.Task):
            assert body is not None
            self._answer(message, bytes(body))
        return True

    def _answer(self, task: m.Task, model: bytes) -> None:
        key = task.key
        strange = (key.client + key.round) % CLIENTS if not key.attempt else CLIENTS
        noise = np.random.default_rng([key.round, key.client])
        x = np.frombuffer(model, "<f4") + noise.normal(size=len(model) // 4).astype("f4")
        if strange == 2:
            x[1] = np.nan
        payload = x.tobytes() + pack_number("run", LocalRun(1 + key.client % 3, 1, 0.5))
        said = digest([payload])
        if strange == 5:
            payload = payload[:-1] + b"!"
        form = [*task.form, m.Field("run", "statistics", 24, 24)]
        reply = m.Reply(
            run=task.run, inc=task.inc, key=key, form=form, size=len(payload), check=said
        )
        self._say(key.client, reply, payload)
        if strange == 7:
            self._say(key.client, reply, payload)

    def wake(self) -> None: ...
    def hang_up(self, conn: bytes) -> None: ...
    def vouch(self, conn: bytes) -> None: ...

    def peer(self, conn: bytes) -> str:
        return "127.0.0.1:2"

    def bytes_read(self, conn: bytes) -> int:
        return 0

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return {}

    def close(self, linger_s: float = 1.0) -> None: ...


def served(out: Path, together: int) -> tuple[str, list[Any], list[Any]]:
    """The model, what became of the rounds' messages, and who was refused and why."""
    config = small(clients=CLIENTS, rounds=3, train={"epochs": 1, "batch_size": 1})
    with start.open_directory(config, out, False) as (config, directory, _):

        def listen(experiment: Any) -> None:
            transport.layout = experiment.digest

        transport = Crowd(together)
        endpoint = Endpoint(transport, None, 2.0, listen=listen)
        run_server(
            config, directory, endpoint, ServerOptions(start.Silent(), ["test"], "cpu", None)
        )
    rounds = lines(directory / "rounds.jsonl")
    assert [r["completed"] for r in rounds] == [list(range(CLIENTS))] * 3
    rows = [r for r in lines(directory / "wire.jsonl") if r["round"] and r["type"] != "beat"]
    refused = [e for e in lines(directory / "events.jsonl") if e["type"] == "refused"]
    return (
        rounds[-1]["model_sha256"],
        sorted(str({**row, "incarnation": 1}) for row in rows),
        sorted((e["round"], e["client"], e["reason"]) for e in refused),
    )


@pytest.mark.parametrize("together", [4, 100])
def test_a_run_is_the_same_however_many_messages_a_wake_up_brings(
    tmp_path: Path, together: int
) -> None:
    alone = served(tmp_path / "one", 1)
    assert len(alone[2]) == 2 * 3
    assert served(tmp_path / "many", together) == alone
