"""A client of secure aggregation: it answers each step of a round once."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping

from fednet.errors import RemoteProtocolError
from fednet.secagg import field, fixed, primitives
from fednet.secagg.fixed import Integers
from fednet.secagg.masks import add_mask, reduce_sums
from fednet.secagg.messages import (
    KEYS,
    NONE,
    SHARES,
    Refused,
    claim,
    pack_entries,
    pair_context,
    unpack_entries,
    unpack_ids,
)
from fednet.secagg.primitives import KEY, SIGNATURE, TAG
from fednet.secagg.terms import STEPS, Terms


class SecureClient:
    """One client in one round. `answer` takes the steps in order; the same question again gets the
    same answer, another question about the same step none.

    `_secret` encrypts shares, `_masking` gives the masks of pairs, `_signing` signs, `_own` is b_u;
    `_keys` has the keys that other clients have advertised.
    """

    def __init__(self, terms: Terms, me: int) -> None:
        if wrong := terms.wrong():
            raise Refused(f"secure aggregation: {wrong}")
        self.terms = terms
        self.me = me
        self._circle = terms.circle[me]
        self._secret, self._masking, self._signing, self._own = (
            secrets.token_bytes(KEY) for _ in range(4)
        )
        self._keys: dict[int, bytes] = {}
        self._held: dict[int, bytes] = {}  # by client: a share of its mask key, one of its b
        self._claimed_survivors: tuple[int, ...] = ()
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
        due = STEPS[len(self._answers)]
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
        terms = self.terms
        half = field.SHARE
        if step == "keys":  # Round 0
            keys = primitives.public_key(self._secret), primitives.public_key(self._masking)
            return b"".join((*keys, primitives.signing_public_key(self._signing)))

        if step == "shares":  # Round 1
            self._take_keys(unpack_entries(question, KEYS))
            n = len(self._circle)
            t = terms.share_threshold(self.me)
            shares = list(
                zip(field.split_secret(self._masking, n, t), field.split_secret(self._own, n, t))
            )
            mine = {who: b"".join(shares[terms.place(self.me, who) - 1]) for who in self._circle}
            self._held[self.me] = mine[self.me]
            sealed = self._encrypt_shares({who: mine[who] for who in self._keys})
            return primitives.commitment(self._own) + sealed

        if step == "masked":  # Round 2
            assert vector is not None
            others = self._decrypt_shares(question)
            for who, share in others.items():
                if share is None or not field.numbers(share):
                    share = 2 * NONE  # reported in the last step
                self._held[who] = share
            total = fixed.residues(vector, terms.modulus)
            add_mask(terms, total, primitives.derive(self._own, b"own " + terms.context), True)
            for who in others:
                about = pair_context(terms, b"mask", min(self.me, who), max(self.me, who))
                key = self._shared_key(self._masking, self._keys[who][KEY : 2 * KEY], about)
                add_mask(terms, total, key, who < self.me)
            return fixed.pack(reduce_sums(terms, total), terms.width)

        if step == "consistency":  # Round 3
            # Of clients outside its circle this client knows only that they are in the cohort.
            beyond = set(terms.cohort) - set(self._circle)
            self._claimed_survivors = self._survivors(question, beyond | set(self._held))
            return primitives.sign(self._signing, claim(terms, self._claimed_survivors))

        # unmask, Round 4
        survivors = self._claimed_survivors
        claimed = claim(terms, survivors)
        agree = [
            who
            for who, signature in unpack_entries(question, SIGNATURE).items()
            if who in survivors
            and who in self._keys
            and primitives.is_signed(self._keys[who][2 * KEY :], signature, claimed)
        ]
        if len(agree) + 1 < terms.share_threshold(self.me):
            raise Refused(f"{len(agree)} others have signed for the same survivors; too few")
        return pack_entries(
            {v: held[half:] if v in survivors else held[:half] for v, held in self._held.items()}
        )

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

    def _decrypt_shares(self, question: bytes) -> dict[int, bytes | None]:
        """Returns the shares that the others encrypted for this client; None for one that cannot be
        decrypted.
        """
        sealed = unpack_entries(question, SHARES + TAG)
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
