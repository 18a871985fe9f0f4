"""The clients as the rounds see them: the one way from a run's steps to its input and output.

    open, add, cancel   send tasks, and cancel them
    wait, discard       return the next task that is over, or drop one that came too late
    verdict             records which replies were useful
    end                 ends a round, and returns the sums of its bytes

Sockets, protocol, journal and inbox are behind it (io.py), and what is done while nothing comes
(watch.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fednet import loading
from fednet.algorithms.state import State
from fednet.config import Config
from fednet.data.datasets.site import class_names
from fednet.errors import ConfigError, without_paths
from fednet.experiment.build import Experiment, make_method
from fednet.journal.book import LEFT_OUT
from fednet.journal.events import Over, Tally, Verdict
from fednet.journal.link import Link
from fednet.models.start import with_model_digest
from fednet.plain import JsonMapping
from fednet.protocol.instructions import Resolved
from fednet.protocol.server import ServerProtocol
from fednet.protocol.tasks import Rules, TaskSpec
from fednet.protocol.workers import Sites
from fednet.records import reading
from fednet.server.decoding import ReplyDecoder, SentModels, form_check
from fednet.server.endpoint import Endpoint, patience, text_for_clients
from fednet.server.events import Events
from fednet.server.faulty_protocol import FaultyServerProtocol
from fednet.server.growth import grow_state, with_clients
from fednet.server.inbox import Inbox, ReceivedReply
from fednet.server.io import ServerIO
from fednet.server.records import Records
from fednet.server.watch import ServerOptions, Watch
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.messages import WHOLE, Key, Purpose


@dataclass(frozen=True)
class DataSizes:
    """How many samples the clients have: by the partition, or as their sites declared."""

    experiment: Experiment
    sites: Sites

    def samples(self, client: int) -> int | None:
        """The most samples that a client trains on; None while that is unknown."""
        if self.experiment.federation is not None:
            return self.experiment.samples(client)
        return self.own(client)

    def own(self, client: int) -> int | None:
        """How many training samples a client has; None while that is unknown."""
        federation = self.experiment.federation
        if federation is not None:
            return len(federation.parts[client])
        facts = self.sites.facts.get(client)
        if facts is None:  # it has not joined this server yet, perhaps an earlier one
            return self.sites.declared.get(client)
        return facts.train

    def test_labels(self, client: int) -> tuple[int, int]:
        """How many labels or values a client can evaluate on: in its own test set, and in the
        class-balanced one, which sites do not have.
        """
        federation = self.experiment.federation
        if federation is not None:
            data = federation.data
            tested = len(federation.tests[client]) * data.targets_each
            return tested, data.n_test * data.targets_each
        facts = self.sites.facts.get(client)
        return 0 if facts is None else facts.test, 0


@dataclass(frozen=True)
class Clients:
    """The clients of a run."""

    io: ServerIO
    rules: Rules
    """How long they are waited for."""
    watch: Watch
    """Looks for a request to stop while they are waited for, and says who is ready."""
    sizes: DataSizes
    sent: SentModels
    """What they were sent, with which their replies are decoded."""
    external: bool = False
    """They are started by others, see `Endpoint`."""
    over_network: bool = False
    """See `Endpoint`."""

    # -- their tasks -------------------------------------------------------------------------------
    def open(
        self,
        exchange: tuple[int, int, Purpose],
        specs: Sequence[TaskSpec],
        deadline_s: float | None = None,
        final: bool = False,
    ) -> None:
        """Opens an exchange or evaluation; what is left of the one before is called off. exchange:
        round, index and purpose. deadline_s: after which no reply is waited for. final: it is the
        last evaluation of the run.
        """
        rules = dataclasses.replace(self.rules, deadline=deadline_s)
        with self.io as io:
            if final:
                io.link.final = exchange[:2]
            io.act(io.protocol.begin(*exchange, specs, rules, io.now()))

    def add(self, round: int, specs: Sequence[TaskSpec]) -> None:
        """More tasks beside those under way."""
        with self.io as io:
            io.act(io.protocol.add(round, specs, io.now()))

    def cancel(self, reason: str) -> None:
        """Cancels the tasks that are open."""
        with self.io as io:
            io.act(io.protocol.cancel(reason, io.now()))

    def wait(self, timeout_s: float) -> ReceivedReply | Resolved | None:
        """The reply to the next task that is over, or why there is none; None after `timeout_s`.
        Each is returned once.
        """
        outcomes = self.io.outcomes
        if not outcomes:
            self.io.do_io(timeout_s, outcomes.__len__)
        return outcomes.popleft() if outcomes else None

    @property
    def has_outcome(self) -> bool:
        """Whether `wait` would return a task at once."""
        return bool(self.io.outcomes)

    def discard_all(self) -> None:
        """Nobody waits any more for what is over until now."""
        while self.io.outcomes:
            self.discard(self.io.outcomes.popleft())

    def discard(self, outcome: ReceivedReply | Resolved) -> None:
        """The outcome came after its exchange was over."""
        if isinstance(outcome, ReceivedReply):
            outcome.let_go()
            self.verdict([(outcome.key, LEFT_OUT, None)])

    # -- their replies -----------------------------------------------------------------------------
    def earlier_replies(self, round: int, index: int) -> dict[int, ReceivedReply]:
        """The replies to an exchange that earlier servers accepted, by client."""
        with self.io as io:
            return io.inbox.earlier_replies(round, index)

    def verdict(self, replies: list[tuple[Key, str, int | None]]) -> None:
        """Records which accepted replies were useful, see `Verdict`."""
        if replies:
            with self.io as io:
                io.journal.note(Verdict(replies))

    def withdraw(self, key: Key) -> None:
        """The reply turned out to be unusable: the next server asks for it again."""
        with self.io as io:
            io.inbox.withdraw(key)

    # -- who is there ------------------------------------------------------------------------------
    def clients_wanted(self) -> int:
        """How many clients the run has with those that ask to join it."""
        with self.io as io:
            return io.protocol.clients_wanted()

    def admit(self, config: Config, server: State) -> int:
        """Decides which of the clients that ask to join the run do so after this round; tells the
        others why they cannot. Returns how many clients the run has then. server: the state after
        this round.
        """
        before = config.clients
        now = self.clients_wanted()
        if now == before:
            return before
        try:
            more = with_clients(config, now)
            grow_state(more, make_method(more), server, before)
        except ConfigError as wrong:
            self.turn_away(without_paths(str(wrong)))
            return before
        return now

    def clients_after_join(self, added: range) -> int:
        """Returns how many clients the run has when those that asked to join it had time to come:
        ids follow without a gap, so one that nobody hosts keeps out those after it. added: their
        ids.
        """
        with self.io as io:
            workers = io.protocol.roster.workers.values()
            here = {client for worker in workers if worker.here for client in worker.ids}
        return next((client for client in added if client not in here), added.stop)

    def turn_away(self, reason: str) -> None:
        """Tells the clients that ask to join the run why they cannot."""
        with self.io as io:
            io.act(io.protocol.turn_away(reason, io.now()))

    def processes(self) -> list[tuple[str, int]]:
        """Host and process id of each client process that is connected."""
        with self.io as io:
            workers = io.protocol.roster.workers.values()
            return [(worker.host, worker.pid) for worker in workers if worker.here]

    # -- the end of a round ------------------------------------------------------------------------
    def end(self, round: int, under_way: Iterable[tuple[int, int]] = ()) -> Tally:
        """Rounds up to this one are over: what the books have for them, and no record has yet.
        under_way: tasks (round, client) that may still be answered; for no other one an earlier
        server's bytes were useful.
        """
        with self.io as io:
            io.journal.note(Over(round, sorted(under_way)))
            return io.journal.book.recorded

    def record_heartbeats(self, round: int) -> None:
        """Writes a row of `wire.jsonl` for those of a round, each way."""
        with self.io as io:
            io.link.close_all_counted(round)

    def journal_position(self) -> tuple[int, int]:
        """(generation, bytes) of the journal's file, when all until now is on disk."""
        with self.io as io:
            return io.journal.position

    def forget(self, up_to: int, under_way: Collection[tuple[int, int]] = ()) -> None:
        """The replies of rounds up to this one are in a checkpoint. under_way: as for `end`."""
        with self.io as io:
            gone = io.inbox.clear(up_to, under_way)
        for path in gone:  # outside: the clients would take the server for dead
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


# -- building --------------------------------------------------------------------------------------
def connect_clients(
    experiment: Experiment,
    records: Records,
    endpoint: Endpoint,
    how: ServerOptions,
    on_gpu: bool,
    crash_at: Callable[[str, int], None],
) -> Clients:
    """Builds what the server talks to its clients with; nobody can connect yet. on_gpu: this
    process computes on one. crash_at: see `ServerIO`. Raises ConfigError where `model.sha256` names
    another model.
    """
    config = experiment.config
    files = records.files
    protocol = make_protocol(experiment, records, endpoint)
    protocol.sites.recall(reading.events(files.path, "declared"))

    def note(event: str, fields: JsonMapping) -> None:
        files.event(event, **{"round": protocol.round, **fields})
        if how.on_event is not None:
            how.on_event(event, fields)

    events = Events(note, how.display.note, endpoint.external_clients)
    endpoint.announce(events, records.incarnation)
    sizes = DataSizes(experiment, protocol.sites)
    sent = SentModels()
    inbox = Inbox(
        files.path / "checkpoint",
        records.journal,
        ReplyDecoder(experiment, sent, sizes.samples, sizes.test_labels).decode,
        endpoint.part == WHOLE and on_gpu,
    )
    curve = config.security.curve
    link = Link(
        "server",
        endpoint.transport.send,
        functools.partial(framing, curve=curve),
        records.journal,
        connection_bytes(curve, "server"),
        endpoint.part,
    )
    io = ServerIO(protocol, endpoint.transport, link, inbox, events, endpoint.pump, crash_at)
    watch = Watch(files.path, io, how, config.rounds, endpoint.keyring)
    return Clients(
        io, protocol.rules, watch, sizes, sent, endpoint.external_clients, endpoint.over_network
    )


def make_protocol(experiment: Experiment, records: Records, endpoint: Endpoint) -> ServerProtocol:
    """Raises ConfigError where `model.sha256` names another model."""
    if experiment.hollow:
        raise ConfigError(
            f"model.sha256: {experiment.sha256[:12]} is not the digest of the model that this "
            f"configuration gives; leave it out."
        )
    config = with_model_digest(experiment.config, experiment.sha256)
    text = text_for_clients(config)
    keyring = endpoint.keyring
    faulty = config.faults.random or config.faults.schedule or config.devices.trace
    protocol = FaultyServerProtocol if faulty else ServerProtocol
    return protocol(
        records.run_id,
        records.incarnation,
        config.clients,
        lambda ids, session: m.Welcome(
            run=records.run_id,
            inc=records.incarnation,
            session=session,
            name=config.name,
            config=text,
            ids=ids,
            beat_s=endpoint.beat_s,
        ),
        time.monotonic(),
        files=loading.loaded_files(),
        layout=experiment.digest,
        part=endpoint.part,
        key_refusal=(lambda user, client: "") if keyring is None else keyring.refusal,
        site_name=(lambda client: "") if keyring is None else keyring.name,
        no_key=(lambda client: "") if keyring is None else keyring.lacking,
        declared=form_check(experiment),
        rules=patience(config, endpoint.pump is not None, endpoint.over_network),
        bytes_read=endpoint.transport.bytes_read,
        class_names=class_names(config.data) if config.data.dataset == "site" else "",
        most_clients=config.round.open if endpoint.external_clients else None,
        round=0 if records.resumed is None else records.resumed.progress.round,
    )
