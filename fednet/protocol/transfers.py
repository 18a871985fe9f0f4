"""How payloads cross: in parts that the receiver asks for, a task's down and its reply's up.

What a peer may make the server hold or send is bounded: a form is checked before a byte of its body
is asked for, parts are granted within a window and a budget, and each part of a task goes out once
a hand-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fednet.errors import RemoteProtocolError
from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import BUDGET, UNUSED_S, WINDOW, Arrived, Note, Store
from fednet.protocol.tasks import Tasks, Work
from fednet.protocol.turn import Turn
from fednet.wire import messages as m
from fednet.wire.messages import Field, Key


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

    # -- up ----------------------------------------------------------------------------------------
    def reply(self, conn: bytes, worker: Worker, reply: m.Reply, body: memoryview | None) -> str:
        """A reply, whole or announced."""
        key, tasks, turn = reply.key, self._tasks, self._turn
        w = tasks.current(key)
        if (
            w is None
            or w.worker != worker.name
            or w.status != "handed"
            or reply.inc != turn.incarnation
        ):
            state = (
                "doubled"
                if w is not None and w.status in ("arriving", "arrived", "done")
                else "late"
            )
            turn.say(Note(state, {"client": key.client, "round": key.round, "worker": worker.name}))
            if reply.size > self._turn.part and state == "late":
                turn.call_off(conn, key)
            return state
        agrees = sum(f.size for f in reply.form) == reply.size and (
            len(body) == reply.size if body is not None else not 0 < reply.size <= self._turn.part
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
            turn.say(Store(key, 0, body), self._arrived(w, reply, worker))
            return ""
        try:
            if not agrees:
                raise RemoteProtocolError("reply: announced sizes do not agree")
            self._declared(key, reply.form)
        except RemoteProtocolError as broken:
            tasks.refuse(w, str(broken), True)
            return "refused"
        w.waited = w.asked = 0.0
        w.status, w.reply, w.up_conn, w.got, w.granted, w.moved = (
            "arriving",
            reply,
            conn,
            0,
            0,
            turn.now,
        )
        tasks.start_next(worker, key.client)
        if body is not None or reply.size == 0:
            turn.say(Store(key, 0, body if body is not None else memoryview(b"")))
            self._whole(w, reply, worker)
        else:
            self.grant()
        tasks.assign()
        return ""

    def part(self, conn: bytes, part: m.Part, body: memoryview | None) -> str:
        """The next part of a reply that was announced."""
        w = self._tasks.current(part.key)
        if (
            w is None
            or part.key.purpose != self._tasks.purpose
            or w.status != "arriving"
            or w.up_conn != conn
            or w.reply is None
        ):
            return "late"
        if part.index < w.got:
            return "doubled"
        expected = min(self._turn.part, w.reply.size - part.index * self._turn.part)
        if part.index != w.got or part.index >= w.granted or body is None or len(body) != expected:
            self._tasks.refuse(
                w,
                f"part {part.index} of {0 if body is None else len(body)} bytes, expected part "
                f"{w.got} of {expected}",
                True,
            )
            return ""
        self._turn.say(Store(part.key, part.index * self._turn.part, body))
        w.got += 1
        w.waited += self._turn.now - max(w.moved, w.asked)
        w.heard = w.moved = self._turn.now
        if w.got * self._turn.part >= w.reply.size:
            self._whole(w, w.reply, self._roster.workers[w.worker])
        self.grant()
        return ""

    def _whole(self, w: Work, reply: m.Reply, worker: Worker) -> None:
        w.status = "arrived"
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
        """Grants parts to those whose replies are coming in, oldest first, within the window and
        the budget.
        """
        turn = self._turn
        arriving = [
            w for w in self._tasks.work.values() if w.status == "arriving" and w.reply is not None
        ]
        free = BUDGET - sum(w.granted - w.got for w in arriving if turn.now - w.moved < UNUSED_S)
        for w in arriving:
            assert w.reply is not None
            parts = -(-w.reply.size // self._turn.part)
            ahead = w.granted - w.got
            n = min(WINDOW - ahead, parts - w.granted, free)
            if n > 0 and ahead <= WINDOW // 2:
                turn.send(
                    w.up_conn,
                    m.Pull(
                        run=turn.run,
                        inc=turn.incarnation,
                        key=self._tasks.key(w),
                        first=w.granted,
                        count=n,
                    ),
                )
                w.asked = turn.now if not ahead else w.asked
                w.granted += n
                free -= n

    # -- down --------------------------------------------------------------------------------------
    def pull(self, conn: bytes, worker: Worker, pull: m.Pull) -> str:
        """The worker asks for parts of its task."""
        w, turn = self._tasks.current(pull.key), self._turn
        if (
            w is None
            or pull.key.purpose != self._tasks.purpose
            or w.worker != worker.name
            or w.conn != conn
            or w.status != "handed"
        ):
            return "late"
        parts = w.job.body.parts(self._turn.part)
        if pull.first != w.sent_parts or pull.first + pull.count > parts or pull.count > WINDOW:
            raise RemoteProtocolError(
                f"pull of parts {pull.first} to {pull.first + pull.count - 1}; {w.sent_parts} of "
                f"{parts} were sent"
            )
        for index in range(pull.first, pull.first + pull.count):
            turn.send(
                conn,
                m.Part(run=turn.run, inc=turn.incarnation, key=pull.key, index=index),
                w.job.body.part(index, self._turn.part),
            )
        w.sent_parts += pull.count
        return ""
