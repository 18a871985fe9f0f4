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
    faults are acted out. wanted: the tasks that are to be answered; the thread of the loop adds
    them, and takes away those that are answered or cancelled. lacking: clients whose last task
    found no state here.
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
        self.lacking: set[int] = set()
        self.wanted: dict[m.Key, Given] = {}
        self._closing = threading.Event()

    def put(self, given: Given, prepared: Prepared) -> None:
        """Has a wanted task done as soon as there is a slot."""
        if prepared.packing is not None:
            prepared.packing.expect()
        self._slots.put(partial(self._do, given, prepared))

    def close(self) -> None:
        """Ends each running task at its next step."""
        self.wanted.clear()
        self._closing.set()

    # -- in the thread of a slot -------------------------------------------------------------------
    def _do(self, given: Given, prepared: Prepared, device: int) -> None:
        packing, key = prepared.packing, given.task.key
        with contextlib.nullcontext() if packing is None else packing.at_work(device):
            if self.wanted.get(key) is not given:
                return
            done: Done | None = None
            again_s: float | None = None
            try:
                done = self._work(given, prepared.workers[device], device)
            except TaskCancelled:
                pass
            except NoRoom as short:
                again_s = short.again_s
                if again_s is None:
                    done = self._failure(given, short, again=True)
                else:
                    of = f"client {key.client} in round {key.round}"
                    log.warning("%s: %s; it is done again", of, short)
            except OWN_ERRORS as error:
                done = self._failure(given, error)
            self._doing.pop(key.client, None)
            if done is not None:
                self._hand_over(done)
            elif again_s is not None and not self._closing.wait(again_s):
                self.put(given, prepared)

    def _work(self, given: Given, worker: Worker, device: int) -> Done:
        """Does a task, with the faults that are planned for it."""
        task, key = given.task, given.task.key
        faults: dict[str, float] = {}
        if self._faults:
            faults = {fault.kind: fault.amount for fault in task.faults}
        elif task.faults and not self._warned_of_faults:
            self._warned_of_faults = True
            log.warning("the server plans faults for this client; without --faults none occurs")
        if "drop_before_training" in faults:
            return Done(given)
        began = time.monotonic()

        def step(stage: str, done: int, of: int) -> None:
            self._doing[key.client] = (stage, done, of)
            if "crash" in faults and 2 * done >= of > 0:
                self._crash(given)
            if self.wanted.get(key) is not given:
                raise TaskCancelled(f"task of client {key.client} in round {key.round}")

        work = partial(worker.work, task, given.body, step)
        replies = self._slots.run(device, work, worker.device.forget)
        if not faults:
            return Done(given, replies)
        if "crash" in faults:  # of a training without steps
            self._crash(given)
        took_s = time.monotonic() - began
        lasts_s = faults.get("slow", 1.0) * max(took_s, faults.get("pace", 0.0))
        wait_s = faults.get("delay", 0.0) + lasts_s - took_s
        return Done(given, replies, faults=faults, due=time.monotonic() + wait_s)

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
            # The user is told of the first one; the others are named when the process ends. A
            # server in this process says it itself.
            if not self.lacking and not self._inline:
                complain(timed(f"fednet-client: round {key.round}: {error}"))
            self.lacking.add(key.client)
        return Done(
            given,
            failed=m.Failed(
                key=key, reason=without_paths(reason), again=again, lacks=lacks, base=base
            ),
            fatal=error if isinstance(error, StateError) and not lacks else None,
        )

    def _crash(self, given: Given) -> NoReturn:
        """Ends the process as a power cut does. If the server runs in it too, only this client
        ends: raises TaskCancelled.
        """
        key = given.task.key
        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._hand_over(Done(given))
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")
