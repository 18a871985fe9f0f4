"""Reads the files of records of a run, and knows how much must be in them.

`summary.json` of a run that is over has the length and the digest of each file. Before that,
`checkpoint/manifest.json` has the length that each file has at least. A file that was cut, emptied
or deleted, and lines that were doubled or swapped, are an error that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from fednet.descriptors import reaching
from fednet.errors import StateError
from fednet.files import read_lines, read_rows
from fednet.plain import JsonDict
from fednet.records.manifest import read_manifest
from fednet.records.rows import Row, Summary

R = TypeVar("R", bound=Row)

RECORDS = ("rounds.jsonl", "clients.jsonl", "wire.jsonl", "events.jsonl")
PUT_BACK = "put the file back as it was, or do the run again"
BLOCK_BYTES = 1 << 20


class Contents(msgspec.Struct, frozen=True):
    """bytes: of the whole file; xxh3: their digest."""

    bytes: int
    xxh3: str


def contents(run: Path) -> dict[str, dict[str, object]]:
    """Returns what `summary.json` has on the files of records of a run that is over."""
    there = [name for name in RECORDS if (run / name).exists()]
    return {name: msgspec.to_builtins(_contents(run / name)) for name in there}


def _contents(path: Path) -> Contents:
    whole = xxhash.xxh3_128()
    size = 0
    with reaching(lambda: path.open("rb")) as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            size += len(block)
    return Contents(size, whole.hexdigest())


def read_summary(run: Path) -> Summary:
    """Reads summary.json; returns an empty one while the run is live. Raises StateError if it is
    not what was written.
    """
    path = run / "summary.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return Summary()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: {error}.") from None


def check(run: Path, names: tuple[str, ...] = RECORDS) -> None:
    """Raises StateError if one of these files is not what a finished run left, or the run has no
    summary.
    """
    if not (run / "summary.json").exists():
        raise StateError(f"{run / 'summary.json'} is missing; {PUT_BACK}.")
    for name, known in (read_summary(run).records or {}).items():
        if name in names:
            written = msgspec.convert(known, Contents)
            _check_size(run / name, written.bytes, exact=True)
            if _contents(run / name) != written:
                raise _changed(run / name)


def rows(run: Path, path: Path, kind: type[R]) -> Iterator[R]:
    """Returns the rows of a file of a run; none if it is not there and need not be. A last line
    that is being written is left out. Raises StateError for a line that is not as it was written, a
    field of another type, and a file of which anything is missing, doubled or swapped: that of a
    finished run after its last row.
    """
    over = (run / "summary.json").exists()
    known = (read_summary(run).records or {}).get(path.name) if over else None
    written = msgspec.convert(known, Contents) if known is not None else None
    if written is not None:
        _check_size(path, written.bytes, exact=True)
    elif not over and path.name in (lengths := _lengths(run)):
        _check_size(path, lengths[path.name], exact=False)
    if not path.exists():
        return iter(())
    return _read(path, kind, written)


def _read(path: Path, kind: type[R], written: Contents | None) -> Iterator[R]:
    whole = xxhash.xxh3_128()
    last = 0
    for row in read_rows(path, kind.decoder(), whole.update):
        if path.name == "rounds.jsonl":
            if last and row.round != last + 1:
                raise StateError(
                    f"{path}: round {row.round} follows round {last}: lines are missing, doubled "
                    f"or in another order; {PUT_BACK}."
                )
            last = row.round
        yield row
    if written is not None and whole.hexdigest() != written.xxh3:
        raise _changed(path)


def events(run: Path, kind: str) -> Iterator[JsonDict]:
    """Returns the events of one type, of a run that may go on."""
    path = run / "events.jsonl"
    found = read_lines(path) if path.exists() else iter(())
    return (event for event in found if event["type"] == kind)


def _lengths(run: Path) -> Mapping[str, int]:
    """Returns how long the files of a run that is not over are at least."""
    if not (run / "checkpoint" / "manifest.json").exists():
        return {}
    return read_manifest(run / "checkpoint")[0].lengths


def _check_size(path: Path, size: int, exact: bool) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise StateError(f"{path} is missing, and {size} bytes were written; {PUT_BACK}.") from None
    if found < size or (exact and found != size):
        raise StateError(f"{path}: {found} bytes, and {size} were written; {PUT_BACK}.")


def _changed(path: Path) -> StateError:
    return StateError(
        f"{path}: not what was written there: lines were changed, doubled or swapped; {PUT_BACK}."
    )
