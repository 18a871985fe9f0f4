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
from collections.abc import Mapping

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

    def _answer(self, step: str, question: bytes, vector: Integers | None) -> bytes:
        terms, piece = self.terms, self.terms.piece
        if step == "keys":
            return primitives.public_key(self._secret)

        if step == "shares":  # lines 2 to 7
            self._take_keys(unpack_entries(question, KEY))
            u, t = terms.needed, terms.private
            rows = field.uniform(u * piece).reshape(u, piece)  # u - t of the mask, t of noise
            self._mask = rows[: u - t].reshape(-1)[: terms.length]
            live = sorted({*self._keys, self.me})
            places = [terms.cohort.index(who) for who in live]
            coded = field.product(field.code(len(terms.cohort), u)[places], rows)
            pieces = dict(zip(live, coded))
            self._held[self.me] = pieces.pop(self.me)
            return self._encrypt_shares({v: fixed.pack(row, WIDTH) for v, row in pieces.items()})

        if step == "masked":  # lines 8 to 14
            for who, text in self._decrypt_shares(question, WIDTH * piece).items():
                if text is not None and field.numbers(text):
                    self._held[who] = fixed.unpack(text, WIDTH)
                else:
                    self._wrong.append(who)  # reported in the last step
            mask, self._mask = self._mask, None
            assert mask is not None
            assert vector is not None
            return fixed.pack(field.add(fixed.residues(vector, terms.modulus), mask), terms.width)

        # unmask, lines 15 to 19
        survivors = self._survivors(question, {*self._held, *self._wrong})
        if wrong := sorted(set(survivors) & set(self._wrong)):
            # Instead of a sum of pieces: as many of these clients as there is room for.
            size, blamed = WIDTH * piece, wrong[: max(0, piece - 2)]
            text = COMPLAINT + b"".join(struct.pack("<I", n) for n in (len(blamed), *blamed))
            return text.ljust(size, b"\0")[:size]
        total = np.zeros(piece, dtype=np.uint64)
        for who in survivors:
            total = field.add(total, self._held[who])
        return fixed.pack(total, WIDTH)


class LightServer(SecureServer):
    @property
    def share(self) -> int:
        return WIDTH * self.terms.piece

    def question(self, client: int) -> bytes:
        return pack_ids(self.survivors) if self.step == "unmask" else super().question(client)

    def sizes(self, client: int) -> tuple[int, int]:
        if self.step == "unmask":
            return ID * len(self.survivors), self.share
        return super().sizes(client)

    def _elements(self, answer: bytes) -> Residues:
        if not field.numbers(answer):
            raise RemoteProtocolError("a number outside of the field")
        return fixed.unpack(answer, WIDTH)

    def _sum(self, total: Residues | None, answer: bytes) -> Residues:
        vector = self._elements(answer)
        return vector if total is None else field.add(total, vector)

    def _check(self, client: int, answer: bytes) -> None:
        if not answer.startswith(COMPLAINT):
            self._elements(answer)

    def _learned(self, step: str, answers: Mapping[int, bytes]) -> JsonDict:
        """Finds the sum of masks from the sums of pieces. Blames the clients whose pieces at least
        `WITNESSES` others could not decrypt, and the one whose sum disagrees with all others.
        """
        terms, u = self.terms, self.terms.needed
        complaints = Counter[int]()
        rows: dict[int, Residues] = {}
        for j, answer in answers.items():
            if answer.startswith(COMPLAINT):
                words = np.frombuffer(answer, "<u4").tolist()[1:]
                complaints.update(set(words[1 : 1 + words[0]] if words else ()) - {j})
            else:
                rows[j] = self._elements(answer)
        blamed = {
            who: f"its pieces could not be opened by {n} others"
            for who, n in complaints.items()
            if n >= WITNESSES and who in self.survivors
        }
        if len(rows) < u:
            raise BelowThreshold(f"{len(rows)} sums of pieces came, and {u} are needed", blamed)
        if not self._consistent(rows):
            for j in rows if len(rows) > u + 1 else ():
                others = {k: row for k, row in rows.items() if k != j}
                if self._consistent(others):
                    blamed[j] = "its sum of pieces was wrong, by the word of all others"
                    rows = others
                    break
            else:
                raise BelowThreshold("a sum of pieces was wrong", blamed)

        clients = sorted(rows)[:u]  # lines 20 to 22
        places = [terms.cohort.index(j) for j in clients]
        first = np.stack([rows[j] for j in clients])
        pieces = field.product(field.decoding(places, u, u - terms.private), first)
        mask = pieces.reshape(-1)[: terms.length]
        total = fixed.lift(field.subtract(self.known["masked"], mask), terms.modulus)
        return {"total": total, "masked": None, "blamed": blamed}

    def _consistent(self, rows: Mapping[int, Residues]) -> bool:
        """Whether all sums are values of one polynomial. Otherwise one of them is wrong."""
        u, clients = self.terms.needed, sorted(rows)
        if len(clients) == u:
            return True
        points = [u + 1 + self.terms.cohort.index(j) for j in clients]
        values = np.stack([rows[j] for j in clients])
        expected = field.product(field.lagrange(points[:u], points[u:]), values[:u])
        return np.array_equal(expected, values[u:])
