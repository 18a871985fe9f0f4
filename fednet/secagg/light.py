"""LightSecAgg: each client adds one mask of its own, whose coded pieces the others hold; the pieces
of a sum of masks are the sums of pieces, so that the sum of the survivors' masks is decoded at once
whoever dropped out.

z_i  mask of client i, uniform in F_q^d      [z~_i]_j  its coded piece for client j, of d / (U - T)
U    answers that are needed                 T         clients that learn nothing together

So et al., Algorithm 1: offline encoding and sharing (steps keys and shares), masking and uploading
(masked), one-shot aggregate-model recovery (unmask).

Departs from the paper: pieces go from client to client through the server, sealed under keys that
are agreed on first (the paper assumes private channels); a client answers for one set of survivors
only; answers beyond the U that are needed are held against them.
"""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from fednet.errors import RemoteProtocolError
from fednet.plain import JsonDict
from fednet.secagg import field, fixed, primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.primitives import KEY, TAG
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

WIDTH = 4  # bytes of an element
COMPLAINT = b"\xff" * WIDTH  # no element: in place of an answer, whose pieces could not be opened


def _about(terms: Terms, sender: int, receiver: int) -> bytes:
    return b"piece %b %d %d" % (terms.context, sender, receiver)


def _sealed_size(terms: Terms) -> int:
    return WIDTH * terms.piece + TAG


class LightClient(SecureClient):
    def __init__(self, terms: Terms, me: int) -> None:
        super().__init__(terms, me)
        self._secret = secrets.token_bytes(KEY)
        self._keys: dict[int, bytes] = {}
        self._mask: Residues | None = None  # until it is used
        self._held: dict[int, Residues] = {}
        self._wrong: list[int] = []  # whose pieces could not be opened

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        if step == "keys":
            return primitives.public(self._secret)
        if step == "shares":
            return self._encode(parted(question, KEY))
        if step == "masked":
            assert vector is not None
            return self._masked(parted(question, _sealed_size(self.terms)), vector)
        return self._sum_of_pieces(question)

    def _key(self, sender: int, receiver: int) -> bytes:
        other = self._keys[receiver if sender == self.me else sender]
        try:
            return primitives.agreed(self._secret, other, _about(self.terms, sender, receiver))
        except ValueError:
            raise Refused("a public key that is none") from None

    def _encode(self, keys: Mapping[int, bytes]) -> bytes:  # lines 2 to 7
        terms = self.terms
        if not set(keys) <= set(terms.cohort) - {self.me} or len(keys) + 1 < terms.needed:
            raise Refused(f"keys of {sorted(keys)}; expected {terms.needed - 1} others at least")
        if len(set(keys.values())) < len(keys):
            raise Refused("two keys that are the same")
        self._keys = dict(keys)
        u, t, piece = terms.needed, terms.private, terms.piece
        rows = field.uniform(u * piece).reshape(u, piece)  # u - t pieces of the mask, t of noise
        self._mask = rows[: u - t].reshape(-1)[: terms.length]
        live = sorted({*keys, self.me})
        places = [terms.cohort.index(who) for who in live]
        coded = field.product(field.code(len(terms.cohort), u)[places], rows)
        pieces = dict(zip(live, coded))
        self._held[self.me] = pieces.pop(self.me)
        return joined(
            {
                who: primitives.sealed(
                    self._key(self.me, who),
                    fixed.pack(row, WIDTH),
                    _about(terms, self.me, who),
                )
                for who, row in pieces.items()
            }
        )

    def _masked(self, sealed: Mapping[int, bytes], vector: Integers) -> bytes:  # lines 8 to 14
        terms, mask = self.terms, self._mask
        if not set(sealed) <= set(self._keys) or len(sealed) + 1 < terms.needed:
            raise Refused(f"pieces of {sorted(sealed)}, too few or of others than gave their keys")
        for who, text in sealed.items():
            piece = primitives.opened(self._key(who, self.me), text, _about(terms, who, self.me))
            if piece is not None and field.numbers(piece):
                self._held[who] = fixed.unpack(piece, WIDTH)
            else:
                self._wrong.append(who)  # the server hears of it in the last step
        assert mask is not None
        self._mask = None
        masked = field.add(fixed.residues(vector, terms.modulus), mask)
        return fixed.pack(masked, terms.width)

    def _sum_of_pieces(self, question: bytes) -> bytes:  # lines 15 to 19
        survivors = self._survivors(question, {*self._held, *self._wrong})
        if wrong := sorted(set(survivors) & set(self._wrong)):
            return _complaint(wrong, self.terms)
        total = np.zeros(self.terms.piece, dtype=np.uint64)
        for who in survivors:
            total = field.add(total, self._held[who])
        return fixed.pack(total, WIDTH)


def _complaint(wrong: list[int], terms: Terms) -> bytes:
    """What is sent in place of a sum of pieces: whose pieces could not be opened, as many as there
    is room for.
    """
    named = wrong[: max(0, terms.piece - 2)]
    text = COMPLAINT + b"".join(struct.pack("<I", n) for n in (len(named), *named))
    return text.ljust(WIDTH * terms.piece, b"\0")[: WIDTH * terms.piece]


class LightServer(SecureServer):
    def question(self, client: int) -> bytes:
        if self.step == "shares":
            return joined({v: self.known["keys"][v] for v in self._others(client, "keys")})
        if self.step == "masked":
            pieces = self.known["shares"]
            return joined({v: pieces[v][client] for v in self._others(client, "shares")})
        return listing(self.survivors) if self.step == "unmask" else b""

    def _sizes(self, step: str, others: Callable[[str], int], survivors: int) -> tuple[int, int]:
        sealed = ID + _sealed_size(self.terms)
        if step == "keys":
            return 0, KEY
        if step == "shares":
            return (ID + KEY) * others("keys"), sealed * others("keys")
        if step == "masked":
            return sealed * others("shares"), self.terms.length * self.terms.width
        return ID * survivors, WIDTH * self.terms.piece

    def _check(self, client: int, answer: bytes) -> None:
        if self.step == "shares":
            whom = tuple(parted(answer, _sealed_size(self.terms)))
            if whom != self._others(client, "keys"):
                raise RemoteProtocolError("pieces for others than those who gave their keys")
        if self.step == "unmask" and not answer.startswith(COMPLAINT):
            self._vector(answer)

    def _vector(self, answer: bytes) -> Residues:
        vector = fixed.unpack(answer, WIDTH)
        if bool((vector >= np.uint64(field.Q)).any()):
            raise RemoteProtocolError("a number outside of the field")
        return vector

    def _sum(self, total: Residues, vector: Residues) -> Residues:
        return field.add(total, vector)

    def _learned(self, step: str, gathered: Gathered) -> JsonDict:
        answers = gathered.answers
        if step == "keys":
            return {"keys": dict(answers)}
        if step == "shares":
            size = _sealed_size(self.terms)
            return {"shares": {i: parted(answer, size) for i, answer in answers.items()}}
        if step == "masked":
            return {"masked": gathered.total, "shares": None}
        rows = {j: self._vector(a) for j, a in answers.items() if not a.startswith(COMPLAINT)}
        named = self._complained_of(answers)
        agreeing, wrong = self._agreeing(rows, named)
        if wrong is not None:
            named[wrong] = "its sum of pieces was wrong, by the word of all others"
        return {"total": self._unmasked(agreeing), "masked": None, "named": named}

    def _complained_of(self, answers: Mapping[int, bytes]) -> dict[int, str]:
        """By client, that its pieces could not be opened by `WITNESSES` others or more."""
        found = Counter[int]()
        for j, answer in answers.items():
            if answer.startswith(COMPLAINT):
                words = np.frombuffer(answer, "<u4").tolist()[1:]
                found.update(set(words[1 : 1 + words[0]] if words else ()) - {j})
        return {
            who: f"its pieces could not be opened by {n} others"
            for who, n in found.items()
            if n >= WITNESSES and who in self.survivors
        }

    def _agreeing(
        self, rows: dict[int, Residues], named: Mapping[int, str]
    ) -> tuple[dict[int, Residues], int | None]:
        """(sums of pieces that lie on one polynomial, who alone sent another). Raises
        BelowThreshold where there are none.
        """
        u = self.terms.needed
        if len(rows) < u:
            raise BelowThreshold(
                f"secure aggregation: {len(rows)} sums of pieces came, and {u} are needed", named
            )
        if self._consistent(rows):
            return rows, None
        for j in rows if len(rows) > u + 1 else ():
            others = {k: row for k, row in rows.items() if k != j}
            if self._consistent(others):
                return others, j
        raise BelowThreshold("secure aggregation: a sum of pieces was wrong", named)

    def _consistent(self, rows: Mapping[int, Residues]) -> bool:
        """Whether all answers lie on one polynomial: else one of them is wrong."""
        u, whose = self.terms.needed, sorted(rows)
        points = [u + 1 + self.terms.cohort.index(j) for j in whose]
        across = field.lagrange(points[:u], points[u:])
        first, rest = ([rows[j] for j in part] for part in (whose[:u], whose[u:]))
        return not rest or bool(
            np.array_equal(field.product(across, np.stack(first)), np.stack(rest))
        )

    def _unmasked(self, rows: Mapping[int, Residues]) -> Integers:  # lines 20 to 22
        terms, u = self.terms, self.terms.needed
        whose = sorted(rows)[:u]
        places = [terms.cohort.index(j) for j in whose]
        first = np.stack([rows[j] for j in whose])
        pieces = field.product(field.decoding(places, u, u - terms.private), first)
        mask = pieces.reshape(-1)[: terms.length]
        return fixed.lift(field.subtract(self.known["masked"], mask), terms.modulus)
