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

import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Union

import msgpack
import msgspec

from fednet.errors import LocalProtocolError, RemoteProtocolError
from fednet.ids import expand_ranges, ranges
from fednet.wire import messages as m
from fednet.wire.body import Body

# Items of a list in a header at most: an announced list takes its memory before its items are
# there.
MAX_LIST = 1 << 16
FORMS = 256  # forms that are remembered at most
FORM_BYTES = 1 << 12  # the longest of these
_encode = msgspec.msgpack.Encoder().encode
_pack_map = msgpack.Packer().pack_map_header
_VERSION = msgpack.packb("v") + msgpack.packb(m.PROTOCOL)
_SUM = msgpack.packb("c") + b"\xce"  # a uint32 follows


def encode(message: m.Message) -> bytes:
    """The header frame of a message. Raises LocalProtocolError for one that no receiver would
    take.
    """
    if isinstance(message, (m.Join, m.Welcome)):
        message = msgspec.structs.replace(message, ids=ranges(message.ids))
    fields = _encode(message)  # a map, of fewer than 16 fields or with their number in two bytes
    start = 1 if fields[0] < 0xDE else 3
    number = fields[0] & 15 if start == 1 else int.from_bytes(fields[1:3], "big")
    covered = _pack_map(number + 2) + _VERSION + fields[start:] + _SUM
    header = covered + zlib.crc32(covered).to_bytes(4, "big")
    if len(header) > m.MAX_HEADER:
        raise LocalProtocolError(
            f"a {message.__struct_config__.tag} message has a header of {len(header)} bytes; "
            f"allowed are {m.MAX_HEADER}."
        )
    return header


# Their lists may be long, and their ids are ranges: they are looked at before they are read.
_OPEN = (m.Join, m.Welcome, m.Ready)


# A form is read by itself: its names are matched against patterns, which takes longer than all the
# rest of a header, and the messages of a round have the same few forms.
class _FormlessReply(m.Reply, tag="reply", frozen=True):
    form: msgspec.Raw  # type: ignore[assignment]


class _FormlessTask(m.Task, tag="task", frozen=True):
    form: msgspec.Raw  # type: ignore[assignment]


_FORMLESS: dict[type[m.Message], type[m.Message]] = {m.Reply: _FormlessReply, m.Task: _FormlessTask}
_WHOLE = {formless: kind for kind, formless in _FORMLESS.items()}
_VALUES = {kind: operator.attrgetter(*kind.__struct_fields__) for kind in _FORMLESS}
_read_form = msgspec.msgpack.Decoder(m.Form).decode


class MessageDecoder:
    """Reads the messages of one direction. Nobody changes the form of a message: others share
    it.
    """

    def __init__(self, kinds: Sequence[type[m.Message]]) -> None:
        self._kinds: dict[object, type[m.Message]] = {}
        for kind in kinds:
            self._kinds[kind.__struct_config__.tag] = kind
        bounded = tuple(_FORMLESS.get(kind, kind) for kind in kinds if kind not in _OPEN)
        self._read_message = msgspec.msgpack.Decoder(Union[bounded]).decode  # noqa: UP007
        self._forms: dict[bytes, list[m.Field]] = {}  # by their bytes

    def _read(self, header: bytes) -> m.Message:
        """Raises ValueError or RecursionError for what is no message that may come."""
        message: m.Message = self._read_message(header)
        kind = _WHOLE.get(type(message))
        if kind is None:
            return message
        names = kind.__struct_fields__
        fields = dict(zip(names, _VALUES[kind](message)))
        text = bytes(fields["form"])
        form = self._forms.get(text)
        if form is None:
            form = _read_form(text)
            if len(text) <= FORM_BYTES:
                if len(self._forms) >= FORMS:
                    self._forms.clear()
                self._forms[text] = form
        fields["form"] = form
        return kind(**fields)

    def __call__(self, frames: Sequence[Any], most: int = m.PART) -> tuple[m.Message, Body | None]:
        """The message and the body that came. most: bytes of a body. Raises RemoteProtocolError."""
        if not 1 <= len(frames) <= 2:
            raise RemoteProtocolError(f"a message has 1 or 2 frames, got {len(frames)}")
        if len(frames[0]) > m.MAX_HEADER:
            raise RemoteProtocolError(
                f"header of {len(frames[0])} bytes, allowed are {m.MAX_HEADER}"
            )
        header = bytes(frames[0])
        if header[-4:] != zlib.crc32(memoryview(header)[:-4]).to_bytes(4, "big"):
            raise RemoteProtocolError("the header was damaged on its way")
        message: m.Message
        try:
            message = self._read(header)
        except (ValueError, RecursionError):  # another kind, or one that is refused with a reason
            message = _looked_at(self._kinds, header)
        if len(frames) == 1:
            return message, None
        frame = frames[1]
        body = frame if isinstance(frame, Body) else Body([frame])
        if body.size > most or not isinstance(message, m.WITH_BODY):
            tag = message.__struct_config__.tag
            raise RemoteProtocolError(f"{tag}: a body of {body.size} bytes is not allowed here")
        return message, body


def _looked_at(kinds: Mapping[object, type[m.Message]], header: bytes) -> m.Message:
    """The message, read in two steps. kinds: that may come, by type. Raises RemoteProtocolError."""
    try:
        # An item takes a byte at least. Lists in lists, each announced long, would else cost a
        # tenth of a second a header.
        longest = min(MAX_LIST, len(header))
        fields = msgpack.unpackb(
            header,
            strict_map_key=True,
            ext_hook=_no_ext,
            max_array_len=longest,
            max_map_len=longest,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as broken:
        raise RemoteProtocolError(f"header is no msgpack ({type(broken).__name__})") from broken
    if not isinstance(fields, dict):
        raise RemoteProtocolError("header is no map")
    tag = fields.get("t")
    kind = kinds.get(tag) if isinstance(tag, str) else None
    if kind is None:
        # What is nested is not shown: to write it out can exhaust the stack.
        shown = repr(tag)[:40] if isinstance(tag, (str, int, float)) else type(tag).__name__
        raise RemoteProtocolError(f"unknown message type {shown}")
    try:
        if isinstance(fields.get("ids"), list):
            fields["ids"] = expand_ranges(fields["ids"], m.MAX_IDS)
        return msgspec.convert(fields, kind, builtin_types=(bytes,))
    except (ValueError, RecursionError) as broken:  # msgspec's are ValueErrors
        raise RemoteProtocolError(m.clean(f"{tag}: {broken}")) from broken


decode_from_client = MessageDecoder(m.FROM_CLIENT)
decode_from_server = MessageDecoder(m.FROM_SERVER)


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
