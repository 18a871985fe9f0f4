"""LightSecAgg: each client adds one mask of its own, and the others hold coded pieces of it. The
sums of pieces are the pieces of the sum of masks, so the server decodes the sum of the survivors'
masks at once, no matter which clients dropped out.

z_i  mask of client i, uniform in F_q^d      [z~_i]_j  its coded piece for client j, of d / (U - T)
U    answers that are needed                 T         clients that learn nothing together

So et al., Algorithm 1: offline encoding and sharing (steps keys and shares), masking and uploading
(masked), one-shot aggregate-model recovery (unmask).

Departs from the paper: pieces go from client to client through the server, encrypted under keys
that are agreed on first (the paper assumes private channels); a client answers for one set of
survivors only; if more than the U needed answers come, they are compared.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from fednet.errors import RemoteProtocolError
from fednet.plain import JsonDict
from fednet.secagg import field, fixed, primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.primitives import KEY
from fednet.secagg.steps import (
    ID,
    WITNESSES,
    BelowThreshold,
    Residues,
    SecureClient,
    SecureServer,
    pack_ids,
    unpack_entries,
)
from fednet.secagg.terms import Terms

WIDTH = 4  # bytes of an element
COMPLAINT = b"\xff" * WIDTH  # not an element: begins a list of clients with unreadable pieces


class LightClient(SecureClient):
    def __init__(self, terms: Terms, me: int) -> None:
        super().__init__(terms, me)
        self._mask: Residues | None = None  # until it is used
        self._held: dict[int, Residues] = {}
        self._wrong: list[int] = []  # clients whose pieces could not be decrypted

    def _advertise(self) -> bytes:
        return primitives.public_key(self._secret)

    def _share(self, question: bytes) -> bytes:  # lines 2 to 7
        terms = self.terms
        self._take_keys(unpack_entries(question, KEY))
        u, t, piece = terms.needed, terms.private, terms.piece
        rows = field.uniform(u * piece).reshape(u, piece)  # u - t pieces of the mask, t of noise
        self._mask = rows[: u - t].reshape(-1)[: terms.length]
        live = sorted({*self._keys, self.me})
        places = [terms.cohort.index(who) for who in live]
        coded = field.product(field.code(len(terms.cohort), u)[places], rows)
        pieces = dict(zip(live, coded))
        self._held[self.me] = pieces.pop(self.me)
        return self._encrypt_shares({who: fixed.pack(row, WIDTH) for who, row in pieces.items()})

    def _masked(self, question: bytes, vector: Integers) -> bytes:  # lines 8 to 14
        terms, mask = self.terms, self._mask
        for who, piece in self._decrypt_shares(question, WIDTH * terms.piece).items():
            if piece is not None and field.numbers(piece):
                self._held[who] = fixed.unpack(piece, WIDTH)
            else:
                self._wrong.append(who)  # reported in the last step
        assert mask is not None
        self._mask = None
        masked = field.add(fixed.residues(vector, terms.modulus), mask)
        return fixed.pack(masked, terms.width)

    def _unmask(self, question: bytes) -> bytes:  # lines 15 to 19
        survivors = self._survivors(question, {*self._held, *self._wrong})
        size = WIDTH * self.terms.piece
        if wrong := sorted(set(survivors) & set(self._wrong)):
            # Instead of a sum of pieces: as many of these clients as there is room for.
            blamed = wrong[: max(0, self.terms.piece - 2)]
            text = COMPLAINT + b"".join(struct.pack("<I", n) for n in (len(blamed), *blamed))
            return text.ljust(size, b"\0")[:size]
        total = np.zeros(self.terms.piece, dtype=np.uint64)
        for who in survivors:
            total = field.add(total, self._held[who])
        return fixed.pack(total, WIDTH)


class LightServer(SecureServer):
    @property
    def share(self) -> int:
        return WIDTH * self.terms.piece

    def question(self, client: int) -> bytes:
        return pack_ids(self.survivors) if self.step == "unmask" else super().question(client)

    def _sizes(self, step: str, others: Callable[[str], int], survivors: int) -> tuple[int, int]:
        if step == "unmask":
            return ID * survivors, self.share
        return super()._sizes(step, others, survivors)

    def _check(self, client: int, answer: bytes) -> None:
        if not answer.startswith(COMPLAINT):
            self._vector(answer)

    def _vector(self, answer: bytes) -> Residues:
        if not field.numbers(answer):
            raise RemoteProtocolError("a number outside of the field")
        return fixed.unpack(answer, WIDTH)

    def _sum(self, total: Residues, vector: Residues) -> Residues:
        return field.add(total, vector)

    def _learned(self, step: str, answers: Mapping[int, bytes]) -> JsonDict:
        rows = {j: self._vector(a) for j, a in answers.items() if not a.startswith(COMPLAINT)}
        blamed = self._complained_of(answers)
        agreeing, wrong = self._agreeing(rows, blamed)
        if wrong is not None:
            blamed[wrong] = "its sum of pieces was wrong, by the word of all others"
        return {"total": self._unmasked(agreeing), "masked": None, "blamed": blamed}

    def _complained_of(self, answers: Mapping[int, bytes]) -> dict[int, str]:
        """Blames the clients whose pieces at least `WITNESSES` others could not decrypt."""
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
        self, rows: dict[int, Residues], blamed: Mapping[int, str]
    ) -> tuple[dict[int, Residues], int | None]:
        """Returns the consistent sums of pieces, and the one client that sent a wrong sum, if any.
        Raises BelowThreshold if there are none.
        """
        u = self.terms.needed
        if len(rows) < u:
            raise BelowThreshold(f"{len(rows)} sums of pieces came, and {u} are needed", blamed)
        if self._consistent(rows):
            return rows, None
        for j in rows if len(rows) > u + 1 else ():
            others = {k: row for k, row in rows.items() if k != j}
            if self._consistent(others):
                return others, j
        raise BelowThreshold("a sum of pieces was wrong", blamed)

    def _consistent(self, rows: Mapping[int, Residues]) -> bool:
        """Whether all sums are values of one polynomial. Otherwise one of them is wrong."""
        u, clients = self.terms.needed, sorted(rows)
        if len(clients) == u:
            return True
        points = [u + 1 + self.terms.cohort.index(j) for j in clients]
        values = np.stack([rows[j] for j in clients])
        expected = field.product(field.lagrange(points[:u], points[u:]), values[:u])
        return np.array_equal(expected, values[u:])

    def _unmasked(self, rows: Mapping[int, Residues]) -> Integers:  # lines 20 to 22
        terms, u = self.terms, self.terms.needed
        clients = sorted(rows)[:u]
        places = [terms.cohort.index(j) for j in clients]
        first = np.stack([rows[j] for j in clients])
        pieces = field.product(field.decoding(places, u, u - terms.private), first)
        mask = pieces.reshape(-1)[: terms.length]
        return fixed.lift(field.subtract(self.known["masked"], mask), terms.modulus)
