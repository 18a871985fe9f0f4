"""Reads the files of records of a run, and knows how much must be in them.

`summary.json` of a run that is over has the length and the digest of each file. Before that,
`checkpoint/manifest.json` has the length that each file has at least. A file that was cut, emptied
or deleted, and lines that were doubled or swapped, are an error that names the file.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from fednet.descriptors import reaching
from fednet.errors import StateError
from fednet.files import read_lines, read_rows
from fednet.plain import JsonDict
from fednet.records.manifest import read_manifest
from fednet.records.rows import Contents, Round, Row, Summary

R = TypeVar("R", bound=Row)

RECORDS = ("rounds.jsonl", "clients.jsonl", "wire.jsonl", "events.jsonl")
PUT_BACK = "put the file back as it was, or do the run again"
BLOCK_BYTES = 1 << 20


def contents(run: Path) -> dict[str, Contents]:
    """Returns what `summary.json` has on the files of records of a run that is over."""
    found = {}
    for name in RECORDS:
        path = run / name
        whole = xxhash.xxh3_128()
        size = 0
        if path.exists():
            with reaching(functools.partial(io.FileIO, path)) as file:
                while block := file.read(BLOCK_BYTES):
                    whole.update(block)
                    size += len(block)
            found[name] = Contents(size, whole.hexdigest())
    return found


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


def rows(run: Path, path: Path, kind: type[R]) -> Iterator[R]:
    """Returns the rows of a file of a run; none if it is not there and need not be. A last line
    that is being written is left out. Raises StateError for a line that is not as it was written, a
    field of another type, and a file of which anything is missing, doubled or swapped: that of a
    finished run after its last row.
    """
    size = 0
    written = None
    if (run / "summary.json").exists():
        written = (read_summary(run).records or {}).get(path.name)
        size = written.bytes if written is not None else 0
    elif (run / "checkpoint" / "manifest.json").exists():
        size = read_manifest(run / "checkpoint")[0].lengths.get(path.name, 0)
    if not path.exists():
        if size:
            raise StateError(f"{path} is missing, and {size} bytes were written; {PUT_BACK}.")
        return iter(())
    found = path.stat().st_size
    if found < size:
        raise StateError(f"{path}: {found} bytes, and {size} were written; {PUT_BACK}.")
    return _read(path, kind, written)


def _read(path: Path, kind: type[R], written: Contents | None) -> Iterator[R]:
    whole = xxhash.xxh3_128()
    last = 0
    for row in read_rows(path, kind.parse, whole.update):
        if isinstance(row, Round):
            if last and row.round != last + 1:
                raise StateError(
                    f"{path}: round {row.round} follows round {last}: lines are missing, doubled "
                    f"or in another order; {PUT_BACK}."
                )
            last = row.round
        yield row
    if written is not None and whole.hexdigest() != written.xxh3:
        raise StateError(
            f"{path}: not what was written there: lines were changed, doubled or swapped; "
            f"{PUT_BACK}."
        )


def events(run: Path, kind: str) -> Iterator[JsonDict]:
    """Returns the events of one type, of a run that may go on."""
    path = run / "events.jsonl"
    found = read_lines(path) if path.exists() else iter(())
    return (event for event in found if event["type"] == kind)
