"""The base of all protocols: a client answers each step once, and a server asks the next step only
of the clients that answered the last one, as long as they are enough.

The steps `keys`, `shares` and `masked` are the same in all protocols: each client advertises keys,
encrypts a share of its secrets for each other client, and sends its masked vector. A question or an
answer is bytes: fixed parts, then entries of one size, each after the id of its client, in
ascending order.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fednet.errors import LeftRound, RemoteProtocolError, RoundVoid
from fednet.plain import JsonDict, JsonMapping
from fednet.secagg import primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.primitives import KEY, TAG
from fednet.secagg.terms import Terms

Residues = npt.NDArray[np.uint64]
ID = 4  # bytes of a client's id
WITNESSES = 3  # clients that must report wrong shares of another one before it is blamed


class Refused(LeftRound):
    """A client refuses a question that would reveal more than the sum, or that is malformed."""


class BelowThreshold(RoundVoid):
    """Too few clients answered, or their answers are inconsistent: the round has no sum. blamed: by
    client, how it broke the protocol, if that is known.
    """

    def __init__(self, text: str, blamed: Mapping[int, str] | None = None) -> None:
        super().__init__(f"secure aggregation: {text}")
        self.blamed = dict(blamed or {})


# -- messages --------------------------------------------------------------------------------------
def pack_entries(entries: Mapping[int, bytes]) -> bytes:
    return b"".join(struct.pack("<I", who) + entries[who] for who in sorted(entries))


def unpack_entries(data: bytes, size: int) -> dict[int, bytes]:
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


def unpack_ids(data: bytes) -> tuple[int, ...]:
    return tuple(unpack_entries(data, 0))


def pack_ids(ids: Iterable[int]) -> bytes:
    return pack_entries(dict.fromkeys(ids, b""))


def pair_context(terms: Terms, purpose: bytes, a: int, b: int) -> bytes:
    """Returns the purpose for which a key of two clients in this round is derived."""
    return b"%b %b %d %d" % (purpose, terms.context, a, b)


# -- the client ------------------------------------------------------------------------------------
class SecureClient:
    """One client in one round. `answer` takes the steps in order; the same question again gets the
    same answer, another question about the same step none.

    `_secret` encrypts shares; `_keys` has the keys that other clients have advertised.
    """

    def __init__(self, terms: Terms, me: int) -> None:
        if wrong := terms.wrong():
            raise Refused(f"secure aggregation: {wrong}")
        self.terms, self.me = terms, me
        self._secret = secrets.token_bytes(KEY)
        self._keys: dict[int, bytes] = {}
        self._answers: dict[str, tuple[bytes, bytes]] = {}
        self._refused = False

    def answer(self, step: str, question: bytes, vector: Integers | None = None) -> bytes:
        """Answers a step. vector: this client's part of the sum, for the step `masked`. Raises
        Refused; this client then takes no further part in the round.
        """
        asked = hashlib.sha256(question).digest()
        if step in self._answers:
            before, answer = self._answers[step]
            if before != asked:
                raise self._no(f"the step {step!r} was asked before with another question")
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

    def previous_answer(self, step: str, question: bytes) -> bytes | None:
        """Returns the answer that was given to this question; None if it was not asked yet."""
        asked, answer = self._answers.get(step, (b"", b""))
        return answer if asked == hashlib.sha256(question).digest() else None

    def _no(self, reason: str) -> Refused:
        self._refused = True
        return Refused(f"secure aggregation: {reason}")

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        """Implemented by each protocol."""
        raise NotImplementedError

    # -- used by several steps ---------------------------------------------------------------------
    def _take_keys(self, keys: Mapping[int, bytes]) -> None:
        others = set(self.terms.circle[self.me]) - {self.me}
        least = self.terms.share_threshold(self.me) - 1
        if not set(keys) <= others or len(keys) < least:
            raise Refused(f"keys of {sorted(keys)}; expected those of {least} others at least")
        single = [key[at : at + KEY] for key in keys.values() for at in range(0, len(key), KEY)]
        if len(set(single)) < len(single):
            raise Refused("two keys that are the same")
        self._keys = dict(keys)

    def _shared_key(self, secret: bytes, other: bytes, purpose: bytes) -> bytes:
        try:
            return primitives.shared_key(secret, other, purpose)
        except ValueError:
            raise Refused("a public key that is none") from None

    def _share_key(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """Returns the key of the shares from one client to another, and its context."""
        about = pair_context(self.terms, b"share", sender, receiver)
        other = self._keys[receiver if sender == self.me else sender]
        return self._shared_key(self._secret, other[:KEY], about), about

    def _encrypt_shares(self, shares: Mapping[int, bytes]) -> bytes:
        """Returns the shares, each encrypted for its client."""
        entries = {}
        for who, share in shares.items():
            key, about = self._share_key(self.me, who)
            entries[who] = primitives.encrypt(key, share, about)
        return pack_entries(entries)

    def _decrypt_shares(self, question: bytes, size: int) -> dict[int, bytes | None]:
        """Returns the shares of `size` bytes that the others encrypted for this client; None for
        one that cannot be decrypted.
        """
        sealed = unpack_entries(question, size + TAG)
        if not set(sealed) <= set(self._keys) or (
            len(sealed) + 1 < self.terms.share_threshold(self.me)
        ):
            raise Refused(f"shares of {sorted(sealed)}, too few or of others than gave their keys")
        opened = {}
        for who, text in sealed.items():
            key, about = self._share_key(who, self.me)
            opened[who] = primitives.decrypt(key, text, about)
        return opened

    def _survivors(self, question: bytes, asked: Iterable[int]) -> tuple[int, ...]:
        """Returns the clients whose vectors are in the sum. asked: the clients that may be."""
        survivors = unpack_ids(question)
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
    that completed it.

    keys: bytes that a client advertises, of which the first `agreeing` keys are for key agreement.
    head: bytes before the encrypted shares in an answer.
    """

    keys = KEY
    agreeing = 1
    head = 0

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

    @property
    def share(self) -> int:
        """Bytes of a share before it is encrypted."""
        raise NotImplementedError

    def question(self, client: int) -> bytes:
        if self.step == "shares":
            return pack_entries({v: self.known["keys"][v] for v in self._others(client, "keys")})
        if self.step == "masked":
            shares = self.known["shares"]
            return pack_entries({v: shares[v][client] for v in self._others(client, "shares")})
        return b""

    def sizes(self, client: int) -> tuple[int, int]:
        """Returns the bytes of the question that is due to this client, and of its answer."""
        sealed = ID + self.share + TAG
        if self.step == "keys":
            return 0, self.keys
        if self.step == "shares":
            others = len(self._others(client, "keys"))
            return (ID + self.keys) * others, self.head + sealed * others
        others = len(self._others(client, "shares"))
        return sealed * others, self.terms.length * self.terms.width

    def most(self, step: str) -> tuple[int, int]:
        """Returns the `sizes` of any client if none is lost: all have circles of one size."""
        before = self.terms.steps[: self.terms.steps.index(step)]
        cohort = self.terms.cohort
        return type(self)(self.terms, dict.fromkeys(before, cohort)).sizes(cohort[0])

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
            # Every other client would refuse the round because of such a key.
            keys = [answer[at : at + KEY] for at in range(0, len(answer), KEY)]
            if not all(map(primitives.is_public_key, keys[: self.agreeing])):
                raise RemoteProtocolError("a public key that agrees on nothing")
            if len({*keys, *gathered.keys}) < len(keys) + len(gathered.keys):
                raise RemoteProtocolError("a public key that occurs twice")
            gathered.keys.update(keys)
        elif self.step == "shares":
            receivers = tuple(self._shares_in(answer))
            if receivers != self._others(client, "keys"):
                raise RemoteProtocolError("shares for others than those that gave their keys")
        elif self.step == "masked":
            gathered.total = self._sum(gathered.total, answer)
            answer = b""
        else:
            self._check(client, answer)
        gathered.answers[client] = answer

    def _shares_in(self, answer: bytes) -> dict[int, bytes]:
        return unpack_entries(answer[self.head :], self.share + TAG)

    def finish(self, gathered: Gathered) -> SecureServer:
        """Returns the server of the next step. Raises BelowThreshold."""
        step, came = self.step, tuple(sorted(gathered.answers))
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
            heads = {u: answer[: self.head] for u, answer in gathered.answers.items()}
            shares = {u: self._shares_in(answer) for u, answer in gathered.answers.items()}
            learned = {"heads": heads, "shares": shares}
        elif step == "masked":
            # Encrypted shares are not kept longer than they are needed.
            learned = {"masked": gathered.total, "shares": None}
        else:
            learned = self._learned(step, gathered.answers)
        return type(self)(self.terms, {**self.live, step: came}, {**self.known, **learned})

    # -- implemented by each protocol --------------------------------------------------------------
    def _sum(self, total: Residues | None, answer: bytes) -> Residues:
        """Adds a masked vector."""
        raise NotImplementedError

    def _check(self, client: int, answer: bytes) -> None:
        """Raises RemoteProtocolError for an invalid answer to a step after `masked`. Its length has
        been checked.
        """
        raise NotImplementedError

    def _learned(self, step: str, answers: Mapping[int, bytes]) -> JsonDict:
        """Returns what the server learns from the answers to a step after `masked`."""
        raise NotImplementedError
