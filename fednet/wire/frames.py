"""The header frame of a message: a msgpack map with the version `v`, the type `t`, and the fields
of the message.

Its last field `c` is the CRC-32 of all its bytes before those four, as a big-endian uint32: a
header that was damaged on its way must never be taken for another one. Payloads have digests of
their own (`check`).

Both sides say their version of the protocol at the join, and unlike ones are refused there; `v`
says which version wrote a header. A field that this side does not know is passed over, and one that
is not there has its default.

The ids of a join and its answer travel as ranges: `[[0, 49999], 70000]`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import msgspec

from fednet.errors import LocalProtocolError, RemoteProtocolError
from fednet.ids import expanded, ranges
from fednet.plain import JsonDict
from fednet.wire import messages as m
from fednet.wire.codec import Body, Content

# Items of a list in a header at most: an announced list takes its memory before its items are
# there.
MAX_LIST = 1 << 16
Kinds = Mapping[object, type[m.Message]]  # of messages, by type
_FROM_CLIENT: Kinds = {kind.__struct_config__.tag: kind for kind in m.FROM_CLIENT}
_FROM_SERVER: Kinds = {kind.__struct_config__.tag: kind for kind in m.FROM_SERVER}


def encode(message: m.Message) -> bytes:
    """The header frame of a message. Raises LocalProtocolError for one that no receiver would
    take.
    """
    fields: JsonDict = msgspec.to_builtins(message, builtin_types=(bytes,))
    if isinstance(message, (m.Join, m.Welcome)):
        fields["ids"] = ranges(fields["ids"])
    covered = msgpack.packb({"v": m.PROTOCOL, **fields, "c": 0xFFFFFFFF})[:-4]
    header: bytes = covered + _sum(covered)
    if len(header) > m.MAX_HEADER:
        raise LocalProtocolError(
            f"a {fields['t']} message has a header of {len(header)} bytes; allowed are "
            f"{m.MAX_HEADER}."
        )
    return header


def _sum(covered: bytes | memoryview) -> bytes:
    """The last four bytes of a header, after what they cover."""
    return zlib.crc32(covered).to_bytes(4, "big")


def decode_from_client(
    frames: Sequence[Any], most: int = m.PART
) -> tuple[m.Message, Content | None]:
    """The message and the body that a client sent. most: bytes of a body. Raises
    RemoteProtocolError.
    """
    return _decode(_FROM_CLIENT, frames, most)


def decode_from_server(
    frames: Sequence[Any], most: int = m.PART
) -> tuple[m.Message, Content | None]:
    """The message and the body that the server sent. most: bytes of a body. Raises
    RemoteProtocolError.
    """
    return _decode(_FROM_SERVER, frames, most)


def _decode(kinds: Kinds, frames: Sequence[Any], most: int) -> tuple[m.Message, Content | None]:
    if not 1 <= len(frames) <= 2:
        raise RemoteProtocolError(f"a message has 1 or 2 frames, got {len(frames)}")
    fields = _fields(memoryview(frames[0]))
    tag = fields.get("t")
    kind = kinds.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise RemoteProtocolError(f"unknown message type {_shown(tag)}")
    try:
        if isinstance(fields.get("ids"), list):
            fields["ids"] = expanded(fields["ids"], m.MAX_IDS)
        message = msgspec.convert(fields, kind, builtin_types=(bytes,))
    except (ValueError, RecursionError) as broken:  # msgspec's are ValueErrors
        raise RemoteProtocolError(m.clean(f"{tag}: {broken}")) from broken
    if len(frames) == 1:
        return message, None
    body: Content = frames[1] if isinstance(frames[1], Body) else memoryview(frames[1])
    if len(body) > most or kind not in m.WITH_BODY:
        raise RemoteProtocolError(f"{tag}: a body of {len(body)} bytes is not allowed here")
    return message, body


def _fields(header: memoryview) -> JsonDict:
    """The map that a header is."""
    if len(header) > m.MAX_HEADER:
        raise RemoteProtocolError(f"header of {len(header)} bytes, allowed are {m.MAX_HEADER}")
    if header[-4:] != _sum(header[:-4]):
        raise RemoteProtocolError("the header was damaged on its way")
    try:
        # An item takes a byte at least. Lists in lists, each announced long, would else cost a
        # tenth of a second a header.
        most = min(MAX_LIST, len(header))
        fields = msgpack.unpackb(
            header, strict_map_key=True, ext_hook=_no_ext, max_array_len=most, max_map_len=most
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as broken:
        raise RemoteProtocolError(f"header is no msgpack ({type(broken).__name__})") from broken
    if not isinstance(fields, dict):
        raise RemoteProtocolError("header is no map")
    return fields


def _shown(value: object) -> str:
    """A value as text for an error. What is nested is not shown: to write it out can exhaust the
    stack.
    """
    return repr(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__


def _no_ext(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def client_of(header: bytes | memoryview) -> int | None:
    """The client whose task a header belongs to, if any. For whoever passes frames on: nothing is
    checked, and what is broken is refused where it arrives.
    """
    try:
        key = msgpack.unpackb(header, raw=False).get("key")
    except (ValueError, AttributeError, msgpack.exceptions.UnpackException):
        return None
    client = key[3] if isinstance(key, list) and len(key) > 3 else None
    return client if isinstance(client, int) else None
