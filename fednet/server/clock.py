"""The virtual clock: nothing sleeps. A message takes the time of its bytes over its client's link,
and training the time of its steps.

All clients of an exchange start together, so the configuration alone decides when each of them is
over, the same in every repetition.
"""

from __future__ import annotations

import math

from msgspec import structs

from fednet import world as worlds
from fednet.config import Config
from fednet.experiment import links
from fednet.protocol.tasks import Leaves, TaskSpec, message_of
from fednet.server.inbox import ReceivedReply
from fednet.transport.framing import framing
from fednet.transport.shaped import LinkShape
from fednet.wire import messages as m
from fednet.wire.frames import encode


class VirtualClock:
    """Computes times from bytes, links and steps. world: who is there when, and how fast devices
    are.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.world = worlds.of(config)
        self._links: dict[int, tuple[LinkShape, float]] = {}

    def _link(self, client: int) -> tuple[LinkShape, float]:
        """Returns a client's link, and the milliseconds of its training step."""
        if client not in self._links:
            if self.world.step_s is not None:
                step_ms = self.world.step_s[client] * 1e3
            else:
                step_ms = float(links.of(self.config, client).step_ms or 0.0)
            self._links[client] = links.shape(self.config, client), step_ms
        return self._links[client]

    def _training(self, client: int, steps: int, slow: float, delay: float) -> float:
        """Returns the seconds that a client trains. slow, delay: planned faults."""
        return steps * slow * self._link(client)[1] / 1e3 + delay

    def seconds(
        self,
        client: int,
        steps: int,
        down: int,
        up: int,
        slow: float = 1.0,
        delay: float = 0.0,
        at: float = 0.0,
    ) -> dict[str, float]:
        """Returns the seconds from the task, sent at second `at` of the run, to the whole reply,
        for one client in one exchange: sending, both ways, and training. down, up: all bytes of the
        messages, as the ledger has them; slow, delay: planned faults.
        """
        link = self._link(client)[0]
        training = self._training(client, steps, slow, delay)
        came = link.time(down, "down", at)
        return {
            "sending": came + link.time(up, "up", at + came + training),
            "training": training,
        }

    def leaving(
        self,
        client: int,
        steps: int,
        down: int,
        at: float,
        slow: float = 1.0,
        delay: float = 0.0,
    ) -> Leaves | None:
        """Returns how many parts of its task or of its reply have been sent when the client leaves;
        the part during which it leaves counts. None if it stays, or its link has no rate.
        """
        until = self.world.until(client, at)
        stays = 0.0 if until is None else until - at
        link = self._link(client)[0]
        came = link.bytes_leaving("down", at, stays)
        if came < down:
            return Leaves(down=math.ceil(came / m.PART))
        begins = link.time(down, "down", at) + self._training(client, steps, slow, delay)
        went = link.bytes_leaving("up", at + begins, stays - begins)
        return None if math.isinf(went) else Leaves(up=math.ceil(went))

    @property
    def patience(self) -> float:
        """Returns how many seconds a lost client is waited for."""
        section = self.config.round
        waits = [s for s in (section.deadline, section.lost.closed_s()) if s is not None]
        return min(waits, default=0.0)


def crossing(message: m.Task | m.Reply) -> int:
    """Returns all bytes of a message with its payload, as the ledger counts them without CURVE: the
    header, and the body beside it or in parts with a header each. Other traffic, such as the
    requests for parts, is small and takes no time here.
    """
    total = framing(len(encode(message)))
    for index in range(-(-message.size // m.PART)):
        size = min(m.PART, message.size - index * m.PART)
        total += framing(size)
        if message.size > m.BESIDE:
            total += framing(
                len(encode(m.Part(run=message.run, inc=message.inc, key=message.key, index=index)))
            )
    return total


def task_bytes(run: str, key: m.Key, spec: TaskSpec) -> int:
    """Returns the bytes of a task as the first server of the run sends it for the first time;
    without `keep`, which depends on the last checkpoint, and so on crashes.
    """
    return crossing(message_of(spec, key, run, 1))


def reply_bytes(reply: ReceivedReply) -> int:
    """Returns the bytes of a reply, header and payload, as it was sent."""
    return crossing(structs.replace(reply.message, run=" " * 16, inc=1))
