"""The states of the protocol, and the events that change them.

Each table says for a state which events may come and which states they lead to; where these are
two, the machine chooses by its limits. The machines change a state by `step` alone, so that nothing
happens that is not written here. `python docs/pages.py` writes the tables of docs/architecture.md
from these.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from fednet.errors import LocalProtocolError


class _Named(enum.Enum):
    __hash__ = object.__hash__  # there is one of each; enum's own is slow


S = TypeVar("S", bound=_Named)
E = TypeVar("E", bound=_Named)
Table = Mapping[S, Mapping[E, tuple[S, ...]]]


def step(table: Table[S, E], state: S, event: E, to: S | None = None) -> S:
    """The state that follows. to: which one, where the event can lead to several. Raises
    LocalProtocolError for an event that cannot come in this state.
    """
    following = table[state].get(event, ())
    if to is None and len(following) == 1:
        return following[0]
    if to is not None and to in following:
        return to
    raise _impossible(state, event, to)


def _impossible(state: S, event: E, to: S | None) -> LocalProtocolError:
    wanted = "" if to is None else f" to {to.value!r}"
    return LocalProtocolError(f"{event.value!r} cannot lead from {state.value!r}{wanted}")


# -- the client ------------------------------------------------------------------------------------
class ClientState(_Named):
    """A client process, towards its server."""

    AWAY = "away"
    JOINING = "joining"
    WELCOMED = "welcomed"
    READY = "ready"
    OVER = "over"


class ClientEvent(_Named):
    OPENED = "connection opened"
    CLOSED = "connection closed"
    REJOINS = "joins again after a refusal"
    WELCOME = "welcome"
    PREPARED = "data and model are in place"
    TURNED_AWAY = "refused for good"
    ENDED = "the run is over"
    LEAVES = "leaves"


_FROM_JOINED = {
    ClientEvent.CLOSED: (ClientState.AWAY,),
    ClientEvent.TURNED_AWAY: (ClientState.OVER,),
    ClientEvent.ENDED: (ClientState.OVER,),
    ClientEvent.LEAVES: (ClientState.OVER,),
}
CLIENT: Table[ClientState, ClientEvent] = {
    ClientState.AWAY: {
        ClientEvent.OPENED: (ClientState.JOINING,),
        ClientEvent.CLOSED: (ClientState.AWAY,),
        ClientEvent.LEAVES: (ClientState.OVER,),
    },
    ClientState.JOINING: {
        ClientEvent.REJOINS: (ClientState.JOINING,),
        ClientEvent.WELCOME: (ClientState.WELCOMED,),
        **_FROM_JOINED,
    },
    ClientState.WELCOMED: {ClientEvent.PREPARED: (ClientState.READY,), **_FROM_JOINED},
    ClientState.READY: _FROM_JOINED,
    ClientState.OVER: {
        ClientEvent.OPENED: (ClientState.OVER,),
        ClientEvent.CLOSED: (ClientState.OVER,),
        ClientEvent.LEAVES: (ClientState.OVER,),
    },
}
CONNECTED = (ClientState.JOINING, ClientState.WELCOMED, ClientState.READY)
TAKEN_IN = (ClientState.WELCOMED, ClientState.READY)


class ClientTaskState(_Named):
    """A task at the client that does it."""

    GONE = "not here"
    COMING = "coming"  # its payload is pulled
    WORKING = "being worked on"
    REPLYING = "replying"


class ClientTaskEvent(_Named):
    TASK = "task without its payload"
    WHOLE = "its payload is whole"
    NO_ROOM = "no room for its payload"
    DAMAGED = "a part out of turn"
    REPLIED = "reply made"
    FAILED = "failed"
    SENT = "reply sent"
    CLOSED = "connection closed"
    CANCELLED = "cancelled by the server"
    ABANDONED = "given up by its client"


CLIENT_TASK: Table[ClientTaskState, ClientTaskEvent] = {
    ClientTaskState.GONE: {
        ClientTaskEvent.TASK: (ClientTaskState.COMING,),
        ClientTaskEvent.WHOLE: (ClientTaskState.WORKING,),  # it came beside the task
    },
    ClientTaskState.COMING: {
        ClientTaskEvent.WHOLE: (ClientTaskState.WORKING,),
        ClientTaskEvent.NO_ROOM: (ClientTaskState.GONE,),
        ClientTaskEvent.DAMAGED: (ClientTaskState.GONE,),
        ClientTaskEvent.CLOSED: (ClientTaskState.GONE,),
        ClientTaskEvent.CANCELLED: (ClientTaskState.GONE,),
    },
    ClientTaskState.WORKING: {
        ClientTaskEvent.REPLIED: (ClientTaskState.REPLYING,),
        ClientTaskEvent.FAILED: (ClientTaskState.GONE,),
        ClientTaskEvent.CANCELLED: (ClientTaskState.GONE,),
        ClientTaskEvent.ABANDONED: (ClientTaskState.GONE,),
    },
    ClientTaskState.REPLYING: {
        ClientTaskEvent.CLOSED: (ClientTaskState.REPLYING,),  # it is announced again
        ClientTaskEvent.SENT: (ClientTaskState.GONE,),
        ClientTaskEvent.CANCELLED: (ClientTaskState.GONE,),
        ClientTaskEvent.ABANDONED: (ClientTaskState.GONE,),
    },
}


# -- the server ------------------------------------------------------------------------------------
class WorkerState(_Named):
    """A client process, as the server sees it."""

    AWAY = "away"  # without a connection
    WELCOMED = "welcomed"
    READY = "ready"
    SILENT = "silent"  # its connection is there
    GONE = "forgotten"


class WorkerEvent(_Named):
    JOINED = "joined"
    READY = "data and model are in place"
    CLOSED = "connection closed"
    LEFT = "left"
    SILENT = "not heard for too long"
    HEARD = "heard again"
    FORGOTTEN = "away for too long"


_FROM_HERE = {
    WorkerEvent.JOINED: (WorkerState.WELCOMED,),  # again, over another connection
    WorkerEvent.CLOSED: (WorkerState.AWAY,),
    WorkerEvent.LEFT: (WorkerState.AWAY,),
    WorkerEvent.SILENT: (WorkerState.SILENT,),
}
WORKER: Table[WorkerState, WorkerEvent] = {
    WorkerState.AWAY: {
        WorkerEvent.JOINED: (WorkerState.WELCOMED,),
        WorkerEvent.FORGOTTEN: (WorkerState.GONE,),
    },
    WorkerState.WELCOMED: {WorkerEvent.READY: (WorkerState.READY,), **_FROM_HERE},
    WorkerState.READY: _FROM_HERE,
    WorkerState.SILENT: {
        WorkerEvent.HEARD: (WorkerState.READY, WorkerState.WELCOMED),  # as before
        WorkerEvent.JOINED: (WorkerState.WELCOMED,),
        WorkerEvent.CLOSED: (WorkerState.AWAY,),
    },
    WorkerState.GONE: {},
}


class TaskState(_Named):
    """A task of a phase at the server."""

    WAITING = "waiting"
    HANDED = "handed"
    ARRIVING = "arriving"  # its reply
    ARRIVED = "arrived"  # and is checked
    DONE = "done"
    DROPPED = "dropped"


class TaskEvent(_Named):
    ASSIGNED = "assigned to a worker"
    ANNOUNCED = "reply announced"
    WHOLE = "reply whole"
    ACCEPTED = "reply accepted"
    RESTARTED = "upload to begin again"
    REFUSED = "reply refused"
    FAILED = "failed"
    LACKED = "its worker lacks a state or the base model"
    LOST = "its worker lost"
    MISSING = "its worker came back without it"
    REVOKED = "its key revoked"
    DEADLINE = "deadline"
    LEFT = "its client left"
    ABSENT = "its client absent or lost"
    CANCELLED = "cancelled"


# Where a task can be tried again it waits for a worker; after too many tries it is dropped.
_AGAIN = (TaskState.WAITING, TaskState.DROPPED)
_DROPPED = (TaskState.DROPPED,)
_WITH_WORKER = {
    TaskEvent.REFUSED: _AGAIN,
    TaskEvent.FAILED: _AGAIN,
    TaskEvent.LACKED: _AGAIN,
    TaskEvent.LOST: _AGAIN,
    TaskEvent.MISSING: _AGAIN,
    TaskEvent.REVOKED: _AGAIN,
    TaskEvent.DEADLINE: _DROPPED,
    TaskEvent.LEFT: _DROPPED,
    TaskEvent.CANCELLED: _DROPPED,
}
TASK: Table[TaskState, TaskEvent] = {
    TaskState.WAITING: {
        TaskEvent.ASSIGNED: (TaskState.HANDED,),
        TaskEvent.LEFT: _DROPPED,
        TaskEvent.ABSENT: _DROPPED,
        TaskEvent.CANCELLED: _DROPPED,
    },
    TaskState.HANDED: {
        TaskEvent.ANNOUNCED: (TaskState.ARRIVING,),
        TaskEvent.WHOLE: (TaskState.ARRIVED,),  # it came beside its announcement
        **_WITH_WORKER,
    },
    TaskState.ARRIVING: {
        TaskEvent.WHOLE: (TaskState.ARRIVED,),
        TaskEvent.RESTARTED: (TaskState.HANDED,),
        **_WITH_WORKER,
    },
    TaskState.ARRIVED: {
        TaskEvent.ACCEPTED: (TaskState.DONE,),
        TaskEvent.REFUSED: _AGAIN,
        TaskEvent.CANCELLED: _DROPPED,
    },
    TaskState.DONE: {},
    TaskState.DROPPED: {},
}
ENDED = (TaskState.DONE, TaskState.DROPPED)
WITH_WORKER = (TaskState.HANDED, TaskState.ARRIVING)


class Effect(_Named):
    """What is done where a task's state changes, in this order."""

    CALL_OFF = "its task is cancelled at its worker"
    WASTE_UP = "the bytes of its reply are wasted"
    WASTE_DOWN = "the bytes of the task are wasted"
    RELEASE = "its worker has no part in it any more"
    FREE = "its worker has room for another"
    WAIT = "it waits for a worker"
    RESOLVE = "the round is notified"


# Its worker does not know that the task is over, or waits to be asked for the rest of a reply.
_CALLED_OFF = {
    TaskEvent.REFUSED: (*WITH_WORKER, TaskState.ARRIVED),
    TaskEvent.LOST: WITH_WORKER,
    TaskEvent.DEADLINE: WITH_WORKER,
    TaskEvent.LEFT: WITH_WORKER,
    TaskEvent.CANCELLED: WITH_WORKER,
}
_BACK = (Effect.WASTE_UP, Effect.WASTE_DOWN, Effect.RELEASE, Effect.FREE)
_FOLLOWS: Mapping[TaskState, Mapping[TaskEvent, tuple[Effect, ...]]] = {
    TaskState.HANDED: {TaskEvent.RESTARTED: (Effect.WASTE_UP,)},
    TaskState.ARRIVING: {TaskEvent.ANNOUNCED: (Effect.FREE,)},
    TaskState.ARRIVED: {TaskEvent.WHOLE: (Effect.RELEASE,)},
    TaskState.DONE: {TaskEvent.ACCEPTED: (Effect.RESOLVE,)},
    TaskState.WAITING: dict.fromkeys(TaskEvent, (*_BACK, Effect.WAIT)),
    TaskState.DROPPED: dict.fromkeys(TaskEvent, (*_BACK, Effect.RESOLVE)),
}


def _effects(state: TaskState, event: TaskEvent, to: TaskState) -> tuple[Effect, ...]:
    found = _FOLLOWS[to].get(event, ())
    if state in _CALLED_OFF.get(event, ()):
        return (Effect.CALL_OFF, *found)
    if state is TaskState.HANDED and event is TaskEvent.WHOLE:  # announced at the same time
        return (*found, Effect.FREE)
    return found


class _Changes(
    dict[
        tuple[TaskState, TaskEvent, TaskState | None],
        tuple[TaskState, tuple[Effect, ...]],
    ]
):
    """Of a task. By state, event, and the state that is asked for (None where only one can follow):
    the state that follows, and what is done. Raises as `step` does.
    """

    def __init__(self) -> None:
        for state, events in TASK.items():
            for event, following in events.items():
                for to in following:
                    self[state, event, to] = to, _effects(state, event, to)
                if len(following) == 1:
                    self[state, event, None] = self[state, event, following[0]]

    def __missing__(self, key: tuple[TaskState, TaskEvent, TaskState | None]) -> NoReturn:
        raise _impossible(*key)


CHANGES = _Changes()
