"""The loop of a client process: one connection for one or many clients. Its thread has the socket,
the protocol and the book; each slot has a thread that trains, in which a task is done.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fednet.capacity import give_back_freed
from fednet.client.books import MessageFile
from fednet.client.faults import CutUploads, PlannedFaults, Silenced
from fednet.client.round_lines import PAUSE_S, RoundLines
from fednet.client.slots import DeviceCall, NoRoom, SlotPool
from fednet.client.stages import Stages, TaskCancelled
from fednet.errors import (
    NO_STORAGE,
    BaseAbsent,
    CannotGoOn,
    ConfigError,
    FednetError,
    LeftRound,
    RemoteProtocolError,
    SharedChanged,
    StateAbsent,
    StateError,
    complain,
    log_line,
    why,
    with_time,
    without_paths,
)
from fednet.files import read_record
from fednet.journal.events import Welcomed
from fednet.journal.journal import Journal
from fednet.journal.link import Incoming, Link
from fednet.loading import error_text
from fednet.protocol import client as p
from fednet.protocol.table import TAKEN_IN
from fednet.transport.base import ClientTransport, Frames, Opened, Received, reached_at
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body

if TYPE_CHECKING:
    from fednet.client.packs import Packs
    from fednet.client.worker import Worker
    from fednet.experiment.links import Shaper

log = logging.getLogger(__name__)
CONNECTION = b""  # a client has one
UNANSWERED_S = 3.0  # after so long without a server the user is told
FIND_S = 0.1  # between two searches for the server
# A client that starts after the run is over waits so long for a server with more rounds.
DONE_S = 60.0
LOOK_S = 1.0  # that a pack waits at most for the thread of the loop, which may end meanwhile

Answer = tuple[m.Reply | m.Failed, Body]  # what a task came to

# A user's method or model may raise anything; none of it may end the thread of a slot.
OWN_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


def given_up(give_up_s: float, transport: ClientTransport | None = None) -> CannotGoOn:
    cause = ""
    if transport is not None and (trouble := transport.trouble):
        cause = f"; {transport.address}: {trouble}"
    return CannotGoOn(
        f"no server has accepted this client for {give_up_s:g} s (--give-up{cause}). To continue, "
        f"start it again with the same --state."
    )


def read_server(run: Path) -> tuple[str, str | None] | None:
    """Returns (address, public key) of the server of a run directory; None while there is none.
    Raises StateError if server.json is damaged.
    """
    remedy = "the server writes it again when it is started"
    try:
        found = read_record(run / "server.json", remedy)
    except OSError:
        return None
    host = found.get("host", "")
    here = "127.0.0.1" if host == socket.gethostname() else host
    return reached_at(found["address"], here), found.get("public_key")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a client process has prepared for one run."""

    workers: Sequence[Worker]
    """One for each device."""
    layout: str
    """See `Ready`."""
    samples: Mapping[int, int]
    """By client, how many it trains on."""
    sites: Sequence[m.SiteFacts] = ()
    """See `Ready`."""
    shaper: Shaper | None = None
    """Puts the clients' emulated links before a transport; None: there are none."""
    packs: Sequence[Packs] = ()
    """What trains clients together, one for each device; none: each client trains by itself."""
    together: int = 1
    """Clients that a pack trains at once."""
    rounds_overlap: bool = False
    """See `ClientProtocol`."""
    largest: Callable[[m.Key], int] = lambda key: p.UNBOUNDED
    """See `ClientProtocol`."""
    main_exchange: int = 0
    """In which clients train."""


class ClientLoop:
    """Carries out the protocol's instructions after messages, finished tasks and ticks."""

    def __init__(
        self,
        protocol: p.ClientProtocol,
        transport: ClientTransport,
        # builds data and model for a run, and opens its book; called again only for another run
        prepare: Callable[[ClientLoop, m.Welcome], Prepared],
        *,
        curve: bool,  # the connection is encrypted, or its bytes are counted as if it were
        # tasks are done within `step`, because the server runs in this process too
        inline: bool = False,
        run: Path | None = None,  # the directory in which the server is found
        faults: bool = False,  # planned faults are acted out
        devices: Sequence[str] = ("cpu",),
        gpu_share: float = 1.0,  # of a GPU that this process may use
        most: int = 1,  # tasks that may ever run at once on a device
    ) -> None:
        self.protocol = protocol
        protocol.bytes_read = self._bytes_read
        self._unshaped = transport
        self.transport = transport  # with the emulated links of a run, if it has any
        self.prepared: Prepared | None = None
        self.ended: m.End | m.Refuse | m.Standing | None = None
        self.error: BaseException | None = None  # ends the process
        self._lacking: set[int] = set()  # clients whose state was not here
        self.message_file = MessageFile()
        self.link = Link(
            "client",
            lambda conn, frames: self.transport.send(frames),
            partial(framing, curve=curve),
            Journal(self.message_file.add, by_round=False),
            connection_bytes(curve, "client"),
            protocol.part,
        )
        self._prepare = prepare
        self._inline = inline
        self._faults = faults
        self._cut_uploads = CutUploads(protocol)
        self._warned_of_faults = False
        # Calls that other threads leave for this one, and what their tasks came to.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[p.DoTask, Answer]] = queue.SimpleQueue()
        # The tasks that are to be answered. Only the thread of the loop adds them, and removes
        # those that are answered or cancelled.
        self._wanted: dict[m.Key, p.DoTask] = {}
        # By planned faults: when each is to be made, on the monotonic clock.
        self._delayed: list[tuple[float, Callable[[], None]]] = []
        self._unhandled: list[tuple[m.Task, Body | None, Frames]] = []  # tasks that were read
        self._round = 0  # of the newest task
        self._answered = 0  # tasks
        self._directory = run
        self._searched_at = 0.0  # when the server was last looked for
        self._done_at: float | None = None  # when the run was first found to be finished
        self._connected = False
        self._leaving = False
        self._closing = threading.Event()
        self._not_yet = ""  # the reason that was said last
        self._lines = RoundLines()
        self.slots = SlotPool(
            devices,
            most,
            gpu_share=gpu_share,
            inline=inline,
            changed=self._slots_changed,
            made=self._wake,
            look=self._look,
        )

    # -- the loop ----------------------------------------------------------------------------------
    def run(
        self, say: Callable[[str], None] = lambda line: None, give_up_s: float | None = None
    ) -> m.End | m.Refuse | m.Standing:
        """Works until the run is over or this process is asked to leave.

        say(sentence) is called after each round, when no server answers, and when one does again.
        Raises CannotGoOn if no server has accepted this process for give_up_s, and the error of a
        task that ends the process.
        """
        self._lines.say = say
        accepted = connected = time.monotonic()  # when this process last was
        reported = False
        while self.ended is None:
            self.step(min(0.5, self.protocol.beat_s / 2))
            if self.error is not None:
                reason = ""
                if isinstance(self.error, ConfigError):  # such as a refusal by this site's policy
                    reason = str(self.error)
                elif isinstance(self.error, OSError):
                    reason = why(self.error)
                if reason:
                    self._follow(self.protocol.leave(without_paths(reason)))
                raise self.error
            if not self._wanted:
                self._lines.over(PAUSE_S)
            now = time.monotonic()
            if self.protocol.state in TAKEN_IN:
                accepted = now
            elif give_up_s is not None and now - accepted > give_up_s:
                raise given_up(give_up_s, self.transport)
            if self._connected:
                connected = now
                if reported:
                    say(log_line(f"connected to {self.transport.address}"))
                reported = False
            elif not reported and self.ended is None and now - connected > UNANSWERED_S:
                trouble = self.transport.trouble
                cause = f" ({trouble})" if trouble else ""
                yet = f"not connected to {self.transport.address} yet{cause}; still trying"
                say(log_line(f"{yet} (Ctrl-C ends this)"))
                reported = True
        self._lines.over()
        return self.ended

    def leave(self) -> None:
        """Asks the loop to end; safe to call from a signal handler."""
        self._leaving = True

    def step(self, timeout_s: float) -> bool:
        """Handles what the transport has received, what the tasks have brought, and what is due by
        now. Returns whether there was anything.
        """
        moved = False
        if self._delayed:
            first = min(due for due, _ in self._delayed)
            timeout_s = max(0.0, min(timeout_s, first - time.monotonic()))
        for event in self.transport.poll(timeout_s):
            moved = True
            if isinstance(event, Received):
                self._received(event.frames)
                continue
            self._handle_tasks()
            if isinstance(event, Opened):
                self._connected = True
                self.link.opened(CONNECTION)
                self._follow(self.protocol.opened(time.monotonic()))
            else:
                self._connected = False
                self.link.mark_cut(CONNECTION)
                self._follow(self.protocol.closed())
                self.link.undecoded(CONNECTION, event.received)
                self.link.closed(CONNECTION)
        self._handle_tasks()
        while not self._calls.empty():
            moved = True
            self._calls.get()()
        if not self._finished.empty():
            moved = True
            self._answer()
        if self._delayed:
            waiting = self._delayed
            self._delayed = []
            for due, call in waiting:
                self._call_at(due, call)
        if self._inline and self.slots.work_inline():
            moved = True
        now = time.monotonic()
        self._follow(self.protocol.tick(now))
        if self._leaving and self.ended is None:
            self._follow(self.protocol.leave())
            self.ended = m.End(over=False, reason="asked to leave")
        if self._directory is not None and not self._connected and now - self._searched_at > FIND_S:
            self._searched_at = now
            self._search_server(self._directory, now)
        self.message_file.flush()
        return moved

    def _search_server(self, run: Path, now: float) -> None:
        """Connects to the server that the run's directory names. Asks this process to end where the
        run has been over for `DONE_S`, and no server continues it.
        """
        if not (run / "summary.json").exists():
            self._done_at = None
        elif self._done_at is None:
            self._done_at = now
        elif now - self._done_at > DONE_S:
            self._leaving = True
        found = read_server(run)
        if found is not None and found[0] != self.transport.address:
            self.transport.reconnect(found[0])

    def close(self) -> None:
        self._wanted.clear()  # each running task ends at its next step
        self._closing.set()
        self.slots.close()
        self.link.closed(CONNECTION)
        self.transport.close(1.0)
        self.message_file.close()

    # -- messages ----------------------------------------------------------------------------------
    def _received(self, frames: Frames) -> None:
        """Reads a message and handles it; a task, with those that come right after it."""
        try:
            message, body = self.link.receive(CONNECTION, frames)
        except RemoteProtocolError as broken:
            self._handle_tasks()
            log.warning("a message of the server is damaged, connecting again: %s", broken)
            self._follow([p.Reconnect()])  # the server may wait for an answer to it
            return
        if isinstance(message, m.Task):
            self._unhandled.append((message, body, frames))
        else:
            self._handle_tasks()
            self._handle([(message, body, frames)])

    def _bytes_read(self) -> int:
        return self.transport.bytes_read()  # of now: an emulated link may have been put before it

    def _handle_tasks(self) -> None:
        if self._unhandled:
            tasks = self._unhandled
            self._unhandled = []
            self._handle(tasks)

    def _handle(self, messages: Sequence[tuple[m.Message, Body | None, Frames]]) -> None:
        """Hands messages to the protocol, records them, does what follows: each step for all."""
        now = time.monotonic()
        follows: list[p.Instruction] = []
        came: list[Incoming] = []
        for message, body, frames in messages:
            instructions: list[p.Instruction] = []
            stray = ""
            try:
                instructions = self.protocol.received(message, body, now)
            except RemoteProtocolError as broken:
                log.warning("refused a message of the server: %s", broken)
                stray = "refused"
            if instructions and isinstance(instructions[0], p.Stray):
                stray = instructions[0].reason
            came.append(Incoming(CONNECTION, message, body, frames, stray))
            follows += instructions
        self.link.record_received(came)
        self._follow(follows)

    def _follow(self, instructions: list[p.Instruction]) -> None:
        """Carries out the protocol's instructions. The messages are sent, and the rows of payloads
        written, of all of them at the end.
        """
        calls: list[DeviceCall] = []
        unsent: list[tuple[bytes, m.Message, Body | None]] = []
        closed: dict[tuple[m.Direction, bool], list[m.Key]] = {}
        begun: m.Key | None = None  # the last task
        if self._faults:
            instructions = self._cut_uploads.apply_to(instructions)
        for i in instructions:
            if isinstance(i, p.Send):
                unsent.append((CONNECTION, i.message, i.body))
            elif isinstance(i, p.DoTask):
                key = i.task.key
                prepared = self.prepared
                if key.round != self._round:  # heartbeats: one line a round
                    self.link.close_counted(CONNECTION, round=self._round)
                    self._round = key.round
                assert prepared is not None
                begun = key
                self._wanted[key] = i
                calls.append(partial(self._do, i, prepared))
            elif isinstance(i, p.ClosePayload):
                closed.setdefault((i.direction, i.whole), []).append(i.key)
            elif isinstance(i, p.Cancelled):
                self._wanted.pop(i.key, None)
            elif isinstance(i, p.Prepare):
                self.link.journal.note(Welcomed(i.welcome.inc))
                if not i.again or self.prepared is None:
                    calls.append(partial(self._prepare_run, i.welcome))
            elif isinstance(i, p.Reconnect):
                self.link.send(unsent)
                unsent = []
                found = None if self._directory is None else read_server(self._directory)
                self.transport.reconnect(None if found is None else found[0])
            elif isinstance(i, m.Refuse) and not i.final:
                if i.reason != self._not_yet:
                    why_not = i.reason.removeprefix("join: ")
                    self._lines.say(log_line(f"not in the run yet: {why_not}"))
                self._not_yet = i.reason
            elif isinstance(i, (m.Refuse, m.Standing)) or (isinstance(i, m.End) and i.over):
                self.ended = i
        self.link.send(unsent)
        for (direction, whole), keys in closed.items():
            self.link.close_payloads(
                CONNECTION, direction, keys, whole, "" if whole else "cut short"
            )
        if begun is not None:
            self._lines.began(begun)
        if calls:
            self.slots.put(calls)

    def _answer(self) -> None:
        """Sends what tasks came to, of those that are still wanted."""
        answers: list[Answer] = []
        while not self._finished.empty():
            given, answer = self._finished.get()
            if self._take_wanted(given):
                answers.append(answer)
        if answers:
            self._follow(self._pass_on(answers))

    def _answer_struck(
        self, given: p.DoTask, answer: tuple[m.Reply, Body] | None, faults: PlannedFaults
    ) -> None:
        """Sends what planned faults leave of what a task came to; None: nothing at all."""
        if not self._take_wanted(given):
            return
        key = given.task.key
        if answer is None or faults.silent(answer[0]):
            self._follow(self.protocol.abandon(key))
            return
        out = faults.apply_to(self._pass_on([answer]))
        end = faults.cut(answer[0].size)
        if end is not None:
            self._cut_uploads.plan(key, end)
        self._follow(out + faults.after())

    def _take_wanted(self, given: p.DoTask) -> bool:
        """Takes a task out of those that are to be answered. Returns whether it was there: the
        server may have cancelled it, and sent it again, which makes it another.
        """
        key = given.task.key
        wanted = self._wanted.get(key) is given
        if wanted:
            del self._wanted[key]
        return wanted

    def _pass_on(self, answers: Sequence[Answer]) -> list[p.Instruction]:
        """Passes what tasks came to on to the protocol, and returns its instructions."""
        self._lines.add_answers(answers)
        before = self._answered
        self._answered += len(answers)
        if not self._inline and self._answered.bit_length() > before.bit_length():
            # After tasks 1, 2, 4, 8, ...: the first tasks leave memory in the heap that is given
            # back; later tasks use the same memory again.
            give_back_freed()
        out = self.protocol.finish(answers)
        if out and self.prepared is not None and self.prepared.shaper is not None:
            # A reply waits for its client's emulated link; this process is free for another one.
            for message, _ in answers:
                if isinstance(message, m.Reply):
                    out += self.protocol.uploading(message.key.client)
        return out

    def _call_at(self, due: float, call: Callable[[], None]) -> None:
        """Makes a call when it is time, on the monotonic clock."""
        if due > time.monotonic():
            self._delayed.append((due, call))
        else:
            call()

    def _use(self, prepared: Prepared, run: str) -> None:
        """Works with what was prepared from now on, and tells the server that it can send tasks."""
        if self.protocol.run != run:
            return  # another server has welcomed this process meanwhile, to another run
        self.transport = self._unshaped
        if prepared.shaper is not None:
            self.transport = prepared.shaper(self._unshaped, self._connected)
        self.protocol.own_links = prepared.shaper is not None
        self.protocol.rounds_overlap = prepared.rounds_overlap
        self.protocol.largest = prepared.largest
        self._lines.main_exchange = prepared.main_exchange
        self._lines.samples = prepared.samples
        self._follow(self.protocol.slots_changed(self.slots.total))
        self._follow(self.protocol.ready(prepared.layout, prepared.sites))

    # -- in the thread of a slot -------------------------------------------------------------------
    def _call_in_loop(self, call: Callable[[], None]) -> None:
        """Makes the thread of the loop make this call; any thread may call it."""
        self.slots.hand_over(partial(self._calls.put, call))
        self._wake()

    def _wake(self) -> None:
        """Makes the thread of the loop look at what others have left for it."""
        if not self._inline:
            self.transport.wake()

    def _look(self) -> None:
        """Waits until the thread of the loop has taken in what has come: further tasks, perhaps."""
        if self._inline or self._closing.is_set():
            return
        looked = threading.Event()
        self._call_in_loop(looked.set)
        looked.wait(LOOK_S)

    def _slots_changed(self) -> None:
        if not self._inline:
            self._call_in_loop(lambda: self._follow(self.protocol.slots_changed(self.slots.total)))

    def _prepare_run(self, welcome: m.Welcome, device: int) -> None:
        try:
            prepared = self._prepare(self, welcome)
        except OWN_ERRORS as broken:
            # SystemExit of a user's own part must not end the process as if all were well.
            if not isinstance(broken, Exception):
                name = type(broken).__name__
                broken = CannotGoOn(f"a part of your own raised {name}: {broken}")
            self._call_in_loop(partial(self._end, broken))
            return
        if not self._inline:
            give_back_freed()
        self.prepared = prepared
        self.slots.pack(prepared.packs, prepared.together)
        self._call_in_loop(partial(self._use, prepared, welcome.run))

    def _do(self, given: p.DoTask, prepared: Prepared, device: int) -> None:
        """Does a wanted task, and leaves what came of it for the thread of the loop."""
        key = given.task.key
        if self._wanted.get(key) is not given:
            return
        again_s: float | None = None
        try:
            self._work(given, prepared.workers[device], device)
        except TaskCancelled:
            pass
        except NoRoom as short:
            again_s = short.again_s
            if again_s is None:
                self._fail(given, short, again=True)
            else:
                of = f"client {key.client} in round {key.round}"
                log.warning("%s: %s; it is done again", of, short)
        except OWN_ERRORS as error:
            self._fail(given, error)
        self.protocol.doing.pop(key.client, None)
        if again_s is not None and not self._closing.wait(again_s):
            self.slots.put([partial(self._do, given, prepared)])

    def _work(self, given: p.DoTask, worker: Worker, device: int) -> None:
        """Does a task as its planned faults have it. Raises what the worker raises."""
        task = given.task
        stages = Stages(given, self._wanted, self.protocol.doing)
        work = partial(worker.work, task, given.body, check=given.check)
        if not task.faults or not self._faults:
            if task.faults and not self._warned_of_faults:
                self._warned_of_faults = True
                log.warning("the server plans faults for this client; without --faults none occurs")
            done = self.slots.run(device, partial(work, stages), worker.device.forget)
            # The thread of the loop is woken when this call is over: those of clients that were
            # trained together are answered together.
            self.slots.hand_over(partial(self._finished.put, (given, done)))
            # A pack has one thread, and a client process has its threads from the start.
            timed = self._inline and not worker.device.packed and stages.step_s < math.inf
            if timed and self.slots.add_timing(device, stages.step_s):
                worker.device.forget_scratch()
            return
        faults = PlannedFaults({fault.kind: fault.amount for fault in task.faults})
        began = time.monotonic()
        struck = faults.around(work, partial(self._crash, given))
        due = 0.0
        answer = None
        try:
            answer = self.slots.run(device, partial(struck, stages), worker.device.forget)
            due = faults.due(began)
        except Silenced:
            pass
        struck_answer = partial(self._answer_struck, given, answer, faults)
        self._call_in_loop(partial(self._call_at, due, struck_answer))

    def _fail(self, given: p.DoTask, error: BaseException, again: bool = False) -> None:
        """Logs why a task failed, and tells the server in one line, which names no file of this
        site to a server elsewhere. again: another try may help.
        """
        key = given.task.key
        base = isinstance(error, BaseAbsent)
        lacks = isinstance(error, (LeftRound, StateAbsent))
        if isinstance(error, OSError) and error.errno in NO_STORAGE:
            # The state that this task would leave cannot be kept. The process ends, and its clients
            # are lost as if it had been killed.
            self._call_in_loop(partial(self._end, error))
            return
        logged = ""
        if isinstance(error, RemoteProtocolError):
            reason = str(error)
            again = error.again
        elif isinstance(error, FednetError):
            reason = error_text(error)
            logged = str(error) if lacks else ""
        elif isinstance(error, OSError):
            reason = logged = why(error)
        else:
            reason = error_text(error)[:1000]
            logged = traceback.format_exc()
        if logged:
            level = logging.WARNING if base else logging.ERROR
            log.log(level, "client %d in round %d: %s", key.client, key.round, logged)
        if isinstance(error, StateAbsent) and not base:
            # The user is told once of each client. A server in this process says it itself.
            if key.client not in self._lacking and not self._inline:
                complain(with_time(f"fednet-client: round {key.round}: {error}"))
            self._lacking.add(key.client)
        if not self._inline:  # else the server's user is this site's
            reason = without_paths(reason)
        failed = m.Failed(key=key, reason=reason, again=again, lacks=lacks, base=base)
        self.slots.hand_over(partial(self._finished.put, (given, (failed, NOTHING))))
        if isinstance(error, (StateError, SharedChanged)) and not lacks:
            self._call_in_loop(partial(self._end, error))

    def _end(self, error: BaseException) -> None:
        """Ends the process with an error, once what its tasks came to before is sent."""
        self.error = error

    def _crash(self, given: p.DoTask) -> NoReturn:
        """Ends the process as a power cut does. If the server runs in it too, only this client
        ends: raises TaskCancelled.
        """
        key = given.task.key
        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._call_in_loop(partial(self._answer_struck, given, None, PlannedFaults()))
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")
