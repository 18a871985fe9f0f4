"""The tasks of a client process: each is done in the thread of a slot, with the faults that are
planned for it, and what came of it is handed to the thread of the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from fednet.client.slots import NoRoom, Slots
from fednet.errors import (
    BaseAbsent,
    FednetError,
    LeftRound,
    RemoteProtocolError,
    StateAbsent,
    StateError,
    complain,
    timed,
    why,
    without_paths,
)
from fednet.loading import raised
from fednet.protocol.client import MOST, Given
from fednet.wire import messages as m
from fednet.wire.codec import Body

if TYPE_CHECKING:
    from fednet.client.packing import Packing
    from fednet.client.worker import Outgoing, Worker
    from fednet.experiment.links import Shaper

log = logging.getLogger(__name__)

# A user's method or model may raise anything; none of it may end the thread of a slot.
OWN_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


class TaskCancelled(FednetError):
    """The server does not want a task any more; raised at the worker's next step."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds what a client process has prepared for one run: a worker for each device. shape() puts
    the clients' emulated links before a transport. packing trains clients together, `together` at
    once on each device. beside: rounds overlap. largest(key) returns the most bytes that a task's
    payload may have.
    """

    workers: Sequence[Worker]
    layout: str
    sites: Sequence[m.SiteFacts] = ()
    shape: Shaper | None = None
    packing: Packing | None = None
    together: int = 1
    beside: bool = False
    largest: Callable[[m.Key], int] = lambda key: MOST


@dataclass(frozen=True, slots=True)
class Done:
    """Holds what came of a task: replies, or a failure, or neither where a planned fault keeps it
    silent. faults: those to act out when it is sent, by kind. due: when it may be sent, on the
    monotonic clock. fatal: the failure ends the process.
    """

    given: Given
    replies: Sequence[Outgoing] = ()
    failed: m.Failed | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    due: float = 0.0
    fatal: BaseException | None = None


class Tasks:
    """Does the tasks that the server gave this process.

    doing: by client, what its task is at, for the server. hand_over(done) passes what came of a
    task to the thread of the loop. inline: the server runs in this process too. faults: planned
    faults are acted out.
    """

    def __init__(
        self,
        slots: Slots,
        doing: dict[int, tuple[str, int, int]],
        hand_over: Callable[[Done], None],
        *,
        inline: bool,
        faults: bool,
    ) -> None:
        self._slots = slots
        self._doing = doing
        self._hand_over = hand_over
        self._inline = inline
        self._faults = faults
        self._warned_of_faults = False
        self.lacking: set[int] = set()  # clients whose last task found no state here
        self._wanted: dict[m.Key, Given] = {}  # tasks that were not cancelled
        self._closing = threading.Event()

    # -- in the thread of the loop -----------------------------------------------------------------
    def add(self, given: Given, prepared: Prepared) -> None:
        self._wanted[given.task.key] = given
        self._queue(given, prepared)

    def cancel(self, key: m.Key) -> None:
        self._wanted.pop(key, None)

    @property
    def idle(self) -> bool:
        """Returns whether no task is left to answer."""
        return not self._wanted

    def is_wanted(self, given: Given) -> bool:
        return self._wanted.get(given.task.key) is given

    def close(self) -> None:
        """Ends each running task at its next step."""
        self._wanted.clear()
        self._closing.set()

    def _queue(self, given: Given, prepared: Prepared) -> None:
        if prepared.packing is not None:
            prepared.packing.expect()
        self._slots.put(partial(self._do, given, prepared))

    # -- in the thread of a slot -------------------------------------------------------------------
    def _do(self, given: Given, prepared: Prepared, device: int) -> None:
        packing = prepared.packing
        with contextlib.nullcontext() if packing is None else packing.at_work(device):
            if not self.is_wanted(given):
                return
            done: Done | None = None
            short_of_memory: NoRoom | None = None
            try:
                done = self._done(given, prepared.workers[device], device)
            except TaskCancelled:
                pass
            except NoRoom as short:
                if short.again_s is None:
                    done = self._failure(given, short, again=True)
                else:
                    short_of_memory = short
            except OWN_ERRORS as error:
                done = self._failure(given, error)
            self._doing.pop(given.task.key.client, None)
            if done is not None:
                self._hand_over(done)
            elif short_of_memory is not None:
                self._do_again(given, prepared, short_of_memory)

    def _done(self, given: Given, worker: Worker, device: int) -> Done:
        """Does a task, with the faults that are planned for it."""
        key = given.task.key
        faults = self._planned_faults(given.task)
        if "drop_before_training" in faults:
            return Done(given)
        began = time.monotonic()

        def step(stage: str, done: int, of: int) -> None:
            self._doing[key.client] = (stage, done, of)
            if "crash" in faults and 2 * done >= of > 0:
                self._crash(given)
            if not self.is_wanted(given):
                raise TaskCancelled(f"task of client {key.client} in round {key.round}")

        replies = self._slots.run(
            device, partial(worker.work, given.task, given.body, step), worker.forget
        )
        if not faults:
            return Done(given, replies)
        if "crash" in faults:  # of a training without steps
            self._crash(given)
        took_s = time.monotonic() - began
        lasts_s = faults.get("slow", 1.0) * max(took_s, faults.get("pace", 0.0))
        wait_s = faults.get("delay", 0.0) + lasts_s - took_s
        return Done(given, replies, faults=faults, due=time.monotonic() + wait_s)

    def _do_again(self, given: Given, prepared: Prepared, short: NoRoom) -> None:
        key = given.task.key
        log.warning("client %d in round %d: %s; it is done again", key.client, key.round, short)
        if not self._closing.wait(short.again_s):
            self._queue(given, prepared)

    def _failure(self, given: Given, error: BaseException, again: bool = False) -> Done:
        """Logs why a task failed. Returns the failure for the server, in one line that names no
        file of this site. again: another try may help.
        """
        key = given.task.key
        base = isinstance(error, BaseAbsent)
        lacks = isinstance(error, (LeftRound, StateAbsent))
        reason = ""
        text = None
        level = logging.ERROR
        if isinstance(error, RemoteProtocolError):
            reason = str(error)
            again = error.again
        elif isinstance(error, FednetError):
            reason = raised(error)
            text = str(error) if lacks else None
            level = logging.WARNING if base else logging.ERROR
        elif isinstance(error, OSError):
            # Often a full disk: the state that this task would leave cannot be kept.
            reason = text = why(error)
        else:
            reason = raised(error)[:1000]
            text = traceback.format_exc()
        if text is not None:
            log.log(level, "client %d in round %d: %s", key.client, key.round, text)
        if isinstance(error, StateAbsent) and not base:
            self._note_lacking(key, str(error))
        return Done(
            given,
            failed=m.Failed(
                key=key, reason=without_paths(reason), again=again, lacks=lacks, base=base
            ),
            fatal=error if isinstance(error, StateError) and not lacks else None,
        )

    def _note_lacking(self, key: m.Key, reason: str) -> None:
        """Tells the user of the first client without its state; the others are named when the
        process ends. A server in this process says it itself.
        """
        if not self.lacking and not self._inline:
            complain(timed(f"fednet-client: round {key.round}: {reason}"))
        self.lacking.add(key.client)

    # -- planned faults ----------------------------------------------------------------------------
    def _planned_faults(self, task: m.Task) -> dict[str, float]:
        """Returns the faults to act out in a task, by kind: none if this process was not started
        for them.
        """
        if self._faults:
            return {fault.kind: fault.amount for fault in task.faults}
        if task.faults and not self._warned_of_faults:
            self._warned_of_faults = True
            log.warning("the server plans faults for this client; without --faults none occurs")
        return {}

    def _crash(self, given: Given) -> NoReturn:
        """Ends the process as a power cut does. If the server runs in it too, only this client
        ends: raises TaskCancelled.
        """
        key = given.task.key
        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._hand_over(Done(given))
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")


def corrupted(body: Body) -> Body:
    """Returns a payload with one byte changed."""
    copy = bytearray(body.whole())
    if copy:
        copy[len(copy) // 2] ^= 0xFF
    return Body([copy])
