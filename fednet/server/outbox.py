"""What the messages of one wake-up lead to, held back until it is written down: once for all of
them, and in the order in which a server that comes after this one relies on it.

    rows of the books  ->  seals of the replies  ->  messages leave  ->  the rounds are told
"""

from __future__ import annotations

from collections.abc import Callable

from fednet.protocol.rules import Resolved, Send
from fednet.server.spool import Spool, Spooled
from fednet.wire import messages as m
from fednet.wire.link import Link, Outgoing

TOGETHER = 64  # messages of a wake-up that are dealt with before anything leaves
MUCH = 1024  # replies that the rounds are told of though more messages have come
LARGE_BYTES = 1 << 16  # of a body: such a message is dealt with by itself, its sender waits

Resolution = tuple[tuple[int, int, str], Resolved]  # of a phase


class Outbox:
    """flush(): what is in the books is with the operating system. tell(what): to the rounds. at:
    see `ServerIO`.
    """

    def __init__(
        self,
        link: Link,
        spool: Spool,
        flush: Callable[[], object],
        tell: Callable[[list[Resolution]], None],
        at: Callable[[str, int], None],
    ) -> None:
        self._link, self._spool, self._flush, self._tell, self._at = link, spool, flush, tell, at
        self._outgoing: list[Outgoing] = []
        self._keys: set[tuple[bytes, m.Key]] = set()  # of payloads that have not left
        self._resolved: list[Resolution] = []
        self._sealed: list[Spooled] = []
        self._heard = 0
        self.tasks = False  # whether one is among what has left since this was set to False

    def send(self, send: Send) -> None:
        """The message is in the books from now on."""
        self._outgoing.append(self._link.compose(send.conn, send.message, send.body))
        key = getattr(send.message, "key", None)
        if key is not None:
            self._keys.add((send.conn, key))
        self.tasks = self.tasks or isinstance(send.message, m.Task)

    def seal(self, reply: Spooled) -> None:
        """The reply counts; its row is in the books."""
        self._spool.seal(reply)
        self._sealed.append(reply)

    def resolved(self, phase: tuple[int, int, str], resolved: Resolved) -> None:
        self._resolved.append((phase, resolved))

    def before_settling(self, conn: bytes, key: m.Key) -> None:
        """An account is settled only once its messages have left: what does not is taken off it."""
        if (conn, key) in self._keys:
            self.leave()

    def heard(self, nbytes: int) -> None:
        """A message was dealt with; nbytes: of its body."""
        self._heard += 1
        large = nbytes >= LARGE_BYTES
        if self._heard >= TOGETHER or large:
            self.conclude(more=not large)

    @property
    def untold(self) -> bool:
        """Whether there is something that the rounds are to be told."""
        return bool(self._resolved)

    def leave(self) -> None:
        """Sends what was composed, once its bytes are in the books."""
        if self._outgoing:
            self._flush()
            outgoing, self._outgoing = self._outgoing, []
            self._keys.clear()
            for out in outgoing:
                self._link.leave(out)

    def conclude(self, more: bool = False) -> None:
        """All that the wake-up led to is written down, and has left; and it is told. more: only
        where that is much already. More may have come meanwhile, and what the rounds make of it
        takes turns with whoever reads that, at every turn for a fifth of the time of both.
        """
        self._heard = 0
        # What was spent stays in the book, whatever becomes of this process. Before the seals: a
        # reply that a resume folds is in the books.
        self._flush()
        self._spool.flush()
        self.leave()
        sealed, self._sealed = self._sealed, []
        for reply in sealed:
            if reply.key.purpose == "train":
                self._at("receiving", reply.key.round)
        if len(self._resolved) >= (MUCH if more else 1):
            resolved, self._resolved = self._resolved, []
            self._tell(resolved)
