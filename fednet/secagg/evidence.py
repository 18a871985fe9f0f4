"""The shares of the last step: the secrets that they give, and the clients that they prove to have
broken the protocol.

A wrong share alone does not show whether its dealer or its holder changed it. Up to `COLLUDERS`
clients may have agreed on what they deal, hand on and report; none of the others is blamed then:

- Right shares of an honest dealer are on one polynomial (of each limb; degree below t), whose value
  at 0 is the secret. Another one with this secret has at most t - 2 of them, and the colluders'
  shares. So a polynomial with the right secret on which t - 1 + COLLUDERS shares are is the
  dealer's, if that is honest, and shares that are not on it are wrong. With fewer shares it shows
  nothing.
- A dealer that colludes can give an honest holder a share that is not on the others' polynomial. So
  a holder is blamed for wrong shares of more than `COLLUDERS` dealers only.
- A dealer is blamed if more than `COLLUDERS` holders report a share that they could not decrypt.
- Of an honest dealer's shares at most COLLUDERS are wrong. If t + COLLUDERS holders have answered
  and no choice of right ones gives the secret whose digest the dealer has sent, the dealer is
  blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from fednet.secagg import decoding
from fednet.secagg.field import as_rows
from fednet.secagg.messages import NONE, BelowThreshold
from fednet.secagg.terms import Terms

COLLUDERS = 2  # clients that cannot get another one blamed, whatever they agree on


class Evidence:
    """shares: by their holder, then by the client whose secret it is."""

    def __init__(self, terms: Terms, shares: Mapping[int, Mapping[int, bytes]]) -> None:
        self._terms = terms
        self._shares = shares
        self._wrong = Counter[int]()  # wrong shares, by holder
        self._doubted = Counter[int]()  # shares that may be wrong, by holder
        self._complaints = Counter[int]()  # shares that could not be decrypted, by dealer

    def blamed(self) -> dict[int, str]:
        """Returns how clients broke the protocol, by client."""
        dealt = {
            who: f"its shares could not be opened by {n} others"
            for who, n in self._complaints.items()
            if n > COLLUDERS
        }
        return dealt | {
            who: f"it handed on wrong shares of {n} others"
            for who, n in self._wrong.items()
            if n > COLLUDERS
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
        # Holders of doubtful shares come last, so that the first ones fit.
        held = [at for at in came if came[at] != NONE]
        held.sort(key=lambda at: (self._doubted[at], at))
        if len(held) >= t:
            secret = self._decode(of, held, t, lambda found: shown(found) == expected)
            if secret is not None:
                return secret
        blamed = self.blamed()
        if len(came) >= t + COLLUDERS:
            blamed[of] = f"it dealt wrong shares, by those of {len(came)} clients"
        raise BelowThreshold(
            f"{len(held)} shares of client {of}'s {what} came, and no {t} of them give the one "
            f"that it answers for",
            blamed,
            spoiled=len(came) >= t,
        )

    def _decode(
        self, of: int, held: list[int], t: int, is_right: Callable[[bytes], bool]
    ) -> bytes | None:
        """Returns the secret, None if no choice of t shares among these gives it. Counts the
        holders' wrong and doubtful shares.
        """
        shares = [self._shares[at][of] for at in held]
        points = [self._terms.place(of, at) for at in held]
        rows = as_rows(shares)

        def try_first(order: list[int]) -> tuple[bytes | None, list[int]]:
            """Returns the secret of the first t in this order, if it is right, and who is off."""
            found, off = decoding.fit([points[i] for i in order], rows[order], t)
            if found is None or not is_right(found):
                return None, []
            return found, [held[order[i]] for i in off]

        # t - 1 right shares at least are among so many: with the secret they determine the rest.
        enough = t - 1 + COLLUDERS
        everyone = list(range(len(held)))
        secret, off = try_first(everyone)
        if secret is not None and not off:
            return secret
        if secret is None or len(held) - len(off) < enough:
            errors = decoding.locate_errors(points, rows, t)
            if errors:
                found, located = try_first([i for i in everyone if i not in errors] + errors)
                if found is not None:
                    secret = found
                    off = located
        confirmed = secret is not None and len(held) - len(off) >= enough
        # Of fewer than t + 2 COLLUDERS shares, those of the colluders cannot always be located.
        could_be = enough + COLLUDERS <= len(held) < t + 2 * COLLUDERS
        if not confirmed and len(held) > t and (secret is None or could_be):
            count = min(COLLUDERS, len(held) - t)
            for left_out, without in decoding.secrets_without(points, rows, count):
                if not is_right(without):
                    continue
                found, others = try_first([i for i in everyone if i not in left_out] + [*left_out])
                if secret is None:
                    secret = without
                    off = [held[i] for i in left_out]
                if found is not None and len(held) - len(others) >= enough:
                    off = others
                    confirmed = True
                    break
        if secret is not None:
            self._doubted.update(off)
            if confirmed:
                self._wrong.update(at for at in off if at != of)
        return secret
