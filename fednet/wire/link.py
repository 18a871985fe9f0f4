"""The choke point: the one place that encodes, bills and sends, and that decodes and bills what comes.

`send` is handed in, so the same link serves every transport. Accounts are named (conn, direction, type, key): parts and
their announcement share one, the pulls that fetch them another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fednet.wire import messages as m
from fednet.wire.ledger import Direction, Ledger


class Link:
    """One side of all connections of a process. side: "server" or "client"."""

    def __init__(self, side: str, send: Callable[[bytes, Sequence[Any]], bool], framing: Callable[[int], int], ledger: Ledger) -> None:
        self.out: Direction = "down" if side == "server" else "up"
        self.back: Direction = "up" if side == "server" else "down"
        self._decode = m.decode_from_client if side == "server" else m.decode_from_server
        self._send = send
        self._framing = framing  # bytes on the wire of a frame of n bytes
        self.ledger = ledger
        self.forms: dict[tuple[bytes, Direction, m.Key], Sequence[m.Field]] = {}

    def send(self, conn: bytes, message: m.Message, body: memoryview | None = None) -> bool:
        """Encodes, bills and sends. False where the connection is gone (nothing is billed then)."""
        header = m.encode(message)
        frames = [header] if body is None else [header, body]
        if not self._send(conn, frames):
            return False
        self._bill(conn, self.out, message, frames)
        return True

    def receive(self, conn: bytes, frames: Sequence[Any]) -> tuple[m.Message, memoryview | None]:
        """Decodes and bills. What cannot be decoded is billed as refused, and raises RemoteProtocolError."""
        try:
            message, body = self._decode(frames)
        except Exception:
            account = self.ledger.account((conn, self.back, "refused"), self.back, "refused")
            account.add({}, sum(self._framing(len(f)) for f in frames), 0)
            self.ledger.settle((conn, self.back, "refused"), False)
            raise
        self._bill(conn, self.back, message, frames)
        return message, body

    def _bill(self, conn: bytes, direction: Direction, message: m.Message, frames: Sequence[Any]) -> None:
        tag = str(message.__struct_config__.tag)
        key: m.Key | None = getattr(message, "key", None)
        framing = sum(self._framing(len(f)) for f in frames)
        body = len(frames[1]) if len(frames) == 2 else 0
        if key is None:
            self.ledger.account((conn, direction, tag), direction, tag, client=getattr(message, "client", -1)).add({}, framing, 0)
            return
        if isinstance(message, (m.Task, m.Reply)):
            self.forms[(conn, direction, key)] = message.form
            start = 0
        else:
            start = message.index * m.PART if isinstance(message, m.Part) else 0
        # A part belongs to the announcement's row; an evaluation's rows are told by their type.
        name = {"part": "task" if direction == "down" else "reply"}.get(tag, tag)
        account = self.ledger.account((conn, direction, name, key), direction, "evaluate" if key.purpose == "evaluate" and name != "pull" else name,
                                      client=key.client, round=key.round, phase=key.phase, attempt=key.attempt, purpose=key.purpose)
        kinds, raw = split(self.forms.get((conn, direction, key), ()), start, start + body) if body else ({}, 0)
        account.add(kinds, framing - sum(kinds.values()), raw)

    def settle(self, conn: bytes, direction: Direction, key: m.Key, useful: bool, **more: Any) -> None:
        """Writes the row of a task's or reply's payload, and that of the pulls that fetched it."""
        name = "task" if direction == "down" else "reply"
        other: Direction = "up" if direction == "down" else "down"
        self.ledger.settle((conn, direction, name, key), useful, **more)
        self.ledger.settle((conn, other, "pull", key), useful)
        self.forms.pop((conn, direction, key), None)

    def settle_plain(self, conn: bytes, direction: Direction, tag: str, **more: Any) -> None:
        """Writes the row of a message that stands alone: joins, refusals, heartbeats."""
        self.ledger.settle((conn, direction, tag), False, **more)


def split(form: Sequence[m.Field], start: int, end: int) -> tuple[dict[str, int], int]:
    """Bytes by kind of the range [start, end) of a payload of that form, and their share of the raw bytes."""
    kinds: dict[str, int] = {}
    raw, at = 0, 0
    for f in form:
        inside = max(0, min(end, at + f.size) - max(start, at))
        if inside:
            kinds[f.kind] = kinds.get(f.kind, 0) + inside
            low, high = max(start, at) - at, min(end, at + f.size) - at
            raw += f.raw * high // f.size - f.raw * low // f.size  # over all parts this sums to f.raw
        at += f.size
    return kinds, raw


def bytes_by_kind(form: Sequence[m.Field]) -> Mapping[str, int]:
    return split(form, 0, sum(f.size for f in form))[0]
