"""What the messages of one wake-up lead to, held back until it is written down: once for all of
them, and in the order in which a server that comes after this one relies on it.

    rows of the books  ->  seals of the replies  ->  messages leave  ->  the rounds are told
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable

from fednet.protocol.instructions import Resolved, Send
from fednet.server.spool import Spool, Spooled
from fednet.wire import messages as m
from fednet.wire.link import Link, Outgoing

# Messages of a wake-up that are dealt with before anything leaves; and of those that a round's
# opening leads to, how many leave before it is looked for what has come: the first clients need not
# wait for the last ones' tasks, and what is known of one is still at hand when its reply comes.
TOGETHER = 64
ALONE_S = 0.02  # how long the rounds are left alone, at most
MUCH = 1024  # replies that the rounds are told of though more messages have come
LARGE_BYTES = 1 << 16  # of a body: such a message is dealt with by itself, its sender waits

Payload = tuple[bytes, m.Key]  # a connection, and a task
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
        self._later: deque[tuple[Send, Payload | None]] = deque()  # not in the books yet
        self._outgoing: list[tuple[Outgoing, Payload | None]] = []
        self._keys = Counter[Payload]()  # of the messages of both
        self._resolved: list[Resolution] = []
        self._sealed: list[Spooled] = []
        self._heard = 0
        self.tasks = False  # whether one is among what has left since this was set to False

    def send(self, send: Send) -> None:
        """Messages leave in the order of these calls, and are in the books before."""
        key = getattr(send.message, "key", None)
        of = None if key is None else (send.conn, key)
        if of is not None:
            self._keys[of] += 1
        self._later.append((send, of))
        if len(self._later) == 1 and len(self._outgoing) < TOGETHER:
            self._compose(1)

    def _compose(self, most: int) -> None:
        while self._later and most:
            (send, of), most = self._later.popleft(), most - 1
            out = self._link.compose(send.conn, send.message, send.body)
            self._outgoing.append((out, of))
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
    def unfinished(self) -> bool:
        """Whether there is something to send, or to tell the rounds, though nothing may come."""
        return bool(self._resolved or self._later)

    def leave(self) -> None:
        """Sends all messages, once their bytes are in the books."""
        self._compose(len(self._later))
        self._leave()

    def _leave(self) -> None:
        if self._outgoing:
            self._flush()
            outgoing, self._outgoing = self._outgoing, []
            for out, of in outgoing:
                self._link.leave(out)
                if of is not None:
                    self._keys[of] -= 1
                    if not self._keys[of]:
                        del self._keys[of]

    def conclude(self, more: bool = False) -> None:
        """All that the wake-up led to is written down, and has left; and it is told. more: only
        where that is much already. More may have come meanwhile, and what the rounds make of it
        takes turns with whoever reads that, at every turn for a fifth of the time of both.
        """
        self._heard = 0
        self._compose(TOGETHER - len(self._outgoing))
        # What was spent stays in the book, whatever becomes of this process. Before the seals: a
        # reply that a resume folds is in the books.
        self._flush()
        self._spool.flush()
        self._leave()
        sealed, self._sealed = self._sealed, []
        for reply in sealed:
            if reply.key.purpose == "train":
                self._at("receiving", reply.key.round)
        if len(self._resolved) >= (MUCH if more else 1):
            resolved, self._resolved = self._resolved, []
            self._tell(resolved)


class Told:
    """What the rounds are told, until they ask. inline: they and who tells are one thread."""

    def __init__(self, inline: bool) -> None:
        self._inline, self._several = inline, False
        # Not a SimpleQueue: a signal that takes it beyond its timeout makes it wait for ever.
        self._found: queue.Queue[list[Resolution] | BaseException] = queue.Queue()
        self._asked = threading.Event()

    def put(self, found: list[Resolution] | BaseException) -> None:
        """Never waits: the rounds may be waiting for what is done after it."""
        several = isinstance(found, list) and len(found) > 1 and not self._inline
        self._several = several and self._found.empty()
        self._asked.clear()
        self._found.put(found)

    def leave_alone(self) -> None:
        """Two threads that share one interpreter lose to each other at every turn what it takes to
        fold a small reply: with several, the rounds are left alone until they ask again, unless
        they are at something else. To be called with no command of theirs left to be done.
        """
        if self._several:
            self._several = False
            self._asked.wait(ALONE_S)

    def get(self, timeout_s: float) -> list[Resolution] | BaseException | None:
        """What is next, or None after so long."""
        if self._found.empty():
            self.ask()
        try:
            return self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def ask(self) -> None:
        """The rounds are done with what they were told, or have a command."""
        self._asked.set()

    def empty(self) -> bool:
        return self._found.empty()
