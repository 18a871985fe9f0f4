"""The server's rounds, top to bottom.

    select -> for each exchange: broadcast, collect, fold in id order, finish -> judge -> checkpoint -> records

The next round's broadcast leaves before this round is judged and checkpointed, so that the clients train meanwhile; the
records and the bits are the same either way.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fednet import seeds
from fednet.algorithms.base import Nothing, Payload, State, Tensors
from fednet.algorithms.evaluation import Counts, evaluate
from fednet.algorithms.hosts import HubHost
from fednet.engine import keepsakes, privacy, selection
from fednet.engine.checkpoint import Checkpoints, Progress
from fednet.engine.clock import VirtualClock, crossing, task_bytes
from fednet.engine.experiment import Experiment, GlobalModel, Judgement
from fednet.engine.faults import Faults, drops
from fednet.engine.hub import Hub
from fednet.engine.rundir import RunDirectory, read_lines
from fednet.engine.site import SPLIT, judgements
from fednet.engine.spool import Spool, Spooled
from fednet.engine.store import on_disk
from fednet.errors import CannotGoOn, Stopped
from fednet.protocol.rules import Job, Rules
from fednet.tensors import combine
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.ledger import Kinds, Row, Tally, add_kinds
from fednet.wire.messages import Key, Purpose
from fednet.wire.payload import Run

# What a round's seconds are split into; of what the clients do, those of the one that came last count.
TIMES = ("training", "encoding", "sending", "waiting", "aggregating", "evaluating", "recording")
POLL_S = 0.2  # how often a request to stop is looked for


class Residuals(State):
    """What compressed broadcasts have left out so far, by field."""

    down: dict[str, torch.Tensor]


@dataclass
class Phase:
    """A phase that is open, or over."""

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    start: dict[int, str]
    seen: dict[int, Any]  # what each client was sent, as it sees it
    residuals: dict[str, torch.Tensor]
    opened: float
    out: dict[int, str] = field(default_factory=dict)  # who is not asked, and why
    spooled: dict[tuple[int, str], Spooled] = field(default_factory=dict)
    done: dict[int, Spooled] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    virtual: dict[int, float] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)  # on the virtual clock: all bytes of each client's task
    encoding: float = 0.0
    virtual_split: dict[int, dict[str, float]] = field(default_factory=dict)
    enrolled: set[int] = field(default_factory=set)  # who gets what is given once

    @property
    def name(self) -> tuple[int, int, Purpose]:
        return self.round, self.index, self.purpose


@dataclass
class Outcome:
    """What a round came to."""

    round: int
    selected: tuple[int, ...]
    completed: tuple[int, ...]
    phases: list[tuple[int, ...]]  # who completed each exchange
    dropped: dict[int, str]
    void: bool
    server: Any
    versions: dict[int, str]
    states: dict[int, str]
    residuals: dict[str, torch.Tensor]
    started: float
    seconds: dict[str, float]
    virtual: float
    virtual_split: dict[str, float]
    predicted: Kinds
    runs: dict[int, Run]
    judged: dict[int, dict[str, Counts]]
    workers: dict[int, dict[str, Any]]
    client_seconds: dict[int, float]
    reported: dict[str, Any]
    warnings: list[str]


class Rounds:
    """One server process's part in a run. Call `run`; it raises Stopped, or CannotGoOn, with everything saved."""

    def __init__(self, experiment: Experiment, directory: RunDirectory, hub: Hub, checkpoints: Checkpoints, spool: Spool, *, run_id: str,
                 host: HubHost, display: Any, faults: Faults, test: Any = None, validation: Any = None,
                 told: Sequence[Callable[[dict[str, Any]], None]] = ()) -> None:
        self.experiment, self.config, self.method = experiment, experiment.config, experiment.algorithm
        self.directory, self.hub, self.checkpoints, self.spool = directory, hub, checkpoints, spool
        self.faults = faults
        self.host, self.display, self.test, self.validation, self.told = host, display, test, validation, told
        self.progress = Progress(run=run_id)
        self.server: Any = None
        self.residuals: dict[str, torch.Tensor] = {}
        self.durable: dict[int, str] = {}
        self.sent: dict[int, Tensors] = {}  # the weights each client was sent in the phase that is open
        self._noise = privacy.Noise(checkpoints.folder / "noise.key") if self.config.privacy.noise else None
        self._accountant = privacy.Accountant(self.config) if self.config.privacy.noise else None
        self.stop_requested: tuple[str, bool] | None = None
        self.until: float | None = None
        self._replayed: dict[Key, list[Row]] = {}  # earlier servers' useful rows of rounds that no checkpoint holds
        self._replayed_useful: Kinds = {"up": {}, "down": {}}  # of these, what is in no record yet
        self._clock = VirtualClock(self.config) if self.config.link.clock == "virtual" else None
        self._status_at = 0.0
        self._began = self._recorded = time.monotonic()
        self._concluding = False

    # -- the run -------------------------------------------------------------------------------------------------------
    def begin(self, resumed: tuple[Any, Progress, Any] | None) -> None:
        """Fresh state, or what a checkpoint holds."""
        if resumed is None:
            first = self.method.init_server(self.experiment.setting.initial.select(self.experiment.shared))
            self.server = on_disk(self.method.prepare(first, self.host), self.checkpoints.rows)
        else:
            self.server, self.progress, more = resumed
            self.residuals = dict(more.down) if more is not None else {}
            self.durable = dict(self.progress.versions)
            self.hub.link.ledger.taken(self.progress.totals)
            self._read_book()
            more_to_do = self.progress.round < self.config.rounds and self._wanted_stop() is None
            self.progress.finished = self.progress.finished and not more_to_do
        self._save()

    def _read_book(self) -> None:
        """What an earlier server received and this one folds is as useful now as it was then."""
        for row in read_lines(self.directory.path / "wire.jsonl"):
            if row["round"] > self.progress.round and row["useful"] and row["purpose"] == "train":
                self._replayed.setdefault(Key(row["round"], row["phase"], row["attempt"], row["client"]), []).append(row)

    def run(self) -> None:
        """All rounds, then the last evaluation."""
        try:
            self._run()
        except Stopped:
            if not self._concluding:  # else the last checkpoint holds all that is finished
                self._save()
            raise
        finally:
            self.spool.close()

    def _run(self) -> None:
        progress, config = self.progress, self.config
        if progress.finished:
            return
        self._await_clients()
        round = progress.round + 1
        phase = self._open(round) if round <= config.rounds and self._wanted_stop() is None else None
        while phase is not None:
            outcome = self._collect_round(phase)
            self.server = outcome.server
            phase = self._open(round + 1, outcome) if round < config.rounds and self._may_overlap() else None
            self._conclude(outcome)
            round += 1
            if phase is None and round <= config.rounds and self._wanted_stop() is None:
                phase = self._open(round)
            if progress.void >= config.round.void_rounds:
                self._cancel_open(phase)
                self._save()
                raise CannotGoOn(f"{progress.void} rounds in a row had fewer than {config.round.min_results} results; the last good state is saved.")
            reason = self._wanted_stop()
            if reason is not None and phase is not None:
                self._cancel_open(phase)
                phase = None
            progress.stopped = reason or ""
        lines = self._last_evaluation()
        progress.finished = True
        self._save({"clients": lines})

    def _may_overlap(self) -> bool:
        """Whether the next round may start before this one is judged: not where what is found may end the run."""
        stop, evaluate = self.config.stop, self.config.evaluate
        return stop.accuracy is None and stop.megabytes is None and stop.seconds is None and not (evaluate.every and evaluate.clients == "all")

    def _wanted_stop(self) -> str | None:
        stop, progress = self.config.stop, self.progress
        spent = sum(progress.totals.get(k, 0) for k in ("up", "down"))
        if stop.accuracy is not None and progress.best is not None and progress.best >= stop.accuracy:
            return f"accuracy {progress.best:.4f} reached"
        if stop.megabytes is not None and spent >= stop.megabytes * 1e6:
            return f"{spent / 1e6:.4g} MB spent"
        seconds = progress.virtual if self._clock else progress.seconds
        if stop.seconds is not None and seconds >= stop.seconds:
            return f"{seconds:.4g} s spent"
        return None

    def _cancel_open(self, phase: Phase | None) -> None:
        if phase is not None:
            self.hub.call(lambda now: self.hub.protocol.cancel("the run ends", now))

    # -- waiting -------------------------------------------------------------------------------------------------------
    def _heed(self) -> None:
        """Stops where someone asked for it; keeps status.json fresh."""
        if self.until is not None and time.monotonic() >= self.until:
            self.stop_requested = ("the time of --until is over", False)
        if self.stop_requested is not None:
            raise Stopped(f"stopped: {self.stop_requested[0]}; go on with --resume.", by_keyboard=self.stop_requested[1])
        now = time.monotonic()
        if now - self._status_at >= 1.0:
            self._status_at = now
            self._status("running")
            self.display.progress({**self.hub.snapshot, "round": self.hub.protocol.round, "rounds": self.config.rounds})

    def _status(self, state: str) -> None:
        protocol = self.hub.protocol
        self.directory.status(state=state, round=protocol.round, rounds=self.config.rounds, phase=protocol.purpose,
                              waiting=self.hub.snapshot["waiting"], arrived=self.hub.snapshot["arrived"])

    def _await_clients(self) -> None:
        start, join = self.config.round.start, self.config.round.join
        wanted = self.config.clients if start == "all" else int(start)
        until = None if join is None else time.monotonic() + join
        told = False
        while self.hub.snapshot["present"] < wanted:
            if self.progress.round > 0 or (until is not None and time.monotonic() >= until):
                break  # after a restart nobody is waited for in advance: each task waits for its own client
            if not told and time.monotonic() - self._began > 2.0:
                self.display.note(f"waiting for clients: {self.hub.snapshot['present']} of {wanted} are here")
                told = True
            self.hub.wait(0.05, (0, 0, ""))
            self._heed()
        if not self.hub.snapshot["present"] and until is not None and time.monotonic() >= until:
            raise CannotGoOn(f"no client joined within {join:g} s (round.join).")

    # -- a phase -------------------------------------------------------------------------------------------------------
    def _rules(self) -> Rules:
        section = self.config.round
        virtual = self._clock is not None or self.faults.replay is not None  # then who counts is not for the clock here to say
        silent = None if self.hub.inline else section.lost.silent  # a client that trains in this very thread sends no heartbeat
        return Rules(deadline=None if virtual else section.deadline, closed=section.lost.closed, silent=silent, join=section.join,
                     first=None if virtual else section.first, defer=self._clock is not None, stalled=section.lost.stalled)

    def _open(self, round: int, before: Outcome | None = None) -> Phase:
        """Opens a round's first exchange."""
        cohort = selection.cohort(self.config, round)
        versions = self.progress.versions if before is None else before.versions
        residuals = self.residuals if before is None else before.residuals
        self.display.round_started(round, self.config.rounds, cohort)
        return self._open_exchange(round, 0, cohort, self.server, dict(versions), dict(residuals))

    def _open_exchange(self, round: int, index: int, cohort: Sequence[int], server: Any, versions: dict[int, str],
                       residuals: dict[str, torch.Tensor]) -> Phase:
        """Encodes each client's task and hands them to the protocol."""
        method, host, config = self.method, self.host, self.config
        host.begin(round, index, cohort)
        phase = Phase(round, index, "train", tuple(cohort), {c: versions.get(c, "") for c in cohort}, {}, residuals, time.monotonic())
        phase.spooled, phase.out = self.spool.found(round, index), self.faults.out(round, index, cohort)
        judge = self._judging(round) and config.evaluate.clients == "auto" and index == len(method.exchanges) - 1
        jobs: list[Job] = []
        cache: dict[str, Any] = {}
        last: Any = None
        for client in cohort:
            down = method.broadcast(server, index, client)
            same = last is not None and all(getattr(last[0], f) is getattr(down, f) for f in down.fields)
            if last is None or not same:
                encoded = self.experiment.down.encode(down, lambda name: seeds.rng(config.seed, f"compress/down/{index}/{name}", round),
                                                      residuals, self.experiment.agreed, cache, slot=f"{index}/")
                last = (down, encoded, encoded.body.check())
            _, encoded, check = last
            phase.seen[client] = encoded.seen
            form, body, enrol = encoded.form, encoded.body, 0
            gift = method.enroll(server, client, host) if not phase.start[client] and index == 0 else None
            if gift is not None:
                phase.enrolled.add(client)
                given = self.experiment.down.encode(gift)
                form, body, enrol = (*given.form, *form), Body([*given.body.segments, *body.segments]), len(given.form)
                check = body.check()
            known = phase.spooled.get((client, "train"))
            if known is not None and known.task != (check, phase.start[client]):  # it answers what another server asked
                phase.spooled = {k: s for k, s in phase.spooled.items() if k[0] != client}
            if self._clock is not None:
                phase.down[client] = task_bytes(self.progress.run, Key(round, index, 0, client), form, body.size, check, phase.start[client],
                                                self.durable.get(client, ""), enrol, judge)
            if (client, "train") in phase.spooled:
                for row in self._replayed.pop(phase.spooled[client, "train"].key, ()):  # what was of use then is so now
                    add_kinds(self._replayed_useful[row["direction"]], row["kinds"])
            elif client not in phase.out:
                faults = self.faults.of(round, index, client)
                jobs.append(Job(client, form, body, check, cost=self._cost(client), start=phase.start[client], keep=self.durable.get(client, ""),
                                enrol=enrol, judge=judge, faults=faults, lost=drops(faults)))
        self.sent = {c: down.x for c, down in phase.seen.items() if isinstance(getattr(down, "x", None), Tensors)}
        phase.encoding = time.monotonic() - phase.opened
        self._begin(phase, jobs)
        return phase

    def _begin(self, phase: Phase, jobs: list[Job]) -> None:
        rules, here = self._rules(), sum(1 for _, purpose in phase.spooled if purpose == "train")
        if rules.first is not None and here:  # what an earlier server received counts among the first
            rules = dataclasses.replace(rules, first=max(1, rules.first - here))
            if here >= (self.config.round.first or 0):
                phase.out |= {j.client: f"not among the first {self.config.round.first}" for j in jobs}
                jobs = []

        def command(now: float) -> list[Any]:
            self.hub.replies.clear()
            return self.hub.protocol.begin(*phase.name, jobs, rules, now)

        self.hub.call(command)

    def _cost(self, client: int) -> int:
        """SGD steps of the client's task: the longest are handed out first."""
        train = self.config.train
        if train.steps is not None:
            return train.steps
        n = len(self.experiment.federation.parts[client]) if self.experiment.federation is not None else \
            getattr(self.hub.protocol.sites.get(client), "train", 0)
        return train.epochs * -(-n // train.batch_size)

    def _collect(self, phase: Phase, fold: Any = None, server: Any = None, runs: dict[int, Run] | None = None) -> Any:
        """Waits for all of a phase and folds the replies in ascending client id, as soon as each one's turn has come."""
        outcomes: dict[int, str] = {c: "" for c, purpose in phase.spooled if purpose == phase.purpose and c in phase.cohort} | phase.out
        for client, reason in phase.out.items():
            self.directory.event("dropped", phase.round, client, reason=reason)
        defer = self._clock is not None
        todo = list(phase.cohort)
        while todo:
            while todo and todo[0] in outcomes and not defer:
                fold = self._fold_one(phase, todo.pop(0), outcomes, fold, server, runs)
            if not todo or (defer and all(c in outcomes for c in todo)):
                break
            resolved = self.hub.wait(POLL_S, phase.name)
            if resolved is not None and resolved.client in phase.start:
                outcomes[resolved.client] = resolved.reason
                if resolved.reason:
                    self.directory.event("dropped", phase.round, resolved.client, reason=resolved.reason)
            self._heed()
        if self._clock is not None:
            self._decide(phase, outcomes)
            for client in todo:
                fold = self._fold_one(phase, client, outcomes, fold, server, runs)
        return fold

    def _reply(self, phase: Phase, client: int, purpose: str) -> Spooled | None:
        return self.hub.replies.get((client, purpose)) or phase.spooled.get((client, purpose))

    def _fold_one(self, phase: Phase, client: int, outcomes: dict[int, str], fold: Any, server: Any, runs: dict[int, Run] | None) -> Any:
        reason = outcomes[client]
        reply = self._reply(phase, client, phase.purpose)
        if reason or reply is None:
            phase.dropped[client] = reason or "lost"
            if reason.startswith("failed") and self.config.round.on_error == "stop":
                raise CannotGoOn(f"client {client} could not do its task in round {phase.round}: {reason.removeprefix('failed: ')}")
            return fold
        phase.done[client] = reply
        if phase.purpose != "train":
            return fold
        up = self._decoded(phase, client, reply)
        if any(f.kind == "condensed" for f in up.fields.values()):
            keepsakes.keep_condensed(self.directory.path, client, up)
        if runs is not None and isinstance(getattr(up, "run", None), Run):
            runs[client] = up.run
        if self.config.privacy.clip is not None:
            up = privacy.received(up, self.sent.get(client), self.config.privacy)
        return self.method.fold(fold, server, client, up, self.host)

    def _decoded(self, phase: Phase, client: int, reply: Spooled) -> Any:
        """The payload of a reply that was checked when it came."""
        received = getattr(phase.seen.get(client), "x", None)
        x = received if isinstance(received, Tensors) else self.experiment.agreed
        return self.experiment.up.decode(self.method.exchanges[phase.index].up, reply.form, reply.body(), x, fill=self._fill(), sound=True)

    def _fill(self) -> Tensors:
        x = getattr(self.server, "x", None)
        whole = isinstance(x, Tensors) and x.layout == self.experiment.shared
        return x if whole and isinstance(x, Tensors) else self.experiment.setting.initial.select(self.experiment.shared)

    def _decide(self, phase: Phase, outcomes: dict[int, str]) -> None:
        """On the virtual clock: who was in time."""
        assert self._clock is not None
        for client, reason in outcomes.items():
            reply = self._reply(phase, client, phase.purpose)
            if not reason and reply is not None:
                phase.virtual_split[client] = self._clock.seconds(client, phase.round, self._cost(client), phase.down[client], _reply_bytes(reply),
                                                                  *self.faults.time(phase.round, phase.index, client))
                phase.virtual[client] = sum(phase.virtual_split[client].values())
        late = {} if self.faults.replay is not None else self._clock.late(phase.virtual)
        for client, reason in late.items():
            outcomes[client] = reason
            self.directory.event("dropped", phase.round, client, reason=reason)
        useful = {c: c not in late for c in phase.virtual if (c, phase.purpose) not in phase.spooled}
        self.hub.call(lambda now: self.hub.protocol.decide(useful), wait=True)

    # -- a round -------------------------------------------------------------------------------------------------------
    def _collect_round(self, phase: Phase) -> Outcome:
        """All exchanges of a round whose first is open."""
        config, method, host = self.config, self.method, self.host
        started, seconds, virtual = phase.opened, dict.fromkeys(TIMES, 0.0), 0.0
        server, versions, states = self.server, dict(self.progress.versions), dict(self.progress.states)
        selected, dropped, runs = phase.cohort, dict[int, str](), dict[int, Run]()
        short, phases = config.round.min_results, list[tuple[int, ...]]()
        virtual_split: dict[str, float] = {}
        predicted: Kinds = {"up": {}, "down": {}}
        while True:
            host.begin(phase.round, phase.index, phase.cohort)
            fold = self._collect(phase, method.start(server, phase.index), server, runs)
            self._split(phase, seconds)
            dropped |= phase.dropped
            self._predict(phase, predicted)
            if self._clock:
                span = self._clock.span(phase.virtual, bool(set(phase.dropped) - set(phase.virtual)))
                virtual += span
                for name, part in self._clock.split(phase.virtual_split, phase.virtual, span).items():
                    virtual_split[name] = virtual_split.get(name, 0.0) + part
            completed = tuple(sorted(phase.done))
            phases.append(completed)
            void = len(completed) < short
            if void:
                break
            begun = time.monotonic()
            self.faults.at("aggregating", phase.round)
            host.begin(phase.round, phase.index, completed)
            if config.privacy.clip is not None:
                fold = privacy.noised(fold, config.privacy, self._noise, phase.round)
            server = self._with_buffers(method.finish(fold, server, completed, host))
            seconds["aggregating"] += time.monotonic() - begun
            for client, reply in phase.done.items():
                if reply.kept:
                    versions[client] = reply.key.version
                    states[client] = reply.state
            if phase.index == len(method.exchanges) - 1:
                break
            phase = self._open_exchange(phase.round, phase.index + 1, completed, server, versions, phase.residuals)
        judged, workers, client_seconds = {}, {}, {}
        for client, reply in phase.done.items():
            workers[client], client_seconds[client] = reply.worker, reply.seconds
            verdict = self._reply(phase, client, "evaluate")
            if verdict is not None:
                judged[client] = judgements(self._judgement(verdict), self.experiment.setting.classes)
        if void:
            server, versions, states = self.server, dict(self.progress.versions), dict(self.progress.states)
        # A void round never was: what its broadcast left out is not owed to those whose state goes back with it.
        residuals = self.residuals if void else phase.residuals
        return Outcome(phase.round, selected, () if void else completed, phases, dropped, void, server, versions, states, residuals, started, seconds,
                       virtual, virtual_split, predicted, runs, judged, workers, client_seconds, dict(host.reported), list(host.warnings))

    def _split(self, phase: Phase, seconds: dict[str, float]) -> None:
        """Adds what a phase took, from its opening until now. Its last client's task tells in what: its own training,
        evaluating and encoding; sending, down and up, is what else passed between hand-out and arrival; all before the
        hand-out, and what its site did besides, is waiting."""
        took = time.monotonic() - phase.opened
        seconds["encoding"] += phase.encoding
        left = max(0.0, took - phase.encoding)
        last = max((r for r in phase.done.values() if r.split), key=lambda r: r.arrived, default=None)
        if last is not None:
            left -= taken(seconds, dict(zip(SPLIT, last.split)) | {"sending": last.taken_s - last.seconds}, left)
        seconds["waiting"] += left

    def _with_buffers(self, server: Any) -> Any:
        """A new shared model keeps the old one's buffers where the clients' do not come up."""
        x = getattr(server, "x", None)
        if isinstance(x, Tensors) and x.layout != self.experiment.shared and x.layout == self.experiment.shared.parameters:
            return server.replace(x=x.with_buffers(self._fill()))
        return server

    def _judgement(self, reply: Spooled) -> Judgement:
        found: Any = self.experiment.up.decode(Judgement, reply.form, reply.body())
        return found

    def _judging(self, round: int) -> bool:
        every = self.config.evaluate.every
        return every > 0 and (round % every == 0 or round == self.config.rounds)

    def _conclude(self, outcome: Outcome) -> None:
        """Judges a round, checkpoints, and writes its records."""
        progress, config = self.progress, self.config
        self._concluding = True
        begun = time.monotonic()
        record: dict[str, Any] = {
            "round": outcome.round,
            "selected": outcome.selected,
            "completed": outcome.completed,
            "completed_by_phase": outcome.phases,
            "dropped": {str(c): r for c, r in sorted(outcome.dropped.items())},
            "void": outcome.void,
        }
        progress.versions, progress.states = outcome.versions, outcome.states
        self.residuals = outcome.residuals
        progress.void = progress.void + 1 if outcome.void else 0
        total = sum(r.n for r in outcome.runs.values())
        if total:
            record["train_loss"] = sum(r.n * r.loss for _, r in sorted(outcome.runs.items())) / total
        model = self.method.global_model(outcome.server)
        if self._judging(outcome.round):
            record |= self._judge(outcome, model)
        self.faults.at("evaluating", outcome.round)
        judged_at = time.monotonic()
        hashes = self._hashes(outcome.server, model)
        tally = self._spent(outcome.round)
        for direction, kinds in outcome.predicted.items():
            add_kinds(progress.predicted.setdefault(direction, {}), kinds)
        outcome.seconds["evaluating"] += judged_at - begun
        now = time.monotonic()
        # Rounds overlap: what passed before the last one's end was counted there.
        elapsed, early = now - max(outcome.started, self._recorded), max(0.0, self._recorded - outcome.started)
        self._recorded = now
        outcome.seconds["recording"] = now - judged_at
        progress.seconds += elapsed
        progress.virtual += outcome.virtual
        if self._accountant is not None:
            outcome.reported |= self._accountant.spent(outcome.round)
        record |= {"seconds": elapsed, "seconds_virtual": outcome.virtual if self._clock else None,
                   "seconds_by_phase": fitted(outcome.seconds, elapsed, early), "seconds_virtual_by_phase": outcome.virtual_split or None,
                   "bytes_up": tally.spent["up"], "bytes_down": tally.spent["down"], "useful": tally.useful,
                   "predicted": outcome.predicted if self.experiment.foretold else None, **hashes,
                   "algorithm": outcome.reported | ({"warnings": outcome.warnings} if outcome.warnings else {})}
        progress.round = outcome.round
        self._best(record, model)
        lines = {"rounds": [record], "clients": self._client_lines(outcome)}
        if outcome.round % config.checkpoint.every == 0 or outcome.round == config.rounds or self.stop_requested:
            self._save(lines)
        else:
            self._append(lines)
        self.directory.event("round", outcome.round, completed=len(outcome.completed))
        self._concluding = False
        self.faults.at("between", outcome.round)
        self.hub.call(lambda now: self.hub.book_round(outcome.round) or [])  # type: ignore[func-returns-value]
        self.display.round_done(record)
        for told in self.told:
            told(record)

    def _judge(self, outcome: Outcome, model: Tensors | None) -> dict[str, Any]:
        """The round's accuracies."""
        found: dict[str, Any] = {}
        section, task = self.config.evaluate, self.experiment.setting.task
        if section.global_ and model is not None and self.test is not None:
            module = self.host.model(model)
            counts = evaluate(module, self.test, task, section.batch_size)
            found |= {"test_loss": counts.mean_loss, "test_accuracy": counts.accuracy, "correct_by_class": counts.table[0],
                      "total_by_class": counts.table[1]}
            if self.validation is not None:
                found["validation_accuracy"] = evaluate(module, self.validation, task, section.batch_size).accuracy
        if section.clients == "all":
            outcome.judged = self._ask_all(outcome.round, outcome.server, final=False)
        if outcome.judged:
            found["client_accuracy"] = pooled(outcome.judged)
        return found

    def _hashes(self, server: Any, model: Tensors | None) -> dict[str, Any]:
        shared = getattr(server, "x", None)
        by_name = shared.tensor_sha256() if isinstance(shared, Tensors) else {}
        found = {"model_sha256": combine(by_name.values()), "tensor_sha256": by_name,
                 "clients_sha256": combine(s for _, s in sorted(self.progress.states.items()) if s)}
        if model is not None and model is not shared:
            found["evaluated_sha256"] = model.sha256()
        return found

    def _spent(self, round: int) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's sums."""
        tally = self.hub.ask(lambda: self.hub.link.ledger.take(round))
        tally.merge(Tally(useful=self._replayed_useful))
        self._replayed_useful = {"up": {}, "down": {}}
        for direction, n in tally.spent.items():
            self.progress.totals[direction] = self.progress.totals.get(direction, 0) + n
            add_kinds(self.progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally

    def _predict(self, phase: Phase, sums: Kinds) -> None:
        """Adds what a phase's messages should amount to, from the declarations, for the clients that completed it."""
        exchange, predicted = self.method.exchanges[phase.index], self.experiment.predicted
        if not self.experiment.foretold:
            return
        for client in phase.done:
            add_kinds(sums["down"], predicted(exchange.down, "down", client))
            add_kinds(sums["up"], predicted(exchange.up, "up", client))
            if client in phase.enrolled and self.method.Enrolment is not None:
                add_kinds(sums["down"], predicted(self.method.Enrolment, "down", client))

    def _best(self, record: dict[str, Any], model: Tensors | None) -> None:
        accuracy = record.get("test_accuracy")
        if accuracy is None:  # a method without a global model is judged by its clients'
            accuracy = (record.get("client_accuracy") or {}).get("personal")
        if accuracy is not None and (self.progress.best is None or accuracy > self.progress.best):
            self.progress.best, self.progress.best_round = accuracy, record["round"]
            if self.config.checkpoint.best and model is not None:
                keepsakes.save_model(self.directory.path / "best.safetensors", model)

    def _client_lines(self, outcome: Outcome) -> list[dict[str, Any]]:
        lines = []
        for client in sorted(outcome.judged):
            run = outcome.runs.get(client)
            verdict, worker = outcome.judged[client], outcome.workers.get(client, {})
            lines.append({"round": outcome.round, "client": client, **client_scores(verdict), "samples": run.n if run else None,
                          "train_loss": run.loss if run else None, "steps": run.steps if run else None,
                          "seconds": outcome.client_seconds.get(client), "host": worker.get("host"), "device": worker.get("device")})
        return lines

    # -- the last evaluation -------------------------------------------------------------------------------------------
    def _last_evaluation(self) -> list[dict[str, Any]]:
        """All clients are asked once, at the end. Returns their lines."""
        section = self.config.evaluate
        if not section.every or section.clients == "none":
            return []
        judged = self._ask_all(self.progress.round, self.server, final=True)
        return [{"round": self.progress.round, "client": c, "final": True, **client_scores(v)} for c, v in sorted(judged.items())]

    def _ask_all(self, round: int, server: Any, final: bool) -> dict[int, dict[str, Counts]]:
        exp, model = self.experiment, self.method.global_model(server)
        down: Payload = GlobalModel(x=model) if model is not None and exp.evaluation() is GlobalModel else Nothing()  # type: ignore[call-arg]
        encoded = exp.exact.encode(down)
        check = encoded.body.check()
        versions = self.progress.versions
        clients = tuple(range(self.config.clients))
        phase = Phase(round, len(self.method.exchanges), "evaluate", clients, {c: versions.get(c, "") for c in clients}, {}, {}, time.monotonic())
        jobs = [Job(c, encoded.form, encoded.body, check, cost=self._cost(c), start=versions.get(c, ""), keep=self.durable.get(c, ""), judge=final)
                for c in clients]
        rules = self._rules()

        def command(now: float) -> list[Any]:
            self.hub.replies.clear()
            return self.hub.protocol.begin(*phase.name, jobs, Rules(None, rules.closed, rules.silent, rules.join, stalled=rules.stalled), now)

        self.hub.call(command)
        clock, self._clock = self._clock, None
        try:
            self._collect(phase)
        finally:
            self._clock = clock
        if phase.dropped:
            self.directory.event("not_evaluated", round, clients=sorted(phase.dropped))
        return {c: judgements(self._judgement(r), exp.setting.classes) for c, r in phase.done.items()}

    # -- saving --------------------------------------------------------------------------------------------------------
    def _save(self, lines: dict[str, list[dict[str, Any]]] | None = None) -> None:
        """Checkpoint first, with the records in it; then the records to their files; then what is spooled may go."""
        self.progress.lengths = self.directory.flush()
        self.progress.records = lines or {}
        extra = Residuals(down=self.residuals) if self.residuals else None  # type: ignore[call-arg]
        self.checkpoints.save(self.server, self.progress, extra, lambda point: self.faults.at(point, self.progress.round))
        self.durable = dict(self.progress.versions)
        self._append(lines or {})
        self.spool.clear(self.progress.round)

    def _append(self, lines: dict[str, list[dict[str, Any]]]) -> None:
        for record in lines.get("rounds", ()):
            self.directory.rounds.append(record)
        for record in lines.get("clients", ()):
            self.directory.clients.append(record)
        self.directory.flush()


def taken(into: dict[str, float], shares: dict[str, float], limit: float) -> float:
    """Adds shares of a time, none below 0 and no more than `limit` together; a client says what it likes. Returns their sum."""
    total = 0.0
    for name, share in shares.items():
        part = min(max(share, 0.0), limit - total) if math.isfinite(share) else 0.0
        into[name] += part
        total += part
    return total


def fitted(seconds: dict[str, float], elapsed: float, early: float) -> dict[str, float]:
    """The split of a round that began `early` seconds before it counts: what its clients had the time for then is left out,
    first of waiting."""
    out = dict(seconds)
    for name in ("waiting", "sending", "training", "encoding", "evaluating"):
        cut = min(early, out[name])
        out[name] -= cut
        early -= cut
    out["waiting"] = max(0.0, out["waiting"] + elapsed - sum(out.values()))
    return out


def _reply_bytes(reply: Spooled) -> int:
    form = list(reply.form)
    return crossing(m.Reply(run=" " * 16, inc=1, key=reply.key, form=form, size=sum(f.size for f in form), check=reply.check, state=reply.state,
                            kept=reply.kept, seconds=reply.seconds, split=list(reply.split)))


def pooled(judged: dict[int, dict[str, Counts]]) -> dict[str, float]:
    """Accuracy over all test samples of the clients judged (not a mean of accuracies), by what was judged."""
    sums: dict[str, Counts] = {}
    for _, verdict in sorted(judged.items()):
        for name, counts in verdict.items():
            sums[name] = sums[name].merge(counts) if name in sums else counts
    return {name: counts.accuracy for name, counts in sums.items()}


def client_scores(verdict: dict[str, Counts]) -> dict[str, Any]:
    """The fields of a line of clients.jsonl."""
    first = next(iter(verdict.values()), None)
    scores: dict[str, Any] = {"test_samples": verdict["personal"].n if "personal" in verdict else (first.n if first else 0)}
    for name in ("global", "personal", "balanced", "finetuned", "finetuned_balanced"):
        scores[f"accuracy_{name}"] = verdict[name].accuracy if name in verdict else None
        if name in verdict:
            scores[f"correct_{name}"] = int(verdict[name].table[0].sum())
            scores[f"tested_{name}"] = verdict[name].n
    return scores
