"""Which answers a client process sends, where its server changes its mind about a task."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fednet.client.loop import ClientLoop, Prepared
from fednet.protocol.client import ClientProtocol
from fednet.transport.base import Received
from fednet.transport.inproc import Inproc
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import decode_from_client, encode

KEY = m.Key(1, 0, 0, 0)
RUN: dict[str, Any] = {"run": "run", "inc": 1}


class Echo:
    """Answers each task with what it was given."""

    device = SimpleNamespace(forget=lambda: None, packed=False)

    def work(self, task: m.Task, body: Body, stages: object, check: object = None):
        form = [m.Field("x", "delta", body.size, body.size)]
        reply = m.Reply(key=task.key, form=form, size=body.size, check=body.digest(), **RUN)
        return reply, Body([bytes(body)])


class Served:
    """A client process that is ready, stepped by hand, and its server."""

    def __init__(self) -> None:
        network = Inproc()
        self.transport = network.server()
        self.loop = ClientLoop(
            ClientProtocol(m.Join(worker="w", ids=[0])),
            network.client(),
            self.prepared,
            curve=False,
            inline=True,
            faults=True,
        )
        self.heard: list[tuple[m.Message, Body | None]] = []
        self.step()
        self.welcome("8")

    def prepared(self, loop: ClientLoop, welcome: m.Welcome) -> Prepared:
        """The configuration is the number of samples."""
        return Prepared([Echo()], "L", {0: int(welcome.config)})  # type: ignore[list-item]

    def welcome(self, config: str) -> None:
        """Lets it in, and waits until it is ready."""
        before = self.readies()
        self.say(m.Welcome(session="s", name="n", config=config, ids=[0], beat_s=1000.0, **RUN))
        while self.readies() == before:
            self.step()

    def readies(self) -> int:
        return sum(isinstance(message, m.Ready) for message, _ in self.heard)

    def end(self) -> list[str]:
        """Ends the run; returns what the process says."""
        self.say(m.End(over=True, **RUN))
        said: list[str] = []
        self.loop.run(said.append)
        return said

    def say(self, message: m.Message, body: bytes | None = None) -> None:
        self.transport.send(self.conn, [encode(message), *([] if body is None else [body])])

    def step(self) -> None:
        self.loop.step(0.0)
        for event in self.transport.poll(0.0):
            if isinstance(event, Received):
                self.conn = event.conn
                self.heard.append(decode_from_client(event.frames, m.PART))

    def give(self, payload: bytes, faults: Sequence[m.Fault] = (), key: m.Key = KEY) -> None:
        """Gives it the task with this payload."""
        form = [m.Field("x", "state", len(payload), len(payload))]
        more = {"check": Body([payload]).digest(), "faults": list(faults)}
        self.say(m.Task(key=key, form=form, size=len(payload), **more, **RUN), payload)

    def answers(self) -> list[bytes]:
        for _ in range(5):
            self.step()
        return [bytes(body) for what, body in self.heard if isinstance(what, m.Reply) and body]


@pytest.mark.parametrize("faults", [[], [m.Fault("delay", 0.0)]])
def test_of_a_task_that_is_called_off_once_it_is_done_nothing_is_sent(faults) -> None:
    served = Served()
    served.give(b"one", faults)
    served.step()  # it is done, and its answer waits for the next step
    served.say(m.Cancel(key=KEY, **RUN))
    assert served.answers() == []


@pytest.mark.parametrize("faults", [[], [m.Fault("delay", 0.0)]])
def test_of_a_task_that_is_given_anew_the_answer_to_what_it_was_before_is_not_sent(faults) -> None:
    served = Served()
    served.give(b"one", faults)
    served.step()
    served.say(m.Cancel(key=KEY, **RUN))
    served.give(b"two", faults)
    assert served.answers() == [b"two"]


def test_an_answer_that_nobody_wants_any_more_does_not_make_its_round_longer(monkeypatch) -> None:
    second = 100.0
    monkeypatch.setattr("fednet.client.loop.time.monotonic", lambda: second)
    served = Served()
    served.give(b"one")
    served.step()
    second = 102.0
    assert served.answers() == [b"one"]
    again = m.Key(1, 0, 1, 0)
    served.give(b"two", key=again)
    served.step()
    second = 109.0
    served.say(m.Cancel(key=again, **RUN))
    assert served.answers() == [b"one"]
    (sentence,) = served.end()
    assert "trained client 0 on 8 samples in 2.0 s" in sentence


def test_a_process_counts_the_samples_of_the_configuration_that_it_works_by() -> None:
    """A resumed run may have another one."""
    served = Served()
    served.loop.transport.reconnect()
    served.step()
    served.welcome("16")
    served.give(b"one")
    assert served.answers() == [b"one"]
    (sentence,) = served.end()
    assert "trained client 0 on 16 samples in" in sentence
