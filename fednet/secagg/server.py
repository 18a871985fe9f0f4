"""The server of secure aggregation: it asks the next step only of the clients that answered the
last one, as long as they are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fednet.errors import RemoteProtocolError
from fednet.plain import JsonDict, JsonMapping
from fednet.secagg import fixed, primitives
from fednet.secagg.evidence import Evidence
from fednet.secagg.field import SHARE, numbers
from fednet.secagg.fixed import Integers
from fednet.secagg.masks import Residues, add_mask, reduce_sums
from fednet.secagg.messages import (
    DIGEST,
    ID,
    KEYS,
    SHARES,
    BelowThreshold,
    claim,
    pack_entries,
    pack_ids,
    pair_context,
    unpack_entries,
)
from fednet.secagg.primitives import KEY, SIGNATURE, TAG
from fednet.secagg.terms import STEPS, Terms


@dataclass
class Gathered:
    """The answers to one step so far. Masked vectors are summed, not kept. keys: those
    advertised.
    """

    answers: dict[int, bytes] = field(default_factory=dict)
    total: Residues | None = None
    keys: set[bytes] = field(default_factory=set)


class SecureServer:
    """An immutable server: `finish` returns the server of the next step. live: by step, the clients
    that completed it. known: what it has learned so far.
    """

    def __init__(
        self,
        terms: Terms,
        live: Mapping[str, tuple[int, ...]] | None = None,
        known: JsonMapping | None = None,
    ) -> None:
        self.terms = terms
        self.live = dict(live or {})
        self.known = dict(known or {})

    @property
    def step(self) -> str | None:
        """The step that is due; None once the sum is known."""
        done = len(self.live)
        return STEPS[done] if done < len(STEPS) else None

    @property
    def asked(self) -> tuple[int, ...]:
        """The clients that are asked in the step that is due."""
        return next(reversed(self.live.values())) if self.live else self.terms.cohort

    @property
    def total(self) -> Integers:
        """The sum of the survivors' vectors."""
        found: Integers = self.known["total"]
        return found

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vectors are in the sum."""
        return self.live["masked"]

    @property
    def blamed(self) -> dict[int, str]:
        """How clients broke the protocol, by client, as far as it is known."""
        found: dict[int, str] = self.known.get("blamed", {})
        return found

    def question(self, client: int) -> bytes:
        """Returns what this client is asked in the step that is due."""
        known = self.known
        if self.step == "keys":
            return b""
        if self.step == "shares":
            return pack_entries({v: known["keys"][v] for v in self._others(client, "keys")})
        if self.step == "masked":
            sealed = known["shares"]
            return pack_entries({v: sealed[v][client] for v in self._others(client, "shares")})
        if self.step == "consistency":
            return pack_ids(self.survivors)
        return pack_entries({v: known["signed"][v] for v in self._others(client, "consistency")})

    def sizes(self, client: int) -> tuple[int, int]:
        """Returns the bytes of the question that is due to this client, and of its answer."""
        sealed = ID + SHARES + TAG
        if self.step == "keys":
            return 0, KEYS
        if self.step == "shares":
            others = len(self._others(client, "keys"))
            return (ID + KEYS) * others, DIGEST + sealed * others
        if self.step == "masked":
            others = len(self._others(client, "shares"))
            return sealed * others, self.terms.length * self.terms.width
        if self.step == "consistency":
            return ID * len(self.survivors), SIGNATURE
        signed, shared = (self._others(client, step) for step in ("consistency", "shares"))
        return (ID + SIGNATURE) * len(signed), (ID + SHARE) * (1 + len(shared))

    def most(self, step: str) -> tuple[int, int]:
        """Returns the `sizes` of any client if none is lost: all have circles of one size."""
        before = STEPS[: STEPS.index(step)]
        cohort = self.terms.cohort
        return SecureServer(self.terms, dict.fromkeys(before, cohort)).sizes(cohort[0])

    def _others(self, client: int, step: str) -> tuple[int, ...]:
        """Returns which others of this client's circle completed a step."""
        done = frozenset(self.live[step])
        return tuple(v for v in self.terms.circle[client] if v in done and v != client)

    def take(self, gathered: Gathered, client: int, answer: bytes) -> None:
        """Adds a client's answer. Raises RemoteProtocolError if it is not a valid one."""
        expected = self.sizes(client)[1]
        if len(answer) != expected:
            raise RemoteProtocolError(
                f"an answer of {len(answer)} bytes to the step {self.step!r}; expected {expected}"
            )
        if self.step == "keys":
            self._check_keys(gathered, answer)
        elif self.step == "shares":
            if tuple(_encrypted_shares(answer)) != self._others(client, "keys"):
                raise RemoteProtocolError("shares for others than those that gave their keys")
        elif self.step == "masked":
            vector = fixed.unpack(answer, self.terms.width)
            if gathered.total is None:
                gathered.total = vector
            else:
                np.add(gathered.total, vector, out=gathered.total)
            answer = b""
        elif self.step == "consistency":
            public = self.known["keys"][client][2 * KEY :]
            if not primitives.is_signed(public, answer, claim(self.terms, self.survivors)):
                raise RemoteProtocolError("an invalid signature of the survivors")
        else:
            shares = unpack_entries(answer, SHARE)
            if tuple(shares) != tuple(sorted({client, *self._others(client, "shares")})):
                raise RemoteProtocolError("shares of other clients than those that sent it some")
            if not all(map(numbers, shares.values())):
                raise RemoteProtocolError("a share outside of the field")
        gathered.answers[client] = answer

    def _check_keys(self, gathered: Gathered, answer: bytes) -> None:
        """Refuses keys because of which every other client would refuse the round."""
        keys = [answer[at : at + KEY] for at in range(0, len(answer), KEY)]
        if not all(map(primitives.is_public_key, keys[:2])):  # the third is for signatures
            raise RemoteProtocolError("a public key that agrees on nothing")
        if len({*keys, *gathered.keys}) < len(keys) + len(gathered.keys):
            raise RemoteProtocolError("a public key that occurs twice")
        gathered.keys.update(keys)

    def finish(self, gathered: Gathered) -> SecureServer:
        """Returns the server of the next step. Raises BelowThreshold."""
        step = self.step
        came = tuple(sorted(gathered.answers))
        assert step is not None
        if wrong := self.terms.wrong():
            raise BelowThreshold(wrong)
        if len(came) < self.terms.needed:
            raise BelowThreshold(
                f"{len(came)} of {len(self.terms.cohort)} clients answered the step {step!r}, and "
                f"{self.terms.needed} are needed"
            )
        if step == "keys":
            learned: JsonDict = {"keys": dict(gathered.answers)}
        elif step == "shares":
            digests = {u: answer[:DIGEST] for u, answer in gathered.answers.items()}
            shares = {u: _encrypted_shares(answer) for u, answer in gathered.answers.items()}
            learned = {"digests": digests, "shares": shares}
        elif step == "masked":
            # Encrypted shares are not kept longer than they are needed.
            learned = {"masked": gathered.total, "shares": None}
        elif step == "consistency":
            learned = {"signed": dict(gathered.answers)}
        else:
            learned = self._unmask(gathered.answers)
        return SecureServer(self.terms, {**self.live, step: came}, {**self.known, **learned})

    def _unmask(self, answers: Mapping[int, bytes]) -> JsonDict:
        """Returns the sum of the vectors of U3, without the masks that do not cancel."""
        terms = self.terms
        survivors = frozenset(self.survivors)
        evidence = Evidence(terms, {u: unpack_entries(a, SHARE) for u, a in answers.items()})
        total = self.known["masked"].copy()
        for u in self.survivors:
            own = evidence.reconstruct(u, "seed", primitives.commitment, self.known["digests"][u])
            add_mask(terms, total, primitives.derive(own, b"own " + terms.context), False)
        for v in sorted(set(self.live["shares"]) - survivors):
            left = [u for u in self._others(v, "shares") if u in survivors]
            if not left:
                continue
            public = self.known["keys"][v][KEY : 2 * KEY]
            masking = evidence.reconstruct(v, "key", primitives.public_key, public)
            for u in left:
                other = self.known["keys"][u][KEY : 2 * KEY]
                about = pair_context(terms, b"mask", min(u, v), max(u, v))
                add_mask(terms, total, primitives.shared_key(masking, other, about), u < v)
        total = fixed.lift(reduce_sums(terms, total), terms.modulus)
        return {"total": total, "masked": None, "blamed": evidence.blamed()}


def _encrypted_shares(answer: bytes) -> dict[int, bytes]:
    """Returns the encrypted shares in an answer to the step `shares`, by receiver."""
    return unpack_entries(answer[DIGEST:], SHARES + TAG)
