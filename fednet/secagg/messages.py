"""What clients and server send each other, and how a round fails.

A question or an answer is bytes: fixed parts, then entries of one size, each after the id of its
client, in ascending order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from fednet.errors import LeftRound, RemoteProtocolError, RoundVoid
from fednet.secagg import field
from fednet.secagg.primitives import KEY
from fednet.secagg.terms import Terms

ID = 4  # bytes of a client's id
KEYS = 3 * KEY  # for shares, for masks, for signatures
DIGEST = KEY  # of b_u, before the encrypted shares
SHARES = 2 * field.SHARE  # one of the mask key and one of b_u
NONE = bytes(field.SHARE)  # replaces a share that cannot be read: a complaint


class Refused(LeftRound):
    """A client refuses a question that would reveal more than the sum, or that is malformed."""


class BelowThreshold(RoundVoid):
    """Too few clients answered, or their answers are inconsistent: the round has no sum. blamed: by
    client, how it broke the protocol, if that is known.
    """

    def __init__(
        self, text: str, blamed: Mapping[int, str] | None = None, spoiled: bool = False
    ) -> None:
        super().__init__(f"secure aggregation: {text}", spoiled)
        self.blamed = dict(blamed or {})


# -- entries ---------------------------------------------------------------------------------------
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


def claim(terms: Terms, survivors: Sequence[int]) -> bytes:
    """Returns what a client signs in the consistency step."""
    return b"survivors %b %b" % (terms.context, pack_ids(survivors))
