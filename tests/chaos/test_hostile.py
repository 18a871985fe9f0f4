"""A live server under attack: what is sent to it is refused with a reason and recorded, and the
model is the same to the bit.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch

from fednet import config as configuration
from fednet.client import join
from fednet.client.policy import Policy
from fednet.experiment import build as experiment
from fednet.experiment.evaluations import EVALUATED_MODELS, EvaluationReply
from fednet.launch.in_process import run_in_process
from fednet.launch.start import Silent
from fednet.protocol.instructions import MOST_STRAYS
from fednet.server.endpoint import listen, listening
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.chaos.mallory import Mallory, packed, raw, reply
from tests.processes import lines, settings, until

CONFIG = settings(
    rounds=6,
    data={"samples": 200, "classes": 4},
    train={"batch_size": 25},
    round={"lost": {"closed": 1, "silent": None}, "start": 4},
)
change = msgspec.structs.replace
Answer = tuple[m.Message, bytes | None]


def serve(
    directory: Path, bind: str | None, after_round: Callable[[Any], Any] = lambda record: None
) -> dict[str, Any]:
    """Run CONFIG in this process: alone, or as a server for clients that connect."""
    directory.mkdir(parents=True)
    config = configuration.from_mapping(CONFIG)
    how = ServerOptions(Silent(), device="cpu", callback=after_round)
    if bind is None:
        return run_in_process(config, directory, how)
    transport = listen(config, bind, None, False)
    return run_server(config, directory, listening(config, directory, transport), how)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, dict[str, Any]]:
    """Call it in a thread. Return the thread, and a place for its `result` or `error`."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = call()
        except BaseException as broken:  # shown by the test
            found["error"] = broken

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def noise_on_the_port(address: str) -> None:
    host, port = address.removeprefix("tcp://").split(":")

    def listens() -> bool:
        with socket.socket() as first:
            return first.connect_ex((host, int(port))) == 0

    until(listens, "the server listens")
    noise = random.Random(0).randbytes(5000)
    for data in (b"GET / HTTP/1.0\r\n\r\n", noise, b"\xff" + bytes(8) + b"\x7f", b""):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(data)


KEY = [1, 0, 0, 0]
OUTSIDE: list[list[bytes]] = [
    [b""],
    [b"\xc1\xc1"],
    [random.Random(1).randbytes(300)],
    [msgpack.packb([1])],
    [b"\x91" * 1020 + b"\xc0"],
    [b"\xdd\xff\xff\xff\xff" * 500],
    [msgpack.packb({"v": 9, "t": "join"})],
    [raw(t="welcome", worker="w")],
    [raw(t="nonsense")],
    [raw(t=["join"])],
    [raw(t="join", worker="w", slots=-1)],
    [raw(t="join", worker="w", slots=1 << 62)],
    [raw(t="join", worker="w", ids=[-1])],
    [raw(t="join", worker="w", pid=1 << 63)],
    [raw(t="join", worker="w", holding=[KEY] * 5000)],
    [raw(t="join", worker="w" * 5000)],
    [raw(t="join", worker="w", versions={str(i): "" for i in range(100)})],
    [raw(t="join", worker="w", ids=[1 << 39])],
    [bytes(m.MAX_HEADER + 1)],
    [raw(t="alive"), b"body"],
    [raw(t="part", key=KEY, index=0), bytes(m.PART + 1)],
    [raw(t="reply", key=KEY, form=[], size=-1)],
    [raw(t="reply", key=KEY, form=[], size=1 << 41)],
    [raw(t="alive", run="foreign")],
    [raw(t="pull", key=KEY, first=0, count=1 << 20)],
    [raw(t="reply", key=[1, 0, 0, 0, "/../../evil"], form=[], size=0)],
]


def before_a_join(address: str) -> Mallory:
    """Send what a stranger may send."""
    mallory = Mallory(address)
    for n, frames in enumerate(OUTSIDE):
        mallory.frames(*frames)
        # One after the other: the server disconnects a peer that sends too many. And it answers
        # so many of a stranger's messages.
        mallory.listen(lambda: len(mallory.refusals()) > min(n, MOST_STRAYS - 1))  # noqa: B023
    return mallory


class Poison:
    """Answers to a task, each wrong in its own way."""

    def __init__(self) -> None:
        self.exp = experiment.build(configuration.from_mapping(CONFIG))
        self.turn = 0

    def right(self, key: m.Key) -> tuple[m.Reply, bytes]:
        """Return a reply of the right form: a correct count of no sample, or a weight of NaN."""
        if key.purpose != "evaluate":
            return reply(self.exp, key, float("nan"))
        counts = torch.zeros(len(EVALUATED_MODELS), 2, 4, dtype=torch.int64)
        counts[0, 0, 0] = 10**6
        losses = torch.zeros(len(EVALUATED_MODELS), dtype=torch.float64)
        return packed(key, self.exp.up.encode(EvaluationReply(counts=counts, losses=losses)))

    def answers(self, task: m.Task) -> Iterator[Answer]:
        """Yield answers that are all to be refused, late, or doubled. The last but one costs
        mallory the task.
        """
        key = task.key
        good, body = self.right(key)
        form = good.form
        yield change(good, key=change(key, client=key.client + 1000)), body  # not its client
        yield change(good, key=change(key, round=key.round + 5)), body
        yield change(good, key=change(key, attempt=key.attempt + 3)), body
        yield m.Part(key=key, index=0), body[: m.PART]
        yield m.Part(key=change(key, purpose="evaluate"), index=0), body[: m.PART]
        yield m.Pull(key=key, first=0, count=1), None
        yield m.Pull(key=key, first=1 << 40, count=1024), None
        yield m.Failed(key=change(key, round=99), reason="x" * 4096, again=True), None
        yield m.Ready(layout="L", sites=[m.SiteFacts(3999, 1 << 40, 1 << 40)]), None
        huge = [change(f, size=1 << 40) for f in form]
        last: list[Answer] = [
            (good, body),  # NaN, or counts that cannot be
            (change(good, form=huge, size=len(form) << 40), None),
            (change(good, check=bytes(16)), body),
            (change(good, form=[change(f, raw=1 << 40) for f in form]), body),
            (change(good, form=[]), b""),
            (change(good, size=good.size + 1), body),
        ]
        yield last[self.turn % len(last)]
        self.turn += 1
        yield good, body  # once more: late now


def ready(directory: Path, mallory: bool) -> bool:
    """Whether mallory, or another worker, is ready with all four clients."""
    found = [e for e in lines(directory / "events.jsonl") if e["type"] == "ready"]
    return any(len(e["clients"]) == 4 and (e["worker"] == "mallory") == mallory for e in found)


def useful(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row["useful"] and row["type"] != "pull":
            for kind, n in row["kinds"].items():
                total[row["direction"], kind] += n
    return total


@pytest.mark.timeout(400)
def test_model_is_the_same_to_the_bit_whatever_is_sent_to_the_server(tmp_path):
    quiet = serve(tmp_path / "quiet", None)
    directory = tmp_path / "attacked"
    there = threading.Event()  # mallory is there for all rounds but the first
    server, served = in_thread(
        lambda: serve(directory, "tcp://127.0.0.1:*", lambda record: there.wait())
    )
    found = until(lambda: served or join.read_server(directory), "the server has an address")
    address = found[0]

    noise_on_the_port(address)
    outsider = before_a_join(address)
    for n in range(20):  # many workers, each twice over one connection
        one = Mallory(address)
        one.say(m.Join(worker=f"crowd-{n}", ids=[n % 4]))
        one.say(m.Join(worker=f"crowd-{n}-again", ids=[n % 4]))
        one.listen(lambda one=one: len(one.refusals()) >= 1)
        one.transport.close(0)

    mallory = Mallory(address)
    mallory.say(m.Join(worker="mallory", ids=[0, 1, 2, 3], slots=2))
    mallory.listen(lambda: bool(mallory.run))
    twin = Mallory(address)
    twin.say(m.Join(worker="mallory", ids=[0]))  # the name of a worker that is here
    twin.listen(lambda: len(twin.refusals()) == 1)
    mallory.frames(encode(m.Alive(run="foreign", inc=mallory.inc)))
    mallory.frames(encode(m.Alive(run=mallory.run, inc=mallory.inc + 1)))
    for _ in range(100):
        mallory.say(m.Progress(client=10**9, stage="\x1b[2J" * 20))

    honest, worked = in_thread(
        lambda: join.main("0-3", Policy(), run=directory, state=directory / "state")
    )
    poison = Poison()
    mallory.listen(lambda: ready(directory, mallory=False))
    mallory.say(m.Ready(layout=poison.exp.shared.digest))
    mallory.listen(lambda: ready(directory, mallory=True))
    there.set()
    answered = 0
    messages = [message for message, _ in mallory.heard]
    while server.is_alive():
        for message in messages:
            if isinstance(message, m.Task):
                answered += 1
                for wrong, body in poison.answers(message):
                    mallory.say(wrong, body)
        messages = mallory.poll(0.01)
    server.join()
    honest.join(20)
    for one in (outsider, mallory, twin):
        one.transport.close(0)
    assert "error" not in served, served
    assert worked == {"result": 0}
    assert served["result"]["model_sha256"] == quiet["model_sha256"]

    assert answered >= 3
    events = lines(directory / "events.jsonl")
    refused = [e for e in events if e["type"] == "refused"]
    assert {"frame", "join", "alive", "reply", "connection"} <= {e["what"] for e in refused}
    assert all(e["reason"] and len(e["reason"]) < 500 for e in refused)
    assert len(refused) >= len(OUTSIDE)
    assert len(events) < 400  # however much was sent
    rows = lines(directory / "wire.jsonl")
    assert sum(r["count"] for r in rows if r["type"] == "refused") >= 20
    assert all(not r["useful"] for r in rows if r.get("reason"))
    # What the federation cost is the same too.
    assert useful(rows) == useful(lines(tmp_path / "quiet" / "wire.jsonl"))
    assert not list(directory.rglob("*evil*"))
