"""What the machines of all protocols share: a client answers each step once, and a server asks the
next step of those alone who answered the last one, as long as they are enough.

A question or an answer is bytes: fixed parts, then entries of one size, each behind the id of the
client it is about, in ascending order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from fednet.errors import LeftRound, RemoteProtocolError, RoundVoid
from fednet.plain import JsonDict, JsonMapping
from fednet.secagg import primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.primitives import KEY
from fednet.secagg.terms import Terms

Residues = npt.NDArray[np.uint64]
ID = 4  # bytes of a client's id


class Refused(LeftRound):
    """A client does not answer a question that would show more than the sum, or makes no sense."""


class BelowThreshold(RoundVoid):
    """Too few answered, or what they answered fits nothing: the round's sum cannot be known. named:
    by client, how it broke the protocol, of those who are known to have done so.
    """

    def __init__(self, text: str, named: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.named = dict(named or {})


WITNESSES = 3  # clients who must say that another one's shares are wrong, before it is named


# -- messages --------------------------------------------------------------------------------------
def joined(entries: Mapping[int, bytes]) -> bytes:
    return b"".join(struct.pack("<I", who) + entries[who] for who in sorted(entries))


def parted(data: bytes, size: int) -> dict[int, bytes]:
    """Raises RemoteProtocolError unless these are entries of that size in ascending order."""
    if len(data) % (ID + size):
        raise RemoteProtocolError(f"entries of {size} bytes in {len(data)} bytes")
    found: dict[int, bytes] = {}
    last = -1
    for at in range(0, len(data), ID + size):
        (who,) = struct.unpack_from("<I", data, at)
        if who <= last:
            raise RemoteProtocolError(f"client {who} is out of order")
        found[who] = data[at + ID : at + ID + size]
        last = who
    return found


def listed(data: bytes) -> tuple[int, ...]:
    return tuple(parted(data, 0))


def listing(ids: Iterable[int]) -> bytes:
    return joined(dict.fromkeys(ids, b""))


# -- the client ------------------------------------------------------------------------------------
class SecureClient:
    """One client in one round. `answer` takes the steps in order; a step that is asked again in the
    same words gets the same answer, in other words none.
    """

    def __init__(self, terms: Terms, me: int) -> None:
        if wrong := terms.wrong():
            raise Refused(f"secure aggregation: {wrong}")
        self.terms, self.me = terms, me
        self._answers: dict[str, tuple[bytes, bytes]] = {}
        self._refused = False

    def answer(self, step: str, question: bytes, vector: Integers | None = None) -> bytes:
        """vector: what is to be summed, for the step `masked`. Raises Refused; then this client has
        no further part in the round.
        """
        asked = hashlib.sha256(question).digest()
        if step in self._answers:
            before, answer = self._answers[step]
            if before != asked:
                raise self._no(f"the step {step!r} was asked before, in other words")
            return answer
        due = self.terms.steps[len(self._answers)]
        if self._refused or step != due:
            raise self._no(f"the step {step!r} was asked, and {due!r} is due")
        try:
            answer = self._answer(step, question, vector)
        except (Refused, RemoteProtocolError) as wrong:
            raise self._no(str(wrong)) from None
        self._answers[step] = asked, answer
        return answer

    def knows(self, step: str, question: bytes) -> bytes | None:
        """The answer that was given to this question; None where it was not asked yet."""
        asked, answer = self._answers.get(step, (b"", b""))
        return answer if asked == hashlib.sha256(question).digest() else None

    def _no(self, reason: str) -> Refused:
        self._refused = True
        return Refused(f"secure aggregation: {reason}")

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        raise NotImplementedError

    def _survivors(self, question: bytes, asked: Iterable[int]) -> tuple[int, ...]:
        """Whose vectors shall be in the sum. asked: of whom that may be true."""
        survivors = listed(question)
        strange = set(survivors) - set(asked)
        if strange or self.me not in survivors:
            raise Refused(f"survivors {list(survivors)} cannot be, of this round's clients")
        if len(survivors) < self.terms.needed:
            raise Refused(
                f"a sum of {len(survivors)} clients is asked for, and {self.terms.needed} are the "
                f"fewest"
            )
        return survivors


# -- the server ------------------------------------------------------------------------------------
class Gathered:
    """Answers to one step, as they come. Masked vectors are summed, not kept. keys: that were
    advertised.
    """

    def __init__(self) -> None:
        self.answers: dict[int, bytes] = {}
        self.total: Residues | None = None
        self.keys: set[bytes] = set()


class SecureServer:
    """A value: `finish` gives the server of the next step and leaves this one as it was. live: who
    completed each step so far. agreeing: how many of the keys that a client advertises are for key
    agreement; they come first.
    """

    agreeing = 1

    def __init__(
        self,
        terms: Terms,
        live: Mapping[str, tuple[int, ...]] | None = None,
        known: JsonMapping | None = None,
    ) -> None:
        self.terms, self.live, self.known = terms, dict(live or {}), dict(known or {})

    @property
    def step(self) -> str | None:
        """The step that is due; None once the sum is known."""
        done = len(self.live)
        return self.terms.steps[done] if done < len(self.terms.steps) else None

    @property
    def asked(self) -> tuple[int, ...]:
        """Who is asked in the step that is due."""
        return next(reversed(self.live.values())) if self.live else self.terms.cohort

    @property
    def total(self) -> Integers:
        """The sum of the survivors' vectors."""
        found: Integers = self.known["total"]
        return found

    @property
    def survivors(self) -> tuple[int, ...]:
        """Whose vectors are in the sum."""
        return self.live["masked"]

    @property
    def named(self) -> dict[int, str]:
        """By client, how it broke the protocol, of those who are known to have done so."""
        found: dict[int, str] = self.known.get("named", {})
        return found

    def question(self, client: int) -> bytes:
        raise NotImplementedError

    def sizes(self, client: int) -> tuple[int, int]:
        """Bytes of the question that is due to this client, and of its answer."""
        assert self.step is not None
        survivors = len(self.live.get("masked", ()))
        return self._sizes(self.step, lambda step: len(self._others(client, step)), survivors)

    def most(self, step: str) -> tuple[int, int]:
        """`sizes` of any client where nobody is lost."""
        circle = max(len(circle) for circle in self.terms.circle.values())
        return self._sizes(step, lambda step: circle - 1, len(self.terms.cohort))

    def _sizes(self, step: str, others: Callable[[str], int], survivors: int) -> tuple[int, int]:
        """others: how many of a client's circle, beside it, completed a step."""
        raise NotImplementedError

    def _others(self, client: int, step: str) -> tuple[int, ...]:
        """Which others of this client's circle completed a step."""
        done = self.live[step]
        return tuple(v for v in self.terms.circle[client] if v in done and v != client)

    def take(self, gathered: Gathered, client: int, answer: bytes) -> None:
        """Adds a client's answer in this step. Raises RemoteProtocolError for what is none."""
        expected = self.sizes(client)[1]
        if len(answer) != expected:
            raise RemoteProtocolError(
                f"an answer of {len(answer)} bytes to the step {self.step!r}; expected {expected}"
            )
        if self.step == "keys":
            self._check_keys(gathered, answer)
        self._check(client, answer)
        if self.step == "masked":
            vector = self._vector(answer)
            gathered.total = vector if gathered.total is None else self._sum(gathered.total, vector)
            answer = b""
        gathered.answers[client] = answer

    def _check_keys(self, gathered: Gathered, answer: bytes) -> None:
        """Raises RemoteProtocolError for keys that agree on nothing or stand twice: every other
        client would refuse the round because of them.
        """
        keys = [answer[at : at + KEY] for at in range(0, len(answer), KEY)]
        if not all(map(primitives.agrees, keys[: self.agreeing])):
            raise RemoteProtocolError("a public key that agrees on nothing")
        if len({*keys, *gathered.keys}) < len(keys) + len(gathered.keys):
            raise RemoteProtocolError("a public key that stands twice")
        gathered.keys.update(keys)

    def _check(self, client: int, answer: bytes) -> None:
        """Raises RemoteProtocolError for what has the right length and is no answer."""

    def finish(self, gathered: Gathered) -> SecureServer:
        """Raises BelowThreshold: then nothing is known but what was said so far."""
        step, came = self.step, tuple(sorted(gathered.answers))
        assert step is not None
        if wrong := self.terms.wrong():
            raise BelowThreshold(f"secure aggregation: {wrong}")
        if len(came) < self.terms.needed:
            raise BelowThreshold(
                f"secure aggregation: {len(came)} of {len(self.terms.cohort)} clients answered the "
                f"step {step!r}, and {self.terms.needed} are needed"
            )
        known = {**self.known, **self._learned(step, gathered)}
        return type(self)(self.terms, {**self.live, step: came}, known)

    def _learned(self, step: str, gathered: Gathered) -> JsonDict:
        raise NotImplementedError

    def _vector(self, answer: bytes) -> Residues:
        raise NotImplementedError

    def _sum(self, total: Residues, vector: Residues) -> Residues:
        raise NotImplementedError
