"""A live server under attack: what is sent at it is refused with a reason and billed, and the model
is the same to the bit.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter

import msgpack
import msgspec
import numpy as np
import pytest
import torch

from fednet import config as configuration
from fednet.client import join
from fednet.client.policy import Policy
from fednet.experiment import build as experiment
from fednet.experiment.judging import JUDGED, Judgement
from fednet.launch.in_process import run_in_process
from fednet.launch.start import Silent
from fednet.protocol.instructions import REFUSALS
from fednet.server.endpoint import listen, listening
from fednet.server.process import host_rounds
from fednet.server.watch import Hosting
from fednet.tensors import Tensors
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.chaos.mallory import Mallory, raw
from tests.processes import until

CONFIG = {
    "name": "attacked",
    "rounds": 6,
    "clients": 4,
    "participation": 1.0,
    "model": {"name": "mlp", "hidden": [16]},
    "data": {
        "dataset": "synthetic",
        "samples": 200,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "iid"},
    },
    "train": {"batch_size": 25},
    "round": {"lost": {"closed": 1, "silent": None}, "start": 4},
}


def serve(directory, bind, after_round=lambda record: None) -> dict:
    directory.mkdir(parents=True)
    config = configuration.from_mapping(CONFIG)
    how = Hosting(Silent(), device="cpu", callback=after_round)
    if bind is None:
        return run_in_process(config, directory, how)
    transport = listen(config, bind, None, False)
    return host_rounds(config, directory, listening(config, directory, transport), how)


def in_thread(call) -> tuple[threading.Thread, dict]:
    found: dict = {}

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
    for data in (
        b"GET / HTTP/1.0\r\n\r\n",
        random.Random(0).randbytes(5000),
        b"\xff" + bytes(8) + b"\x7f",
        b"",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(data)


def before_a_join(address: str) -> Mallory:
    """What someone may send who was never let in."""
    mallory = Mallory(address)
    key = [1, 0, 0, 0]
    for n, frames in enumerate(
        (
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
            [raw(t="join", worker="w", holding=[key] * 5000)],
            [raw(t="join", worker="w" * 5000)],
            [raw(t="join", worker="w", versions={str(i): "" for i in range(100)})],
            [raw(t="join", worker="w", ids=[1 << 39])],
            [bytes(m.MAX_HEADER + 1)],
            [raw(t="alive"), b"body"],
            [raw(t="part", key=key, index=0), bytes(m.PART + 1)],
            [raw(t="reply", key=key, form=[], size=-1)],
            [raw(t="reply", key=key, form=[], size=1 << 41)],
            [raw(t="alive", run="foreign")],
            [raw(t="pull", key=key, first=0, count=1 << 20)],
            [raw(t="reply", key=[1, 0, 0, 0, "/../../evil"], form=[], size=0)],
        )
    ):
        mallory.frames(*frames)
        # One after the other: who sends more than may wait is hung up on. And of a stranger's
        # messages so many are answered.
        mallory.listen(lambda: len(mallory.refusals()) > min(n, REFUSALS - 1))  # noqa: B023
    return mallory


class Poison:
    """Answers to a task, each wrong in its own way."""

    def __init__(self, exp) -> None:
        self.exp = exp
        self.turn = 0

    def answers(self, task: m.Task):
        """(message, body) pairs that are all to be refused, late, or doubled; the last costs
        mallory the task.
        """
        key, exp = task.key, self.exp
        if key.purpose == "evaluate":
            counts = torch.zeros(len(JUDGED), 2, 4, dtype=torch.int64)
            counts[0, 0, 0] = 10**6  # correct, of none
            encoded = exp.up.encode(
                Judgement(counts=counts, losses=torch.zeros(len(JUDGED), dtype=torch.float64))
            )
        else:
            up = exp.algorithm.exchanges[0].up
            x = Tensors.zeros(exp.shared)
            x.vector[3] = float("nan")
            from fednet.wire.payload import Run

            values = {n: x if f.form == "tensors" else Run(1, 1, 0.0) for n, f in up.fields.items()}
            encoded = exp.up.encode(up(**values), lambda name: np.random.default_rng(0))
        body = bytes(encoded.body.whole())
        good = m.Reply(key=key, form=list(encoded.form), size=len(body), check=encoded.body.check())

        def change(**more):
            return msgspec.structs.replace(good, **more)

        def of(**more):
            return msgspec.structs.replace(key, **more)

        yield change(key=of(client=key.client + 1000)), body  # a client that it does not host
        yield change(key=of(round=key.round + 5)), body
        yield change(key=of(attempt=key.attempt + 3)), body
        yield m.Part(key=key, index=0), body[: m.PART]
        yield m.Part(key=of(purpose="evaluate"), index=0), body[: m.PART]
        yield m.Pull(key=key, first=0, count=1), None
        yield m.Pull(key=key, first=1 << 40, count=1024), None
        yield m.Failed(key=of(round=99), reason="x" * 4096, again=True), None
        yield m.Ready(layout="L", sites=[m.SiteFacts(3999, 1 << 40, 1 << 40)]), None
        last = (
            (good, body),  # NaN, or counts that cannot be
            (
                change(
                    form=[msgspec.structs.replace(f, size=1 << 40) for f in good.form],
                    size=len(good.form) << 40,
                ),
                None,
            ),
            (change(check=bytes(16)), body),
            (change(form=[msgspec.structs.replace(f, raw=1 << 40) for f in good.form]), body),
            (change(form=[]), b""),
            (change(size=good.size + 1), body),
        )
        yield last[self.turn % len(last)]
        self.turn += 1
        yield good, body  # once more: late now


@pytest.mark.timeout(400)
def test_model_is_the_same_to_the_bit_whatever_is_sent_at_the_server(tmp_path):
    quiet = serve(tmp_path / "quiet", None)
    directory = tmp_path / "attacked"
    there = threading.Event()  # mallory is, for all rounds but the first
    server, served = in_thread(
        lambda: serve(directory, "tcp://127.0.0.1:*", lambda record: there.wait())
    )
    while (found := join.read_server(directory)) is None:
        assert server.is_alive(), served
        time.sleep(0.01)
    address = found[0]

    noise_on_the_port(address)
    outsider = before_a_join(address)
    crowd = [Mallory(address) for _ in range(20)]
    for n, one in enumerate(crowd):  # a flood of workers, each twice over one connection
        one.say(m.Join(worker=f"crowd-{n}", ids=[n % 4]))
        one.say(m.Join(worker=f"crowd-{n}-again", ids=[n % 4]))
        one.listen(lambda one=one: len(one.refusals()) >= 1)
        one.transport.close(0)

    mallory = Mallory(address)
    mallory.say(m.Join(worker="mallory", ids=[0, 1, 2, 3], slots=2))
    mallory.listen(lambda: bool(mallory.run))
    twin = Mallory(address)
    twin.say(m.Join(worker="mallory", ids=[0]))  # the name of someone who is here
    twin.listen(lambda: len(twin.refusals()) == 1)
    mallory.frames(encode(m.Alive(run="foreign", inc=mallory.inc)))
    mallory.frames(encode(m.Alive(run=mallory.run, inc=mallory.inc + 1)))
    for _ in range(100):
        mallory.say(m.Progress(client=10**9, phase="\x1b[2J" * 20))

    honest, worked = in_thread(
        lambda: join.main(join.Options("0-3", Policy(), run=directory, state=directory / "state"))
    )
    events = directory / "events.jsonl"
    poison = Poison(experiment.build(configuration.from_mapping(CONFIG)))
    mallory.listen(lambda: ready(events, lambda name: name != "mallory"))
    mallory.say(m.Ready(layout=poison.exp.shared.digest))
    mallory.listen(lambda: ready(events, lambda name: name == "mallory"))
    there.set()
    answered = 0
    tasks = [message for message, _ in mallory.heard]
    while server.is_alive():
        tasks += mallory.poll(0.01)
        while tasks:
            message = tasks.pop(0)
            if isinstance(message, m.Task):
                answered += 1
                for wrong, body in poison.answers(message):
                    mallory.say(wrong, body)
    server.join()
    honest.join(20)
    for one in (outsider, mallory, twin):
        one.transport.close(0)
    assert "error" not in served, served
    assert worked == {"result": 0}
    assert served["result"]["model_sha256"] == quiet["model_sha256"]

    assert answered >= 3
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    refused = [e for e in lines if e["type"] == "refused"]
    told = Counter(e["what"] for e in refused)
    assert {"frame", "join", "alive", "reply", "connection"} <= set(told), told
    assert all(e["reason"] and len(e["reason"]) < 500 for e in refused)
    assert sum(e.get("count", 1) for e in refused) >= 26 + 20
    assert len(lines) < 400  # however much was sent
    rows = [json.loads(line) for line in (directory / "wire.jsonl").read_text().splitlines()]
    assert sum(r["count"] for r in rows if r["type"] == "refused") >= 20
    assert all(not r["useful"] for r in rows if r.get("reason"))
    calm = [
        json.loads(line) for line in (tmp_path / "quiet" / "wire.jsonl").read_text().splitlines()
    ]
    assert useful(rows) == useful(calm)  # and what the federation cost is the same too
    assert not list(directory.rglob("*evil*"))


def ready(events, who) -> bool:
    """Whether a worker of such a name is, with all four clients on board."""
    lines = events.read_text().splitlines() if events.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("}")]
    return any(e["type"] == "ready" and len(e["clients"]) == 4 and who(e["worker"]) for e in told)


def useful(rows) -> Counter:
    total: Counter = Counter()
    for row in rows:
        if row["useful"] and row["type"] != "pull":
            for kind, n in row["kinds"].items():
                total[row["direction"], kind] += n
    return total
