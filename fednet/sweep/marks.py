"""A run's state is in marks beside it, FOLDER/.cells/NAME.done and .failed: the SHA-256 of its
configuration, its exit status, the SHA-256 of its records and that of the user's own files that it
stands on. A run whose records are no longer those is done again, as is one whose files were edited,
one that failed under another configuration, and one that cannot be resumed; what there was is kept
aside, as FOLDER/.cells/NAME.changedK.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet import config as configuration
from fednet import loading, registry
from fednet.descriptors import named
from fednet.errors import ConfigError
from fednet.files import read_text
from fednet.plain import JsonDict

AGAIN = "delete it, and the same command does that run again"
REFUSED = 2  # exit status: the configuration or the data are at fault, and may be mended
TORN = 5  # exit status of a cell: what an earlier start left cannot be gone on with
# That tables are made from.
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


def state(task: RunSpec, asked: tuple[str, str]) -> str:
    """done | failed | changed | edited | to do | begun; asked: `digest`. edited: the user's own
    files are others now, or it failed under another configuration. Raises ConfigError where the run
    is another configuration's.
    """
    found = _mark(task)
    if found is not None:
        word, said = found
        if said[0] != asked[0] and word == "done":
            raise ConfigError(
                f"{task.run} was run under another configuration; give another --out."
            )
        # A mark of before the files were in it is taken as it is.
        if (said[0], *said[3:4]) not in (asked, asked[:1]):
            return "edited"
    return state_now(task)


def state_now(task: RunSpec) -> str:
    """The same, whatever configuration it was."""
    found = _mark(task)
    if found is None:
        return "begun" if task.run.exists() else "to do"
    word, said = found
    return "changed" if word == "done" and not _intact(task, said) else word


def _mark(task: RunSpec) -> tuple[str, list[str]] | None:
    for word in ("done", "failed"):
        path = task.books / f"{task.name}.{word}"
        if path.exists():
            return word, read_text(path, AGAIN).split()
    return None


def ended(folder: Path) -> list[Path]:
    """The runs of a sweep that are done, in the order in which the sweep names them; what it names
    no longer stands last, by name, as do all where no order was left.
    """
    order = folder / ".cells" / "order"
    names = []
    if order.exists():
        names = read_text(order, "the sweep's command writes it anew").splitlines()
    place = {name: i for i, name in enumerate(names)}
    done = (mark.stem for mark in (folder / ".cells").glob("*.done"))
    return [folder / n for n in sorted(done, key=lambda n: (place.get(n, len(place)), n))]


def _intact(task: RunSpec, said: Sequence[str]) -> bool:
    """Whether the records are those that the run ended with (a mark without their SHA-256: whether
    they are there).
    """
    return (task.run / "summary.json").exists() and (len(said) < 3 or said[2] == records(task))


def records(task: RunSpec) -> str:
    """SHA-256 of what the run's tables are made from."""
    whole = hashlib.sha256()
    for name in RECORDS:
        path = task.run / name
        whole.update(name.encode() + (named(path).read_bytes() if path.exists() else b"-"))
    return whole.hexdigest()


def why(task: RunSpec) -> str:
    """The last line that a run printed; empty where there is none."""
    path = task.books / f"{task.name}.log"
    said = (
        path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if path.exists()
        else []
    )
    return said[-1] if said else ""


def set_aside(task: RunSpec) -> Path:
    """A changed, edited or torn run out of the way, so that it is done again. Returns where it
    is.
    """
    aside = next(
        p for k in itertools.count(1) if not (p := task.books / f"{task.name}.changed{k}").exists()
    )
    if task.run.exists():
        os.replace(task.run, aside)
    for word in ("done", "failed"):
        (task.books / f"{task.name}.{word}").unlink(missing_ok=True)
    return aside


def digest(task: RunSpec, load: Sequence[str] = (), sets: Sequence[str] = ()) -> tuple[str, str]:
    """SHA-256 of what the run was asked to be, its configuration as given and `--set`s, and of the
    user's own files that it stands on ("-" for none). Defaults are left out: a new key of a later
    fednet does not make a finished run another one. So is where the data come from, and a file of
    which the run uses no part: a paper's own runs stay what they are beside a user's method, and
    while it is worked on.
    """
    said = json.dumps([task.config, changes(sets)], sort_keys=True)
    files = [f for f in map(Path, load) if _stands_on(f, said, sets)]
    code = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest() if files else "-"
    return hashlib.sha256(said.encode()).hexdigest(), code


def _stands_on(file: Path, said: str, sets: Sequence[str]) -> bool:
    """Whether the run names a part of the file, or the file registers none: what it is there for,
    nobody can tell.
    """
    module = loading.module_of(file)
    names = registry.of_module(module) if module else []
    return not names or any(f'"{n}"' in said or any(n in text for text in sets) for n in names)


def changes(sets: Sequence[str]) -> list[str]:
    """The `--set`s that change what a run computes."""
    return [text for text in sets if text.partition("=")[0].strip() not in configuration.WHERE]
