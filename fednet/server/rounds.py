"""The server's rounds, top to bottom.

    select
    for each exchange: broadcast, collect, fold in id order, finish
    judge, checkpoint, record

The next round's broadcast leaves before this round is judged and checkpointed, so that the clients
train meanwhile; the records and the bits are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fednet import records
from fednet.algorithms.base import State, Tensors
from fednet.errors import CannotGoOn, Stopped
from fednet.experiment import privacy, selection
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock
from fednet.experiment.faults import Faults
from fednet.experiment.rundir import RunDirectory
from fednet.experiment.store import on_disk
from fednet.files import read_lines
from fednet.server import accuracies as scores
from fednet.server import exports
from fednet.server.accounts import Accounts, nothing, predict
from fednet.server.checkpoint import Checkpoints, Progress
from fednet.server.folding import Folding
from fednet.server.hashes import model_hashes
from fednet.server.io_thread import ServerIO
from fednet.server.phases import Phase, Phases
from fednet.server.spool import Spool
from fednet.server.stopping import may_overlap, reached
from fednet.server.timing import TIMES, add_phase, fitted
from fednet.tensors import combine
from fednet.training.evaluation import Counts
from fednet.training.hosts import ServerHost
from fednet.wire.ledger import Kinds, add_kinds
from fednet.wire.messages import clean
from fednet.wire.payload import Run

SHOWN = 3  # clients left out whose reasons are shown for a round


class Residuals(State):
    """What compressed broadcasts have left out so far, by field."""

    down: dict[str, torch.Tensor]


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
    client_reports: dict[int, dict[str, float]]
    reported: dict[str, Any]
    warnings: list[str]


class Rounds:
    """One server process's part in a run. Call `run`; it raises Stopped, or CannotGoOn, with
    everything saved.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory,
        io: ServerIO,
        checkpoints: Checkpoints,
        spool: Spool,
        *,
        run_id: str,
        host: ServerHost,
        display: Any,
        faults: Faults,
        test: Any = None,
        validation: Any = None,
        told: Sequence[Callable[[records.Round], None]] = (),
    ) -> None:
        self.experiment, self.config, self.method = (
            experiment,
            experiment.config,
            experiment.algorithm,
        )
        self.directory, self.io, self.checkpoints, self.spool = directory, io, checkpoints, spool
        self.faults = faults
        self.host, self.display, self.test, self.validation, self.told = (
            host,
            display,
            test,
            validation,
            told,
        )
        self.progress = Progress(run=run_id)
        self.server: Any = None
        self.residuals: dict[str, torch.Tensor] = {}
        self.durable: dict[int, str] = {}
        self._noise = (
            privacy.Noise(checkpoints.folder / "noise.key") if self.config.privacy.noise else None
        )
        self._accountant = privacy.Accountant(self.config) if self.config.privacy.noise else None
        self.stop_requested: tuple[str, bool] | None = None
        self.until: float | None = None
        book = io.link.ledger
        self.accounts = Accounts(
            lambda round: io.ask(lambda: book.take(round)),
            lambda row: io.call(lambda now: book.enter(row) or []),  # type: ignore[func-returns-value]
        )
        self._clock = VirtualClock(self.config) if self.config.link.clock == "virtual" else None
        self.phases = Phases(
            experiment,
            directory,
            io,
            spool,
            self.accounts,
            run=run_id,
            host=host,
            faults=faults,
            clock=self._clock,
            check_stop=self._check_stop,
        )
        self._status_at = 0.0
        self._began = self._recorded = time.monotonic()
        self._concluding = False

    # -- the run -----------------------------------------------------------------------------------
    def begin(self, resumed: tuple[Any, Progress, Any] | None) -> None:
        """Fresh state, or what a checkpoint holds."""
        if resumed is None:
            first = self.method.init_server(
                self.experiment.setting.initial.select(self.experiment.shared)
            )
            self.server = on_disk(self.method.prepare(first, self.host), self.checkpoints.rows)
        else:
            self.server, self.progress, more = resumed
            self.residuals = dict(more.down) if more is not None else {}
            self.durable = dict(self.progress.versions)
            self.io.link.ledger.taken(self.progress.totals)
            self.accounts.read(read_lines(self.directory.path / "wire.jsonl"), self.progress.round)
            more_to_do = (
                self.progress.round < self.config.rounds
                and reached(self.config, self.progress) is None
            )
            self.progress.finished = self.progress.finished and not more_to_do
        self._save()

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
        phase = (
            self._open(round)
            if round <= config.rounds and reached(config, progress) is None
            else None
        )
        while phase is not None:
            outcome = self._collect_round(phase)
            self.server = outcome.server
            phase = (
                self._open(round + 1, outcome)
                if round < config.rounds and may_overlap(config)
                else None
            )
            self._conclude(outcome)
            round += 1
            if phase is None and round <= config.rounds and reached(config, progress) is None:
                phase = self._open(round)
            hopeless = self._hopeless(outcome)
            if hopeless:
                self._cancel_open(phase)
                self._save()
                raise CannotGoOn(f"{hopeless}; the last good state is saved.")
            reason = reached(config, progress)
            if reason is not None and phase is not None:
                self._cancel_open(phase)
                phase = None
            progress.stopped = reason or ""
        lines = self._last_evaluation()
        progress.finished = True
        self._save({"clients": lines})

    def _hopeless(self, outcome: Outcome) -> str:
        """Why no further round is tried; "" while there is one to try."""
        whose = "; ".join(failures(outcome)[:1])
        everybody = outcome.void and len(failures(outcome)) == len(outcome.selected) > 0
        # One client that fails whenever it is asked alone must not end a federation of many.
        if everybody and (len(outcome.selected) > 1 or self.config.clients == 1):
            return f"nobody could do the task of round {outcome.round}: {whose}"
        least = self.config.round.min_results
        if self.progress.void < self.config.round.void_rounds:
            return ""
        return f"{self.progress.void} rounds in a row had fewer than {least} results" + (
            f" ({whose})" if whose else ""
        )

    def _cancel_open(self, phase: Phase | None) -> None:
        if phase is not None:
            self.io.call(lambda now: self.io.protocol.cancel("the run ends", now))

    # -- waiting -----------------------------------------------------------------------------------
    def _check_stop(self) -> None:
        """Stops where someone asked for it; keeps status.json fresh."""
        if self.until is not None and time.monotonic() >= self.until:
            self.stop_requested = ("the time of --until is over", False)
        if self.stop_requested is not None:
            raise Stopped(
                f"stopped: {self.stop_requested[0]}; go on with --resume.",
                by_keyboard=self.stop_requested[1],
            )
        now = time.monotonic()
        if now - self._status_at >= 1.0:
            self._status_at = now
            self.status("running")
            self.display.progress(
                {
                    **self.io.snapshot,
                    "round": self.io.protocol.round,
                    "rounds": self.config.rounds,
                }
            )

    def status(self, state: str) -> None:
        """Writes status.json."""
        protocol = self.io.protocol
        self.directory.status(
            state=state,
            round=protocol.round,
            rounds=self.config.rounds,
            phase=protocol.purpose,
            waiting=self.io.snapshot["waiting"],
            arrived=self.io.snapshot["arrived"],
        )

    def _await_clients(self) -> None:
        start, join = self.config.round.start, self.config.round.join
        wanted = self.config.clients if start == "all" else int(start)
        until = None if join is None else time.monotonic() + join
        told = False
        while self.io.snapshot["present"] < wanted:
            if self.progress.round > 0 or (until is not None and time.monotonic() >= until):
                # after a restart nobody is waited for in advance: each task waits for its own
                # client
                break
            if not told and time.monotonic() - self._began > 2.0:
                self.display.note(
                    f"waiting for clients: {self.io.snapshot['present']} of {wanted} are here"
                )
                told = True
            self.io.wait(0.05, (0, 0, ""))
            self._check_stop()
        if not self.io.snapshot["present"] and until is not None and time.monotonic() >= until:
            raise CannotGoOn(f"no client joined within {join:g} s (round.join).")

    # -- a round -----------------------------------------------------------------------------------
    def _open(self, round: int, before: Outcome | None = None) -> Phase:
        """Opens a round's first exchange."""
        cohort = selection.cohort(self.config, round)
        versions = self.progress.versions if before is None else before.versions
        states = self.progress.states if before is None else before.states
        residuals = self.residuals if before is None else before.residuals
        self.display.round_started(round, self.config.rounds, cohort)
        return self.phases.open(
            round,
            0,
            cohort,
            self.server,
            dict(versions),
            dict(states),
            self.durable,
            dict(residuals),
        )

    def _collect_round(self, phase: Phase) -> Outcome:
        """All exchanges of a round whose first is open."""
        config, method, host = self.config, self.method, self.host
        started, seconds, virtual = phase.opened, dict.fromkeys(TIMES, 0.0), 0.0
        server, versions, states = (
            self.server,
            dict(self.progress.versions),
            dict(self.progress.states),
        )
        selected, dropped, runs = phase.cohort, dict[int, str](), dict[int, Run]()
        short, phases = config.round.min_results, list[tuple[int, ...]]()
        virtual_split: dict[str, float] = {}
        predicted = nothing()
        client_reports: dict[int, dict[str, float]] = {}
        while True:
            folding = self._folding(server, phase)
            for client, reply in self.phases.replies(phase):
                folding.add(client, reply)
                if reply.reported:
                    client_reports.setdefault(client, {}).update(reply.reported)
            add_phase(seconds, time.monotonic() - phase.opened, phase.encoding, phase.done.values())
            dropped |= phase.dropped
            predict(
                self.experiment,
                method.exchanges[phase.index],
                sorted({*phase.done, *folding.left_out}),  # their bytes were as declared
                phase.enrolled,
                predicted,
            )
            if self._clock:
                span = self._clock.span(
                    phase.virtual, bool(set(phase.dropped) - set(phase.virtual))
                )
                virtual += span
                for name, part in self._clock.split(
                    phase.virtual_split, phase.virtual, span
                ).items():
                    virtual_split[name] = virtual_split.get(name, 0.0) + part
            begun = time.monotonic()
            if len(phase.done) >= short:
                self.faults.at("aggregating", phase.round)
            after = folding.result(short)
            dropped |= phase.dropped
            runs |= folding.runs
            completed = tuple(sorted(phase.done))
            phases.append(completed)
            void = after is None
            if void:
                break
            server = after
            seconds["aggregating"] += time.monotonic() - begun
            for client, reply in phase.done.items():
                if reply.kept:
                    versions[client] = reply.key.version
                    states[client] = reply.state
            if phase.index == len(method.exchanges) - 1:
                break
            phase = self.phases.open(
                phase.round,
                phase.index + 1,
                completed,
                server,
                versions,
                states,
                self.durable,
                phase.residuals,
            )
        judged = self.phases.judged(phase)
        workers, client_seconds = (
            {c: reply.worker for c, reply in phase.done.items()},
            {c: reply.seconds for c, reply in phase.done.items()},
        )
        if void:
            server, versions, states = (
                self.server,
                dict(self.progress.versions),
                dict(self.progress.states),
            )
        # A void round never was: what its broadcast left out is not owed to those whose state goes
        # back with it.
        residuals = self.residuals if void else phase.residuals
        return Outcome(
            phase.round,
            selected,
            () if void else completed,
            phases,
            dropped,
            void,
            server,
            versions,
            states,
            residuals,
            started,
            seconds,
            virtual,
            virtual_split,
            predicted,
            runs,
            judged,
            workers,
            client_seconds,
            client_reports,
            dict(host.reported),
            list(host.warnings),
        )

    def _folding(self, server: Any, phase: Phase) -> Folding:
        """What folds an exchange's replies. server: as the exchange has it, where `self.server` is
        the round's.
        """

        def finish(fold: Any, completed: tuple[int, ...]) -> Any:
            self.host.begin(phase.round, phase.index, completed)
            if self.config.privacy.clip is not None:
                fold = privacy.noised(fold, self.config.privacy, self._noise, phase.round)
            return self._with_buffers(self.method.finish(fold, server, completed, self.host))

        return Folding(
            self.experiment,
            self.host,
            server,
            phase,
            self.phases.sent,
            self._fill(),
            finish,
            lambda client, reason: self.phases.leave_out(phase, client, reason),
            lambda client, up: exports.keep_condensed(self.directory.path, client, up),
        )

    def _fill(self) -> Tensors:
        """What stands where a reply says nothing."""
        x = self.method.shared_model(self.server)
        whole = x is not None and x.layout == self.experiment.shared
        return x if x is not None and whole else self.experiment.agreed

    def _with_buffers(self, server: Any) -> Any:
        """A new shared model keeps the old one's buffers where the clients' do not come up."""
        x = self.method.shared_model(server)
        if (
            x is not None
            and x.layout != self.experiment.shared
            and x.layout == self.experiment.shared.parameters
        ):
            return self.method.with_model(server, x.with_buffers(self._fill()))
        return server

    def _conclude(self, outcome: Outcome) -> None:
        """Judges a round, checkpoints, and writes its records."""
        progress, config = self.progress, self.config
        self._concluding = True
        begun = time.monotonic()
        record = records.Round(
            round=outcome.round,
            selected=list(outcome.selected),
            completed=list(outcome.completed),
            completed_by_phase=[list(clients) for clients in outcome.phases],
            dropped={str(c): r for c, r in sorted(outcome.dropped.items())},
            void=outcome.void,
        )
        progress.versions, progress.states = outcome.versions, outcome.states
        self.residuals = outcome.residuals
        progress.void = progress.void + 1 if outcome.void else 0
        record.set(**scores.losses(outcome.runs, self.method))
        due = scores.due(config, outcome.round)
        model = self.newest(outcome.server, measured=due)
        if due:
            record.set(**self._judge(outcome, model))
        self.faults.at("evaluating", outcome.round)
        judged_at = time.monotonic()
        hashes = self._hashes(outcome.server, model)
        tally = self.accounts.spent(outcome.round, progress)
        for direction, kinds in outcome.predicted.items():
            add_kinds(progress.predicted.setdefault(direction, {}), kinds)
        outcome.seconds["evaluating"] += judged_at - begun
        now = time.monotonic()
        # Rounds overlap: what passed before the last one's end was counted there.
        elapsed, early = (
            now - max(outcome.started, self._recorded),
            max(0.0, self._recorded - outcome.started),
        )
        self._recorded = now
        outcome.seconds["recording"] = now - judged_at
        progress.seconds += elapsed
        progress.virtual += outcome.virtual
        if self._accountant is not None:
            outcome.reported |= self._accountant.spent(outcome.round)
        record.set(
            seconds=elapsed,
            seconds_virtual=outcome.virtual if self._clock else None,
            seconds_by_phase=fitted(outcome.seconds, elapsed, early),
            seconds_virtual_by_phase=outcome.virtual_split or None,
            bytes_up=tally.spent["up"],
            bytes_down=tally.spent["down"],
            useful=tally.useful,
            predicted=outcome.predicted if self.experiment.foretold else None,
            **hashes,
            algorithm=outcome.reported
            | ({"warnings": outcome.warnings} if outcome.warnings else {}),
        )
        progress.round = outcome.round
        self._best(record, model)
        lines = {"rounds": [record.line()], "clients": client_lines(outcome)}
        if (
            outcome.round % config.checkpoint.every == 0
            or outcome.round == config.rounds
            or self.stop_requested
        ):
            self._save(lines)
        else:
            self._append(lines)
        self.directory.event("round", outcome.round, completed=len(outcome.completed))
        self._concluding = False
        self.faults.at("between", outcome.round)
        self.io.call(lambda now: self.io.book_round(outcome.round) or [])  # type: ignore[func-returns-value]
        self.display.round_done(record)
        shown = failures(outcome)
        for text in shown[:SHOWN]:
            self.display.note(f"round {outcome.round}: {text}")
        if len(shown) > SHOWN:
            self.display.note(f"round {outcome.round}: and {len(shown) - SHOWN} more clients")
        for told in self.told:
            told(record)

    def _judge(self, outcome: Outcome, model: Tensors | None) -> dict[str, Any]:
        """The round's accuracies."""
        found: dict[str, Any] = {}
        section = self.config.evaluate
        if self.method.has_global and section.global_ and model is not None:
            if self.test is not None:
                found |= scores.global_scores(
                    self.host, model, self.test, self.validation, section.batch_size
                )
            if self.calibrated_by is not None:
                found["batch_norm_measured_over"] = self.calibrated_by
        if section.clients == "all":
            outcome.judged = self._ask_all(outcome.round, model, final=False)
        if outcome.judged:
            found["client_accuracy"] = scores.pooled(outcome.judged)
        return found

    def _hashes(self, server: Any, model: Tensors | None) -> dict[str, Any]:
        whole, by_name = model_hashes(self.method, server)
        found = {
            "model_sha256": whole,
            "tensor_sha256": by_name,
            "clients_sha256": combine(s for _, s in sorted(self.progress.states.items()) if s),
        }
        if model is not None and model is not self.method.shared_model(server):
            found["evaluated_sha256"] = model.sha256()
        return found

    def _best(self, record: records.Round, model: Tensors | None) -> None:
        accuracy = record.test_accuracy
        if accuracy is None:  # a method without a global model is judged by its clients'
            accuracy = (record.client_accuracy or {}).get("personal")
        if accuracy is not None and (self.progress.best is None or accuracy > self.progress.best):
            self.progress.best, self.progress.best_round = accuracy, record.round
            if self.config.checkpoint.best and model is not None:
                named = self.experiment.state_dict(model)
                exports.save_model(self.directory.path / "best.safetensors", named)

    # -- the last evaluation -----------------------------------------------------------------------
    def _last_evaluation(self) -> list[dict[str, Any]]:
        """The clients are asked once, at the end. Returns their lines."""
        section = self.config.evaluate
        if not section.every or section.clients == "none":
            return []
        self.directory.flush()
        took_part = participants(self.directory.path)
        judged = self._ask_all(self.progress.round, self.newest(self.server), final=True)
        return [
            scores.client_row(
                self.progress.round, c, v, final=True, took_part=c in took_part
            ).line()
            for c, v in sorted(judged.items())
        ]

    def _ask_all(
        self, round: int, model: Tensors | None, final: bool
    ) -> dict[int, dict[str, Counts]]:
        progress = self.progress
        return self.phases.evaluation(
            round, model, progress.versions, progress.states, self.durable, final
        )

    def newest(self, server: Any, measured: bool = True) -> Tensors | None:
        """The shared model, or shared part, as it is judged and written out. measured: its
        BatchNorm statistics too, over the public or the test inputs, where the clients' do not come
        up.
        """
        x = self.method.shared_part(server)
        if x is None or not measured or self.calibrated_by is None:
            return x
        inputs = self.host.public_inputs if self.calibrated_by == "public" else self.test
        return self.host.recalibrated(x, inputs[0])

    @property
    def calibrated_by(self) -> str | None:
        """Whose inputs BatchNorm's statistics are measured over, `public` or `test`. None where
        there is no need to, or where the sites have all samples.
        """
        if not self.experiment.uncalibrated:
            return None
        public = self.host.public is not None
        return "public" if public else "test" if self.test is not None else None

    # -- saving ------------------------------------------------------------------------------------
    def _save(self, lines: dict[str, list[dict[str, Any]]] | None = None) -> None:
        """Checkpoint first, with the records in it; then the records to their files; then what is
        spooled may go.
        """
        self.progress.lengths = self.directory.flush(self.config.checkpoint.fsync)
        self.progress.records = lines or {}
        extra = Residuals(down=self.residuals) if self.residuals else None  # type: ignore[call-arg]
        self.checkpoints.save(
            self.server,
            self.progress,
            extra,
            lambda point: self.faults.at(point, self.progress.round),
        )
        self.durable = dict(self.progress.versions)
        self._append(lines or {})
        self.spool.clear(self.progress.round)

    def _append(self, lines: dict[str, list[dict[str, Any]]]) -> None:
        for record in lines.get("rounds", ()):
            self.directory.rounds.append(record)
        for record in lines.get("clients", ()):
            self.directory.clients.append(record)
        self.directory.flush()


def participants(directory: Path) -> set[int]:
    """Who completed a round of the run so far."""
    records = read_lines(directory / "rounds.jsonl")
    return {c for record in records for c in record["completed"]}


def failures(outcome: Outcome) -> list[str]:
    """A sentence for each client that could not do its task, or whose reply could not be used."""
    return [
        clean(f"client {client}: {reason}")
        for client, reason in sorted(outcome.dropped.items())
        if reason.startswith(("failed", "refused", "damaged"))
    ]


def client_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """The round's lines of clients.jsonl: of whom there is something to say."""
    rows: dict[int, dict[str, Counts]] = {c: {} for c in outcome.client_reports}
    rows |= outcome.judged
    return [
        scores.client_row(
            outcome.round,
            c,
            verdict,
            outcome.runs.get(c),
            seconds=outcome.client_seconds.get(c),
            worker=outcome.workers.get(c),
            reported=outcome.client_reports.get(c),
        ).line()
        for c, verdict in sorted(rows.items())
    ]
