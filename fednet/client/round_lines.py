"""What a client process tells its user of each round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from fednet import ids
from fednet.errors import log_line
from fednet.records import mb
from fednet.wire import messages as m
from fednet.wire.body import Body

PAUSE_S = 1.0  # after so long without a task the sentence on a round is printed


class RoundLines:
    """Says a sentence for each round (`round 3: trained client 0 on 120 samples in 0.4 s, sent 0.18
    MB`), for each evaluation, and for each task that failed.

    The server sends tasks one after the other, so a sentence is said when a task of another round
    comes, or none for PAUSE_S.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda line: None
        # See `Prepared`.
        self.main_exchange = 0
        self.samples: Mapping[int, int] = {}
        self._of = (0, "")  # round and purpose
        self._began = self._ended = 0.0
        # Of the replies since the last sentence, without their payloads.
        self._clients: set[int] = set()
        self._trained: set[int] = set()
        self._sent = 0  # bytes

    def began(self, key: m.Key) -> None:
        here = key.round, key.purpose
        if here != self._of:
            self.over()
            self._of = here
            self._began = time.monotonic()

    def add_answers(self, answers: Iterable[tuple[m.Reply | m.Failed, Body]]) -> None:
        for message, _ in answers:
            key = message.key
            if isinstance(message, m.Failed):
                failed = f"round {key.round}: client {key.client} failed: {message.reason}"
                self.say(log_line(failed))
                continue
            self._clients.add(key.client)
            self._sent += message.size
            if key.purpose == "train" and key.phase == self.main_exchange:
                self._trained.add(key.client)
        self._ended = time.monotonic()

    def over(self, pause_s: float = 0.0) -> None:
        """Says the sentence, if there is one, and the last answer was so long ago."""
        if not self._clients or time.monotonic() - self._ended < pause_s:
            return
        round, purpose = self._of
        what = "evaluated" if purpose == "evaluate" else "answered for"
        clients = self._clients
        on = ""
        if self._trained:
            what = "trained"
            clients = self._trained
            on = f" on {sum(self.samples[client] for client in clients)} samples"
        named = f"client{'s' if len(clients) > 1 else ''} {ids.as_text(clients)}"
        if len(named) > 70:
            named = f"{len(clients)} clients"
        took = f"{self._ended - self._began:.1f} s"
        self.say(log_line(f"round {round}: {what} {named}{on} in {took}, sent {mb(self._sent)}"))
        self._clients = set()
        self._trained = set()
        self._sent = 0
        self._of = (0, "")
