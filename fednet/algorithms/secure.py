"""Runs a method under secure aggregation: the server gets the sum of the clients' replies, and no
single reply.

The steps of the protocol are the exchanges of the round. Local training is in the step `masked`:
the client's reply is converted to whole numbers and masked, and the server sums it. `server_update`
then gets the same accumulator as without masks. A method declares in `summed` what is summed; a
method that declares nothing is refused.

Weights in a reply (kind `state`) are summed as the difference to the weights that the client got,
whose entries are small. A client's keys are in `secrets` of its host, in memory only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, ClassVar, get_type_hints

import numpy as np
import torch

from fednet import seeds
from fednet.algorithms.base import (
    Algorithm,
    ClientHost,
    Exchange,
    Layout,
    LocalRun,
    Masked,
    OwnPayload,
    Payload,
    State,
    Statistics,
    Sum,
    Tensors,
    kind,
)
from fednet.errors import ConfigError, RemoteProtocolError, RoundVoid
from fednet.plain import JsonMapping
from fednet.secagg import BelowThreshold, SecureClient, SecureServer, Terms
from fednet.secagg.fixed import FixedPoint, Integers
from fednet.secagg.server import Gathered
from fednet.secagg.terms import STEPS, draw_order
from fednet.wire.payload import run_of

if TYPE_CHECKING:
    from fednet.config import Config
    from fednet.config.schema import SecaggSection

# By step, the ledger kind of its question. A step asks for what an earlier step has answered.
QUESTIONS = {
    "keys": "",
    "shares": "keys",
    "masked": "shares",
    "consistency": "consistency",
    "unmask": "consistency",
}


class StateBetweenSteps(State):
    """The server's state between two steps: the method's from before the round, and the
    protocol's.
    """

    inner: State
    machine: SecureServer


class StepAnswers(State):
    """The answers to one step so far."""

    gathered: Gathered


class Secure(Algorithm):
    """`secure_class` mixes this into a method. terms: of the protocol in a round. point: the
    conversion of a summed field's entries to whole numbers, for fields that are `weighted` and for
    `plain` ones. `plan_sums` sets both.
    """

    terms: Callable[[int], Terms]
    point: Mapping[str, FixedPoint]
    steps: ClassVar[tuple[str, ...]] = STEPS
    plain: ClassVar[Exchange]  # the method's own

    # -- the client --------------------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        step = self.steps[phase]
        if step == "masked":
            self._mine(host, step)  # else nothing would come of the training
            own = self.plain.down(**{name: getattr(down, name) for name in self.plain.down.fields})
            return super().client_update(0, client, own, host)
        machine = self._mine(host, step)
        question = _bytes(down.question) if QUESTIONS[step] else b""
        return client, self.exchanges[phase].up(answer=_array(machine.answer(step, question)))

    def mask_reply(
        self, phase: int, up: Payload, down: OwnPayload, x: Tensors | None, host: ClientHost
    ) -> Payload:
        """Returns the masked reply that is sent. x: the weights that the client got."""
        if self.steps[phase] != "masked":
            return up
        machine = self._mine(host, "masked")
        question = _bytes(down.question)
        parts = list[Integers]()
        outside = 0
        run = run_of(up)
        weight = 1 if run is None else int(self.weight(run))
        for name, how in self.summed.items():
            value = getattr(up, name)
            if up.fields[name].kind == "state":
                value = value.params - x.params.to(value.device)
            point = self.point[how]
            vector = value.vector.detach().cpu().numpy()
            parts.append(point.encode(vector, weight if point.most > 1 else 1))
            outside += point.count_outside(vector)
        if outside:
            host.report(secagg_clipped=float(outside))
        entries = np.concatenate(parts)
        if machine.previous_answer("masked", question) is None:
            host.secrets.leaves(host.client_id, host.round, entries.tobytes())
        answer = machine.answer("masked", question, entries)
        kind = self.exchanges[phase].up
        shown = {}
        if kind.run_field is not None:
            shown[kind.run_field] = run
        else:
            host.reported.clear()  # of one client, as its counts are
        return kind(answer=_array(answer), **shown)

    def _mine(self, host: ClientHost, step: str) -> SecureClient:
        terms = self.terms(host.round)
        return host.secrets.machine(terms, host.round, host.client_id, fresh=step == "keys")

    # -- the server --------------------------------------------------------------------------------
    def broadcast(self, server, phase, client_id):
        step = self.steps[phase]
        asked = self.exchanges[phase].down
        if step == "keys":
            return asked()
        question = _array(server.machine.question(client_id))
        if step != "masked":
            return asked(question=question)
        own = super().broadcast(server.inner, 0, client_id)
        return asked(question=question, **{name: getattr(own, name) for name in own.fields})

    def init_accumulator(self, server, phase):
        return StepAnswers(gathered=Gathered())

    def accumulate(self, accumulator, server, client_id, up, host):
        machine = self.machine(server, host.round)
        answer = _bytes(up.answer)
        if machine.step == "masked":
            # The masks of an earlier round are no longer in use: the sum would be noise.
            digest = hashlib.sha256(answer).digest()
            last, before = host.last_masked.get(client_id, (host.round, digest))
            if last < host.round and before == digest:
                raise RemoteProtocolError(f"its masked vector of round {last} once more")
            host.last_masked[client_id] = host.round, digest
        machine.take(accumulator.gathered, client_id, answer)
        return accumulator

    def server_update(self, accumulator, server, cohort, host):
        try:
            machine = self.machine(server, host.round).finish(accumulator.gathered)
        except BelowThreshold as void:
            host.blamed.update(void.blamed)
            raise
        host.blamed.update(machine.blamed)
        inner = server.inner if isinstance(server, StateBetweenSteps) else server
        if machine.step is not None:
            return StateBetweenSteps(inner=inner, machine=machine)
        host.cohort = machine.survivors
        return super().server_update(self._unmask(machine, inner), inner, machine.survivors, host)

    def machine(self, server: object, round: int) -> SecureServer:
        """Returns the server's state machine of the protocol in this exchange."""
        if isinstance(server, StateBetweenSteps):
            return server.machine
        return SecureServer(self.terms(round))

    def _unmask(self, machine: SecureServer, inner: object) -> State:
        """Returns the accumulator that the method would have had of the survivors' replies."""
        base = self.shared_model(inner)
        total = machine.total
        sums = {}
        assert base is not None
        for (name, how), part in zip(self.summed.items(), np.split(total, len(self.summed))):
            if not self.point[how].possible(part, len(machine.survivors)):
                raise RoundVoid(
                    f"secure aggregation: no {len(machine.survivors)} clients that keep to "
                    f"privacy.secagg can have the sum of {name} that came out; what one of them "
                    f"sent under its masks was something else",
                    spoiled=True,
                )
            found, weight = self.point[how].decode(part)
            about = self.plain.up.fields[name]
            like = base if about.form == "tensors" else base.params
            vector = torch.from_numpy(found).to(like.device)
            if about.kind == "state":
                vector = vector + weight * like.vector.double()
            whole = Sum.empty().add(like, float(weight))  # the buffers do not come up
            sums[name] = dataclasses.replace(whole, vector=vector, count=len(machine.survivors))
        return self.Accumulator(**sums)

    # -- what crosses ------------------------------------------------------------------------------
    def most(self, payload: type[Payload], round: int) -> dict[str, int]:
        """Returns the largest bytes of the fields whose size the declaration does not give."""
        for step, exchange in zip(self.steps, self.exchanges):
            if payload in (exchange.down, exchange.up):
                asked, answered = SecureServer(self.terms(round)).most(step)
                return {"question": asked, "answer": answered}
        return {}

    def exact(self, server: object, round: int, client: int) -> dict[str, int]:
        """Returns these bytes for this client, in the exchange that `server` is the state of."""
        asked, answered = self.machine(server, round).sizes(client)
        return {"question": asked, "answer": answered}

    def sizes(self, payload, client):
        return self.most(payload, 1) or super().sizes(payload, client)

    # -- the shared model --------------------------------------------------------------------------
    def shared_model(self, server):
        return super().shared_model(
            server.inner if isinstance(server, StateBetweenSteps) else server
        )

    def with_model(self, server, x):
        if isinstance(server, StateBetweenSteps):
            return server.replace(inner=super().with_model(server.inner, x))
        return super().with_model(server, x)


def plan_sums(
    config: Config,
    method: Secure,
    shared: Layout,
    cohort: Callable[[int], Sequence[int]],
    parts: Sequence[Sized] | None,
) -> None:
    """Sets `terms` and `point` of a run's method. cohort: of a round. parts: the clients' samples,
    if they are known. Raises ConfigError if the run's sums are not possible.
    """
    section = config.privacy.secagg
    if config.model.buffers == "average" and shared.sizes[1] + shared.sizes[2]:
        raise ConfigError(
            "privacy.secagg: this model's BatchNorm statistics would leave their clients unmasked; "
            "set model.buffers: local."
        )
    weighted = "weighted" in method.summed.values() and method.weight(LocalRun(1, 1, 0.0)) != (
        method.weight(LocalRun(2, 1, 0.0))
    )
    most = section.max_samples or (max(len(part) for part in parts) if parts else None)
    if config.privacy.clip is not None or not weighted:
        most = 1
    if most is None:
        raise ConfigError(
            "privacy.secagg.max_samples: the sites bring their own data, so nobody knows how many "
            "samples one may have; give the most that shall count."
        )
    equal = FixedPoint(section.bits, section.clip)
    point = {"plain": equal, "weighted": dataclasses.replace(equal, most=most)}

    @functools.lru_cache(maxsize=4)
    def terms(round: int) -> Terms:
        clients = tuple(cohort(round))
        assert section.protocol != "none"
        return Terms(
            section.protocol,
            clients,
            section.threshold,
            len(method.summed) * (shared.sizes[0] + 1),  # each field's entries, then its weight
            max(p.largest for p in point.values()),
            f"{config.name} {config.seed} {round}".encode(),
            section.neighbours,
            draw_order(len(clients), seeds.rng(config.seed, "secagg/graph", round)),
        )

    if wrong := terms(1).wrong():
        raise ConfigError(f"privacy.secagg: {wrong}.")
    method.terms = terms
    method.point = point


def secure_class(method: type[Algorithm], section: SecaggSection) -> type[Secure]:
    """Makes a class of the method whose replies are summed under masks (`privacy.secagg`)."""
    (plain,) = method.exchanges
    exchanges: list[Exchange] = []
    for step in STEPS:
        down = {"question": _bytes_of(QUESTIONS[step])} if QUESTIONS[step] else {}
        up = {"answer": _bytes_of(step)}
        if step == "masked":
            hints = get_type_hints(plain.down, include_extras=True)
            down |= {name: hints[name] for name in plain.down.fields}
            if section.counts == "open" and plain.up.run_field is not None:
                up[plain.up.run_field] = Statistics
        masked = Masked(trains=step == "masked", bound=bool(exchanges))
        kinds = _payload("Down", step, down), _payload("Up", step, up)
        exchanges.append(Exchange(*kinds, step, masked))
    made = {"exchanges": tuple(exchanges), "plain": plain}
    own = {"main": STEPS.index("masked"), "__module__": method.__module__}
    return type(method.__name__, (Secure, method), {**made, **own, "__doc__": method.__doc__})


def _payload(way: str, step: str, fields: JsonMapping) -> type[Payload]:
    return type(f"{step.capitalize()}{way}", (Payload,), {"__annotations__": dict(fields)})


def _bytes_of(booked: str) -> object:
    return kind(booked, "array", dtype="uint8", rank=1)


def _array(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _bytes(array: torch.Tensor) -> bytes:
    return array.numpy().tobytes()
