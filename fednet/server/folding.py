"""The replies of one exchange, folded into the server's next state.

Each reply was checked when it came; what is wrong with it may show only here: the method raises, or
what comes of it is no model. Then that client's reply is left out, with its reason, and the fold
begins anew with the others, in the same order: the result has the bits of a round in which the
client was lost. Where nothing is wrong, replies are folded once, as they come.

Three bounds are set by the replies of a round together:

- `security.max_norm: auto` leaves out a reply whose field has more than `OUTLIER` times the largest
  of 1, the norm of the shared model, and the median of the replies' norms; with fewer than three
  replies no median can be trusted. A rule by the round rather than by a warning at its end, since
  the model is lost by then; so wide, since honest updates differ by their numbers of steps, and
  what an honest run sends never comes near it.
- A shared model of more than `GROWTH` times its initial norm is no result: it is treated as one
  that is not finite.
- `round.max_share` lowers the sample counts of clients that would weigh more than that share of all
  that are folded; `auto` is half, where the counts are the sites' own word and three replied.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping

import torch

from fednet.algorithms.base import Run, Samples, Tensors
from fednet.algorithms.staleness import rebased
from fednet.algorithms.state import State
from fednet.errors import FednetError, RemoteProtocolError, RoundVoid, no_memory
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.loading import WrongPart, raised
from fednet.robust import stack
from fednet.server.asking import Phase
from fednet.server.shares import lowered, share_of_one
from fednet.server.spool import Spooled
from fednet.training.hosts import ServerHost
from fednet.wire.payload import Payload, run_of, weights_of

OUTLIER = 1e3
GROWTH = 1e6
ENOUGH = 3  # replies, for what is judged by the others


class Folding:
    """noise: what the server adds to a sum of clipped updates. before, server: the state that the
    round and that this exchange began with. leave_out(client, reason): the reply does not count;
    may raise, where the configuration says to stop. keep(client, up): what was folded.

    Nine arguments: the run, its server and its noise, its states, the phase and what was sent in
    it, and two calls to whoever keeps the round.
    """

    def __init__(
        self,
        experiment: Experiment,
        host: ServerHost,
        noise: privacy.Noise | None,
        before: State,
        server: State,
        phase: Phase,
        sent: Mapping[int, Tensors],
        leave_out: Callable[[int, str], None],
        keep: Callable[[int, Payload], None],
    ) -> None:
        """See above for the arguments."""
        self.experiment, self.method, self.host = experiment, experiment.algorithm, host
        self.server, self.phase, self._sent = server, phase, sent
        self._fill = self._filling(before)  # what stands where a reply says nothing
        self._noise, self._leave_out, self._keep = noise, leave_out, keep
        self.runs: dict[int, Run] = {}
        self.left_out: dict[int, str] = {}
        self._replies: dict[int, Spooled] = {}
        self._norms: dict[int, dict[str, float]] = {}
        self._counted: dict[int, int] = {}  # samples, where they count for less than was said
        self._said = dict(host.reported), list(host.warnings)
        self._fold: State | None = self._start()

    @property
    def completed(self) -> tuple[int, ...]:
        return tuple(sorted(self._replies))

    def add(self, client: int, reply: Spooled) -> None:
        """Folds the next reply, in ascending order of the clients."""
        self._replies[client] = reply
        if self._fold is None:  # begun anew by `result`
            return
        try:
            self._fold = self._one(self._fold, client)
        except Exception as broken:
            self._drop(client, f"its reply could not be folded: {_theirs(broken)}")

    def result(self, least: int) -> State | None:
        """The next server state; None where fewer than `least` replies can be used."""
        self._bound_norms()
        self._bound_shares()
        while len(self._replies) >= least:
            try:
                after, wrong, whose = self._try(self.completed)
            except RoundVoid as void:
                self.host.warn(str(void))
                return None
            if not wrong:
                for client, n in self._counted.items():
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
        return None

    # -- folding -----------------------------------------------------------------------------------
    def _start(self) -> State:
        self.host.begin(self.phase.round, self.phase.index, self.phase.cohort)
        self.host.reported, self.host.warnings = dict(self._said[0]), list(self._said[1])
        fold, method = self.method.start(self.server, self.phase.index), self.method
        if not stack.needed(self.experiment.config):
            return fold
        up = method.exchanges[self.phase.index].up
        kinds = {name: f.kind for name, f in up.fields.items() if f.form == "tensors"}
        return stack.stacked(fold, method.shared_model(self.server), kinds)

    def _one(self, fold: State, client: int) -> State:
        up, method = self._read(client), self.method
        run, name = run_of(up), up.roles.run
        bounds = self._counted.get(client), self.phase.declared.get(client)
        if run is not None and name is not None:
            if most := [n for n in bounds if n is not None and n < run.n]:
                run = dataclasses.replace(run, n=min(most))
                up = dataclasses.replace(up, **{name: run})
            self.runs[client] = run
        config, sent = self.experiment.config, self._sent.get(client)
        if config.privacy.clip is not None:
            up = privacy.received(up, sent, config.privacy)
        self.host.staleness = self.phase.staleness.get(client, 0)
        if not method.weighs_staleness:
            now = method.shared_model(self.server)
            up = rebased(up, sent, now, self.host.staleness)
        fold = method.fold(fold, self.server, client, up, self.host)
        self._keep(client, up)
        return fold

    def _read(self, client: int) -> Payload:
        reply, exp = self._replies[client], self.experiment
        up = reply.decoded()
        if up is None:
            received = weights_of(self.phase.seen.get(client))
            up = exp.up.decode(
                self.method.exchanges[self.phase.index].up,
                reply.form,
                reply.body(),
                received if received is not None else exp.agreed,
                fill=self._fill,
                sound=True,
                past=self.phase.past(client, "up", reply.key.round),
            )
        if client not in self._norms and exp.config.security.max_norm == "auto":
            self._norms[client] = {
                name: _norm(value)
                for name, value in ((n, getattr(up, n)) for n in up.fields)
                if isinstance(value, Tensors)
            }
        return up

    def _try(self, clients: tuple[int, ...]) -> tuple[State | None, str, int | None]:
        """(the next state, "", None) of these clients, or (None, why none comes of them, by whose
        reply where one alone could not be folded).
        """
        fold, self._fold = self._fold, None
        if fold is None:
            fold = self._start()
            for client in clients:
                try:
                    fold = self._one(fold, client)
                except Exception as broken:
                    return None, f"its reply could not be folded: {_theirs(broken)}", client
        try:
            after = self._finish(stack.settled(fold, self.experiment.config, clients), clients)
        except Exception as broken:
            return None, f"no model comes of its reply: {_theirs(broken)}", None
        wrong = self._unsound(after)
        if wrong:
            return None, f"no model comes of its reply: {wrong}", None
        return after, "", None

    def _filling(self, before: State) -> Tensors:
        x = self.method.shared_model(before)
        whole = x is not None and x.layout == self.experiment.shared
        return x if x is not None and whole else self.experiment.agreed

    def _finish(self, fold: State, clients: tuple[int, ...]) -> State:
        """The next state. A new shared model keeps the old one's buffers where the clients' do not
        come up.
        """
        self.host.begin(self.phase.round, self.phase.index, clients)
        if self._noise is not None:
            section = self.experiment.config.privacy
            fold = privacy.noised(fold, section, self._noise, self.phase.round)
        after = self.method.finish(fold, self.server, clients, self.host)
        x, shared = self.method.shared_model(after), self.experiment.shared
        if x is not None and x.layout != shared and x.layout == shared.parameters:
            return self.method.with_model(after, x.with_buffers(self._fill))
        return after

    # -- what is wrong -----------------------------------------------------------------------------
    def _drop(self, client: int, reason: str) -> None:
        del self._replies[client]
        self.runs.pop(client, None)
        self.left_out[client] = reason
        self._fold = None
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
        most = GROWTH * max(1.0, _norm(self.experiment.agreed))
        if x is not None and _norm(x) > most:
            return f"a model of norm {_norm(x):.3g}, where {most:.3g} is {GROWTH:g} times its first"
        return ""

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

    # -- bounds that follow from the round ---------------------------------------------------------
    def _bound_norms(self) -> None:
        if len(self._norms) < ENOUGH:
            return
        x = self.method.shared_model(self.server)
        least = max(1.0, 0.0 if x is None else _norm(x))
        for name in next(iter(self._norms.values())):
            norms = {c: self._norms[c][name] for c in self._replies}
            if len(norms) < ENOUGH:
                return
            most = OUTLIER * max(least, statistics.median_low(norms.values()))
            for client, norm in norms.items():
                if norm > most:
                    self._drop(
                        client,
                        f"{name} has norm {norm:.4g}; among this round's replies "
                        f"security.max_norm: auto allows {most:.4g}",
                    )

    def _bound_shares(self) -> None:
        exp = self.experiment
        if self.method.in_memory:
            return  # what a client counts is in its vector, see privacy.secagg.max_samples
        share = share_of_one(exp, len(self._replies))
        by_samples = self.method.weight(Run(1, 1, 0.0)) != self.method.weight(Run(2, 1, 0.0))
        if share is None or not by_samples or stack.alike(exp.config):
            return
        said = {c: self.runs[c].n for c in self._replies if c in self.runs}
        self._counted = lowered(said, share)
        if self._counted:
            self._fold = None


def _norm(value: Tensors) -> float:
    return math.sqrt(value.square)


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
