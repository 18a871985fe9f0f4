"""The replies of one exchange, added up and made into the server's next state.

Replies are accumulated as they come, in ascending order of the clients. On its way into the sum
each passes the guards (guards.py), which review all replies together before a result is made, and
finish the sum. Each reply was checked when it came; what is wrong with it may show only here: the
method raises, or what comes of it is no model. Then that client's reply is left out, with its
reason; where each reply alone gives a model, the one of the largest norm is. Wherever a review, or
a reply that failed, changes who counts or for how much, the others are accumulated again, in the
same order: the result has the bits of a round in which the client was lost.

A shared model of more than `GROWTH` times its initial norm is no result: it is treated as one that
is not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fednet.algorithms.base import LocalRun, Samples, Tensors
from fednet.algorithms.state import State, fingerprints, leaves
from fednet.errors import FednetError, RemoteProtocolError, RoundVoid, no_memory
from fednet.experiment.build import Experiment
from fednet.loading import WrongPart, error_text
from fednet.server.exchanges import Exchanges
from fednet.server.guards import at_most, guards_of, guards_with
from fednet.server.inbox import ReceivedReply
from fednet.server.open_round import OpenExchange
from fednet.wire.codec import cut
from fednet.wire.payload import Payload, run_of, tensors_of

GROWTH = 1e6


class Aggregation:
    """Adds up the replies of one exchange: `add` for all of them, then `result`.

    before: the method's state at the server as the round began. server: the same as this exchange
    began, to which the replies are added.
    """

    def __init__(self, exchanges: Exchanges, exchange: OpenExchange, before: State) -> None:
        self.exchange = exchange
        self.server = exchange.before.server
        self._exchanges = exchanges
        self._clients = exchanges.clients
        setup = exchanges.setup
        self.method = setup.method
        self.host = setup.host
        self.experiment = setup.experiment
        declared = self.method.exchanges[exchange.index]
        self._up = declared.up
        self._known = declared.summation.known
        fields = declared.up.fields.items()
        self._images = [n for n, f in fields if f.kind == "condensed" and f.form == "samples"]
        self._fill = filling(self.experiment, before)  # buffers for replies without any
        self._shared = self.method.shared_model(self.server)
        self._guards = guards_of(setup, self._clients.sent, exchange, self._shared)
        self._admitting = guards_with(self._guards, "admit")
        self._changing = guards_with(self._guards, "change")
        self._counting = guards_with(self._guards, "samples")
        self._replies: dict[int, ReceivedReply] = {}  # of those who are not left out
        self.left_out: dict[int, str] = {}  # by client, why
        self.spoiled = False  # whether no result comes because of what an unknown client has sent
        self._runs: dict[int, LocalRun | None] = {}
        self.condensed: dict[int, Samples] = {}  # images, by client
        self._reported = dict(self.host.reported)
        self._warnings = list(self.host.warnings)
        self._unchanged = fingerprints(self.server)
        self._failed = False  # whether server_update raised when it was last tried
        self._accumulator: State | None = self._start()  # None: to be started over by `result`

    @property
    def runs(self) -> dict[int, LocalRun]:
        """What each client's training was, with the samples that it counts for."""
        found: dict[int, LocalRun] = {}
        for client in self._replies:
            run = self._runs[client]
            if run is not None:
                n = run.n
                for guard in self._counting:
                    n = guard.samples(client, n)
                found[client] = run if n == run.n else dataclasses.replace(run, n=n)
        return found

    def add(self, replies: Sequence[tuple[int, ReceivedReply]]) -> None:
        """Takes the next replies, in ascending order of the clients. Small ones are read together,
        then accumulated together.
        """
        ups: list[tuple[int, Payload]] = []
        for client, reply in replies:
            self._replies[client] = reply
            try:
                ups.append((client, self._admit(client)))
            except Exception as broken:
                self._drop(client, _not_aggregated(broken))
            if not reply.small:
                self._add(ups)
                ups = []
        self._add(ups)

    def _admit(self, client: int) -> Payload:
        """Reads a reply, and notes what is known of it before it is added up."""
        up = self._read(client)
        for guard in self._admitting:
            guard.admit(client, up)
        self._runs[client] = run_of(up)
        for name in self._images:
            value = getattr(up, name)
            if isinstance(value.x, torch.Tensor) and value.x.dim() == 4:
                self.condensed[client] = value
        return up

    def _add(self, ups: Sequence[tuple[int, Payload]]) -> None:
        if len(ups) > 1 and self._accumulator is not None and self.method.adds_alike:
            try:
                changed = [self._change(client, up) for client, up in ups]
                self._accumulator = self.method.add_all(self._accumulator, changed)
            except Exception as broken:
                _error_of_reply(broken)  # raises what is not a reply's
                self._accumulator = None  # `result` adds one after the other, and finds whose it is
            return
        for client, up in ups:
            if self._accumulator is None:
                return
            try:
                self._accumulator = self._accumulate(self._accumulator, client, up)
            except Exception as broken:
                self._drop(client, _not_aggregated(broken))

    def result(self, least: int) -> State | None:
        """The next server state; None where fewer than `least` replies can be used. Raises
        WrongPart where the method has changed the state before it.
        """
        self._review()
        while len(self._replies) >= least:
            try:
                after, wrong, culprit = self._try(tuple(self._replies))
            except RoundVoid as void:
                self.host.warn(str(void))
                self.spoiled = void.spoiled
                return None
            finally:
                self._check_unchanged()
            if not wrong:
                for guard in self._guards:
                    for remark in guard.remarks():
                        self.host.warn(remark)
                return after
            bad = {} if culprit is None else {culprit: wrong}
            if culprit is None and self._known:
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
        if everybody and (len(failed) > 1 or self.experiment.config.clients == 1):
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
        self.host.reported = dict(self._reported)
        self.host.warnings = list(self._warnings)
        accumulator = self.method.init_accumulator(self.server, self.exchange.index)
        for guard in self._guards:
            accumulator = guard.start(accumulator)
        return accumulator

    def _read(self, client: int) -> Payload:
        """The client's reply; its samples are no more than its site first declared. Tensors that
        came from a GPU of this process stay there if they are only added.
        """
        reply = self._replies[client]
        exp = self.experiment
        up = reply.take_payload()
        if up is not None:
            self.exchange.asked[client].memory.update(reply.remembered)
        else:
            own, _ = cut(reply.message.form, reply.body(), len(self._up.fields))
            up = exp.up.decode(
                self._up,
                *own,
                self._clients.sent.get(client, exp.initial_shared),
                fill=self._fill,
                sound=True,
                past=self.exchange.past(client, "up"),
            )
            for name, norm in reply.norms.items():
                vars(getattr(up, name))["rough_norm"] = norm  # else found in another pass
        moved: dict[str, Tensors] = {}
        for name, value in tensors_of(up).items():
            if value.vector.is_cpu:
                continue
            if self.method.only_sums:
                for part in (value.vector, value.buffers, value.counters):
                    # Until then nothing else may be put into their memory.
                    part.record_stream(torch.cuda.current_stream(value.device))
            else:
                moved[name] = value.to("cpu")
        if moved:
            up = dataclasses.replace(up, **moved)
        declared = self._clients.sizes.sites.declared.get(client)
        return up if declared is None else at_most(up, declared)

    def _accumulate(self, accumulator: State, client: int, up: Payload) -> State:
        up = self._change(client, up)
        self.host.staleness = self.exchange.asked[client].staleness or 0
        return self.method.accumulate(accumulator, self.server, client, up, self.host)

    def _change(self, client: int, up: Payload) -> Payload:
        """The reply as the guards let it count."""
        for guard in self._changing:
            up = guard.change(client, up)
        return up

    def _try(self, clients: tuple[int, ...]) -> tuple[State | None, str, int | None]:
        """(the next state, "", None) of these clients, or (None, why none comes of them, by whose
        reply where one alone could not be added). A new shared model keeps the old one's buffers
        where the clients' do not come up.
        """
        self._failed = False
        accumulator = self._accumulator
        self._accumulator = None
        if accumulator is None:
            accumulator = self._start()
            for client in clients:
                try:
                    accumulator = self._accumulate(accumulator, client, self._read(client))
                except Exception as broken:
                    return None, _not_aggregated(broken), client
        try:
            for guard in self._guards:
                accumulator = guard.finish(accumulator, clients)
            self.host.begin(self.exchange.round, self.exchange.index, clients)
            after = self.method.server_update(accumulator, self.server, clients, self.host)
            x = self.method.shared_model(after)
            shared = self.experiment.shared
            if x is not None and x.device.type != "cpu":
                x = x.to("cpu")
                after = self.method.with_model(after, x)
            if x is not None and x.layout != shared and x.layout == shared.parameters:
                after = self.method.with_model(after, x.with_buffers(self._fill))
        except Exception as broken:
            self._failed = True
            return None, f"server_update fails with its reply: {_error_of_reply(broken)}", None
        for f in dataclasses.fields(after):
            value = getattr(after, f.name)
            if not self._finite(value) and self._finite(getattr(self.server, f.name, None)):
                return None, f"its reply gives no model: {f.name} is not finite", None
        norm = 0.0 if x is None else x.rough_norm
        most = GROWTH * max(1.0, self.experiment.initial_shared.rough_norm)
        if norm > most:
            found = f"a model of norm {norm:.3g}, where {most:.3g} is {GROWTH:g} times its first"
            return None, f"its reply gives no model: {found}", None
        return after, "", None

    # -- who is left out --------------------------------------------------------------------------
    def _review(self) -> None:
        for guard in self._guards:
            left_out, again = guard.review(tuple(self._replies))
            for client, reason in left_out.items():
                self._drop(client, reason)
            if again:
                self._accumulator = None

    def _drop(self, client: int, reason: str) -> None:
        del self._replies[client]
        self.left_out[client] = reason
        self.condensed.pop(client, None)
        self._accumulator = None
        self._exchanges.leave_out(self.exchange, client, reason)

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
    return x if x is not None and whole else experiment.initial_shared


def _not_aggregated(broken: Exception) -> str:
    """Returns why a reply is left out, see `_error_of_reply`."""
    return f"its reply could not be aggregated: {_error_of_reply(broken)}"


def _error_of_reply(broken: Exception) -> str:
    """Returns the error that a reply led to, and where it was raised. Raises it again if the cause
    is not the reply but the server, such as a full disk.
    """
    own = isinstance(broken, (OSError, torch.OutOfMemoryError)) or no_memory(broken)
    brought = RemoteProtocolError, WrongPart
    fednets = isinstance(broken, FednetError) and not isinstance(broken, brought)
    if own or fednets:
        raise broken
    return error_text(broken, anywhere=True)
