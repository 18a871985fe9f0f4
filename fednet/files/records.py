"""Records of JSON that carry the digest of their own text, `check`, as their last field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from fednet.descriptors import named, reaching
from fednet.errors import StateError
from fednet.files.whole import Buffer, write_aside
from fednet.plain import JsonDict, plain

T = TypeVar("T")

CHECK_BYTES = 16
_CHECK = b',"check":"'
_TAIL_BYTES = len(_CHECK) + 16 + 2


def digest(segments: Iterable[Buffer]) -> bytes:
    """The 16 bytes of XXH3-128 over segments that lie one behind the other."""
    whole = xxhash.xxh3_128()
    for segment in segments:
        whole.update(segment)
    return whole.digest()


def line(record: JsonDict) -> bytes:
    """A record's line, with the digest of all before it as its last field."""
    return checked(json.dumps(record, separators=(",", ":"), default=plain).encode())


def plain_line(record: JsonDict) -> bytes:
    """The text that `line` makes, of a record of strings and whole numbers alone, at a fifth of the
    time: a book has a line a message.
    """
    return checked(_encode(record))


def checked(text: bytes) -> bytes:
    """A JSON object's text as a line that carries its digest. It must have a field."""
    return b'%b%b%b"}\n' % (text[:-1], _CHECK, xxhash.xxh3_64_hexdigest(text).encode())


_encode = msgspec.json.Encoder().encode


def unchecked(text: bytes) -> bytes:
    """The text that `checked` was given. Raises ValueError where the line is not what it made."""
    record = without_check(text.removesuffix(b"\n"))
    if record is None:
        raise ValueError(f"its check is {'of another text' if _CHECK in text else 'missing'}")
    return record


def without_check(text: bytes) -> bytes | None:
    """What `checked` was given, of a line without its end; None where it is not what that made."""
    record = text[:-_TAIL_BYTES] + b"}"
    return record if checked(record)[:-1] == text else None


def write_record(
    path: Path, record: JsonDict, mode: int | None = None, fsync: bool = False
) -> None:
    """A file that holds one record."""
    write_aside(path, line(record), mode, fsync)


def read_record(path: Path, remedy: str, by_hand: type | None = None) -> JsonDict:
    """What `write_record` wrote. Raises StateError where the file is not as it was written, and
    FileNotFoundError. remedy: what the reader of that error can do. by_hand: a person may have
    written it, without a check: an object of that type then, which allows no unknown field.
    """
    try:
        text = reaching(named(path).read_bytes)
        if by_hand is not None and b'"check"' not in text:
            return msgspec.to_builtins(msgspec.json.decode(text, type=by_hand))
        if not text.endswith(b"\n"):
            raise ValueError("its end is missing" if text else "it is empty")
        return decoded(unchecked(text))
    except (ValueError, RecursionError) as broken:
        raise StateError(f"{path}: not what was written there ({broken}); {remedy}.") from broken


def read_text(path: Path, remedy: str) -> str:
    """A small file of text: a mark, an order. Raises StateError where it is no text or
    says nothing, and FileNotFoundError. remedy: what the reader of that error can do.
    """
    try:
        text = reaching(named(path).read_bytes).decode()
    except UnicodeDecodeError as broken:
        raise StateError(f"{path}: is no text ({broken.reason}); {remedy}.") from None
    if not text.strip():
        raise StateError(f"{path}: is empty; {remedy}.")
    return text


def read_value(path: Path, kind: type[T], remedy: str) -> T:
    """A small file of JSON, as a lock or a claim is. Raises StateError where it holds no such
    value, and FileNotFoundError. remedy: what the reader of that error can do.
    """
    text = reaching(named(path).read_bytes)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        what = str(broken) if text else "it is empty"
        raise StateError(f"{path}: not what was written there ({what}); {remedy}.") from None


def decoded(text: bytes) -> JsonDict:
    try:
        return msgspec.json.decode(text, type=JsonDict)
    except msgspec.DecodeError:  # a NaN, which JSON has not
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object") from None
        return found
