"""What has left a server is in its files, and so are the replies that it has accepted: these tests
look at the disk as it is at the moment in which a message leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fednet.files import digest
from fednet.protocol.tasks import TaskSpec
from fednet.server.inbox import ReceivedReply
from fednet.transport.framing import framing
from fednet.transport.inproc import Inproc, InprocServer
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import encode
from tests.processes import lines
from tests.rooms import run
from tests.server.test_io_thread import clients_of, made_io, ready

CHANGES = {"rounds": 2, "evaluate": {"clients": "all"}, "faults": {"random": {"duplicate": 0.3}}}


@pytest.mark.parametrize("beats", [0, 1])
def test_a_reply_is_on_disk_before_any_message_leaves_and_before_the_rounds_get_it(
    tmp_path: Path, beats: int
) -> None:
    """Messages of the same wake-up too: here the answer to a heartbeat that came with the reply.
    Without one nothing leaves.
    """
    network = Inproc()
    left = list[bool]()
    transport = network.server()
    io, *_ = made_io(tmp_path, transport, pump=lambda: False)
    clients = clients_of(io, tmp_path)
    client = ready(io, network)
    key = m.Key(1, 0, 0, 0)
    payload = b"what the client came to"
    clients.open((1, 0, "train"), [TaskSpec(0, [], Body([]), b"")])
    send = transport.send

    def on_disk() -> bool:
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        return any(payload in file for file in files)

    def sent(conn: bytes, frames: Sequence[Any]) -> bool:
        left.append(on_disk())
        return send(conn, frames)

    io.link._send = sent
    form = [m.Field("x", "delta", len(payload), len(payload))]
    check = digest([payload])
    reply = m.Reply(run="run", inc=1, key=key, form=form, size=len(payload), check=check)
    for _ in range(beats):
        client.send([encode(m.Alive(run="run", inc=1))])
    client.send([encode(reply), payload])
    io._step(0.0)
    assert left == beats * [True]
    outcome = clients.wait(0.0)
    assert isinstance(outcome, ReceivedReply)
    assert on_disk()
    io.close(linger_s=0)


@pytest.mark.parametrize("at", [1, 4, 9, 14])
def test_the_bytes_of_a_message_are_on_disk_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The disk as it is when the nth message leaves: the server that goes on from it has in its
    book what the first one had sent until then, this message, and no half of another one.
    """
    send = InprocServer.send
    left = list[int]()

    def sent(self: InprocServer, conn: bytes, frames: Sequence[Any]) -> bool:
        left.append(sum(framing(len(frame)) for frame in frames))
        if len(left) == at:
            shutil.copytree(tmp_path / "first", tmp_path / "second")
            (tmp_path / "second" / "r" / "lock").unlink(missing_ok=True)
        return send(self, conn, frames)

    monkeypatch.setattr(InprocServer, "send", sent)
    run(tmp_path / "first", **CHANGES)
    assert len(left) > at
    monkeypatch.setattr(InprocServer, "send", send)
    directory = run(tmp_path / "second", resume=True, **CHANGES)
    rows = [r for r in lines(directory / "wire.jsonl") if r["incarnation"] == 1]
    down = [r for r in rows if r["direction"] == "down" and r["type"] != "connection"]
    assert sum(r["bytes"] for r in down) in [sum(left[:n]) for n in range(at, len(left) + 1)]
