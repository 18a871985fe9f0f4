"""What becomes of the tasks that a client process is given: done, and answered, or failed."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fednet.client.threads import NoRoom, Threads
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
    from fednet.client.packing import Packing
    from fednet.client.workplace import Answer, Workplace
    from fednet.experiment.links import Shaper

log = logging.getLogger(__name__)

# What a method or a model of a user's own may raise: anything, and in a thread that serves tasks
# none of it may end the thread.
OWN_FAULTS = (Exception, SystemExit, KeyboardInterrupt)

Call = Callable[[], list[p.Instruction]]


class TaskCancelled(FednetError):
    """The server does not want this task any more."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a client process has made ready for one run: a workplace a device. shape: puts the
    clients' emulated links before a transport, told whether its connection stands. packing,
    together: where clients are trained as one, and how many tasks a device then has. beside:
    rounds overlap. largest(key): bytes of a task's payload at most.
    """

    workplaces: Sequence[Workplace]
    layout: str
    sites: Sequence[m.SiteFacts] = ()
    shape: Shaper | None = None
    packing: Packing | None = None
    together: int = 1
    beside: bool = False
    largest: Callable[[m.Key], int] = lambda key: MOST


class TaskWork:
    """Tasks wait for a thread, are done at its device, and are answered by calls that the thread of
    the loop makes. later(call): hands it one. faults: whether planned ones are acted out. inline:
    the server is in this process too.
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
        self._protocol, self._threads, self._later = protocol, threads, later
        self._inline, self._faults, self._faults_said = inline, faults, False
        self.prepared: Prepared | None = None
        self.broken: BaseException | None = None  # what is to end the process
        self._wanted: dict[m.Key, p.Given] = {}  # tasks that have not been cancelled
        # Replies that a planned fault keeps back, and until when.
        self._held: list[tuple[float, Call]] = []
        self.lacking: set[int] = set()  # clients whose last task found no state here
        self._closing = threading.Event()

    # -- the loop's side ---------------------------------------------------------------------------
    def give(self, given: p.Given) -> None:
        self._wanted[given.task.key] = given
        self._wait(given)

    def cancel(self, key: m.Key) -> None:
        self._wanted.pop(key, None)

    def stop(self) -> None:
        """A training that still runs ends at its next step."""
        self._wanted.clear()
        self._closing.set()

    def within(self, timeout_s: float) -> float:
        """The timeout, or less where a reply that is kept back is due before."""
        first = min((due for due, _ in self._held), default=None)
        return timeout_s if first is None else max(0.0, min(timeout_s, first - time.monotonic()))

    def due(self) -> list[Call]:
        """The replies that were kept back until now."""
        now = time.monotonic()
        found = [h for h in self._held if h[0] <= now]
        self._held = [h for h in self._held if h[0] > now]
        return [call for _, call in found]

    # -- a task ------------------------------------------------------------------------------------
    def _wait(self, given: p.Given) -> None:
        """A task waits for a thread."""
        packing = self.prepared.packing if self.prepared is not None else None
        if packing is None:
            self._threads.put(functools.partial(self._task, given))
        else:
            packing.expect()
            self._threads.put(functools.partial(self._packed, given, packing))

    def _packed(self, given: p.Given, packing: Packing, card: int) -> None:
        with packing.at_work(card):
            self._task(given, card)

    def _task(self, given: p.Given, card: int) -> None:
        key = given.task.key
        if self._wanted.get(key) is not given or self.prepared is None:
            return
        planned = self._planned(given.task)
        if "drop_before_training" in planned:
            return self._later(lambda: self._silent(key))
        began = time.monotonic()
        answers = self._done(given, self.prepared.workplaces[card], card, planned)
        if answers is not None:
            self._protocol.doing.pop(key.client, None)
            took = time.monotonic() - began
            lasts = planned.get("slow", 1.0) * max(took, planned.get("pace", 0.0))
            wait_s = planned.get("delay", 0.0) + lasts - took
            self._later(lambda: self._reply(given, answers, planned, wait_s))

    def _done(
        self, given: p.Given, workplace: Workplace, card: int, planned: dict[str, float]
    ) -> Sequence[Answer] | None:
        """What came of a task; None where nothing did, and who was to be told has been."""
        key, doing = given.task.key, self._protocol.doing

        def progress(phase: str, step: int, steps: int) -> None:
            doing[key.client] = (phase, step, steps)
            if "crash" in planned and 2 * step >= steps > 0:
                self._crash(key)

        def cancelled() -> bool:
            return self._wanted.get(key) is not given

        try:
            return self._threads.at(
                card,
                lambda: workplace.do(given.task, given.body, progress, cancelled),
                workplace.forget,
            )
        except NoRoom as short:
            doing.pop(key.client, None)
            if short.again_s is None:
                self._failed(given, str(short), again=True)
            else:
                log.warning(
                    "client %d in round %d: %s; it is done again", key.client, key.round, short
                )
                if not self._closing.wait(short.again_s):
                    self._wait(given)
        except TaskCancelled:
            doing.pop(key.client, None)
        except RemoteProtocolError as broken:
            self._failed(given, str(broken), again=broken.again)
        except FednetError as broken:
            lacks = isinstance(broken, (LeftRound, StateAbsent))
            base = isinstance(broken, BaseAbsent)
            self._failed(given, raised(broken), lacks=lacks or base, base=base)
            if base:
                log.warning("client %d in round %d: %s", key.client, key.round, broken)
            elif lacks:
                log.error("client %d in round %d: %s", key.client, key.round, broken)
                if isinstance(broken, StateAbsent):
                    self._lacks(key, str(broken))
            elif isinstance(broken, StateError):
                self.broken = broken
        except OSError as broken:
            # A full disk above all: the state that this task would leave cannot be kept.
            log.error("client %d in round %d: %s", key.client, key.round, why(broken))
            self._failed(given, why(broken))
        except OWN_FAULTS as broken:
            # The server gets a line, the log all of it.
            log.error("client %d in round %d\n%s", key.client, key.round, traceback.format_exc())
            self._failed(given, raised(broken)[:1000])
        return None

    def _lacks(self, key: m.Key, reason: str) -> None:
        """The first such client is said at once, the others at the end of the process: see
        `lacking`. A server in this process says it itself.
        """
        if not self.lacking and not self._inline:
            complain(timed(f"fednet-client: round {key.round}: {reason}"))
        self.lacking.add(key.client)

    def _failed(
        self,
        given: p.Given,
        reason: str,
        *,
        again: bool = False,
        lacks: bool = False,
        base: bool = False,
    ) -> None:
        """reason: as it is for this site; the server learns nothing of the site's files."""
        key = given.task.key
        self._protocol.doing.pop(key.client, None)
        self._later(
            lambda: (
                self._protocol.failed(key, without_paths(reason), again, lacks, base)
                if self._wanted.pop(key, None) is given
                else []
            )
        )

    def _reply(
        self,
        given: p.Given,
        answers: Sequence[Answer],
        planned: dict[str, float],
        wait_s: float = 0.0,
    ) -> list[p.Instruction]:
        """Hands in what came of a task, with the faults that were planned for it."""
        key = given.task.key
        if self._wanted.get(key) is not given:
            return []
        if wait_s > 0:
            self._held.append(
                (time.monotonic() + wait_s, lambda: self._reply(given, answers, planned))
            )
            return []
        if "crash" in planned and not self._inline:
            self._crash(key)
        if "crash" in planned or "drop_before_sending" in planned:
            return self._silent(key)
        del self._wanted[key]
        self.lacking.discard(key.client)
        out: list[p.Instruction] = []
        for answer in answers:
            training = answer.reply.key == key
            body = spoilt(answer.body) if training and "corrupt" in planned else answer.body
            out += self._protocol.reply(
                answer.reply, body, planned.get("drop_during_upload") if training else None
            )
        if "duplicate" in planned:
            out += [i for i in out if isinstance(i, p.Out) and isinstance(i.message, m.Reply)]
        if out and self.prepared is not None and self.prepared.shape is not None:
            # The reply waits for its client's emulated link; this process is free for its next
            # client.
            out += self._protocol.uploading(key.client)
        if "disconnect" in planned:
            out.append(p.Reconnect())
        return out

    # -- planned faults ----------------------------------------------------------------------------
    def _planned(self, task: m.Task) -> dict[str, float]:
        """The faults to act out in a task: none, where this process was not started for them."""
        if not self._faults and task.faults and not self._faults_said:
            self._faults_said = True
            log.warning("the server plans faults for this client; without --faults none strikes")
        return {f.kind: f.amount for f in task.faults} if self._faults else {}

    def _crash(self, key: m.Key) -> None:
        """The process ends as by a power cut. Where the server lives in it too, only this client
        does.
        """
        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._silent(key)
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")

    def _silent(self, key: m.Key) -> list[p.Instruction]:
        """Nothing more is heard of this task."""
        self._wanted.pop(key, None)
        return self._protocol.forget(key)


def spoilt(body: Body) -> Body:
    """A payload with one of its bytes another."""
    copy = bytearray(body.whole())
    if copy:
        copy[len(copy) // 2] ^= 0xFF
    return Body([copy])
