"""The replies of one exchange, added up and made into the server's next state.

Replies are accumulated as they come, in ascending order of the clients. Before a result is made all
of them are reviewed together (`security.max_norm: auto`, `round.max_share`). Each reply was checked
when it came; what is wrong with it may show only here: the method raises, or what comes of it is no
model. Then that client's reply is left out, with its reason; where each reply alone gives a model,
the one of the largest norm is. Wherever a review, or a reply that failed, changes who counts or for
how much, the others are accumulated again, in the same order: the result has the bits of a round in
which the client was lost. A review still sees every reply that could be read: one that fails cannot
take away a bound that the others are held to.

On its way into the sum a reply's samples are lowered to what it counts for, its update is clipped
(`privacy.clip`), and a stale one is rebased. A robust rule makes its sum of all replies after the
last one; then the server's noise is added.

A shared model of more than `GROWTH` times its initial norm is no result: it is treated as one that
is not finite.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fednet.algorithms.base import Run, Samples, Tensors
from fednet.algorithms.staleness import rebased
from fednet.algorithms.state import State, fingerprints, leaves
from fednet.errors import FednetError, RemoteProtocolError, RoundVoid, no_memory
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.loading import WrongPart, raised
from fednet.robust import stack
from fednet.server.exchange import OpenExchange, leave_out
from fednet.server.inbox import ReceivedReply
from fednet.wire.payload import Payload, run_of, tensors_of

if TYPE_CHECKING:
    from fednet.server.session import Session

GROWTH = 1e6
OUTLIER = 1e3
ENOUGH = 3  # replies: of fewer none can have less than half


class Aggregation:
    """Adds up the replies of one exchange: `add` for each of them, then `result`.

    before: the method's state at the server as the round began. server: the same as this exchange
    began, to which the replies are added.
    """

    def __init__(self, session: Session, exchange: OpenExchange, before: State) -> None:
        self.session, self.exchange, self.server = session, exchange, exchange.before.server
        self.config, self.method, self.host = session.config, session.method, session.host
        self.experiment = session.experiment
        self._up = self.method.exchanges[exchange.index].up
        self._fill = filling(self.experiment, before)  # buffers for replies without any
        self._shared = self.method.shared_model(self.server)
        self._stacked = stack.needs_stack(self.config)
        # Under secure aggregation the count is in the masked vector: privacy.secagg.max_samples.
        # With clipping, or a rule that bears malicious clients, all replies count the same.
        by_samples = self.method.weight(Run(1, 1, 0.0)) != self.method.weight(Run(2, 1, 0.0))
        self._bounds_shares = (
            by_samples and not self.method.in_memory and not stack.equal_weights(self.config)
        )
        self._replies: dict[int, ReceivedReply] = {}  # of those who are not left out
        self.left_out: dict[int, str] = {}  # by client, why
        self.spoiled = False  # whether no result comes because of what an unknown client has sent
        # Of all whose reply could be read. Norms by field, as its tensors were sent: of `Weights`
        # the model's norm, not the update's (which `privacy.updates` gives).
        self._norms: dict[int, dict[str, float]] = {}
        self._runs: dict[int, Run | None] = {}
        self.condensed: dict[int, Samples] = {}  # images, by client
        self._counts: dict[int, int] = {}  # samples, where they count for fewer than were sent
        self._reported, self._warnings = dict(self.host.reported), list(self.host.warnings)
        self._unchanged = fingerprints(self.server)
        self._failed = False  # whether server_update raised when it was last tried
        self._accumulator: State | None = self._start()  # None: to be started over by `result`

    @property
    def runs(self) -> dict[int, Run]:
        """What each client's training was, with the samples that it counts for."""
        found: dict[int, Run] = {}
        for client in self._replies:
            run = self._runs[client]
            if run is not None:
                n = min(run.n, self._counts.get(client, run.n))
                found[client] = dataclasses.replace(run, n=n)
        return found

    def add(self, client: int, reply: ReceivedReply) -> None:
        """Takes the next reply, in ascending order of the clients."""
        self._replies[client] = reply
        try:
            up = self._read(client)
            if self.config.security.max_norm == "auto":
                own = tensors_of(up).items()
                self._norms[client] = {name: value.rough_norm for name, value in own}
            self._runs[client] = run_of(up)
            for name, field in up.fields.items():
                value = getattr(up, name)
                if field.kind != "condensed" or not isinstance(value, Samples):
                    continue
                if isinstance(value.x, torch.Tensor) and value.x.dim() == 4:
                    self.condensed[client] = value
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
                after, wrong, whose = self._try(tuple(self._replies))
            except RoundVoid as void:
                self.host.warn(str(void))
                self.spoiled = void.spoiled
                return None
            finally:
                self._check_unchanged()
            if not wrong:
                for client, n in self._counts.items():
                    self.host.warn(
                        f"client {client}'s samples count as {n}: round.max_share allows no more"
                    )
                return after
            bad = {} if whose is None else {whose: wrong}
            if whose is None and not self.method.in_memory:  # under masks no part is known
                alone = {c: self._alone(c) for c in self._replies}
                bad = {c: reason for c, (reason, _) in alone.items() if reason}
                self._blame_method([failed for _, failed in alone.values()], wrong)
                if not bad:
                    bad = {max(self._replies, key=self._norm_of): wrong}
            if not bad:
                self.host.warn(wrong)
                self.spoiled = True
                return None
            for client, reason in bad.items():
                self._drop(client, reason)
            self._review()
        return None

    def _alone(self, client: int) -> tuple[str, bool]:
        """Why no model comes of this reply alone, or "", and whether server_update raised that."""
        wrong = self._try((client,))[1]
        return wrong, self._failed

    def _blame_method(self, failed: list[bool], wrong: str) -> None:
        """Raises WrongPart if server_update raised with the reply of each client that was asked: no
        reply is to blame, and no other round would help. failed: of each reply alone.
        """
        everybody = all(failed) and len(failed) == len(self.exchange.asked)
        if everybody and (len(failed) > 1 or self.config.clients == 1):
            why = wrong.partition("with its reply: ")[2]
            raise WrongPart(
                f"{type(self.method).__name__}: server_update fails with every client's reply: "
                f"{why}"
            )

    def _norm_of(self, client: int) -> float:
        """The norm of a reply's tensors, the largest of several."""
        return max([x.rough_norm for x in tensors_of(self._read(client)).values()], default=0.0)

    # -- accumulating ------------------------------------------------------------------------------
    def _start(self) -> State:
        self.host.begin(self.exchange.round, self.exchange.index, self.exchange.cohort)
        self.host.reported, self.host.warnings = dict(self._reported), list(self._warnings)
        accumulator = self.method.init_accumulator(self.server, self.exchange.index)
        if self._stacked:
            kinds = {name: f.kind for name, f in self._up.fields.items() if f.form == "tensors"}
            accumulator = stack.with_stacks(accumulator, self._shared, kinds)
        return accumulator

    def _read(self, client: int) -> Payload:
        """The client's reply; its samples are no more than its site first declared. Tensors that
        came from a GPU of this process stay there if they are only added.
        """
        reply, exp = self._replies[client], self.experiment
        up = reply.take_payload()
        if up is not None:
            self.exchange.asked[client].memory.update(reply.remembered)
        else:
            up = exp.up.decode(
                self._up,
                reply.message.form,
                reply.body(),
                self.session.sent.get(client, exp.agreed),
                fill=self._fill,
                sound=True,
                past=self.exchange.past(client, "up"),
            )
        moved: dict[str, Tensors] = {}
        for name, value in tensors_of(up).items():
            if value.device.type == "cpu":
                continue
            if self.method.only_sums:
                for part in (value.vector, value.buffers, value.counters):
                    # Until then nothing else may be put into their memory.
                    part.record_stream(torch.cuda.current_stream(value.device))
            else:
                moved[name] = value.to("cpu")
        if moved:
            up = dataclasses.replace(up, **moved)
        declared = self.session.io.protocol.sites.declared.get(client)
        return up if declared is None else _at_most(up, declared)

    def _added(self, accumulator: State, client: int, up: Payload) -> State:
        sent, staleness = self.session.sent.get(client), self.exchange.asked[client].staleness
        if client in self._counts:
            up = _at_most(up, self._counts[client])
        if self.config.privacy.clip is not None:
            up = privacy.received(up, sent, self.config.privacy)
        if staleness and not self.method.own_schedule:
            up = rebased(up, sent, self._shared, staleness)
        self.host.staleness = staleness or 0
        return self.method.accumulate(accumulator, self.server, client, up, self.host)

    def _try(self, clients: tuple[int, ...]) -> tuple[State | None, str, int | None]:
        """(the next state, "", None) of these clients, or (None, why none comes of them, by whose
        reply where one alone could not be added). A new shared model keeps the old one's buffers
        where the clients' do not come up.
        """
        self._failed = False
        accumulator, self._accumulator = self._accumulator, None
        if accumulator is None:
            accumulator = self._start()
            for client in clients:
                try:
                    accumulator = self._added(accumulator, client, self._read(client))
                except Exception as broken:
                    return None, f"its reply could not be aggregated: {_theirs(broken)}", client
        try:
            if self._stacked:
                accumulator = stack.with_sums(accumulator, self.config, clients)
            if self.session.noise is not None:
                section, round = self.config.privacy, self.exchange.round
                accumulator = privacy.noised(accumulator, section, self.session.noise, round)
            self.host.begin(self.exchange.round, self.exchange.index, clients)
            after = self.method.server_update(accumulator, self.server, clients, self.host)
            x, shared = self.method.shared_model(after), self.experiment.shared
            if x is not None and x.device.type != "cpu":
                x = x.to("cpu")
                after = self.method.with_model(after, x)
            if x is not None and x.layout != shared and x.layout == shared.parameters:
                after = self.method.with_model(after, x.with_buffers(self._fill))
        except Exception as broken:
            self._failed = True
            return None, f"server_update fails with its reply: {_theirs(broken)}", None
        for f in dataclasses.fields(after):
            value = getattr(after, f.name)
            if not self._finite(value) and self._finite(getattr(self.server, f.name, None)):
                return None, f"its reply gives no model: {f.name} is not finite", None
        norm = 0.0 if x is None else x.rough_norm
        most = GROWTH * max(1.0, self.experiment.agreed.rough_norm)
        if norm > most:
            found = f"a model of norm {norm:.3g}, where {most:.3g} is {GROWTH:g} times its first"
            return None, f"its reply gives no model: {found}", None
        return after, "", None

    # -- who is left out, and who counts less ------------------------------------------------------
    def _review(self) -> None:
        """Leaves out replies whose field is longer than `OUTLIER` times the largest of 1, the norm
        of the shared model, and the median of the replies' norms (`security.max_norm: auto`). With
        fewer than three replies no median can be trusted. The bound is that wide because honest
        updates differ by their numbers of steps; what an honest run sends never comes near it.

        Lowers the sample counts of clients that would weigh more than `round.max_share`.
        """
        if len(self._norms) >= ENOUGH:
            least = 1.0 if self._shared is None else max(1.0, self._shared.rough_norm)
            for name in next(iter(self._norms.values())):
                median = statistics.median_low([norms[name] for norms in self._norms.values()])
                most = OUTLIER * max(least, median)
                for client in tuple(self._replies):
                    found = self._norms[client][name]
                    if found > most:
                        self._drop(
                            client,
                            f"{name} has norm {found:.4g}; among this round's replies "
                            f"security.max_norm: auto allows {most:.4g}",
                        )
        share = share_of_one(self.experiment, len(self._runs)) if self._bounds_shares else None
        if share is None:
            return
        runs = {client: self._runs[client] for client in self._replies}
        counts = lowered({c: run.n for c, run in runs.items() if run is not None}, share)
        if counts != self._counts:
            self._counts = counts
            self._accumulator = None

    def _drop(self, client: int, reason: str) -> None:
        del self._replies[client]
        self.left_out[client] = reason
        self.condensed.pop(client, None)
        self._accumulator = None
        leave_out(self.session, self.exchange, client, reason)

    def _finite(self, value: object) -> bool:
        """Whether all numbers of a value are finite. Rows of a PerClient are not looked at: they
        are what clients sent, and were checked when it came.
        """
        for _, part in leaves("", value):
            if isinstance(part, Tensors):
                # Buffers that the model began with as masks of infinities stay so.
                if not part.is_finite(self.experiment.up.exempt):
                    return False
            elif isinstance(part, torch.Tensor):
                if part.is_floating_point() and not torch.isfinite(part).all():
                    return False
            elif isinstance(part, float) and not math.isfinite(part):
                return False
        return True

    def _check_unchanged(self) -> None:
        """Raises WrongPart if the method has written into the state before the exchange: clients
        in this process, a round that is aggregated again and a checkpoint may still read it.
        """
        for name, fingerprint in fingerprints(self.server).items():
            if fingerprint != self._unchanged[name]:
                raise WrongPart(
                    f"{type(self.method).__name__}: server_update or accumulate changed "
                    f"server.{name} in place (or client_update what it received, in one process); "
                    f"a method must leave what it gets as it is, and return new values "
                    f"(server.{name}.clone(), for example)."
                )


def filling(experiment: Experiment, before: State) -> Tensors:
    """The model whose buffers replace those that clients do not send."""
    x = experiment.algorithm.shared_model(before)
    whole = x is not None and x.layout == experiment.shared
    return x if x is not None and whole else experiment.agreed


def share_of_one(experiment: Experiment, replies: int) -> float | None:
    """The largest part that one client may have in a mean by samples (`round.max_share`); None:
    there is no bound.
    """
    share = experiment.config.round.max_share
    if share == "auto":
        return 0.5 if experiment.federation is None and replies >= ENOUGH else None
    return share


def lowered(counts: Mapping[int, int], share: float) -> dict[int, int]:
    """The counts that have to be lowered so that none is more than `share` of their sum, or of an
    equal part where so few cannot have less.
    """
    share = max(share, 1 / max(1, len(counts)))
    ordered = sorted(counts.items(), key=lambda item: item[1])
    high: list[int] = []
    rest = sum(counts.values())
    most = share * rest
    while ordered and ordered[-1][1] > most:
        client, n = ordered.pop()
        high.append(client)
        rest -= n
        left = 1 - share * len(high)
        if left > 1e-9:
            most = share * rest / left
        elif ordered:
            most = float(ordered[-1][1])
        else:
            most = float(n)
    cap = max(1, math.floor(most))
    return {c: cap for c in high if counts[c] > cap}


def _at_most(up: Payload, n: int) -> Payload:
    """The reply, with at most n samples."""
    run, name = run_of(up), up.run_field
    if run is None or name is None or run.n <= n:
        return up
    return dataclasses.replace(up, **{name: dataclasses.replace(run, n=n)})


def _theirs(broken: Exception) -> str:
    """Returns the error that a reply led to, and where it was raised. Raises it again if the cause
    is not the reply but the server, such as a full disk.
    """
    own = isinstance(broken, (OSError, torch.OutOfMemoryError)) or no_memory(broken)
    brought = RemoteProtocolError, WrongPart
    fednets = isinstance(broken, FednetError) and not isinstance(broken, brought)
    if own or fednets:
        raise broken
    return raised(broken, anywhere=True)
