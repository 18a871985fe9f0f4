"""Planned faults, acted out around the worker that does a task and around what is sent of its
reply. Where none is planned, both pass as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import msgspec

from fednet.errors import FednetError
from fednet.protocol import client as p
from fednet.protocol.table import ClientTaskState
from fednet.wire import messages as m
from fednet.wire.body import Body

if TYPE_CHECKING:
    from fednet.client.stages import Stages

    Work = Callable[[Stages], tuple[m.Reply, Body]]


class Silenced(FednetError):
    """The task is not answered, and the server is not notified."""


@dataclass(frozen=True, slots=True)
class PlannedFaults:
    """The faults of one task that this client acts out."""

    amounts: Mapping[str, float] = field(default_factory=dict)
    """By kind; see `faults.schedule` in the configuration for the units."""

    def around(self, work: Work, crash: Callable[[], NoReturn]) -> Work:
        """The same work with the faults that strike while it is done. crash() does not return."""

        def struck(stages: Stages) -> tuple[m.Reply, Body]:
            if "drop_before_training" in self.amounts:
                raise Silenced("dropped before training, as planned")
            if "crash" not in self.amounts:
                return self._spoilt(*work(stages))
            stages.halfway = crash
            work(stages)
            crash()  # at the end of a training without steps

        return struck if self.amounts else work

    def _spoilt(self, reply: m.Reply, body: Body) -> tuple[m.Reply, Body]:
        if "corrupt" not in self.amounts or not body.size:
            return reply, body
        copy = bytearray(body.to_bytes())
        copy[len(copy) // 2] ^= 0xFF
        return reply, Body([copy])

    def due(self, began: float) -> float:
        """When the reply of a task may be sent that is done now. began: when it was begun; both on
        the monotonic clock.
        """
        now = time.monotonic()
        took_s = now - began
        lasts_s = self.amounts.get("slow", 1.0) * max(took_s, self.amounts.get("pace", 0.0))
        return now + self.amounts.get("delay", 0.0) + lasts_s - took_s

    def silent(self, reply: m.Reply) -> bool:
        """Whether nothing of the reply is sent. An empty one cannot be cut."""
        cut = self.cut(reply.size) is not None
        return "drop_before_sending" in self.amounts or (cut and not reply.size)

    def cut(self, size: int) -> int | None:
        """Bytes of an upload of so many after which this client falls silent; None: it does not."""
        share = self.amounts.get("drop_during_upload")
        return None if share is None else m.Fault("drop_during_upload", share).cut(size)

    def apply_to(self, instructions: Sequence[p.Instruction]) -> list[p.Instruction]:
        """What is sent in place of these messages of a reply."""
        found = list(instructions)
        if "duplicate" in self.amounts:
            found += [i for i in found if isinstance(i, p.Send) and isinstance(i.message, m.Reply)]
        return found

    def after(self) -> list[p.Instruction]:
        """What is done once they are sent."""
        return [p.Reconnect()] if "disconnect" in self.amounts else []


class CutUploads:
    """Uploads that end before they are whole. All that the protocol wants sent passes through here
    before it is recorded. Of an upload that has ended nothing more is sent, and its task is over,
    as if its client had gone.
    """

    def __init__(self, protocol: p.ClientProtocol) -> None:
        self._protocol = protocol
        self._ends: dict[m.Key, int] = {}  # bytes of an upload after which it ends
        self._ended: set[m.Key] = set()

    def plan(self, key: m.Key, end: int) -> None:
        self._ends[key] = end

    def apply_to(self, instructions: list[p.Instruction]) -> list[p.Instruction]:
        """What is done in place of these instructions of the protocol."""
        if not self._ends:
            return instructions
        found: list[p.Instruction] = []
        for i in instructions:
            if isinstance(i, p.ClosePayload) and i.direction == "up" and i.key in self._ends:
                found.append(msgspec.structs.replace(i, whole=False))
            elif isinstance(i, p.Send) and isinstance(i.message, (m.Reply, m.Part)):
                found += self._sent_of(i.message, i.body)
            else:
                found.append(i)
        for key in self._ended:
            found += self._protocol.abandon(key)
        self._ended.clear()
        for key in list(self._ends):
            if self._protocol.task_state(key) is ClientTaskState.GONE:
                del self._ends[key]
        return found

    def _sent_of(self, message: m.Reply | m.Part, body: Body | None) -> list[p.Send]:
        """What is sent of a message of a reply: a part before the end is, one after it is not."""
        key = message.key
        end = self._ends.get(key)
        if end is None or body is None:
            return [p.Send(message, body)]
        if key in self._ended:
            return []
        start = message.index * self._protocol.part if isinstance(message, m.Part) else 0
        if end - start > body.size:
            return [p.Send(message, body)]
        self._ended.add(key)
        if end <= start and isinstance(message, m.Part):
            return []
        return [p.Send(message, body.slice(0, end - start))]
