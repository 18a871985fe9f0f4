"""JSON records with the digest of their own text as the last field, `check`."""

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
    """XXH3-128 (16 bytes) over all segments in order."""
    whole = xxhash.xxh3_128()
    for segment in segments:
        whole.update(segment)
    return whole.digest()


def line(record: JsonDict) -> bytes:
    """A record as a line with its digest."""
    return checked(json.dumps(record, separators=(",", ":"), default=plain).encode())


def plain_line(record: JsonDict) -> bytes:
    """The same line, for a record of strings and whole numbers only, in a fifth of the time."""
    return checked(_encode(record))


def checked(text: bytes) -> bytes:
    """The text of a JSON object, with at least one field, as a line with its digest."""
    return b'%b%b%b"}\n' % (text[:-1], _CHECK, xxhash.xxh3_64_hexdigest(text).encode())


_encode = msgspec.json.Encoder().encode


def unchecked(text: bytes) -> bytes:
    """The text that `checked` got. Raises ValueError where the line is not what it returned."""
    record = without_check(text.removesuffix(b"\n"))
    if record is None:
        raise ValueError(f"its check is {'of another text' if _CHECK in text else 'missing'}")
    return record


def without_check(text: bytes) -> bytes | None:
    """The same for a line without its newline, but None where it is not what `checked` returned."""
    record = text[:-_TAIL_BYTES] + b"}"
    return record if checked(record)[:-1] == text else None


def write_record(
    path: Path, record: JsonDict, mode: int | None = None, fsync: bool = False
) -> None:
    """A file that holds one record."""
    write_aside(path, line(record), mode, fsync)


def read_record(path: Path, remedy: str, by_hand: type | None = None) -> JsonDict:
    """Reads what `write_record` wrote. Raises StateError where it is damaged, and
    FileNotFoundError. remedy: what to do then, for the error. by_hand: a user may have written the
    file without a check; it is then read as that type, which allows no unknown field.
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
    """Reads a small file of text. Raises StateError where it is empty or no text, and
    FileNotFoundError. remedy: what to do then, for the error.
    """
    try:
        text = reaching(named(path).read_bytes).decode()
    except UnicodeDecodeError as broken:
        raise StateError(f"{path}: is no text ({broken.reason}); {remedy}.") from None
    if not text.strip():
        raise StateError(f"{path}: is empty; {remedy}.")
    return text


def read_value(path: Path, kind: type[T], remedy: str) -> T:
    """Reads a small file of JSON, such as a lock. Raises StateError where it has no such value, and
    FileNotFoundError. remedy: what to do then, for the error.
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
    except msgspec.DecodeError:  # a NaN, which msgspec does not read
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object") from None
        return found
