"""A client process: one connection, one or many logical clients, one thread for the socket and one a seat for training."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednet import __version__, ids, loading
from fednet import config as configuration
from fednet.engine import determinism, memory
from fednet.engine.rundir import Lines, repair
from fednet.engine.seats import MOST, Cpu, Seats, card_of, out_of_memory
from fednet.errors import CannotGoOn, ConfigError, FednetError, RemoteProtocolError, StateError
from fednet.protocol import client as p
from fednet.transport.base import ClientTransport, Closed, Opened, Received
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.ledger import Ledger
from fednet.wire.link import Link

if TYPE_CHECKING:
    from fednet.engine.packing import Packing

log = logging.getLogger(__name__)
HERE = b""  # a client has one connection
UNANSWERED_S = 3.0  # after so long without a server the user is told
DONE_S = 60.0  # a client that came when the run was over waits so long for a server that goes on with more rounds


Shaper = Callable[[ClientTransport, bool], ClientTransport]


class Prepared:
    """What a client process has made ready for one run: a workplace a device. shape: puts the clients' emulated links before a transport, told
    whether its connection stands. packing, together: where clients are trained as one, and how many tasks are then at a device at once."""

    def __init__(self, workplaces: Sequence[Any], layout: str, sites: Sequence[m.SiteFacts] = (), shape: Shaper | None = None,
                 packing: Packing | None = None, together: int = 1) -> None:
        self.workplaces, self.layout, self.sites, self.shape = workplaces, layout, list(sites), shape
        self.packing, self.together = packing, together


class ClientLoop:
    """Drives the protocol, the link and the work. inline: work is done within `step` (one process), which waits for it.

    prepare(welcome): builds data and model for a run, and opens its book; called again only for another run. seats: who may
    be at work on which device; each seat has a thread.
    """

    def __init__(self, protocol: p.ClientProtocol, transport: ClientTransport, framing: Callable[[int], int],
                 prepare: Callable[[m.Welcome], Prepared], *, greeting: tuple[int, int] = (0, 0), inline: bool = False,
                 find: Callable[[], str | None] | None = None,
                 on_thread: Callable[[], object] | None = None, seats: Seats | None = None) -> None:
        self.protocol, self.transport = protocol, transport
        self.ended: p.Ended | p.TurnedAway | None = None
        self.broken: BaseException | None = None
        self._rows: list[dict[str, Any]] = []
        self._book: Lines | None = None
        self.link = Link("client", lambda conn, frames: self.transport.send(frames), framing, Ledger(self._write, by_round=False), greeting)
        self._round = 0
        self._prepare, self._inline, self._find = prepare, inline, find
        self._prepared: Prepared | None = None
        self._tasks: queue.SimpleQueue[Callable[[int], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Callable[[], list[p.Instruction]]] = queue.SimpleQueue()
        self._wanted: dict[m.Key, p.Given] = {}  # tasks that have not been cancelled
        self._held: list[tuple[float, Callable[[], list[p.Instruction]]]] = []  # replies that a planned fault keeps back
        self._found_at = 0.0
        self._connected = False
        self._threads: list[threading.Thread] = []
        self._pool: ThreadPoolExecutor | None = None
        self._on_thread = on_thread
        self._leaving = False
        self._closing = threading.Event()
        self.seats = seats or Seats([Cpu()], 1)
        self._open_seats()

    # -- the loop ------------------------------------------------------------------------------------------------------
    def run(self, say: Callable[[str], None] = lambda line: None) -> p.Ended | p.TurnedAway:
        """Until the run is over or this process is asked to leave. say: told when nobody answers, and when someone does again."""
        alone, told = time.monotonic(), False
        while self.ended is None:
            self.step(min(0.5, self.protocol.beat_s / 2))
            if self.broken is not None:
                raise self.broken
            if self._connected:
                if told:
                    say(f"connected to {self.transport.address}")  # type: ignore[attr-defined]
                alone, told = time.monotonic(), False
            elif not told and self.ended is None and time.monotonic() - alone > UNANSWERED_S:
                say(f"not connected to {self.transport.address} yet; trying on (Ctrl-C ends this)")  # type: ignore[attr-defined]
                told = True
        return self.ended

    def leave(self) -> None:
        """Asks the loop to end; safe to call from a signal handler."""
        self._leaving = True

    def step(self, timeout_s: float) -> bool:
        """One turn: what the transport has, what the work has brought, what time has done. Whether anything moved."""
        moved = False
        if self._held:
            timeout_s = max(0.0, min(timeout_s, min(due for due, _ in self._held) - time.monotonic()))
        for event in self.transport.poll(timeout_s):
            moved = True
            now = time.monotonic()
            if isinstance(event, Opened):
                self._connected = True
                self.link.opened(HERE)
                self._do(self.protocol.opened(now))
            elif isinstance(event, Closed):
                self._connected = False
                self._do(self.protocol.closed(now))
                self.link.closed(HERE)
            elif isinstance(event, Received):
                self._receive(event, now)
        while not self._results.empty():
            moved = True
            self._do(self._results.get()())
        now = time.monotonic()
        for held in [h for h in self._held if h[0] <= now]:
            self._held.remove(held)
            self._do(held[1]())
        if self._inline and not self._tasks.empty():
            moved = True
            self._work_inline()
        self._do(self.protocol.tick(time.monotonic()))
        if self._leaving and self.ended is None:
            self._do(self.protocol.leave())
            self.ended = p.Ended(False, "asked to leave")
        if not self._connected and self._find is not None and time.monotonic() - self._found_at > 0.1:
            self._found_at = time.monotonic()
            address = self._find()
            if address is not None and address != self.transport.address:  # type: ignore[attr-defined]
                self.transport.reconnect(address)
        return moved

    def close(self) -> None:
        self._wanted.clear()  # a training that still runs ends at its next step
        self._closing.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:  # the interpreter must not end under a thread that is within torch
            thread.join(10.0)
        if self._pool is not None:
            self._pool.shutdown()
        self.link.closed(HERE)
        self.transport.close(1.0)
        if self._book is not None:
            with contextlib.suppress(OSError):  # said already, where it was met
                self._book.close()

    # -- messages ------------------------------------------------------------------------------------------------------
    def _receive(self, event: Received, now: float) -> None:
        try:
            message, body = self.link.receive(HERE, event.frames)
        except RemoteProtocolError as broken:
            log.warning("refused a message of the server, and connecting anew: %s", broken)
            self._do([p.Reconnect()])  # what it was is lost, and might have been awaited
            return
        instructions, stray = list[p.Instruction](), ""
        try:
            instructions = self.protocol.received(message, body, now)
        except RemoteProtocolError as broken:
            log.warning("refused a message of the server: %s", broken)
            stray = "refused"
        if instructions and isinstance(instructions[0], p.Stray):
            stray = instructions[0].reason
        self.link.book(HERE, message, body, event.frames, stray)
        self._do(instructions)

    def _do(self, instructions: list[p.Instruction]) -> None:
        for i in instructions:
            if isinstance(i, p.Out):
                self.link.send(HERE, i.message, i.body)
            elif isinstance(i, p.Given):
                self._wanted[i.task.key] = i
                if i.task.key.round != self._round:  # heartbeats: one line a round
                    self.link.settle_counted(HERE, round=self._round)
                    self._round = i.task.key.round
                self._enter(i)
            elif isinstance(i, p.Welcomed):
                self._welcomed(i)
            elif isinstance(i, p.Booked):
                self.link.settle(HERE, "down" if i.direction == "down" else "up", i.key, i.whole, **({} if i.whole else {"reason": "cut short"}))
            elif isinstance(i, p.Cancelled):
                self._wanted.pop(i.key, None)
            elif isinstance(i, p.Ended):
                if i.over:
                    self.ended = i
            elif isinstance(i, p.TurnedAway):
                self.ended = i
            elif isinstance(i, p.Reconnect):
                self.transport.reconnect(self._find() if self._find is not None else None)

    def _welcomed(self, event: p.Welcomed) -> None:
        self.link.ledger.incarnation = event.welcome.inc
        if not event.again or self._prepared is None:
            self._tasks.put(lambda card: self._get_ready(event.welcome))

    # -- work ----------------------------------------------------------------------------------------------------------
    def _open_seats(self) -> None:
        """A thread for each seat that has none."""
        for card in range(0 if self._inline else len(self.seats.cards)):
            while self.seats.open(card):
                thread = threading.Thread(target=self._work, args=(card,), name=f"fednet-train-{len(self._threads)}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work_inline(self) -> None:
        """The next job; of clients that are packed as many as may be at work at once, each in a thread."""
        jobs = [job for _ in range(min(self._tasks.qsize(), self.seats.total)) if (job := self._tasks.get()) is not None]
        if self.seats.total == 1:
            jobs[0](0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.seats.total, "fednet-train")
        for done in [self._pool.submit(job, 0) for job in jobs]:
            done.result()

    def _work(self, card: int) -> None:
        if self._on_thread is not None:
            self._on_thread()
        while (job := self._tasks.get()) is not None:
            job(card)
            del job  # and the payload it came with
            if self.seats.leave(card):
                return

    def _answer(self, call: Callable[[], list[p.Instruction]]) -> None:
        self._results.put(call)
        if not self._inline:
            self.transport.wake()

    def _get_ready(self, welcome: m.Welcome) -> None:
        try:
            prepared = self._prepare(welcome)
        except Exception as broken:  # raised again in the thread that runs the loop, which ends the process
            self.broken = broken
            self._answer(list)
            return
        self._prepared = prepared
        self.seats.together(prepared.together)
        self._open_seats()
        # Another server may have welcomed this process meanwhile: what is ready here is not what that one asked for.
        self._answer(lambda: self._now_ready(prepared) if self.protocol.run == welcome.run else [])

    def _now_ready(self, prepared: Prepared) -> list[p.Instruction]:
        self.transport = getattr(self.transport, "inner", self.transport)  # the links of another run's clients
        if prepared.shape is not None:
            self.transport = prepared.shape(self.transport, self._connected)
        return [*self.protocol.at_once(self.seats.total), *self.protocol.ready(prepared.layout, prepared.sites)]

    def _enter(self, given: p.Given) -> None:
        """A task waits for a thread."""
        packing = self._prepared.packing if self._prepared is not None else None
        if packing is None:
            self._tasks.put(functools.partial(self._task, given))
        else:
            packing.expect()
            self._tasks.put(functools.partial(self._packed, given, packing))

    def _packed(self, given: p.Given, packing: Packing, card: int) -> None:
        with packing.at_work(card):
            self._task(given, card)

    def _task(self, given: p.Given, card: int) -> None:
        key = given.task.key
        if self._wanted.get(key) is not given or self._prepared is None:
            return
        from fednet.engine.site import TaskCancelled

        doing, planned = self.protocol.doing, {f.kind: f.amount for f in given.task.faults}
        began = time.monotonic()
        if "drop_before_training" in planned:
            return self._answer(lambda: self._silent(key))

        def progress(phase: str, step: int, steps: int) -> None:
            doing[key.client] = (phase, step, steps)
            if "crash" in planned and 2 * step >= steps > 0:
                self._crash(key)

        workplace = self._prepared.workplaces[card]
        try:
            answers = self._at(card, workplace, lambda: workplace.do(given.task, given.body, progress, lambda: self._wanted.get(key) is not given))
        except NoRoom as short:
            doing.pop(key.client, None)
            if short.again_s is None:
                return self._failed(given, str(short), True)
            log.warning("client %d in round %d: %s; it is done again", key.client, key.round, short)
            if not self._closing.wait(short.again_s):
                self._enter(given)
        except TaskCancelled:
            doing.pop(key.client, None)
            return
        except RemoteProtocolError as broken:
            self._failed(given, str(broken), True)
        except FednetError as broken:
            self._failed(given, str(broken), False)
            if isinstance(broken, StateError):
                self.broken = broken
        except OSError as broken:  # a full disk above all: the state that this task would leave cannot be kept
            log.error("client %d in round %d: %s", key.client, key.round, why(broken))
            self._failed(given, why(broken), False)
        except Exception as broken:  # a method or a model of a user's own may raise anything: the server is told, the log has it
            log.error("client %d in round %d\n%s", key.client, key.round, traceback.format_exc())
            self._failed(given, f"{type(broken).__name__}: {broken}"[:1000], False)
        else:
            doing.pop(key.client, None)
            wait_s = planned.get("delay", 0.0) + (planned.get("slow", 1.0) - 1.0) * (time.monotonic() - began)
            self._answer(lambda: self._reply(given, answers, planned, wait_s))

    def _at(self, card: int, workplace: Any, work: Callable[[], Any]) -> Any:
        """What `work` returns, done at a card. Raises NoRoom where the card's memory is not enough."""
        limit = self.seats.begin(card)
        try:
            done = work()
        except Exception as broken:
            if not out_of_memory(broken):
                self.seats.given_up(card)
                raise
        else:
            if self.seats.end(card):
                self._open_seats()
                self._tell_seats()
            return done
        workplace.forget()  # not within `except`: the exception holds on to what the task had taken
        again_s = self.seats.ran_short(card, limit)
        self._tell_seats()
        raise NoRoom(self.seats.cards[card].name, again_s)

    def _tell_seats(self) -> None:
        if not self._inline:
            self._answer(lambda: self.protocol.at_once(self.seats.total))

    def _reply(self, given: p.Given, answers: Sequence[Any], planned: dict[str, float], wait_s: float = 0.0) -> list[p.Instruction]:
        """Hands in what came of a task, with the faults that were planned for it."""
        key = given.task.key
        if self._wanted.get(key) is not given:
            return []
        if wait_s > 0:
            self._held.append((time.monotonic() + wait_s, lambda: self._reply(given, answers, planned)))
            return []
        if "crash" in planned and not self._inline:
            self._crash(key)
        if "crash" in planned or "drop_before_sending" in planned:
            return self._silent(key)
        del self._wanted[key]
        out: list[p.Instruction] = []
        for answer in answers:
            training = answer.reply.key == key
            body = spoilt(answer.body) if training and "corrupt" in planned else answer.body
            out += self.protocol.reply(answer.reply, body, planned.get("drop_during_upload") if training else None)
        if "duplicate" in planned:
            out += [i for i in out if isinstance(i, p.Out) and isinstance(i.message, m.Reply)]
        if out and self._prepared is not None and self._prepared.shape is not None:
            # The reply waits for its client's emulated link; this process is free for its next client.
            out.append(p.Out(m.Beat(run=self.protocol.run, inc=self.protocol.inc, client=key.client, phase=m.UPLOADING)))
        if "disconnect" in planned:
            out.append(p.Reconnect())
        return out

    def _crash(self, key: m.Key) -> None:
        """The process ends as by a power cut. Where the server lives in it too, only this client does."""
        from fednet.engine.site import TaskCancelled

        if not self._inline:
            os.kill(os.getpid(), signal.SIGKILL)
        self._silent(key)
        raise TaskCancelled(f"client {key.client} crashed in round {key.round}, as planned")

    def _silent(self, key: m.Key) -> list[p.Instruction]:
        """Nothing more is heard of this task."""
        self._wanted.pop(key, None)
        return self.protocol.forget(key)

    def _failed(self, given: p.Given, reason: str, again: bool) -> None:
        key = given.task.key
        self.protocol.doing.pop(key.client, None)
        self._answer(lambda: self.protocol.failed(key, reason, again) if self._wanted.pop(key, None) is given else [])

    # -- books ---------------------------------------------------------------------------------------------------------
    def open_book(self, path: Path) -> None:
        """The client's own book. Rows written before it was known where it lies are in it too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        if self._book is not None:
            self._book.close()
        self._book = Lines(path)
        for row in self._rows:
            self._book.append(row)
        self._rows.clear()

    def _write(self, row: dict[str, Any]) -> None:
        if self._book is None:
            self._rows.append(row)
        else:
            self._book.append(row)
            self._book.flush()


class NoRoom(FednetError):
    """A task ran out of its device's memory. again_s: seconds after which to do it again, None: not any more."""

    def __init__(self, card: str, again_s: float | None) -> None:
        super().__init__(f"there is not enough memory on {card}" + (" for this client alone" if again_s is None else ""))
        self.again_s = again_s


def why(broken: OSError) -> str:
    """What the system said, and of which file."""
    return f"{broken.strerror or broken}{f' ({broken.filename})' if broken.filename else ''}"


def spoilt(body: Body) -> Body:
    """A payload with one of its bytes another."""
    copy = bytearray(body.whole())
    if copy:
        copy[len(copy) // 2] ^= 0xFF
    return Body([copy])


# -- preparing ---------------------------------------------------------------------------------------------------------
def preparer(loop: Callable[[], ClientLoop], *, data: Path | None, state: Path | None, devices: Sequence[str], state_lost: bool, allow: Sequence[str] | None,
             quiet: bool, say: Callable[[str], None]) -> Callable[[m.Welcome], Prepared]:
    """The function that makes a client process ready for the run that a server tells it of."""

    def prepare(welcome: m.Welcome) -> Prepared:
        from fednet.engine import experiment
        from fednet.engine.packing import Packing
        from fednet.engine.site import Workplace
        from fednet.engine.store import ClientStore

        config = configuration.from_text(welcome.config, "the server's configuration")
        determinism.settle(config.train.threads, config.train.precision)
        root = state_directory(state, welcome.run)
        at_home = config.data.dataset == "site"
        own: dict[int, Any] = {}
        if at_home:
            from fednet.data.site import alone, load_site

            for client in welcome.ids:
                folder = _own_folder(data, client)
                own[client] = alone(load_site(config.data, folder, config.seed))
            exp = experiment.build(config, data, next(iter(own.values())).data if own else None)
        else:
            exp = experiment.build(config, data)
        if allow is not None:
            check_allowed(exp, allow)

        def site(client: int, device: str = devices[0]) -> Any:
            return own[client].site(0, device) if at_home else exp.federation.site(client, device)

        def balanced(device: str) -> Any:
            from fednet.data import balanced_test
            from fednet.data.federation import Site

            found = exp.data if not at_home else next(iter(own.values())).data
            import numpy as np
            import torch

            return Site(found, np.zeros(0, dtype=np.int64), balanced_test(found, config.seed), torch.device(device)).test

        store = ClientStore(root, exp.algorithm.Client)
        packing = Packing(config.train.pack, exp.setting.task, loop().seats.limit, config.train.threads) if config.train.pack > 1 else None
        workplaces = [Workplace(exp, store, functools.partial(site, device=device), device, state_lost=state_lost,
                                balanced=None if at_home or not exp.setting.classes else functools.partial(balanced, device),
                                pack=packing.at(card) if packing is not None else None) for card, device in enumerate(devices)]
        loop().open_book(root / f"wire-{loop().protocol.worker}.jsonl" if len(welcome.ids) == config.clients else root / "wire.jsonl")
        for workplace in workplaces:
            workplace.warm()
        facts = [m.SiteFacts(c, site(c).n, site(c).n_test, [int(k) for k in site(c).class_counts]) for c in welcome.ids] if at_home else []
        if not quiet:
            say(f"joined {welcome.name} as client{'s' if len(welcome.ids) > 1 else ''} {_listed(welcome.ids)} on {', '.join(devices)}")
        return Prepared(workplaces, exp.digest, facts, shaper(config), packing, max(1, min(config.train.pack, len(welcome.ids))))

    return prepare


def state_directory(state: Path | None, run: str) -> Path:
    """Where a client process keeps what belongs to one run."""
    return (state or Path(os.environ.get("FEDNET_OUT") or "runs") / "client-state") / run


def shaper(config: Any) -> Shaper | None:
    """What emulates the links of `config.link`; None where there is nothing to emulate."""
    from fednet import seeds
    from fednet.engine import links
    from fednet.transport.shaped import Link as Shape
    from fednet.transport.shaped import ShapedClient

    if not links.emulated(config):
        return None
    rng = seeds.rng(config.seed if config.link.seed is None else config.link.seed, "jitter/emulated")
    return lambda transport, is_open: ShapedClient(transport, Shape(), time.monotonic, rng, link_of=links.chooser(config),
                                                   curve=config.security.curve, is_open=is_open)


def _own_folder(data: Path | None, client: int) -> Path | None:
    """A site that hosts several clients keeps each one's data in DIR/client-K; one client's data may be DIR itself."""
    if data is not None and (data / f"client-{client}").exists():
        return data / f"client-{client}"
    return data


def _listed(numbers: Sequence[int]) -> str:
    ranges, start = [], None
    for i, n in enumerate(numbers):
        start = n if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            ranges.append(f"{start}-{n}" if n > start else str(n))
            start = None
    return ",".join(ranges)


def check_allowed(experiment: Any, allow: Sequence[str]) -> None:
    """Raises ConfigError where the method's replies hold a kind that this site does not let out."""
    for exchange in experiment.algorithm.exchanges:
        for name, field in exchange.up.fields.items():
            if field.kind not in allow:
                raise ConfigError(f"the method {experiment.config.algorithm.name} sends up {name!r} of kind {field.kind!r}, and --allow names only "
                                  f"{', '.join(allow)}.")


def explanation(experiment: Any, clients: Sequence[int]) -> list[str]:
    """What would leave this site each round, from the declarations."""
    method, lines = experiment.algorithm, []
    for client in clients:
        for number, exchange in enumerate(method.exchanges, 1):
            kinds = experiment.predicted(exchange.up, "up", client)
            parts = ", ".join(f"{kind} {n:,} bytes" for kind, n in kinds.items())
            down = sum(experiment.predicted(exchange.down, "down", client).values())
            lines.append(f"client {client}, exchange {number}: up {parts}; down {down:,} bytes")
    keeps = method.keeps[1]
    lines.append(f"kept at this site between rounds: {keeps if keeps != '-' else 'nothing'}")
    lines.append("evaluations send up counts of correct answers by class (accuracy)")
    return lines


# -- the command -------------------------------------------------------------------------------------------------------
def main(text: str, *, server: str | None, run: Path | None, device: str, data: Path | None, state: Path | None, keys: Path | None,
         allow: list[str] | None, explain: bool, load: list[Path], state_lost: str | None, quiet: bool, share: float = 1.0) -> int:
    """`fednet-client`. Ends with 0 when the run is over; reconnects for as long as it lives before that. share: of its GPUs, where
    other workers are known to be on them too."""
    from fednet.engine.placement import place
    from fednet.transport.framing import connection_bytes, framing
    from fednet.transport.zeromq import ZmqClient

    wanted = ids.parse(text)
    loading.load_parts(load)
    memory.keep_freed()
    determinism.settle()
    here = place(device)
    pair = None
    find = None
    say = (lambda line: None) if quiet else (lambda line: print(line, flush=True))
    if run is not None:
        if read_server(run) is None:
            say(f"waiting for {run / 'server.json'}")
        address, public = wait_for_server(run)
        find = _finder(run, lambda: this().leave())
    else:
        address, public = str(server), None
    if keys is not None:
        from fednet.transport import keys as keyfiles

        pair = keyfiles.load(keys)
        if public and pair.server is None:
            import dataclasses

            pair = dataclasses.replace(pair, server=public)
    if run is not None and (pair is None) != (public is None):
        wants = "has CURVE keys, and so must its clients: give --keys FILE" if pair is None else "has no CURVE keys: leave --keys out"
        raise ConfigError(f"{run}: the server there {wants}.")
    transport = ZmqClient(address, keys=pair, on_refused=_once())
    protocol = p.ClientProtocol(secrets.token_hex(6), ids=list(wanted.listed), share=wanted.share, host=socket.gethostname(), pid=os.getpid(),
                                device=",".join(here), slots=len(here), versions=versions(), files=loading.loaded())
    loop: ClientLoop | None = None

    def this() -> ClientLoop:
        assert loop is not None
        return loop

    prepare = preparer(this, data=data, state=state, devices=here, state_lost=state_lost == "reset", allow=allow, quiet=quiet, say=say)
    if explain:
        prepare = _explaining(data, state)
    curve = pair is not None
    loop = ClientLoop(protocol, transport, lambda n: framing(n, curve=curve), prepare, greeting=connection_bytes(curve, "client"), find=find,
                      on_thread=determinism.settle, seats=Seats([card_of(device, share) for device in here], len(wanted.listed) or MOST))
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not the main thread: the caller has the signals
            signal.signal(number, lambda *_: this().leave())
    say(f"connecting to {address}")
    try:
        end = loop.run(say)
    except _Explained:
        return 0
    except OSError as broken:
        raise CannotGoOn(f"this client stops: {why(broken)}; started again with the same --state, it goes on.") from broken
    finally:
        loop.close()
    if isinstance(end, p.TurnedAway):
        raise ConfigError(f"the server refused this client: {end.reason}")
    say("the run is over" if end.over else "left")
    return 0


def _finder(run: Path, leave: Callable[[], None]) -> Callable[[], str | None]:
    """Finds the server of a run directory while there is no connection; leaves a run that has been finished for `DONE_S`."""
    done_at: list[float] = []

    def find() -> str | None:
        if not (run / "summary.json").exists():
            done_at.clear()
        elif not done_at:
            done_at.append(time.monotonic())
        elif time.monotonic() - done_at[0] > DONE_S:
            leave()
        return (read_server(run) or (None, None))[0]

    return find


def _once() -> Callable[[str, str], None]:
    """Says each reason for which this client and the server do not come together once, however often it is tried."""
    told: set[str] = set()

    def refused(reason: str, address: str) -> None:
        if reason not in told:
            told.add(reason)
            print(f"fednet-client: not connected to {address}: {reason}; trying on", file=sys.stderr, flush=True)

    return refused


class _Explained(FednetError):
    """`--explain` has said what it had to say."""


def _explaining(data: Path | None, state: Path | None) -> Callable[[m.Welcome], Prepared]:
    def prepare(welcome: m.Welcome) -> Prepared:
        from fednet.engine import experiment

        config = configuration.from_text(welcome.config, "the server's configuration")
        exp = experiment.build(config, data)
        print(f"{welcome.name}: {config.algorithm.name}, {config.rounds} rounds, {config.cohort_size} of {config.clients} clients a round")
        for line in explanation(exp, welcome.ids):
            print(line)
        print(f"read here: the data of {config.data.dataset}{f' in {data or config.data.root}' if data or config.data.root else ''}")
        print(f"stored here: {state_directory(state, welcome.run)} (the clients' states, and wire.jsonl, this site's own book of all messages)",
              flush=True)
        raise _Explained("")

    return prepare


def versions() -> dict[str, str]:
    import platform

    import torch

    return {"fednet": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def read_server(run: Path) -> tuple[str, str | None] | None:
    """(address, public key) of the server of a run directory; None while there is none."""
    try:
        found = json.loads((run / "server.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    address = found["address"]
    host = found.get("host", "")
    for anywhere in ("0.0.0.0", "[::]"):
        if anywhere in address:
            address = address.replace(anywhere, "127.0.0.1" if host == socket.gethostname() else host)
    return address, found.get("public_key")


def wait_for_server(run: Path) -> tuple[str, str | None]:
    """Waits for a run's server.json."""
    while (found := read_server(run)) is None:
        time.sleep(0.02)
    return found
