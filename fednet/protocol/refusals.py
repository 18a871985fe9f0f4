"""What a peer is told that sends what cannot be used, and when it is hung up on."""

from __future__ import annotations

from collections.abc import Callable

from fednet.protocol.rules import STRIKES, TOLD, Forget, Note
from fednet.protocol.turn import Turn
from fednet.wire import messages as m


class Refusals:
    """count: of all. worker_of(conn): the name of the worker behind a connection, or ""."""

    def __init__(self, turn: Turn, worker_of: Callable[[bytes], str]) -> None:
        self._turn, self._worker_of = turn, worker_of
        self.count = 0
        self.strikes: dict[
            bytes, int
        ] = {}  # by connection: messages in this phase that belong to nothing

    def note(self, what: str, reason: str, worker: str, **more: object) -> None:
        """Counts a refusal."""
        self.count += 1
        self._turn.say(
            Note(
                "refused",
                {"what": what, **more, "reason": m.clean(reason), "worker": worker},
            )
        )

    def tell(
        self,
        conn: bytes,
        reason: str,
        what: str = "frame",
        final: bool = False,
        unread: bool = False,
    ) -> None:
        """Counts a refusal; the sender is told of the first ones."""
        self.note(what, reason, self._worker_of(conn))
        if self.strikes.get(conn, 0) < TOLD:
            turn = self._turn
            turn.send(
                conn,
                m.Refuse(
                    run=turn.run,
                    inc=turn.incarnation,
                    reason=m.clean(reason),
                    final=final,
                    unread=unread,
                ),
            )

    def strike(self, conn: bytes) -> None:
        """A message that belongs to nothing: after many, the connection is hung up on."""
        self.strikes[conn] = self.strikes.get(conn, 0) + 1
        if self.strikes[conn] == STRIKES:
            self._turn.say(
                Note(
                    "hung_up",
                    {
                        "reason": f"{STRIKES} messages that belong to nothing",
                        "worker": self._worker_of(conn),
                    },
                ),
                Forget(conn, hang_up=True),
            )
