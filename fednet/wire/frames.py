"""The header frame of a message: a msgpack map with the version `v`, the type `t`, and the fields
of the message.

Its last field `c` is the CRC-32 of all its bytes before those four, as a big-endian uint32: a
header that was damaged on its way must never be taken for another one. A peer may leave it out;
payloads have digests of their own (`check`).

Both sides say their version of the protocol at the join, and unlike ones are refused there; `v`
says which version wrote a header. A field that this side does not know is passed over, and one that
is not there has its default.

The ids of a join and its answer travel as ranges: `[[0, 49999], 70000]`.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Sequence
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
OFTEN = (m.Task, m.Reply, m.Alive, m.Progress, m.Pull, m.Part)
SHORT = 1 << 12  # bytes of a header that is decoded in one step
_CHECKED = b"\xa1c\xce"  # the last field's name and type
_pack = msgspec.msgpack.Encoder().encode


class _Decoder:
    """Typed decoding of headers for one direction."""

    def __init__(self, types: Sequence[type[m.Message]]) -> None:
        self.types: dict[str, type[m.Message]] = {str(t.__struct_config__.tag): t for t in types}
        # A union of message types: Python has no type for one that is put together as it runs.
        often: Any = functools.reduce(operator.or_, (t for t in types if t in OFTEN))
        self._often = msgspec.msgpack.Decoder(often).decode

    def __call__(
        self, frames: Sequence[Any], most: int = m.PART
    ) -> tuple[m.Message, Content | None]:
        """most: bytes of a body."""
        if not 1 <= len(frames) <= 2:
            raise RemoteProtocolError(f"a message has 1 or 2 frames, got {len(frames)}")
        message = self._at_once(frames[0]) or self._closely(frames[0])
        body: Content | None = None
        if len(frames) == 2:
            body = frames[1] if isinstance(frames[1], Body) else memoryview(frames[1])
        if body is not None and (len(body) > most or not isinstance(message, m.WITH_BODY)):
            tag = message.__struct_config__.tag
            raise RemoteProtocolError(f"{tag}: a body of {len(body)} bytes is not allowed here")
        return message, body

    def _at_once(self, header: object) -> m.Message | None:
        """The message of a header that is as `encode` writes it, and of a kind that comes often;
        None for any other, which may be sound all the same. No list of such a message may be
        long, so that what is announced takes no memory.
        """
        if type(header) is not bytes or not 8 <= len(header) <= SHORT:
            return None
        begin = 1 if 0x80 < header[0] < 0x90 else 3  # after the number of fields, up to 15 or 255
        if (
            (begin == 3 and header[:2] != b"\xde\x00")
            or header[begin : begin + 2] != b"\xa1v"
            or not 0 < header[begin + 2] < 0x80
            or header[-7:-4] != _CHECKED
            or _sum(memoryview(header)[:-4]) != header[-4:]
        ):
            return None
        try:
            return self._often(header)
        except (ValueError, RecursionError):
            return None

    def _closely(self, frame: Any) -> m.Message:
        header = memoryview(frame)
        if len(header) > m.MAX_HEADER:
            raise RemoteProtocolError(f"header of {len(header)} bytes, allowed are {m.MAX_HEADER}")
        try:
            # An item takes a byte at least. Lists in lists, each announced long, would else cost a
            # tenth of a second a header.
            most = min(MAX_LIST, len(header))
            fields = msgpack.unpackb(
                header,
                raw=False,
                strict_map_key=True,
                ext_hook=_no_ext,
                max_array_len=most,
                max_map_len=most,
            )
        except (
            ValueError,
            TypeError,
            msgpack.exceptions.UnpackException,
            RecursionError,
        ) as broken:
            raise RemoteProtocolError(f"header is no msgpack ({type(broken).__name__})") from broken
        if not isinstance(fields, dict):
            raise RemoteProtocolError("header is no map")
        if fields.pop("c", None) not in (None, int.from_bytes(_sum(header[:-4]), "big")):
            raise RemoteProtocolError("the header was damaged on its way")
        version = fields.pop("v", None)
        if type(version) is not int or version < 1:
            raise RemoteProtocolError(f"version {_shown(version)}, expected a whole number")
        # Of one letter are the names of this frame only: `c` damaged must not pass for a field that
        # a later release added.
        if any(not isinstance(name, str) or len(name) < 2 for name in fields if name != "t"):
            raise RemoteProtocolError("the header has a field without a name")
        tag = fields.get("t")
        kind = self.types.get(tag) if isinstance(tag, str) else None
        if kind is None:
            raise RemoteProtocolError(f"unknown message type {_shown(tag)}")
        try:
            if isinstance(fields.get("ids"), list):
                fields["ids"] = expanded(fields["ids"], m.MAX_IDS)
            message = msgspec.convert(fields, kind, builtin_types=(bytes,))
        except (ValueError, RecursionError) as broken:  # msgspec's are ValueErrors
            raise RemoteProtocolError(m.clean(f"{tag}: {broken}")) from broken
        return message


def _shown(value: object) -> str:
    """A value as text for an error. What is nested is not shown: to write it out can exhaust the
    stack.
    """
    return repr(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__


def _no_ext(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


decode_from_client = _Decoder(m.FROM_CLIENT)
decode_from_server = _Decoder(m.FROM_SERVER)


def encode(message: m.Message) -> bytes:
    """The header frame of a message. Raises LocalProtocolError for one that no receiver would
    take.
    """
    if isinstance(message, (m.Join, m.Welcome)):
        fields: JsonDict = msgspec.to_builtins(message, builtin_types=(bytes,))
        fields["ids"] = ranges(fields["ids"])
        packed = msgpack.packb(fields, use_bin_type=True)
    else:
        packed = _pack(message)
    # A map of two fields more: up to 15 stand in its first byte.
    many, begin = (packed[0] & 0x0F, 1) if packed[0] < 0x90 else (packed[2], 3)
    size = bytes((0x82 + many,)) if many < 14 else bytes((0xDE, 0, many + 2))
    header = b"%b\xa1v%c%b%b" % (size, m.PROTOCOL, packed[begin:], _CHECKED)
    header += _sum(header)
    if len(header) > m.MAX_HEADER:
        raise LocalProtocolError(
            f"a {message.__struct_config__.tag} message has a header of {len(header)} bytes; "
            f"allowed are {m.MAX_HEADER}."
        )
    return header


def _sum(covered: bytes | memoryview) -> bytes:
    """The last four bytes of a header, after what they cover."""
    return zlib.crc32(covered).to_bytes(4, "big")


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
