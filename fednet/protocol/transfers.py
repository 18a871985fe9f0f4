"""How payloads cross: in parts that the receiver asks for, a task's down and its reply's up.

What a peer may make the server hold or send is bounded: a form is checked before a byte of its body
is asked for, parts are granted within a window and a budget, and each part of a task goes out once
a hand-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fednet.errors import RemoteProtocolError
from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import BUDGET, UNUSED_S, Arrived, Store
from fednet.protocol.tasks import Tasks
from fednet.protocol.turn import Turn
from fednet.protocol.window import Receiving
from fednet.protocol.work import WITH_WORKER, Work, WorkStatus
from fednet.wire import messages as m
from fednet.wire.messages import Field, Key

ANSWERED = (WorkStatus.ARRIVING, WorkStatus.ARRIVED, WorkStatus.DONE)


class Transfers:
    """What is done with a message returns why it belongs to nothing that is under way, or "".
    declared(key, form): raises RemoteProtocolError for a reply that is not of the form and size
    that the method declares.
    """

    def __init__(
        self,
        turn: Turn,
        roster: Roster,
        tasks: Tasks,
        declared: Callable[[Key, Sequence[Field]], None],
    ) -> None:
        self._turn, self._roster, self._tasks, self._declared = turn, roster, tasks, declared
        # By client, whose replies come in: those that may be asked for more, in the order in which
        # they came to it; and those that were asked for parts which have not come.
        self._wanting: dict[int, Work] = {}
        self._asked: dict[int, Work] = {}

    # -- up ----------------------------------------------------------------------------------------
    def reply(self, conn: bytes, worker: Worker, reply: m.Reply, body: memoryview | None) -> str:
        """A reply, whole or announced."""
        key, tasks, turn = reply.key, self._tasks, self._turn
        w = tasks.current(key)
        if (
            w is None
            or w.worker != worker.name
            or w.status is not WorkStatus.HANDED
            or reply.inc != turn.incarnation
        ):
            state = "doubled" if w is not None and w.status in ANSWERED else "late"
            turn.note(state, client=key.client, round=key.round, worker=worker.name)
            if reply.size > self._turn.part and state == "late":
                turn.call_off(conn, key)
            return state
        cut = w.job.short(reply.size)
        ends = (reply.size, cut if reply.size <= turn.part else reply.size)
        agrees = sum(f.size for f in reply.form) == reply.size and (
            len(body) in ends if body is not None else not 0 < reply.size <= turn.part
        )
        # Evaluated within the training task: small, beside the reply, gates nothing.
        if key.purpose != tasks.purpose:
            if key.purpose != "evaluate" or not w.job.judge or not agrees or body is None:
                raise RemoteProtocolError(
                    f"an evaluation of client {key.client} that was not asked for"
                )
            if w.judge_conn:
                return "doubled"
            self._declared(key, reply.form)
            w.judge_conn = conn
            turn.say(Store(key, 0, body, reply.size), self._arrived(w, reply, worker))
            return ""
        try:
            if not agrees:
                raise RemoteProtocolError("reply: announced sizes do not agree")
            self._declared(key, reply.form)
        except RemoteProtocolError as broken:
            tasks.refuse(w, str(broken), True)
            return "refused"
        tasks.put(w, WorkStatus.ARRIVING)
        w.runs(turn.now)  # though one before it was dropped without a word, and seems to
        w.reply, w.up_conn, w.moved = reply, conn, turn.now
        w.up = Receiving(reply.size, turn.part, until=w.job.cut("up", turn.part), short=cut)
        tasks.start_next(worker, key.client)
        if body is not None and len(body) < reply.size:
            w.up.ended = True
        elif body is not None or reply.size == 0:
            turn.say(Store(key, 0, body if body is not None else memoryview(b""), reply.size))
            self._whole(w, reply, worker)
        else:
            self._wanting[key.client] = w
            self.grant()
        tasks.assign(worker)
        return ""

    def failed(self, worker: Worker, failed: m.Failed) -> str:
        """The worker could not do its task."""
        w = self._tasks.current(failed.key)
        self._turn.note(
            "failed",
            client=failed.key.client,
            round=failed.key.round,
            purpose=failed.key.purpose,
            worker=worker.name,
            reason=failed.reason,
        )
        if (
            w is None
            or failed.key.purpose != self._tasks.purpose
            or w.worker != worker.name
            or w.status not in WITH_WORKER
        ):
            return "late"
        if failed.base and w.job.with_base is not None:
            self._tasks.take_back(w, "given out again")
            w.job = w.job.with_base()
            self._tasks.assign()
            return ""
        if failed.lacks:
            self._tasks.elsewhere(w, worker, failed)
            return ""
        self._tasks.refuse(w, failed.reason, failed.again, "damaged" if failed.again else "failed")
        return ""

    def part(self, conn: bytes, part: m.Part, body: memoryview | None) -> str:
        """The next part of a reply that was announced."""
        w = self._tasks.current(part.key)
        if w is None or w.up is None or w.reply is None or w.status is not WorkStatus.ARRIVING:
            return "late"
        if part.key.purpose != self._tasks.purpose or w.up_conn != conn:
            return "late"
        if w.up.cut_off(part.index, body):
            w.heard = w.moved = self._turn.now
            return ""
        try:
            start = w.up.take(part.index, body)
        except RemoteProtocolError as broken:
            self._tasks.refuse(w, str(broken), True)
            return ""
        if start is None or body is None:
            return "doubled"
        self._turn.say(Store(part.key, start, body, w.reply.size))
        w.waited += self._turn.now - max(w.moved, w.asked)
        w.heard = w.moved = self._turn.now
        if w.up.whole:
            self._whole(w, w.reply, self._roster.workers[w.worker])
        else:
            self._wanting.setdefault(part.key.client, w)
            self._asked[part.key.client] = w
        self.grant()
        return ""

    def _whole(self, w: Work, reply: m.Reply, worker: Worker) -> None:
        self._tasks.put(w, WorkStatus.ARRIVED)
        self._turn.say(self._arrived(w, reply, worker))

    def _arrived(self, w: Work, reply: m.Reply, worker: Worker) -> Arrived:
        return Arrived(
            reply.key,
            reply.form,
            reply.size,
            reply.check,
            reply.state,
            reply.kept,
            reply.seconds,
            worker.name,
            tuple(reply.split),
            self._turn.now - w.since,
            reply.reported,
        )

    def grant(self) -> None:
        """Grants parts to those whose replies are coming in, whoever waits longest first, within
        the window and the budget.
        """
        turn, free = self._turn, BUDGET
        for client, w in list(self._asked.items()):  # no more than the budget
            ahead = w.up.ahead if w.up is not None and w.status is WorkStatus.ARRIVING else 0
            if not ahead or turn.now - w.moved >= UNUSED_S:
                del self._asked[client]
            else:
                free -= ahead
        while free > 0 and self._wanting:
            client, w = next(iter(self._wanting.items()))
            up = w.up if w.status is WorkStatus.ARRIVING else None
            began = up is not None and not up.ahead
            granted = up.grant(free) if up is not None else None
            if granted is None:
                del self._wanting[client]
                continue
            first, count = granted
            turn.send(w.up_conn, m.Pull(key=self._tasks.key(w), first=first, count=count))
            w.asked = turn.now if began else w.asked
            self._asked[client] = w
            free -= count

    # -- down --------------------------------------------------------------------------------------
    def pull(self, conn: bytes, worker: Worker, pull: m.Pull) -> str:
        """The worker asks for parts of its task."""
        w, turn = self._tasks.current(pull.key), self._turn
        if w is None or w.down is None or w.status is not WorkStatus.HANDED:
            return "late"
        if pull.key.purpose != self._tasks.purpose or w.worker != worker.name or w.conn != conn:
            return "late"
        parts = w.down.pulled(pull.first, pull.count)
        for index, data in parts or ():
            turn.send(conn, m.Part(key=pull.key, index=index), data)
        return "" if parts is not None else "doubled"
