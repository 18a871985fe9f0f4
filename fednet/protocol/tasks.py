"""What a client is asked to do, how long the server waits for it, and how far it is. The states of
a task are in `table`; what becomes of it is in `server`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fednet.protocol.table import TaskState
from fednet.protocol.transfers import Receiving, Sending
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.messages import Field, Key

TRIES = 3  # how often a task is handed out whose replies are refused
DEATHS = 5  # how often a worker may be lost while it runs one task, which may kill it
NOT_HANDED = frozenset([TaskState.WAITING, TaskState.DROPPED])  # no process has it
NO_REPLY = NOT_HANDED | {TaskState.HANDED}  # none was announced
# Why a client was dropped that no longer has the state which its task starts from.
STATE_LOST = "failed: state lost: "
LEFT = "left"  # why a client that went away did not complete its task
DEADLINE = "deadline"  # why a client that took too long did not


@dataclass(frozen=True, slots=True)
class Leaves:
    """When a client goes away in the middle of its task. at: on the caller's clock. Without a time:
    after `down` parts of the task (None: all) and then `up` bytes of the reply have crossed.
    """

    at: float | None = None
    down: int | None = None
    up: int = 0


def end_of(reply: float, leaves: float, deadline: float) -> tuple[float, str]:
    """The second at which a client's task is over, and why it has no reply then, "" where it has
    one. All are seconds of one clock, infinite for never: when its whole reply is here, when the
    client goes away, and the last one at which it is in time.
    """
    if min(reply, leaves) > deadline:
        return deadline, DEADLINE
    if reply > leaves:
        return leaves, LEFT
    return reply, ""


class TaskSpec(msgspec.Struct):
    """What one client is asked to do. Nobody changes it once it is handed to the protocol."""

    client: int
    form: Sequence[Field] = ()
    body: Body = msgspec.field(default_factory=Body)
    check: bytes = b""
    """The digest of the body."""
    cost: int = 0
    """SGD steps; the longest task goes out first."""
    start: str = ""
    """The version of the client's state that it starts from."""
    state: str = ""
    """The SHA-256 of that state."""
    keep: str = ""
    """The version of the client's state that the last checkpoint names."""
    enrol: int = 0
    """How many leading fields of the form are the client's enrolment."""
    evaluates: bool = False
    """Whether the client evaluates within the task."""
    bound: bool = False
    """Only the worker of the client's last task can do it, while that worker is there; a client
    whose worker cannot is lost.
    """
    leaves: Leaves | None = None
    """When the client leaves; None: it stays."""
    round: int = 0
    """Of this task, where tasks of several rounds are under way; 0: the phase's."""
    with_base: Callable[[], TaskSpec] | None = None
    """Makes the same task with the base model before its payload, for a worker that lacks it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How long the server waits, in seconds; None: for ever."""

    deadline: float | None = None
    """For a client's task, from its hand-out; behind others of its process, from its turn on."""
    closed: float | None = 3.0
    """For a client whose connection closed."""
    silent: float | None = 10.0
    """For a client whose heartbeats stopped."""
    join: float | None = 60.0
    """For an id that never came, from the server's start."""


class TrackedTask(msgspec.Struct, eq=False):
    """A client's task, as the server keeps track of it: what is asked, and how far it is."""

    spec: TaskSpec
    key: Key  # of the present attempt
    place: int = 0  # in the order in which tasks are handed out, from 1 on
    status: TaskState = TaskState.WAITING
    since: float = 0.0  # hand-out, or when it got to the head of its worker's queue
    heard: float = 0.0  # hand-out, or the last message about this task
    refusals: int = 0
    unread: int = 0  # unreadable messages while its worker was at it
    refused_by: set[str] = set()  # workers that failed; others are tried first
    deaths: int = 0  # how often its worker was lost while it was running it
    # Of the present attempt, if it was handed out.
    worker: str = ""
    conn: bytes = b""  # where the task went
    running: bool = False
    down: Sending | None = None
    # Of its reply, if that was announced.
    reply: m.Reply | None = None
    up: Receiving | None = None
    up_conn: bytes = b""  # where it comes from

    def run(self, now: float) -> None:
        """Its worker starts with it."""
        if not self.running:
            self.running = True
            self.since = self.heard = now

    def forget_worker(self) -> None:
        """No worker has it any more."""
        self.worker = ""
        self.conn = b""
        self.running = False
        self.down = None

    def forget_reply(self) -> None:
        """No reply to it is announced any more."""
        self.reply = None
        self.up = None
        self.up_conn = b""


def message_of(
    spec: TaskSpec,
    key: Key,
    run: str,
    incarnation: int,
    keep: str = "",
    deadline_s: float | None = None,
) -> m.Task:
    """The task as it is announced. keep, deadline_s: of this hand-out; left out where its bytes are
    computed for simulated time, which may not depend on checkpoints.
    """
    return m.Task(
        run=run,
        inc=incarnation,
        key=key,
        form=list(spec.form),
        size=spec.body.size,
        check=spec.check,
        start=spec.start,
        state=spec.state,
        enrol=spec.enrol,
        evaluates=spec.evaluates,
        keep=keep,
        deadline_s=deadline_s,
    )
