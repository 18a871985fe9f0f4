"""Planned faults of one task, acted out around the worker that does it and around what is sent of
its reply. Where none is planned, both pass as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from fednet.errors import FednetError
from fednet.protocol import client as p
from fednet.wire import messages as m
from fednet.wire.codec import Body

if TYPE_CHECKING:
    from fednet.client.worker import EncodedReply, Step

    Work = Callable[[Step], EncodedReply]


class Silenced(FednetError):
    """The task is not answered, and the server is not notified."""


@dataclass(frozen=True, slots=True)
class PlannedFaults:
    """The faults of one task that this client acts out."""

    amounts: Mapping[str, float] = field(default_factory=dict)
    """By kind; see `faults.schedule` in the configuration for the units."""

    def around(self, work: Work, crash: Callable[[], NoReturn]) -> Work:
        """The same work with the faults that strike while it is done. crash() ends the process, or
        raises.
        """

        def struck(step: Step) -> EncodedReply:
            if "drop_before_training" in self.amounts:
                raise Silenced("dropped before training, as planned")

            def crashing(stage: str, done: int, of: int) -> None:
                step(stage, done, of)
                if 2 * done >= of > 0:
                    crash()

            if "crash" not in self.amounts:
                return self._spoilt(work(step))
            work(crashing)
            crash()  # at the end of a training without steps

        return struck if self.amounts else work

    def _spoilt(self, reply: EncodedReply) -> EncodedReply:
        if "corrupt" not in self.amounts or not reply.body.size:
            return reply
        copy = bytearray(reply.body.whole())
        copy[len(copy) // 2] ^= 0xFF
        return replace(reply, body=Body([copy]))

    def due(self, began: float) -> float:
        """When the reply of a task may be sent that is done now. began: when it was begun; both on
        the monotonic clock.
        """
        if not self.amounts:
            return 0.0
        now = time.monotonic()
        took_s = now - began
        lasts_s = self.amounts.get("slow", 1.0) * max(took_s, self.amounts.get("pace", 0.0))
        return now + self.amounts.get("delay", 0.0) + lasts_s - took_s

    @property
    def silent(self) -> bool:
        """Whether nothing of the reply is sent."""
        return "drop_before_sending" in self.amounts

    @property
    def share(self) -> float | None:
        """Of the upload that is sent before this client falls silent; None: all of it."""
        return self.amounts.get("drop_during_upload")

    def apply_to(self, instructions: Sequence[p.Instruction]) -> list[p.Instruction]:
        """What is sent in place of these messages of a reply."""
        found = list(instructions)
        if "duplicate" in self.amounts:
            found += [i for i in found if isinstance(i, p.Out) and isinstance(i.message, m.Reply)]
        return found

    def after(self) -> list[p.Instruction]:
        """What follows on them."""
        return [p.Reconnect()] if "disconnect" in self.amounts else []
