"""The files of records of a run, read in one place that knows how much must be in them.

Of a run that is over `summary.json` has a seal of each file: its bytes, and the digest of all of
them. Of one that is not, `checkpoint/manifest.json` has the bytes that each file has at least. A
file that was cut, emptied or deleted, and lines that were doubled or swapped, are an error that
names the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from fednet.descriptors import named, reaching
from fednet.errors import StateError
from fednet.files import read_rows
from fednet.records.manifest import read_manifest
from fednet.records.rows import Row, Summary

R = TypeVar("R", bound=Row)

SEALED = ("rounds.jsonl", "clients.jsonl", "wire.jsonl", "events.jsonl")
PUT_BACK = "put the file back as it was, or do the run again"
BLOCK_BYTES = 1 << 20


class Seal(msgspec.Struct, frozen=True):
    """bytes: of the whole file; xxh3: their digest."""

    bytes: int
    xxh3: str


def seals(run: Path) -> dict[str, dict[str, object]]:
    """What `summary.json` says of the files of a run that is over."""
    found = {}
    for name in SEALED:
        if (run / name).exists():
            found[name] = msgspec.to_builtins(_seal(run / name))
    return found


def _seal(path: Path) -> Seal:
    whole, size = xxhash.xxh3_128(), 0
    with reaching(lambda: named(path).open("rb")) as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            size += len(block)
    return Seal(size, whole.hexdigest())


def read_summary(run: Path) -> Summary:
    """Empty while the run is live. Raises StateError where it is not what was written."""
    path = run / "summary.json"
    try:
        return msgspec.json.decode(named(path).read_bytes(), type=Summary)
    except FileNotFoundError:
        return Summary()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: {error}.") from None


def check(run: Path, names: tuple[str, ...] = SEALED) -> None:
    """Raises StateError where one of these files is not what a finished run left, or the run has no
    summary.
    """
    if not (run / "summary.json").exists():
        raise StateError(f"{run / 'summary.json'} is missing; {PUT_BACK}.")
    for name, said in (read_summary(run).records or {}).items():
        if name in names:
            seal = msgspec.convert(said, Seal)
            _check_size(run / name, seal.bytes, exact=True)
            if _seal(run / name) != seal:
                raise _changed(run / name)


def rows(run: Path, path: Path, kind: type[R], end: int | None = None) -> Iterator[R]:
    """The rows of a file of a run, up to a byte; none where it is not there and none need be. A
    last line that is being written is left out. Raises StateError for a line that is not as it was
    written, a field of another type, and a file of which anything is missing, doubled or swapped:
    that of a finished run after its last row.
    """
    over = (run / "summary.json").exists()
    said = (read_summary(run).records or {}).get(path.name) if over else None
    seal = msgspec.convert(said, Seal) if said is not None else None
    if seal is not None:
        _check_size(path, seal.bytes, exact=True)
    elif not over and path.name in (known := _lengths(run)):
        _check_size(path, known[path.name], exact=False)
    if not path.exists():
        return iter(())
    return _read(path, kind, end, seal)


def _read(path: Path, kind: type[R], end: int | None, seal: Seal | None) -> Iterator[R]:
    whole = xxhash.xxh3_128()
    seen = None if seal is None else whole.update
    last = 0
    for row in read_rows(path, True, kind.decoder(), end, kind.together(), seen):
        if path.name == "rounds.jsonl":
            if last and row.round != last + 1:
                raise StateError(
                    f"{path}: round {row.round} follows round {last}: lines are missing, doubled "
                    f"or in another order; {PUT_BACK}."
                )
            last = row.round
        yield row
    if seal is not None and whole.hexdigest() != seal.xxh3:
        raise _changed(path)


def _lengths(run: Path) -> Mapping[str, int]:
    """Of a run that is not over: how long its files are at least."""
    if not (run / "checkpoint" / "manifest.json").exists():
        return {}
    return read_manifest(run / "checkpoint")[0].lengths


def _check_size(path: Path, size: int, exact: bool) -> None:
    try:
        found = named(path).stat().st_size
    except FileNotFoundError:
        raise StateError(f"{path} is missing, and {size} bytes were written; {PUT_BACK}.") from None
    if found < size or (exact and found != size):
        raise StateError(f"{path}: {found} bytes, and {size} were written; {PUT_BACK}.")


def _changed(path: Path) -> StateError:
    return StateError(
        f"{path}: not what was written there: lines were changed, doubled or swapped; {PUT_BACK}."
    )
