"""The replies of one exchange, added up and made into the server's next state.

Replies are accumulated as they come, in ascending order of the clients. Before a result is made the
postprocessors review all of them together. Each reply was checked when it came; what is wrong with
it may show only here: the method raises, or what comes of it is no model. Then that client's reply
is left out, with its reason. Wherever a review, or a reply that failed, changes who counts or for
how much, the others are accumulated again, in the same order: the result has the bits of a round in
which the client was lost. (It still is one of the replies that bounds are taken from.)

A shared model of more than `GROWTH` times its initial norm is no result: it is treated as one that
is not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from fednet.algorithms.base import Run, Samples, Tensors
from fednet.algorithms.state import State
from fednet.errors import FednetError, RemoteProtocolError, RoundVoid, no_memory
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.loading import WrongPart, raised
from fednet.server import exports, postprocessors
from fednet.server.exchange import Exchange
from fednet.server.inbox import Reply
from fednet.server.postprocessors import Summary, norm
from fednet.training.hosts import ServerHost
from fednet.wire.payload import Payload, run_of

GROWTH = 1e6


class Aggregation:
    """noise: what the server adds to a sum of clipped updates. before, server: the state that the
    round and that this exchange began with. sent: the weights that each client was sent. declared:
    samples by client, at most.
    leave_out(client, reason): the reply does not count; may raise, where the configuration says to
    stop.
    """

    def __init__(
        self,
        experiment: Experiment,
        host: ServerHost,
        noise: privacy.Noise | None,
        before: State,
        server: State,
        exchange: Exchange,
        sent: Mapping[int, Tensors],
        declared: Mapping[int, int],
        leave_out: Callable[[int, str], None],
    ) -> None:
        """See above for the arguments."""
        self.experiment, self.method, self.host = experiment, experiment.algorithm, host
        self.server, self.exchange = server, exchange
        self._sent, self._declared = sent, declared
        self._fill = filling(experiment, before)  # buffers for replies without any
        self._leave_out = leave_out
        self._steps = postprocessors.of(experiment, noise, server, exchange, sent)
        self._replies: dict[int, Reply] = {}  # of those who are not left out
        self.left_out: dict[int, str] = {}  # by client, why
        self._summaries: dict[int, Summary] = {}  # of all whose reply could be read
        self._images: dict[int, Samples] = {}  # condensed ones, by client
        self._counts: dict[int, int] = {}  # samples, where they count for fewer than were sent
        self._reported, self._warnings = dict(host.reported), list(host.warnings)
        self._versions = versions(server)
        self._accumulator: State | None = self._start()  # None: to be started over by `result`

    @property
    def completed(self) -> tuple[int, ...]:
        return tuple(sorted(self._replies))

    @property
    def runs(self) -> dict[int, Run]:
        """What each client's training was, with the samples that it counts for."""
        found: dict[int, Run] = {}
        for client in self.completed:
            run = self._summaries[client].run
            if run is not None and client in self._counts:
                run = _lowered(run, self._counts[client])
            if run is not None:
                found[client] = run
        return found

    @property
    def condensed(self) -> dict[int, Samples]:
        """Condensed images, by client, of the replies that count."""
        return {client: x for client, x in self._images.items() if client in self._replies}

    def add(self, client: int, reply: Reply) -> None:
        """Takes the next reply, in ascending order of the clients."""
        self._replies[client] = reply
        try:
            up = self._read(client)
            self._summaries[client] = Summary.of(up)
            images = exports.condensed(up)
            if images is not None:
                self._images[client] = images
            if self._accumulator is not None:
                self._accumulator = self._added(self._accumulator, client, up)
        except Exception as broken:
            self._drop(client, f"its reply could not be aggregated: {_theirs(broken)}")

    def result(self, least: int) -> State | None:
        """The next server state; None where fewer than `least` replies can be used. Raises
        WrongPart where the method has changed the state before it.
        """
        self._review()
        while len(self._replies) >= least:
            try:
                after, wrong, whose = self._try(self.completed)
            except RoundVoid as void:
                self.host.warn(str(void))
                return None
            finally:
                self._check_unchanged()
            if not wrong:
                for client, n in self._counts.items():
                    self.host.warn(
                        f"client {client}'s samples count as {n}: round.max_share allows no more"
                    )
                return after
            if whose is not None:
                self._drop(whose, wrong)
            elif self.method.in_memory:  # of a sum under masks nobody knows whose part was wrong
                self.host.warn(wrong)
                return None
            else:
                self._blame(wrong)
            self._review()
        return None

    # -- accumulating ------------------------------------------------------------------------------
    def _start(self) -> State:
        self.host.begin(self.exchange.round, self.exchange.index, self.exchange.cohort)
        self.host.reported, self.host.warnings = dict(self._reported), list(self._warnings)
        accumulator = self.method.init_accumulator(self.server, self.exchange.index)
        for step in self._steps:
            accumulator = step.start(accumulator)
        return accumulator

    def _read(self, client: int) -> Payload:
        """The client's reply; its samples are no more than its site first declared."""
        reply, exp = self._replies[client], self.experiment
        up = reply.take_payload()
        if up is not None:
            self.exchange.asked[client].memory.update(reply.remembered)
        else:
            received = self._sent.get(client)
            up = exp.up.decode(
                self.method.exchanges[self.exchange.index].up,
                reply.message.form,
                reply.body(),
                received if received is not None else exp.agreed,
                fill=self._fill,
                sound=True,
                past=self.exchange.past(client, "up", reply.message.key.round),
            )
        up, declared = self._placed(up), self._declared.get(client)
        return up if declared is None else _counted(up, declared)

    def _placed(self, up: Payload) -> Payload:
        """The reply with its tensors where they are added up: those that came from a GPU of this
        process stay there if they are only added, in whose memory nothing else may be put before.
        """
        moved: dict[str, Tensors] = {}
        for name in up.fields:
            value = getattr(up, name)
            if not isinstance(value, Tensors) or value.device.type == "cpu":
                continue
            if self.method.only_sums:
                for part in (value.vector, value.buffers, value.counters):
                    part.record_stream(torch.cuda.current_stream(value.device))
            else:
                moved[name] = value.to("cpu")
        return dataclasses.replace(up, **moved) if moved else up

    def _added(self, accumulator: State, client: int, up: Payload) -> State:
        if client in self._counts:
            up = _counted(up, self._counts[client])
        for step in self._steps:
            up = step.change(up, client)
        self.host.staleness = self.exchange.asked[client].staleness or 0
        return self.method.accumulate(accumulator, self.server, client, up, self.host)

    def _try(self, clients: tuple[int, ...]) -> tuple[State | None, str, int | None]:
        """(the next state, "", None) of these clients, or (None, why none comes of them, by whose
        reply where one alone could not be added).
        """
        accumulator, self._accumulator = self._accumulator, None
        if accumulator is None:
            accumulator = self._start()
            for client in clients:
                try:
                    accumulator = self._added(accumulator, client, self._read(client))
                except Exception as broken:
                    return None, f"its reply could not be aggregated: {_theirs(broken)}", client
        try:
            after = self._finish(accumulator, clients)
        except Exception as broken:
            return None, f"its reply gives no model: {_theirs(broken)}", None
        wrong = self._unsound(after)
        if wrong:
            return None, f"its reply gives no model: {wrong}", None
        return after, "", None

    def _finish(self, accumulator: State, clients: tuple[int, ...]) -> State:
        """The next state. A new shared model keeps the old one's buffers where the clients' do not
        come up.
        """
        for step in self._steps:
            accumulator = step.finish(accumulator, clients, self.exchange.round)
        self.host.begin(self.exchange.round, self.exchange.index, clients)
        after = self.method.server_update(accumulator, self.server, clients, self.host)
        x, shared = self.method.shared_model(after), self.experiment.shared
        if x is not None and x.device.type != "cpu":
            x = x.to("cpu")
            after = self.method.with_model(after, x)
        if x is not None and x.layout != shared and x.layout == shared.parameters:
            return self.method.with_model(after, x.with_buffers(self._fill))
        return after

    # -- who is left out, and who counts less ------------------------------------------------------
    def _review(self) -> None:
        """What the postprocessors say of all replies is done."""
        counts: dict[int, int] = {}
        for step in self._steps:
            verdict = step.review(self._summaries, self.completed)
            for client, reason in verdict.left_out.items():
                self._drop(client, reason)
            counts |= verdict.counts
        if counts != self._counts:
            self._counts = counts
            self._accumulator = None

    def _drop(self, client: int, reason: str) -> None:
        del self._replies[client]
        self.left_out[client] = reason
        self._accumulator = None
        self._leave_out(client, reason)

    def _blame(self, wrong: str) -> None:
        """Leaves out those whose replies give no sound state by themselves; where each alone does,
        the one with the largest values.
        """
        alone = {c: self._try((c,))[1] for c in self.completed}
        bad = {c: reason for c, reason in alone.items() if reason}
        if not bad:
            largest = max(self.completed, key=lambda c: (_size(self._read(c)), c))
            bad = {largest: wrong}
        for client, reason in bad.items():
            self._drop(client, reason)

    def _unsound(self, after: State) -> str:
        """Why this is no state to go on from, or ""."""
        for f in dataclasses.fields(after):
            value = getattr(after, f.name)
            if not self._finite(value) and self._finite(getattr(self.server, f.name, None)):
                return f"{f.name} is not finite"
        x = self.method.shared_model(after)
        most = GROWTH * max(1.0, norm(self.experiment.agreed))
        if x is not None and norm(x) > most:
            return f"a model of norm {norm(x):.3g}, where {most:.3g} is {GROWTH:g} times its first"
        return ""

    def _check_unchanged(self) -> None:
        """Raises WrongPart if the method has written into the state before the exchange: clients
        in this process, a round that is aggregated again and a checkpoint may still read it.
        """
        for name, version in versions(self.server).items():
            if version != self._versions[name]:
                raise WrongPart(
                    f"{type(self.method).__name__}: server_update or accumulate changed "
                    f"server.{name} in place (or client_update what it received, in one process); "
                    f"a method must leave what it gets as it is, and return new values "
                    f"(server.{name}.clone(), for example)."
                )

    def _finite(self, value: object) -> bool:
        if isinstance(value, Tensors):
            # Buffers that the model began with as masks of infinities stay so.
            return value.is_finite(self.experiment.up.exempt)
        if isinstance(value, torch.Tensor):
            return not value.is_floating_point() or bool(torch.isfinite(value).all())
        if isinstance(value, float):
            return math.isfinite(value)
        if isinstance(value, State):
            return all(self._finite(v) for v in vars(value).values())
        if isinstance(value, dict):
            return all(self._finite(v) for v in value.values())
        if isinstance(value, (tuple, list)):
            return all(self._finite(v) for v in value)
        return True  # rows of a PerClient are what clients sent, and were checked when it came


def versions(state: State) -> dict[str, int]:
    """How often each tensor of a state was written into, by its place in the state."""
    found: dict[str, int] = {}

    def look(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value._version
        elif isinstance(value, Tensors):
            for part in ("vector", "buffers", "counters"):
                look(f"{name}.{part}", getattr(value, part))
        elif isinstance(value, State):
            for field in dataclasses.fields(value):
                look(f"{name}.{field.name}" if name else field.name, getattr(value, field.name))
        elif isinstance(value, dict):
            for key, part in value.items():
                look(f"{name}[{key!r}]", part)
        elif isinstance(value, (tuple, list)):
            for place, part in enumerate(value):
                look(f"{name}[{place}]", part)

    look("", state)
    return found


def filling(experiment: Experiment, before: State) -> Tensors:
    """Returns the model whose buffers replace those that clients do not send. before: the state
    that the round began with.
    """
    x = experiment.algorithm.shared_model(before)
    whole = x is not None and x.layout == experiment.shared
    return x if x is not None and whole else experiment.agreed


def _lowered(run: Run, n: int) -> Run:
    """The run with at most n samples."""
    return run if run.n <= n else dataclasses.replace(run, n=n)


def _counted(up: Payload, n: int) -> Payload:
    """The reply with at most n samples."""
    run, name = run_of(up), up.roles.run
    if run is None or name is None:
        return up
    return dataclasses.replace(up, **{name: _lowered(run, n)})


def _size(up: Payload) -> float:
    """The largest absolute value of a reply's arrays."""
    values = [getattr(up, name) for name in up.fields]
    arrays = [
        *(v.vector for v in values if isinstance(v, Tensors)),
        *(v.x for v in values if isinstance(v, Samples)),
        *values,
    ]
    found = [
        float(a.abs().max())
        for a in arrays
        if isinstance(a, torch.Tensor) and a.numel() and a.is_floating_point()
    ]
    return max(found, default=0.0)


def _theirs(broken: Exception) -> str:
    """What a reply brought about, and where. What is the server's own trouble (its disk, its
    memory, its state) is raised again.
    """
    own = isinstance(broken, (OSError, torch.OutOfMemoryError)) or no_memory(broken)
    brought = RemoteProtocolError, WrongPart
    fednets = isinstance(broken, FednetError) and not isinstance(broken, brought)
    if own or fednets:
        raise broken
    return raised(broken, anywhere=True)
