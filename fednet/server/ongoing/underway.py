"""The tasks under way where training waits for nobody: tasks of several rounds at a time, and what
a resume needs of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from fednet.algorithms.state import State
from fednet.plain import JsonMapping
from fednet.protocol.tasks import Job
from fednet.records.manifest import UnderWay
from fednet.server.asking import Asking, Phase
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import Reply
from fednet.wire.codec import Body
from fednet.wire.messages import Field
from fednet.wire.payload import Payload


class SentDown(State):
    """What went down with a task. form: of its fields, as JSON; enrol: how many of them are the
    client's enrolment.
    """

    form: str
    enrol: int
    body: torch.Tensor  # uint8


@dataclass(slots=True)
class PendingTask:
    """A client's task, until its reply is counted. at: seconds, when it was given out; leaves: when
    its client is gone. seen: what went down, as the client sees it. bytes: of all that, on the
    virtual clock. out: why no reply comes of it. wanted: it is to be handed out. over: its reply
    is here, or it is known that none will come.
    """

    round: int
    at: float
    job: Job
    seen: Payload
    bytes: int
    enrolled: bool
    leaves: float = math.inf
    out: str = ""
    wanted: bool = True
    over: bool = False
    reply: Reply | None = None
    verdict: Reply | None = None

    def saved(self) -> UnderWay:
        return UnderWay(
            round=self.round,
            at=self.at,
            start=self.job.start,
            sent=self.job.check.hex(),
            bytes=self.bytes,
            enrolled=self.enrolled,
        )


def kept(checkpoints: Checkpoints, under_way: Mapping[int, UnderWay]) -> dict[str, State]:
    """What a checkpoint has of what went down with these tasks, by name."""
    names = sorted({f"sent-{task.sent}" for task in under_way.values()})
    return {name: checkpoints.other(name, SentDown) for name in names}


class PendingTasks(dict[int, PendingTask]):
    """The tasks under way, by client. phase: what goes down in the round that is open."""

    def __init__(self, asking: Asking, at: float) -> None:
        """at: the second of the run at which this server goes on."""
        super().__init__()
        self._asking, self._at = asking, at
        self.phase: Phase | None = None

    def open(self, round: int, residuals: dict[str, torch.Tensor]) -> None:
        """A round begins. residuals: changed, as what goes down leaves something out."""
        self.phase = self._asking.prepared(round, 0, (), {}, residuals)

    def give(
        self, client: int, at: float, server: State, start: str, state: str, keep: str
    ) -> PendingTask:
        """A task of the round that is open. start, state, keep: see `Job`."""
        phase, asking = self.phase, self._asking
        assert phase is not None
        phase.start[client], phase.at, phase.opened = start, at, time.monotonic()
        phase.out |= asking.faults.out(phase.round, 0, [client])
        job = asking.ask(phase, client, server, state, keep)
        return self._entered(phase, at, job, client in phase.enrolled)

    def resume(
        self, client: int, saved: UnderWay, sent: JsonMapping, state: str, keep: str
    ) -> PendingTask:
        """A task that an earlier server gave out. sent: as `saved` returned it."""
        asking, method = self._asking, self._asking.method
        phase = asking.prepared(saved.round, 0, (), {}, {}, saved.at)
        phase.opened -= self._at - saved.at
        down: SentDown = sent[f"sent-{saved.sent}"]
        form = tuple(msgspec.json.decode(down.form, type=list[Field]))
        data = down.body.numpy().data
        cut = sum(f.size for f in form[: down.enrol])
        agreed = asking.experiment.agreed
        seen = asking.experiment.down.decode(
            method.exchanges[0].down, form[down.enrol :], data[cut:], agreed, fill=agreed
        )
        phase.seen[client] = seen
        phase.out |= asking.faults.out(phase.round, 0, [client])
        body, check = Body([data]), bytes.fromhex(saved.sent)
        job = Job(
            client, form, body, check, start=saved.start, state=state, keep=keep, enrol=down.enrol
        )
        task = self._entered(phase, saved.at, asking.struck(phase, job), saved.enrolled)
        task.bytes = saved.bytes
        return task

    def _entered(self, phase: Phase, at: float, job: Job, enrolled: bool) -> PendingTask:
        client = job.client
        spooled = phase.spooled.get((client, "train"))
        task = self[client] = PendingTask(
            phase.round,
            at,
            msgspec.structs.replace(job, round=phase.round),
            phase.seen[client],
            phase.down.get(client, 0),
            enrolled,
            at + phase.leaves.get(client, math.inf),
            out=phase.out.get(client, ""),
            wanted=spooled is None and client not in phase.out,
            reply=spooled,
            verdict=phase.spooled.get((client, "evaluate")),
        )
        return task

    def saved(
        self, training: Mapping[int, int], before: Mapping[str, State]
    ) -> tuple[dict[int, UnderWay], dict[str, State]]:
        """(those of clients that train, what a checkpoint keeps of what went down with them, by
        name). before: what it kept until now.
        """
        under_way = {client: self[client].saved() for client in sorted(training)}
        sent: dict[str, State] = {}
        for client in under_way:
            job = self[client].job
            name = f"sent-{job.check.hex()}"
            if name in before:
                sent[name] = before[name]
            elif name not in sent:
                form = msgspec.json.encode(list(job.form)).decode()
                body = torch.frombuffer(bytearray(job.body.whole()), dtype=torch.uint8)
                sent[name] = SentDown(form=form, enrol=job.enrol, body=body)  # type: ignore[call-arg]
        return under_way, sent
