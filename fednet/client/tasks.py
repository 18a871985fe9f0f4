"""The tasks of a client process: each waits for a slot, is done by the worker of that slot's
device, and is answered in the thread of the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fednet.client.slots import NoRoom, Threads
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
from fednet.protocol import client as p
from fednet.protocol.client import MOST, ClientProtocol
from fednet.wire import messages as m
from fednet.wire.codec import Body

if TYPE_CHECKING:
    from fednet.client.slots import Packing
    from fednet.client.worker import Outgoing, Worker
    from fednet.experiment.links import Shaper

log = logging.getLogger(__name__)

# What a method or a model of a user's own may raise: anything, and in a thread that serves tasks
# none of it may end the thread.
OWN_ERRORS = (Exception, SystemExit, KeyboardInterrupt)

Call = Callable[[], list[p.Instruction]]


class TaskCancelled(FednetError):
    """The server does not want a task any more; raised where the worker takes its next step."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a client process has prepared for one run: a worker for each device. shape() puts the
    clients' emulated links before a transport. packing trains clients together, `together` at once
    on each device. beside: rounds overlap. largest(key) returns the most bytes that a task's
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


class Tasks:
    """The tasks that the server gave this process and that are not answered yet.

    later(call) makes the thread of the loop make a call. inline: the server runs in this process
    too. faults: planned faults are acted out.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        threads: Threads,
        later: Callable[[Call], None],
        *,
        inline: bool,
        faults: bool,
    ) -> None:
        self._protocol = protocol
        self._threads = threads
        self._later = later
        self._inline = inline
        self._faults = faults
        self._warned_of_faults = False
        self.prepared: Prepared | None = None
        self.error: BaseException | None = None  # what is to end the process
        self.lacking: set[int] = set()  # clients whose last task found no state here
        self._wanted: dict[m.Key, p.Given] = {}  # tasks that have not been cancelled
        self._delayed: list[
            tuple[float, Call]
        ] = []  # replies that a planned fault delays, till when
        self._closing = threading.Event()

    # -- in the thread of the loop -----------------------------------------------------------------
    def add(self, given: p.Given) -> None:
        self._wanted[given.task.key] = given
        self._queue(given)

    def cancel(self, key: m.Key) -> None:
        self._wanted.pop(key, None)

    def stop(self) -> None:
        """Makes each task that still runs end at its next step."""
        self._wanted.clear()
        self._closing.set()

    def until_due(self, timeout_s: float) -> float:
        """Returns the timeout, or less if a delayed reply is due before."""
        if not self._delayed:
            return timeout_s
        first = min(due for due, _ in self._delayed)
        return max(0.0, min(timeout_s, first - time.monotonic()))

    def take_due(self) -> list[Call]:
        """Returns the replies that were delayed until now, and forgets them."""
        if not self._delayed:
            return []
        now = time.monotonic()
        found = [call for due, call in self._delayed if due <= now]
        self._delayed = [(due, call) for due, call in self._delayed if due > now]
        return found

    def _queue(self, given: p.Given) -> None:
        packing = None if self.prepared is None else self.prepared.packing
        if packing is not None:
            packing.expect()
        self._threads.put(lambda device: self._do(given, device, packing))

    # -- in the thread of a slot -------------------------------------------------------------------
    def _do(self, given: p.Given, device: int, packing: Packing | None) -> None:
        """Does a task, and hands what came of it to the thread of the loop."""
        with contextlib.nullcontext() if packing is None else packing.at_work(device):
            key = given.task.key
            if self._wanted.get(key) is not given or self.prepared is None:
                return
            faults = self._planned_faults(given.task)
            if "drop_before_training" in faults:
                self._later(lambda: self._fall_silent(key))
                return
            began = time.monotonic()
            worker = self.prepared.workers[device]

            def step(stage: str, done: int, of: int) -> None:
                self._protocol.doing[key.client] = (stage, done, of)
                if "crash" in faults and 2 * done >= of > 0:
                    self._crash(key)
                if self._wanted.get(key) is not given:
                    raise TaskCancelled(f"task of client {key.client} in round {key.round}")

            try:
                replies = self._threads.run(
                    device, lambda: worker.work(given.task, given.body, step), worker.forget
                )
            except TaskCancelled:
                self._protocol.doing.pop(key.client, None)
            except NoRoom as short:
                self._again(given, short)
            except OWN_ERRORS as error:
                self._fail(given, error)
            else:
                self._protocol.doing.pop(key.client, None)
                took_s = time.monotonic() - began
                lasts_s = faults.get("slow", 1.0) * max(took_s, faults.get("pace", 0.0))
                wait_s = faults.get("delay", 0.0) + lasts_s - took_s
                self._later(lambda: self._answer(given, replies, faults, wait_s))

    def _again(self, given: p.Given, short: NoRoom) -> None:
        """Queues a task that ran out of memory again, or fails it if that did not help."""
        if short.again_s is None:
            self._fail(given, short, again=True)
            return
        key = given.task.key
        self._protocol.doing.pop(key.client, None)
        log.warning("client %d in round %d: %s; it is done again", key.client, key.round, short)
        if not self._closing.wait(short.again_s):
            self._queue(given)

    def _fail(self, given: p.Given, error: BaseException, again: bool = False) -> None:
        """Logs why a task failed, and tells the server so in one line that names no file of this
        site. again: another try may help.
        """
        key = given.task.key
        lacks = isinstance(error, (LeftRound, StateAbsent))
        if isinstance(error, RemoteProtocolError):
            reason = str(error)
            again = error.again
        elif isinstance(error, FednetError):
            reason = raised(error)
            if isinstance(error, BaseAbsent):
                log.warning("client %d in round %d: %s", key.client, key.round, error)
            elif lacks:
                log.error("client %d in round %d: %s", key.client, key.round, error)
        elif isinstance(error, OSError):
            # A full disk above all: the state that this task would leave cannot be kept.
            reason = why(error)
            log.error("client %d in round %d: %s", key.client, key.round, reason)
        else:
            reason = raised(error)[:1000]
            log.error("client %d in round %d\n%s", key.client, key.round, traceback.format_exc())
        base = isinstance(error, BaseAbsent)
        fatal = isinstance(error, StateError) and not lacks
        self._protocol.doing.pop(key.client, None)

        def tell() -> list[p.Instruction]:
            if fatal:
                self.error = error
            if self._wanted.get(key) is not given:
                return []
            del self._wanted[key]
            return self._protocol.failed(key, without_paths(reason), again, lacks, base)

        self._later(tell)
        if isinstance(error, StateAbsent) and not base:
            self._note_lacking(key, str(error))

    def _note_lacking(self, key: m.Key, reason: str) -> None:
        """Says so of the first client without its state; the others are named when the process
        ends: see `lacking`. A server in this process says it itself.
        """
        if not self.lacking and not self._inline:
            complain(timed(f"fednet-client: round {key.round}: {reason}"))
        self.lacking.add(key.client)

    # -- answers, in the thread of the loop --------------------------------------------------------
    def _answer(
        self, given: p.Given, replies: Sequence[Outgoing], faults: dict[str, float], wait_s: float
    ) -> list[p.Instruction]:
        """Hands in the replies of a task, with the faults that were planned for it."""
        key = given.task.key
        if self._wanted.get(key) is not given:
            return []
        if wait_s > 0:
            due = time.monotonic() + wait_s
            self._delayed.append((due, lambda: self._answer(given, replies, faults, 0.0)))
            return []
        if "crash" in faults and not self._inline:
            self._crash(key)
        if "crash" in faults or "drop_before_sending" in faults:
            return self._fall_silent(key)
        del self._wanted[key]
        self.lacking.discard(key.client)
        out: list[p.Instruction] = []
        for outgoing in replies:
            body, share = outgoing.body, None
            if outgoing.reply.key == key:
                body = corrupted(body) if "corrupt" in faults else body
                share = faults.get("drop_during_upload")
            out += self._protocol.reply(outgoing.reply, body, share)
        if "duplicate" in faults:
            out += [i for i in out if isinstance(i, p.Out) and isinstance(i.message, m.Reply)]
        if out and self.prepared is not None and self.prepared.shape is not None:
            # The reply waits for its client's emulated link; this process is free for its next
            # client.
            out += self._protocol.uploading(key.client)
        if "disconnect" in faults:
            out.append(p.Reconnect())
        return out

    # -- planned faults ----------------------------------------------------------------------------
    def _planned_faults(self, task: m.Task) -> dict[str, float]:
        """Returns the faults to act out in a task, by kind: none if this process was not started
        for them.
        """
        if self._faults:
            return {fault.kind: fault.amount for fault in task.faults}
        if task.faults and not self._warned_of_faults:
            self._warned_of_faults = True
            log.warning("the server plans faults for this client; without --faults none strikes")
        return {}

    def _crash(self, key: m.Key) -> None:
        """Ends the process as a power cut does. If the server runs in it too, only this client
        ends.
        """
        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._fall_silent(key)
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")

    def _fall_silent(self, key: m.Key) -> list[p.Instruction]:
        """Forgets a task: the server hears nothing more of it."""
        self._wanted.pop(key, None)
        return self._protocol.forget(key)


def corrupted(body: Body) -> Body:
    """Returns a payload with one of its bytes another."""
    copy = bytearray(body.whole())
    if copy:
        copy[len(copy) // 2] ^= 0xFF
    return Body([copy])
