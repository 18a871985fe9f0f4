"""The shares of the last step: the secrets that they give, and whom they prove to have lied."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from fednet.secagg import field
from fednet.secagg.messages import NONE, BelowThreshold
from fednet.secagg.terms import Terms

WITNESSES = 3  # clients that must report wrong shares of another one before it is blamed
SUBSETS = 200  # tried at most, if some shares are wrong


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
