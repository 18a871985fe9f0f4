"""What a client process says of each round: `round 3: trained client 0 on 120 samples in 0.4 s,
sent 0.18 MB`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from fednet import ids
from fednet.errors import log_line
from fednet.records import mb
from fednet.wire import messages as m

if TYPE_CHECKING:
    from fednet.client.tasks import Done

LONGEST = 60  # characters of a list of clients; a longer one is only counted
PAUSE_S = 1.0  # after so long without a task this process's part of a round counts as done


class RoundLines:
    """Says a sentence for each round, for each evaluation, and for each task that failed.

    The server sends tasks one after the other, so a sentence is said when a task of another round
    comes, or none for PAUSE_S.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda line: None
        self._of: tuple[int, str] | None = None  # round and purpose
        self._began = self._ended = 0.0
        # Of the replies since the last sentence, without their payloads.
        self._clients: set[int] = set()
        self._samples: dict[int, int] = {}  # by client that trained
        self._sent = 0  # bytes

    def began(self, key: m.Key) -> None:
        """Notes that a task has come."""
        here = key.round, key.purpose
        if here != self._of:
            self.over()
            self._of, self._began = here, time.monotonic()

    def answered(self, done: Done) -> None:
        key = done.given.task.key
        if done.failed is not None:
            failed = f"round {key.round}: client {key.client} failed: {done.failed.reason}"
            self.say(log_line(failed))
        for outgoing in done.replies:
            self._clients.add(key.client)
            self._sent += outgoing.reply.size
            if outgoing.samples is not None:
                self._samples[key.client] = outgoing.samples
        self._ended = time.monotonic()

    def paused(self) -> None:
        """Notes that no task is being done here."""
        if self._clients and time.monotonic() - self._ended > PAUSE_S:
            self.over()

    def over(self) -> None:
        """Says what was done since the last sentence."""
        if not self._clients or self._of is None:
            return
        round, purpose = self._of
        what = "answered for"
        clients: Collection[int] = self._clients
        if purpose == "evaluate":
            what = "evaluated"
        elif self._samples:
            what = "trained"
            clients = self._samples
        on = f" on {sum(self._samples.values())} samples" if self._samples else ""
        took = f"{self._ended - self._began:.1f} s"
        sent = mb(self._sent)
        self.say(log_line(f"round {round}: {what} {_named(clients)}{on} in {took}, sent {sent}"))
        self._clients, self._samples, self._sent = set(), {}, 0
        self._of = None


def _named(clients: Collection[int]) -> str:
    text = ids.as_text(clients)
    if len(text) > LONGEST:
        return f"{len(clients)} clients"
    return f"client{'s' if len(clients) > 1 else ''} {text}"
