"""Reads a run directory.

    run = open_run("runs/fedavg-digits")
    run.rounds[-1].test_accuracy, run.summary["bytes"], run.model()

Files are read when they are first asked for. A run may be live: a line that is still being written
is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from fednet.config import tree
from fednet.errors import ConfigError, StateError, lacking, unknown
from fednet.files import read_text
from fednet.places import expand_home, runs
from fednet.plain import JsonDict, meet
from fednet.records import FILES, Client, Event, Messages, Round, Summary, Wire, reading
from fednet.records.table import OWN

if TYPE_CHECKING:
    import pandas
    from torch import nn

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Run:
    """A run directory.

    rounds, clients, wire, events, summary: rows of `fednet.records`; config, partition: mappings.
    """

    dir: Path

    @cached_property
    def config(self) -> JsonDict:
        path = self.dir / "config.yaml"
        text = read_text(path, "put it back, or delete the run")
        value = tree.compose(text, str(path)).plain()
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path}: expected a mapping of keys to values, got {type(value).__name__}."
            )
        return value

    @cached_property
    def rounds(self) -> list[Round]:
        return list(self.lines("rounds"))

    @cached_property
    def clients(self) -> list[Client]:
        return list(self.lines("clients"))

    @cached_property
    def wire(self) -> list[Wire]:
        return list(self.lines("wire"))

    @cached_property
    def events(self) -> list[Event]:
        return list(self.lines("events"))

    @cached_property
    def summary(self) -> Summary:
        """Empty while the run is live."""
        return reading.read_summary(self.dir)

    @cached_property
    def partition(self) -> JsonDict:
        """Empty if each client brings its own data."""
        path = self.dir / "partition.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict)
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StateError(f"{path}: expected a JSON object; {error}.") from None

    # Of the type that FILES has for the name.
    def lines(self, name: str) -> Iterator[Any]:
        """Yields the rows of `NAME.jsonl`, one at a time: those of a long run need not fit in
        memory. Of `wire.jsonl` they are single messages.
        """
        if name == "wire":
            return (message for line in self.grouped_messages() for message in line.each())
        return reading.rows(self.dir, self.dir / f"{name}.jsonl", FILES[name])

    def grouped_messages(self) -> Iterator[Messages]:
        """Yields the lines of `wire.jsonl`, each with the messages that are alike."""
        return reading.rows(self.dir, self.dir / "wire.jsonl", Messages)

    # -- often needed ------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "?"))

    @cached_property
    def own_model(self) -> str:
        """The kind of the clients' own models: `personal`, or for a method without personal models
        `local`, the last local model.
        """
        found = [self.summary.own_model, *(r.own_model for r in self.rounds)]
        return next((own for own in found if own), OWN)

    @property
    def finished(self) -> bool:
        """Whether it ended: all its rounds done, or a target or a budget of `stop` reached."""
        return bool(self.summary)

    @cached_property
    def counts(self) -> np.ndarray | None:
        """(clients, C) training samples by client and class; None if the partition is not known."""
        table = self.partition.get("samples_by_class")
        return np.asarray(table, dtype=np.int64) if table else None

    @cached_property
    def partition_sha256(self) -> list[str]:
        """SHA-256 of each client's indices, in id order."""
        return list(self.partition.get("sha256", ()))

    def model(self) -> nn.Module:
        """Returns the global model with its final weights, on the CPU, in eval mode. If the method
        shares only a part of the model, the rest has its initial values (the clients' models are in
        `personal/`).

        Raises StateError if the run has no global model, has not ended, or the file is not what the
        run wrote; ConfigError if the model is a user's own that is neither under code/ nor loaded.
        """
        from fednet import config, models
        from fednet import loading as parts
        from fednet.algorithms.state import read_named
        from fednet.data import loading
        from fednet.data.datasets import site

        path = self.dir / "model.safetensors"
        if not path.exists():
            raise StateError(
                f"{path} is missing: the run has not ended, or its method has no global model."
            )
        tensors, check = read_named(path)
        if check != self.summary.model_check:
            raise StateError(f"{path}: not the model that this run ended with (summary.json).")
        own = [self.dir / file for file in self.config.get("load", ())]
        with parts.apart(own):  # the run's copies, not what the process has of the same names
            settings = config.load(self.dir / "config.yaml")
            facts = self.partition
            if facts.get("input_shape"):
                shape = tuple(facts["input_shape"])
                outputs = int(facts["outputs"])
            elif settings.data.dataset == "site":
                shape, _, outputs = site.declared_form(settings.data)
            else:  # partition.json is gone
                found = loading.load(settings.data, settings.data.root, settings.seed)
                shape = found.input_shape
                outputs = found.outputs
            chosen = {"name": settings.model.name, **settings.model.options}
            module = models.build(chosen, shape, outputs, settings.seed)
        try:
            module.load_state_dict(tensors, strict=True)
        except RuntimeError as other:
            raise StateError(
                f"{path}: its tensors are not those of model {settings.model.name!r}: {other}"
            ) from None
        return module.eval()

    def frame(self, what: str) -> pandas.DataFrame:
        """Returns a pandas DataFrame of `rounds`, `clients`, `wire` or `events`, with the same
        columns of the same types for every run.
        """
        if what not in FILES:
            raise ConfigError(unknown("frame", what, FILES))
        try:
            import pandas
        except ImportError:
            raise ConfigError(lacking("Run.frame", "pandas")) from None
        rows = [row.flat() for row in self.lines(what)]
        columns = FILES[what].columns()
        made = {
            name: pandas.Series([r[name] for r in rows], dtype=columns[name]) for name in columns
        }
        return pandas.DataFrame(made)


def once(make: F) -> F:
    """Decorates a function of a run: it computes once per `Run`."""

    @functools.wraps(make)
    def kept(run: Run, *more: object) -> object:
        found = run.__dict__.setdefault("_once", {})
        key = (make.__module__, make.__qualname__, *more)
        if key not in found:
            found[key] = make(run, *more)
        return found[key]

    return kept  # type: ignore[return-value]


def open_run(path: str | Path) -> Run:
    """Returns the run in that directory. Raises ConfigError if there is none."""
    folder = expand_home(path, "open_run")
    meet()  # whichever thread reads what is below
    if folder.is_file() and folder.name == "config.yaml":
        folder = folder.parent
    if not (folder / "config.yaml").is_file():
        usual = runs() / folder
        inside = _runs_in(folder)
        beside = _runs_in(folder.parent)
        hint = ""
        if (usual / "config.yaml").is_file():
            hint = f" Did you mean {usual}?"
        elif inside:
            hint = f" Runs in it: {', '.join(inside[:6])}."
        elif beside:
            hint = f" Runs beside it: {', '.join(beside[:6])}."
        raise ConfigError(f"{folder}: expected a run directory, one that holds config.yaml.{hint}")
    return Run(folder.resolve())


def _runs_in(folder: Path) -> list[str]:
    found = folder.glob("*/config.yaml") if folder.is_dir() else ()
    return sorted(str(p.parent) for p in found if p.is_file())
