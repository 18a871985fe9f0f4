"""How the runs of a sweep or a table ended, in a mark beside each: FOLDER/.cells/NAME.done or
.failed.

A run is done again if its records are not those that it ended with, if the user's files behind it
were edited, or if it failed under another configuration. What there was of it is kept as
FOLDER/.cells/NAME.changedK.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fednet import loading, registry
from fednet.config import WHERE
from fednet.descriptors import named
from fednet.errors import ConfigError, StateError
from fednet.files import read_record, read_text, write_record
from fednet.plain import JsonDict
from fednet.records import reading

AGAIN = "delete it, and the same command does that run again"
REFUSED = 2  # exit status: the configuration or the data are at fault, and may be mended
# The files that tables are made from.
RECORDS = ("config.yaml", "summary.json", "rounds.jsonl", "clients.jsonl", "partition.json")


@dataclass(frozen=True)
class RunSpec:
    """A run to be made: `config` is its whole configuration; the directory is `folder` / its
    name.
    """

    config: JsonDict
    folder: Path

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def books(self) -> Path:
        return self.folder / ".cells"

    def book(self, kind: str) -> Path:
        """A file about the run, such as its mark `done` or its `log`."""
        return self.books / f"{self.name}.{kind}"


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """config, files, records: SHA-256 of the run's configuration, of the user's files behind it
    ("-" for none), and of its records; status: its exit status.
    """

    config: str
    files: str
    status: int
    records: str


def write(task: RunSpec, word: str, asked: tuple[str, str], status: int) -> None:
    """Marks a run as `done` or `failed`."""
    mark = Mark(*asked, status, records(task))
    other = "failed" if word == "done" else "done"
    task.book(other).unlink(missing_ok=True)
    write_record(task.book(word), msgspec.to_builtins(mark))


def read(task: RunSpec) -> tuple[str, Mark] | None:
    """("done" or "failed", the mark). Raises StateError if the mark is damaged."""
    for word in ("done", "failed"):
        path = task.book(word)
        if path.exists():
            try:
                return word, msgspec.convert(read_record(path, AGAIN), Mark)
            except msgspec.ValidationError as wrong:
                raise StateError(f"{path}: is no mark ({wrong}); {AGAIN}.") from None
    return None


def state(task: RunSpec, asked: tuple[str, str]) -> str:
    """done | failed | changed | edited | to do | begun. asked: as `digest` returns it. edited: the
    user's files have changed, or it failed under another configuration. Raises ConfigError if it
    was done under another configuration.
    """
    found = read(task)
    if found is not None:
        word, mark = found
        if mark.config != asked[0] and word == "done":
            raise ConfigError(
                f"{task.run} was run under another configuration; give another name or --out."
            )
        if (mark.config, mark.files) != asked:
            return "edited"
    return state_now(task)


def state_now(task: RunSpec) -> str:
    """The same, for any configuration."""
    found = read(task)
    if found is None:
        return "begun" if task.run.exists() else "to do"
    word, mark = found
    return "changed" if word == "done" and damage(task, mark) else word


def damage(task: RunSpec, mark: Mark) -> str:
    """What is wrong with the records of a run that is marked as done; "" for nothing."""
    try:
        reading.check(task.run, RECORDS)
    except StateError as broken:
        return str(broken)
    if mark.records != records(task):
        return f"{task.run}: its records are not those that it ended with."
    return ""


def ended(folder: Path) -> list[Path]:
    """The runs of a sweep that are done, in the order of the file `order`, the others after them by
    name.
    """
    order = folder / ".cells" / "order"
    names = []
    if order.exists():
        names = read_text(order, "the sweep's command writes it again").splitlines()
    place = {name: i for i, name in enumerate(names)}
    done = (mark.stem for mark in (folder / ".cells").glob("*.done"))
    return [folder / n for n in sorted(done, key=lambda n: (place.get(n, len(place)), n))]


def records(task: RunSpec) -> str:
    """SHA-256 of the files that the run's tables are made from."""
    whole = hashlib.sha256()
    for name in RECORDS:
        path = task.run / name
        whole.update(name.encode() + (named(path).read_bytes() if path.exists() else b"-"))
    return whole.hexdigest()


def why(task: RunSpec) -> str:
    """The last line that a run printed; empty if there is none."""
    path = task.book("log")
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def set_aside(task: RunSpec) -> Path:
    """Moves a run that is to be done again out of the way, and removes its mark. Returns where it
    is.
    """
    asides = (task.book(f"changed{k}") for k in itertools.count(1))
    aside = next(path for path in asides if not path.exists())
    if task.run.exists():
        os.replace(task.run, aside)
    for word in ("done", "failed"):
        task.book(word).unlink(missing_ok=True)
    return aside


def digest(task: RunSpec, load: Sequence[str] = (), sets: Sequence[str] = ()) -> tuple[str, str]:
    """SHA-256 of the configuration as given with its `--set`s, and of the user's files behind the
    run ("-" for none).

    Left out are where the data come from, and files of which the run uses no part.
    """
    data = {k: v for k, v in task.config.get("data", {}).items() if f"data.{k}" not in WHERE}
    config = {**task.config, "data": data} if data else task.config
    said = json.dumps([config, changes(sets)], sort_keys=True)
    named = dict.fromkeys(map(Path, (*load, *task.config.get("load", ()))))
    files = [file for file in named if _uses(file, said, sets)]
    code = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest() if files else "-"
    return hashlib.sha256(said.encode()).hexdigest(), code


def _uses(file: Path, said: str, sets: Sequence[str]) -> bool:
    """Whether the run names a part of the file. True also if the file registers none, since then
    nobody can tell what it is for.
    """
    module = loading.module_of(file)
    names = registry.of_module(module) if module else []
    return not names or any(f'"{n}"' in said or any(n in text for text in sets) for n in names)


def changes(sets: Sequence[str]) -> list[str]:
    """The `--set`s that change what a run computes."""
    return [text for text in sets if text.partition("=")[0].strip() not in WHERE]
