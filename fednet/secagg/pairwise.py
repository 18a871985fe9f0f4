"""SecAgg and SecAgg+: masks of pairs that cancel in the sum, and one of each client's own.

    y_u = x_u + PRG(b_u) + sum_{v < u} PRG(s_uv) - sum_{v > u} PRG(s_uv)      mod R

u, v  clients, v among u's neighbours      s_uv  what X25519 gives of u's and v's mask keys
b_u   u's own seed                         U1, U2, U3  clients that answered keys, shares, masked

Bonawitz et al., Figure 4: Round 0 keys, 1 shares, 2 masked, 3 consistency, 4 unmask. In SecAgg
every client is the neighbour of every other; SecAgg+ (Bell et al., Algorithm 2) has a sparse graph.
For a client of U3 the server gets shares of b_u, for one of U2 that is not in U3 shares of its mask
key, and of no client both.

Departs from the papers:

- Keys for the signatures of the consistency step are advertised with the others; Bonawitz et al.
  have them certified by a third party.
- Each client sends a digest of b_u with its shares. By it (and for a mask key by its public half)
  the server detects wrong shares, and looks for shares that give the right secret.
- A client that cannot decrypt a share goes on, and reports it in the last step, see `Evidence`.
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
from fednet.secagg.primitives import KEY, SIGNATURE
from fednet.secagg.steps import (
    ID,
    WITNESSES,
    BelowThreshold,
    Refused,
    Residues,
    SecureClient,
    SecureServer,
    pack_entries,
    pack_ids,
    pair_context,
    unpack_entries,
)
from fednet.secagg.terms import Terms

KEYS = 3 * KEY  # for shares, for masks, for signatures
NONE = bytes(field.SHARE)  # replaces a share that could not be decrypted: a complaint
SUBSETS = 200  # tried at most, if some shares are wrong


def _claim(terms: Terms, survivors: Sequence[int]) -> bytes:
    """Returns what a client signs in the consistency step."""
    return b"survivors %b %b" % (terms.context, pack_ids(survivors))


def _mask(terms: Terms, total: Residues, key: bytes, plus: bool) -> None:
    """Adds PRG(key) to total, or subtracts it. `_cut` reduces the sums modulo R."""
    mask = primitives.mask_stream(key, terms.length, terms.width)
    (np.add if plus else np.subtract)(total, mask, out=total)


def _cut(terms: Terms, total: Residues) -> Residues:
    """Reduces sums modulo R. They wrapped around at 2^64, which R divides."""
    return total if terms.width == 8 else total & np.uint64(terms.modulus - 1)


class PairwiseClient(SecureClient):
    def __init__(self, terms: Terms, me: int) -> None:
        super().__init__(terms, me)
        self._circle = terms.circle[me]
        self._masking, self._signing, self._own = (secrets.token_bytes(KEY) for _ in range(3))
        self._held: dict[int, bytes] = {}  # by client: a share of its mask key, one of its b
        self._claimed_survivors: tuple[int, ...] = ()

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        terms, half = self.terms, field.SHARE
        if step == "keys":  # Round 0
            keys = primitives.public_key(self._secret), primitives.public_key(self._masking)
            return b"".join((*keys, primitives.signing_public_key(self._signing)))

        if step == "shares":  # Round 1
            self._take_keys(unpack_entries(question, KEYS))
            n, t = len(self._circle), terms.share_threshold(self.me)
            shares = list(zip(field.split(self._masking, n, t), field.split(self._own, n, t)))
            mine = {who: b"".join(shares[terms.place(self.me, who) - 1]) for who in self._circle}
            self._held[self.me] = mine[self.me]
            sealed = self._encrypt_shares({who: mine[who] for who in self._keys})
            return primitives.commitment(self._own) + sealed

        if step == "masked":  # Round 2
            assert vector is not None
            others = self._decrypt_shares(question, 2 * half)
            for who, share in others.items():
                self._held[who] = share or 2 * NONE  # reported in the last step
            total = fixed.residues(vector, terms.modulus)
            _mask(terms, total, primitives.derive(self._own, b"own " + terms.context), True)
            for who in others:
                about = pair_context(terms, b"mask", min(self.me, who), max(self.me, who))
                key = self._shared_key(self._masking, self._keys[who][KEY : 2 * KEY], about)
                _mask(terms, total, key, who < self.me)
            return fixed.pack(_cut(terms, total), terms.width)

        if step == "consistency":  # Round 3
            # Of clients outside its circle this client knows only that they are in the cohort.
            beyond = set(terms.cohort) - set(self._circle)
            self._claimed_survivors = self._survivors(question, beyond | set(self._held))
            return primitives.sign(self._signing, _claim(terms, self._claimed_survivors))

        # unmask, Round 4
        survivors = self._claimed_survivors
        claim = _claim(terms, survivors)
        agree = [
            who
            for who, signature in unpack_entries(question, SIGNATURE).items()
            if who in survivors
            and who in self._keys
            and primitives.is_signed(self._keys[who][2 * KEY :], signature, claim)
        ]
        if len(agree) + 1 < terms.share_threshold(self.me):
            raise Refused(f"{len(agree)} others have signed for the same survivors; too few")
        return pack_entries(
            {v: held[half:] if v in survivors else held[:half] for v, held in self._held.items()}
        )


class PairwiseServer(SecureServer):
    keys = KEYS
    agreeing = 2
    head = KEY  # the digest of b_u
    share = 2 * field.SHARE  # one of the mask key and one of b_u

    def question(self, client: int) -> bytes:
        if self.step == "consistency":
            return pack_ids(self.survivors)
        if self.step == "unmask":
            signed = self.known["signed"]
            return pack_entries({v: signed[v] for v in self._others(client, "consistency")})
        return super().question(client)

    def sizes(self, client: int) -> tuple[int, int]:
        if self.step == "consistency":
            return ID * len(self.survivors), SIGNATURE
        if self.step == "unmask":
            signed, shared = (self._others(client, step) for step in ("consistency", "shares"))
            share = ID + field.SHARE
            return (ID + SIGNATURE) * len(signed), share * (1 + len(shared))
        return super().sizes(client)

    def _check(self, client: int, answer: bytes) -> None:
        if self.step == "consistency":
            claim = _claim(self.terms, self.survivors)
            if not primitives.is_signed(self.known["keys"][client][2 * KEY :], answer, claim):
                raise RemoteProtocolError("an invalid signature of the survivors")
            return
        shares = unpack_entries(answer, field.SHARE)
        if tuple(shares) != tuple(sorted({client, *self._others(client, "shares")})):
            raise RemoteProtocolError("shares of other clients than those that sent it some")
        if not all(map(field.numbers, shares.values())):
            raise RemoteProtocolError("a share outside of the field")

    def _sum(self, total: Residues | None, answer: bytes) -> Residues:
        vector = fixed.unpack(answer, self.terms.width)
        return vector if total is None else np.add(total, vector, out=total)

    def _learned(self, step: str, answers: Mapping[int, bytes]) -> JsonDict:
        if step == "consistency":
            return {"signed": dict(answers)}
        terms, survivors = self.terms, frozenset(self.survivors)
        evidence = Evidence(terms, {u: unpack_entries(a, field.SHARE) for u, a in answers.items()})
        # The sum of the vectors of U3, less the masks that do not cancel.
        total = self.known["masked"].copy()
        for u in self.survivors:
            own = evidence.reconstruct(u, "seed", primitives.commitment, self.known["heads"][u])
            _mask(terms, total, primitives.derive(own, b"own " + terms.context), False)
        for v in sorted(set(self.live["shares"]) - survivors):
            left = [u for u in self._others(v, "shares") if u in survivors]
            if not left:
                continue
            public = self.known["keys"][v][KEY : 2 * KEY]
            masking = evidence.reconstruct(v, "key", primitives.public_key, public)
            for u in left:
                other = self.known["keys"][u][KEY : 2 * KEY]
                about = pair_context(terms, b"mask", min(u, v), max(u, v))
                _mask(terms, total, primitives.shared_key(masking, other, about), u < v)
        total = fixed.lift(_cut(terms, total), terms.modulus)
        return {"total": total, "masked": None, "blamed": evidence.blamed()}


class Evidence:
    """The shares of the last step, and the clients that they prove to have broken the protocol.

    A wrong share alone does not show whether its dealer or its holder changed it. A client is
    blamed if `WITNESSES` others accuse it; fewer may be lying.
    """

    def __init__(self, terms: Terms, shares: Mapping[int, Mapping[int, bytes]]) -> None:
        """shares: by their holder, then by the client whose secret it is."""
        self._terms, self._shares = terms, shares
        self._wrong = Counter[int]()  # wrong shares, by holder
        self._complaints = Counter[int]()  # shares that could not be decrypted, by dealer

    def blamed(self) -> dict[int, str]:
        """Returns how clients broke the protocol, by client."""
        dealt = {
            who: f"its shares could not be opened by {n} others"
            for who, n in self._complaints.items()
            if n >= WITNESSES
        }
        return dealt | {
            who: f"it handed on wrong shares of {n} others"
            for who, n in self._wrong.items()
            if n >= WITNESSES
        }

    def reconstruct(
        self, of: int, what: str, shown: Callable[[bytes], bytes], expected: bytes
    ) -> bytes:
        """Returns that client's secret, for which `shown` returns what is expected. Raises
        BelowThreshold if no shares give it.
        """
        t = self._terms.share_threshold(of)
        came = {
            at: entries[of]
            for at, entries in self._shares.items()
            if of in entries and at in self._terms.circle[of]
        }
        self._complaints[of] = sum(1 for at in came if came[at] == NONE and at != of)
        # Holders of wrong shares come last, so that the first try fits.
        order = sorted(came, key=lambda at: (self._wrong[at], at))
        held = [(self._terms.place(of, at), came[at]) for at in order if came[at] != NONE]
        for number, chosen in enumerate(_subsets(held, t, of)):
            found = field.combine(chosen, t)
            if found is None or shown(found) != expected:
                continue
            doubted = order if number else [at for at in order if self._wrong[at]]
            others = [(self._terms.place(of, at), came[at]) for at in doubted]
            others = [share for share in others if share in held and share not in chosen]
            for point in field.off_line(chosen, others) if others else ():
                self._wrong[self._terms.circle[of][point - 1]] += 1
            return found
        # The dealer of inconsistent shares is blamed, if otherwise `WITNESSES` others would lie.
        if len(held) > t and not field.off_line(held[:t], held[t:]):
            accusers = len(held)  # all agree on another secret than it promised
        else:
            accusers = max(0, len(held) - t + 1) + self._complaints[of]
        blamed = self.blamed()
        if accusers >= WITNESSES:
            blamed[of] = f"it dealt wrong shares, by the word of {accusers} others"
        raise BelowThreshold(
            f"{len(held)} shares of client {of}'s {what} came, and no {t} of them give the one "
            f"that it answers for",
            blamed,
        )


def _subsets(held: list[tuple[int, bytes]], t: int, seed: int) -> Iterator[list[tuple[int, bytes]]]:
    """Yields sets of t shares, the first t first: all sets, or `SUBSETS` drawn at random."""
    if len(held) < t:
        return
    if math.comb(len(held), t) <= SUBSETS:
        yield from map(list, itertools.combinations(held, t))
        return
    yield held[:t]
    draw = random.Random(seed)
    for _ in range(SUBSETS):
        yield draw.sample(held, t)
