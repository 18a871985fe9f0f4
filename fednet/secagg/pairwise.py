"""SecAgg and SecAgg+: masks of pairs that cancel in the sum, and each client's own.

    y_u = x_u + PRG(b_u) + sum_{v < u} PRG(s_uv) - sum_{v > u} PRG(s_uv)      mod R

u, v  clients, v among u's neighbours      s_uv  what X25519 gives of u's and v's mask keys
b_u   u's own seed                         U1, U2, U3  who answered keys, shares, masked

Bonawitz et al., Figure 4: Round 0 keys, 1 shares, 2 masked, 3 consistency, 4 unmask. SecAgg is this
with every client the neighbour of every other; SecAgg+ (Bell et al., Algorithm 2) has a sparse
graph. For a client of U3 the server gets shares of b_u, for one of U2 that is not in U3 shares of
its mask key, and of no client both.

Departs from the papers: keys of the consistency step's signatures are advertised with the others,
where Bonawitz et al. have them vouched for by a third party; each client sends a digest of b_u with
its shares, by which the server finds that a share of it was wrong, as it finds it of a mask key by
its public half, and looks for shares that give the right one; a share that a client cannot open
does not end its part in the round: it says so in the last step, see `Evidence`.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fednet.errors import RemoteProtocolError
from fednet.plain import JsonDict
from fednet.secagg import field, fixed, primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.primitives import KEY, SIGNATURE, TAG
from fednet.secagg.steps import (
    ID,
    WITNESSES,
    BelowThreshold,
    Gathered,
    Refused,
    Residues,
    SecureClient,
    SecureServer,
    joined,
    listing,
    parted,
)
from fednet.secagg.terms import Terms

KEYS = 3 * KEY  # for shares, for masks, for signatures
SEALED = 2 * field.SHARE + TAG  # a share of the mask key and one of b_u
NONE = bytes(field.SHARE)  # in place of a share that could not be opened: a complaint
SUBSETS = 200  # of shares at most that are tried, where some of them are wrong


def _pair(terms: Terms, purpose: bytes, a: int, b: int) -> bytes:
    return b"%b %b %d %d" % (purpose, terms.context, a, b)


def _claim(terms: Terms, survivors: Sequence[int]) -> bytes:
    """What a client signs in the consistency step."""
    return b"survivors %b %b" % (terms.context, listing(survivors))


def _mask(terms: Terms, total: Residues, key: bytes, plus: bool) -> None:
    """total += or -= PRG(key). What a sum has above R is cut off at the end."""
    mask = primitives.stream(key, terms.length, terms.width)
    (np.add if plus else np.subtract)(total, mask, out=total)


def _cut(terms: Terms, total: Residues) -> Residues:
    """The residues of sums that were let run over 2^64, of which R is a divisor."""
    return total if terms.width == 8 else total & np.uint64(terms.modulus - 1)


class PairwiseClient(SecureClient):
    def __init__(self, terms: Terms, me: int) -> None:
        super().__init__(terms, me)
        self._circle = terms.circle[me]
        self._sealing, self._masking, self._signing, self._own = (
            secrets.token_bytes(KEY) for _ in range(4)
        )
        self._keys: dict[int, bytes] = {}  # of whom else answered `keys`, on this circle
        self._held: dict[int, bytes] = {}  # by client: a share of its mask key, one of its b
        self._survivors_said: tuple[int, ...] = ()

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        if step == "keys":
            return self._advertise()
        if step == "shares":
            return self._share(parted(question, KEYS))
        if step == "masked":
            assert vector is not None
            return self._masked(parted(question, SEALED), vector)
        if step == "consistency":
            return self._sign(question)
        return self._unmask(parted(question, SIGNATURE))

    def _advertise(self) -> bytes:  # Round 0
        keys = primitives.public(self._sealing), primitives.public(self._masking)
        return b"".join((*keys, primitives.verifying(self._signing)))

    def _share(self, keys: Mapping[int, bytes]) -> bytes:  # Round 1
        t, others = self.terms.share_threshold(self.me), set(self._circle) - {self.me}
        if not set(keys) <= others or len(keys) + 1 < t:
            raise Refused(f"keys of {sorted(keys)}; expected those of {t - 1} neighbours at least")
        halves = [key[at : at + KEY] for key in keys.values() for at in range(0, KEYS, KEY)]
        if len(set(halves)) < len(halves):
            raise Refused("two keys that are the same")
        self._keys = dict(keys)
        n = len(self._circle)
        shares = list(zip(field.split(self._masking, n, t), field.split(self._own, n, t)))
        places = {who: self.terms.place(self.me, who) - 1 for who in self._circle}
        self._held[self.me] = b"".join(shares[places[self.me]])
        sealed = {
            who: primitives.sealed(
                self._sealed_by(who, self.me, who),
                b"".join(shares[places[who]]),
                _pair(self.terms, b"share", self.me, who),
            )
            for who in keys
        }
        return primitives.commitment(self._own) + joined(sealed)

    def _sealed_by(self, other: int, sender: int, receiver: int) -> bytes:
        about = _pair(self.terms, b"share", sender, receiver)
        return self._with(self._sealing, self._keys[other][:KEY], about)

    def _with(self, mine: bytes, other: bytes, purpose: bytes) -> bytes:
        try:
            return primitives.agreed(mine, other, purpose)
        except ValueError:
            raise Refused("a public key that is none") from None

    def _masked(self, sealed: Mapping[int, bytes], vector: Integers) -> bytes:  # Round 2
        terms = self.terms
        if not set(sealed) <= set(self._keys) or len(sealed) + 1 < terms.share_threshold(self.me):
            raise Refused(f"shares of {sorted(sealed)}, too few or of others than gave their keys")
        for who, text in sealed.items():
            about = _pair(terms, b"share", who, self.me)
            shares = primitives.opened(self._sealed_by(who, who, self.me), text, about)
            self._held[who] = shares or 2 * NONE  # the server hears of it in the last step
        total = fixed.residues(vector, terms.modulus)
        _mask(terms, total, primitives.derived(self._own, b"own " + terms.context), True)
        for who in sealed:
            about = _pair(terms, b"mask", min(self.me, who), max(self.me, who))
            key = self._with(self._masking, self._keys[who][KEY : 2 * KEY], about)
            _mask(terms, total, key, who < self.me)
        return fixed.pack(_cut(terms, total), terms.width)

    def _sign(self, question: bytes) -> bytes:  # Round 3
        # Clients beyond this circle are known by the cohort alone.
        beyond = set(self.terms.cohort) - set(self._circle)
        self._survivors_said = self._survivors(question, beyond | set(self._held))
        return primitives.signed(self._signing, _claim(self.terms, self._survivors_said))

    def _unmask(self, signatures: Mapping[int, bytes]) -> bytes:  # Round 4
        claim = _claim(self.terms, self._survivors_said)
        agree = [
            who
            for who, signature in signatures.items()
            if who in self._survivors_said
            and who in self._keys
            and primitives.verifies(self._keys[who][2 * KEY :], signature, claim)
        ]
        if len(agree) + 1 < self.terms.share_threshold(self.me):
            raise Refused(f"{len(agree)} others have signed for the same survivors; too few")
        half = field.SHARE
        return joined(
            {
                who: held[half:] if who in self._survivors_said else held[:half]
                for who, held in self._held.items()
            }
        )


class PairwiseServer(SecureServer):
    agreeing = 2

    def question(self, client: int) -> bytes:
        step, known = self.step, self.known
        if step == "shares":
            return joined({v: known["keys"][v] for v in self._others(client, "keys")})
        if step == "masked":
            return joined({v: known["shares"][v][client] for v in self._others(client, "shares")})
        if step == "consistency":
            return listing(self.survivors)
        if step == "unmask":
            return joined({v: known["signed"][v] for v in self._others(client, "consistency")})
        return b""

    def _sizes(self, step: str, others: Callable[[str], int], survivors: int) -> tuple[int, int]:
        if step == "keys":
            return 0, KEYS
        if step == "shares":
            return (ID + KEYS) * others("keys"), KEY + (ID + SEALED) * others("keys")
        if step == "masked":
            return (ID + SEALED) * others("shares"), self.terms.length * self.terms.width
        if step == "consistency":
            return ID * survivors, SIGNATURE
        share = ID + field.SHARE
        return (ID + SIGNATURE) * others("consistency"), share * (1 + others("shares"))

    def _check(self, client: int, answer: bytes) -> None:
        if self.step == "shares":
            whom = tuple(parted(answer[KEY:], SEALED))
            if whom != self._others(client, "keys"):
                raise RemoteProtocolError("shares for others than those who gave their keys")
        if self.step == "unmask":
            whose = tuple(parted(answer, field.SHARE))
            if whose != tuple(sorted({client, *self._others(client, "shares")})):
                raise RemoteProtocolError("shares of others than those whose shares it was handed")
            if not all(map(field.numbers, parted(answer, field.SHARE).values())):
                raise RemoteProtocolError("a share outside of the field")
        if self.step == "consistency":
            claim = _claim(self.terms, self.survivors)
            if not primitives.verifies(self.known["keys"][client][2 * KEY :], answer, claim):
                raise RemoteProtocolError("a signature that is none of the survivors")

    def _vector(self, answer: bytes) -> Residues:
        return fixed.unpack(answer, self.terms.width)

    def _sum(self, total: Residues, vector: Residues) -> Residues:
        return np.add(total, vector, out=total)

    def _learned(self, step: str, gathered: Gathered) -> JsonDict:
        answers = gathered.answers
        if step == "keys":
            return {"keys": dict(answers)}
        if step == "shares":
            return {
                "commitments": {u: a[:KEY] for u, a in answers.items()},
                "shares": {u: parted(a[KEY:], SEALED) for u, a in answers.items()},
            }
        if step == "masked":
            # What was for others to read is not kept longer than it is needed.
            return {"masked": gathered.total, "shares": None}
        if step == "consistency":
            return {"signed": dict(answers)}
        shares = {u: parted(a, field.SHARE) for u, a in answers.items()}
        evidence = Evidence(self.terms, shares)
        total = self._unmasked(evidence)
        return {"total": total, "masked": None, "named": evidence.named()}

    def _unmasked(self, evidence: Evidence) -> Integers:
        """The sum of what U3 sent, less what does not cancel in it."""
        terms = self.terms
        total = self.known["masked"].copy()
        survivors = frozenset(self.survivors)
        for u in self.survivors:
            own = evidence.secret(u, "seed", primitives.commitment, self.known["commitments"][u])
            _mask(terms, total, primitives.derived(own, b"own " + terms.context), False)
        for v in sorted(set(self.live["shares"]) - survivors):
            left = [u for u in self._others(v, "shares") if u in survivors]
            if not left:
                continue
            public = self.known["keys"][v][KEY : 2 * KEY]
            masking = evidence.secret(v, "key", primitives.public, public)
            for u in left:
                other = self.known["keys"][u][KEY : 2 * KEY]
                about = _pair(terms, b"mask", min(u, v), max(u, v))
                _mask(terms, total, primitives.agreed(masking, other, about), u < v)
        return fixed.lift(_cut(terms, total), terms.modulus)


class Evidence:
    """The shares that came in the last step, and what they say of who broke the protocol.

    Who dealt wrong shares, and who handed on other shares than it was dealt, look alike in a single
    one: a client is named where `WITNESSES` others say so. Fewer than that may be its accusers.
    """

    def __init__(self, terms: Terms, shares: Mapping[int, Mapping[int, bytes]]) -> None:
        """shares: by who held them, then by whose secret they are of."""
        self._terms, self._shares = terms, shares
        self._handed_on = Counter[int]()  # wrong shares, by who held them
        self._complaints = Counter[int]()  # shares that could not be opened, by who dealt them

    def named(self) -> dict[int, str]:
        """By client, how it broke the protocol."""
        dealt = {
            who: f"its shares could not be opened by {n} others"
            for who, n in self._complaints.items()
            if n >= WITNESSES
        }
        return dealt | {
            who: f"it handed on wrong shares of {n} others"
            for who, n in self._handed_on.items()
            if n >= WITNESSES
        }

    def secret(self, of: int, what: str, shown: Callable[[bytes], bytes], expected: bytes) -> bytes:
        """The secret of that client's, of which `shown` gives what is expected. Raises
        BelowThreshold where no shares give it.
        """
        t = self._terms.share_threshold(of)
        came = {
            at: entries[of]
            for at, entries in self._shares.items()
            if of in entries and at in self._terms.circle[of]
        }
        self._complaints[of] = sum(1 for at in came if came[at] == NONE and at != of)
        # Those whose shares were wrong before come last: the first try fits then.
        order = sorted(came, key=lambda at: (self._handed_on[at], at))
        held = [(self._terms.place(of, at), came[at]) for at in order if came[at] != NONE]
        for number, chosen in enumerate(_subsets(held, t, of)):
            found = field.combine(chosen, t)
            if found is None or shown(found) != expected:
                continue
            doubted = order if number else [at for at in order if self._handed_on[at]]
            others = [(self._terms.place(of, at), came[at]) for at in doubted]
            others = [share for share in others if share in held and share not in chosen]
            for point in field.off_line(chosen, others) if others else ():
                self._handed_on[self._terms.circle[of][point - 1]] += 1
            return found
        raise BelowThreshold(
            f"secure aggregation: {len(held)} shares of client {of}'s {what} came, and no {t} of "
            f"them give the one that it answers for",
            self.named() | self._against(of, held, t),
        )

    def _against(self, of: int, held: list[tuple[int, bytes]], t: int) -> dict[int, str]:
        """Who dealt shares that fit nothing, where so many others would have to lie."""
        if len(held) > t and not field.off_line(held[:t], held[t:]):
            accusers = len(held)  # all agree on another secret than it answers for
        else:
            accusers = max(0, len(held) - t + 1) + self._complaints[of]
        if accusers < WITNESSES:
            return {}
        return {of: f"it dealt wrong shares, by the word of {accusers} others"}


def _subsets(held: list[tuple[int, bytes]], t: int, seed: int) -> Iterator[list[tuple[int, bytes]]]:
    """Some t of the shares, the first t first: all there are, or `SUBSETS` drawn at random."""
    if len(held) < t:
        return
    if math.comb(len(held), t) <= SUBSETS:
        yield from map(list, itertools.combinations(held, t))
        return
    yield held[:t]
    draw = random.Random(seed)
    for _ in range(SUBSETS):
        yield draw.sample(held, t)
