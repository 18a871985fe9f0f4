"""The connections of a server: who they are as far as that is known, how many there may be, of
each and of all, and what the kernel counted of them.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable

from fednet import descriptors
from fednet.transport import strangers
from fednet.transport.base import Frames, pause
from fednet.transport.framing import connection_bytes
from fednet.transport.kernel import KernelSocket

RESERVED = 256
"""Descriptors kept for files; a quarter of all where there are fewer than four times as many."""

PAST = 4096
"""Connections that have ended whose counts are kept apart; those of earlier ones are added up."""

WATCH_S = 0.25
"""How often all connections are looked at for messages that never end. There is no event for it:
nothing arrives."""

STALLED_S = 2.0
"""For how long a peer's end may be known to the kernel alone. libzmq 4.3.5 reads no further once a
message could not be decrypted, and never reports the end of that connection; of any other it does
at once."""

Refuse = Callable[[str, str, "Connection"], None]
"""(what, reason, connection)"""


class Connection:
    """One TCP connection, from when the kernel has it."""

    __slots__ = (
        "conn",
        "fd",
        "kernel",
        "over_at",
        "owner",
        "queue",
        "received",
        "received_then",
        "serial",
        "user",
        "why",
    )

    def __init__(self, serial: int, fd: int) -> None:
        self.serial, self.fd = serial, fd
        self.conn: bytes | None = None  # known from its first message
        self.user: str | None = None
        self.why = ""  # the reason for which this side ended it
        self.owner: str | None = None  # whose it is counted as: a key's, or an address's
        self.kernel: KernelSocket | None = None
        # bytes of its finished messages; as of the last look
        self.received = self.received_then = 0
        self.over_at: float | None = None  # since when its peer is seen to have ended it
        self.queue: deque[Frames] = deque()

    def counts(self) -> tuple[int, int]:
        """(sent, received) so far, as the kernel says; zeros where it does not."""
        found = self.kernel.bytes() if self.kernel is not None else None
        return found if found is not None else (0, 0)

    def peer(self) -> str:
        return self.kernel.peer() if self.kernel is not None else "unknown"

    def address(self) -> str:
        """Without the port."""
        return self.peer().rpartition(":")[0]

    def hang_up(self) -> None:
        if self.kernel is not None:
            self.kernel.hang_up()


class Connections:
    """refuse: told of those that are hung up on. most: connections at a time; None: as many as the
    process may open descriptors, less a reserve. each: of them of one key or, without CURVE, one
    address, as is counted too with CURVE whoever has proved a key and not said a word; None: no
    fewer.

    A connection is a stranger until it has proved a key or, without CURVE, brought a message; a
    guest until `vouch`; and is hung up on for a newer one in this order, the oldest first.
    """

    def __init__(
        self,
        refuse: Refuse,
        curve: bool,
        most: int | None,
        each: int | None,
        max_unfinished_bytes: int,
    ) -> None:
        limit = descriptors.limit()
        room = max(2, limit - descriptors.count() - min(RESERVED, limit // 4))
        self._refuse, self._max_unfinished, self._each = refuse, max_unfinished_bytes, each
        self.room = room if most is None else min(room, most)
        self._most_strangers = min(strangers.MAX_STRANGERS, max(1, self.room // 2))
        # what a server has sent a peer whose handshake is over
        self._proved = connection_bytes(True, "server")[0] if curve else None
        self._serial = itertools.count(1)
        self.links: dict[int, Connection] = {}  # by descriptor: those that stand
        self.conns: dict[bytes, Connection] = {}  # by routing id: those that have spoken
        self.strangers: dict[int, Connection] = {}  # by serial
        self._guests: dict[int, Connection] = {}  # by serial
        self._owned: dict[str, dict[int, Connection]] = {}  # by owner and serial
        self.ended: list[Connection] = []  # what they had sent may still be unread
        self._leaving: set[int] = set()  # serials of those hung up on that libzmq still has
        self._kept = 0  # those with a second descriptor
        self._past: dict[bytes | int, tuple[int, int]] = {}
        self._closing = False  # then all that stand end at once
        self._look_at = self._watch_at = 0.0

    # -- coming and going --------------------------------------------------------------------------
    def accepted(self, fd: int) -> Connection:
        self.disconnected(fd)  # whose end was not told
        self.links[fd] = link = Connection(next(self._serial), fd)
        self.strangers[link.serial] = link
        return link

    def settle(self, fresh: Iterable[Connection]) -> None:
        """Looks at those just accepted that have not gone already, and makes room for them."""
        for link in fresh:
            if self.links.get(link.fd) is link:
                try:
                    link.kernel = KernelSocket(link.fd)
                except OSError:
                    continue  # gone already, and its descriptor perhaps a file's now
                if self._proved is None:
                    self._own(link, link.address())
        while self._used() > self.room and (oldest := self._oldest()) is not None:
            self._drop(oldest, "connections", f"more than {self.room} descriptors of connections")

    def _used(self) -> int:
        return len(self.links) + self._kept - len(self._leaving)

    def _oldest(self) -> Connection | None:
        """Whoever is hung up on for the newest, who may be a guest in a moment."""
        if len(self.strangers) > 1 or not self._guests:
            return next(iter(self.strangers.values()), None)
        return next(iter(self._guests.values()))

    def _own(self, link: Connection, owner: str) -> None:
        """Counts it as one of that owner's. Of too many, whom nobody has vouched for is hung up on,
        the oldest first.
        """
        self._disown(link)
        if link.serial in self._leaving:
            return
        link.owner = owner
        owned = self._owned.setdefault(owner, {})
        owned[link.serial] = link
        if self._each is not None and len(owned) > self._each:
            unknown = (
                other
                for serial, other in owned.items()
                if serial in self.strangers or serial in self._guests
            )
            reason = f"more than {self._each} connections of one key or address"
            self._drop(next(unknown, link), "each", reason)

    def _disown(self, link: Connection) -> None:
        if link.owner is not None:
            owned = self._owned.get(link.owner, {})
            owned.pop(link.serial, None)
            if not owned:
                self._owned.pop(link.owner, None)
            link.owner = None

    def disconnected(self, fd: int) -> None:
        link = self.links.pop(fd, None)
        if link is not None:
            self._disown(link)
            self.ended.append(link)
            self._leaving.discard(link.serial)
            self.strangers.pop(link.serial, None)
            self._guests.pop(link.serial, None)

    def stranger(self, fd: int) -> Connection | None:
        """The connection on that descriptor, where no message of it is known."""
        link = self.links.get(fd)
        return link if link is not None and link.conn is None else None

    def all_ended(self) -> None:
        for fd in list(self.links):
            self.disconnected(fd)

    def spoke(self, link: Connection, conn: bytes, user: str | None) -> None:
        """Its first message came, by which it is known from now on."""
        link.conn, link.user = conn, user
        self.conns[conn] = link
        self._proven(link)
        if user is not None:
            self._own(link, user)

    def vouch(self, conn: bytes) -> None:
        link = self.conns.get(conn)
        if link is not None:
            self._guests.pop(link.serial, None)

    def _proven(self, link: Connection) -> None:
        if self.strangers.pop(link.serial, None) is None:
            return
        self._guests[link.serial] = link
        if link.kernel is not None and self._used() < self.room * 3 // 4:
            try:
                link.kernel.keep()
                self._kept += 1
            except OSError:
                pass  # its last bytes go uncounted: no reason to hang up on it

    def end(self, link: Connection) -> tuple[int, int] | None:
        """All that it had sent has been read. Returns (sent, received), as far as they are
        known.
        """
        if link.conn is not None and self.conns.get(link.conn) is link:
            del self.conns[link.conn]
        self._kept -= link.kernel is not None and link.kernel.kept
        counts = link.kernel.close() if link.kernel is not None else None
        link.kernel = None
        if counts is not None:
            self._past[link.conn or link.serial] = counts
        if len(self._past) > PAST and not self._closing:
            first = next(name for name in self._past if name != 0)
            sent, received = self._past.pop(first)
            before = self._past.get(0, (0, 0))
            self._past[0] = before[0] + sent, before[1] + received
        return counts

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        now = dict(self._past)
        for link in (*self.links.values(), *self.ended):
            counts = link.kernel.bytes() if link.kernel is not None else None
            if counts is not None:
                now[link.conn or link.serial] = counts
        return now

    def close(self) -> None:
        self._closing = True
        for link in (*self.links.values(), *self.ended):
            self.end(link)
        for held in (
            self.links,
            self.conns,
            self.strangers,
            self._guests,
            self._owned,
            self.ended,
        ):
            held.clear()

    # -- looking at them ---------------------------------------------------------------------------
    def wait(self) -> float | None:
        """How long until the next look; None: there is nobody to look at."""
        if not self.links:
            return None
        due = min(self._look_at, self._watch_at) if self.strangers else self._watch_at
        return max(0.0, due - time.monotonic())

    def look(self) -> None:
        """Hangs up on strangers who are too many or too loud, and on messages without an end; not
        before it is time to.
        """
        now, began = time.monotonic(), time.thread_time()
        if self.strangers and now >= self._look_at:
            self._look()
            self._look_at = time.monotonic() + pause(strangers.LOOK_S, began)
        if now >= self._watch_at:
            began = time.thread_time()
            self._watch()
            self._watch_at = time.monotonic() + pause(WATCH_S, began)

    def _look(self) -> None:
        seen = []
        for link in list(self.strangers.values()):
            if link.serial in self._leaving:
                continue  # for one that was looked at before it
            sent, received = link.counts()
            if self._proved is not None and sent >= self._proved:
                self._proven(link)
                self._own(link, link.address())
            else:
                seen.append((link, received))
        for link, reason in strangers.unwelcome(seen, self._most_strangers):
            self._drop(link, "stranger", reason)

    def _watch(self) -> None:
        now = time.monotonic()
        for link in list(self.links.values()):
            if link.serial in self.strangers:
                continue
            if link.received != link.received_then:
                # It has finished one since, so it is not amid an endless one; and to ask the kernel
                # about a busy connection can take a millisecond.
                link.received_then = link.received
            elif link.counts()[1] - link.received > self._max_unfinished:
                reason = f"more than {self._max_unfinished} bytes of no finished message"
                self._refuse("endless", reason, link)
                link.hang_up()
            elif link.kernel is not None and link.kernel.over:
                link.over_at = link.over_at or now
                if now - link.over_at >= STALLED_S:
                    self.disconnected(link.fd)

    def _drop(self, link: Connection, what: str, reason: str) -> None:
        """It stands among the connections until libzmq tells of its end."""
        self._disown(link)
        self._leaving.add(link.serial)
        self.strangers.pop(link.serial, None)
        self._guests.pop(link.serial, None)
        self._refuse(what, reason, link)
        link.hang_up()
