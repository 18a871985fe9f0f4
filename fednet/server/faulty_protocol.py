"""The planned faults of clients around the server's protocol, which knows nothing of them.

The server plans which fault strikes whom. So it sends them with the tasks (`client/faults.py` acts
them out), and knows beforehand which tasks bring no reply, or only a part of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fednet.protocol.server import ServerProtocol
from fednet.protocol.table import WITH_WORKER, TaskEvent, TaskState
from fednet.protocol.tasks import TaskSpec, TrackedTask
from fednet.protocol.workers import ClientProcess
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.messages import Fault


class FaultySpec(TaskSpec):
    """What one client is asked to do, and what disturbs it."""

    faults: Sequence[Fault] = ()
    """Planned; sent with the first hand-out."""
    lost: str = ""
    """The kind of the fault among these by which the reply is lost; "" if none loses it."""
    pace: Sequence[Fault] = ()
    """How long the client's device takes, at each hand-out."""

    def cut(self, size: int) -> int | None:
        """The bytes after which the upload of a reply of `size` bytes is cut; None: it is not."""
        for fault in self.faults:
            if fault.kind == self.lost == "drop_during_upload":
                return fault.cut(size)
        return None


class FaultyServerProtocol(ServerProtocol):
    """All its tasks are `FaultySpec`. One whose reply will be lost is handed out once. The server
    waits for it as long as for a client whose connection closed; its worker does the tasks of other
    clients meanwhile.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._struck: dict[int, int] = {}  # by client: the place of the task that had its faults

    def _message(self, t: TrackedTask) -> m.Task:
        spec = _spec(t)
        faults = list(spec.pace)
        if self._struck.get(spec.client) != t.place:
            self._struck[spec.client] = t.place
            faults = [*spec.faults, *faults]
            for f in spec.faults:
                self._note(
                    "fault",
                    round=t.key.round,
                    client=spec.client,
                    kind=f.kind,
                    amount=f.amount,
                    worker=t.worker,
                )
        return msgspec.structs.replace(super()._message(t), faults=faults)

    # -- what comes of an upload that is cut -------------------------------------------------------
    def _reply(self, conn: bytes, worker: ClientProcess, reply: m.Reply, body: Body | None) -> str:
        """A body that ends where it is to be cut counts as the beginning of an upload."""
        t = self._current(reply.key)
        handed = t is not None and t.worker == worker.name and t.status is TaskState.HANDED
        if t is None or not handed or body is None or len(body) != _spec(t).cut(reply.size):
            return super()._reply(conn, worker, reply, body)
        self._check_declared(t, reply)
        self._announced(t, conn, reply)  # of which nothing more is asked for
        self._assign(worker)
        return ""

    def _part(self, conn: bytes, part: m.Part, body: Body | None) -> str:
        """After the part in which an upload is to be cut no other is asked for."""
        t = self._current(part.key)
        coming = t is not None and t.status is TaskState.ARRIVING and t.up_conn == conn
        if t is None or not coming or t.up is None or body is None:
            return super()._part(conn, part, body)
        in_turn = part.index == t.up.got < t.up.granted
        ends = part.index * self.part + len(body) == _spec(t).cut(t.up.size)
        if not in_turn or not ends:
            return super()._part(conn, part, body)
        t.heard = self.now
        t.up.granted = t.up.got  # the rest is not asked for
        self._wanting.pop(t.spec.client, None)
        self._grant()
        return ""

    # -- a task without a reply --------------------------------------------------------------------
    def _why_dropped(self, t: TrackedTask) -> str:
        lost = _spec(t).lost
        return f"lost: {lost}" if lost else super()._why_dropped(t)

    def _expire(self) -> None:
        super()._expire()
        for t in self.open_tasks():
            lost = _spec(t).lost
            running = t.status in WITH_WORKER and t.running
            if lost and running and self._too_long(t.heard, self.rules.closed):
                self._change(t, TaskEvent.CANCELLED, f"lost: {lost}")


def _spec(t: TrackedTask) -> FaultySpec:
    assert isinstance(t.spec, FaultySpec)
    return t.spec
