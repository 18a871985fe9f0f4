"""A run directory, read back.

    run = open_run("runs/quickstart")
    run.rounds[-1].test_accuracy, run.summary["bytes"], run.model()

Files are read when they are first asked for. A run may be live: a line that is still being written is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fednet.config import tree
from fednet.errors import ConfigError, StateError, unknown

if TYPE_CHECKING:
    from torch import nn

# What a line of each file may leave out (a round without evaluation, say): then the attribute is None, not an error.
FIELDS = {
    "rounds": (
        "round",
        "selected",
        "completed",
        "dropped",
        "void",
        "seconds",
        "seconds_virtual",
        "seconds_by_phase",
        "train_loss",
        "test_loss",
        "test_accuracy",
        "validation_accuracy",
        "correct_by_class",
        "client_accuracy",
        "bytes_up",
        "bytes_down",
        "model_sha256",
        "tensor_sha256",
        "clients_sha256",
        "evaluated_sha256",
        "algorithm",
    ),
    "clients": (
        "round",
        "client",
        "samples",
        "test_samples",
        "train_loss",
        "steps",
        "accuracy_global",
        "accuracy_personal",
        "accuracy_balanced",
        "seconds",
        "host",
        "device",
    ),
    "wire": (
        "round",
        "client",
        "direction",
        "type",
        "kinds",
        "envelope",
        "bytes",
        "raw_bytes",
        "useful",
        "purpose",
        "incarnation",
        "phase",
        "attempt",
        "count",
    ),
    "events": ("round", "client", "type", "bytes", "elapsed"),
}
APPEND_ONLY = ("wire", "events")  # never cut on resume, so a line torn by a crash may stand in the middle
_NAMES = {name for names in FIELDS.values() for name in names}


class Record(dict[str, Any]):
    """One line of a file: a dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in _NAMES:
            return None
        raise AttributeError(unknown("field", name, self))


def lines(path: Path, append_only: bool = False) -> Iterator[Record]:
    """The records of a JSON-lines file. A torn last line is left out, as is any torn line of an append-only file.

    Raises StateError for a line in the middle of another file that is no JSON object.
    """
    if not path.exists():
        return
    decode = msgspec.json.Decoder(dict).decode
    torn = None
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if torn is not None and not append_only:
                raise StateError(f"{path}:{torn}: expected a JSON object a line; the file is damaged.")
            if not text.strip():
                continue
            try:
                yield Record(decode(text))
            except msgspec.DecodeError:
                torn = number


@dataclass(frozen=True)
class Run:
    """A run directory.

    rounds, clients, wire, events: lists of records; config, summary, partition: mappings.
    """

    dir: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.dir / "config.yaml"
        value = tree.compose(path.read_text(encoding="utf-8"), str(path)).plain()
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(value).__name__}.")
        return value

    @cached_property
    def rounds(self) -> list[Record]:
        return list(self.lines("rounds"))

    @cached_property
    def clients(self) -> list[Record]:
        return list(self.lines("clients"))

    @cached_property
    def wire(self) -> list[Record]:
        return list(self.lines("wire"))

    @cached_property
    def events(self) -> list[Record]:
        return list(self.lines("events"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Empty while the run is live."""
        return _json(self.dir / "summary.json")

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Empty where each client brings its own data."""
        return _json(self.dir / "partition.json")

    def lines(self, name: str) -> Iterator[Record]:
        """The records of `NAME.jsonl`, one at a time: `wire.jsonl` of a long run need not fit in memory."""
        return lines(self.dir / f"{name}.jsonl", name in APPEND_ONLY)

    # -- what is often asked -----------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "?"))

    @property
    def finished(self) -> bool:
        return len(self.rounds) >= int(self.config.get("rounds", 0)) and bool(self.summary)

    @cached_property
    def counts(self) -> np.ndarray | None:
        """(clients, C) training samples by client and class; None where the partition is not known."""
        table = self.partition.get("counts", self.partition.get("clients"))
        if isinstance(table, dict):
            table = [table[k] for k in sorted(table, key=int)]
        if not isinstance(table, list) or not table:
            return None
        if isinstance(table[0], dict):
            table = [row.get("counts", row.get("classes")) for row in table]
        return np.asarray(table, dtype=np.int64)

    @cached_property
    def partition_sha256(self) -> list[str]:
        """SHA-256 of each client's indices, in id order."""
        hashes = self.partition.get("sha256")
        if isinstance(hashes, dict):
            return [hashes[k] for k in sorted(hashes, key=int)]
        if isinstance(hashes, list):
            return list(hashes)
        people = self.partition.get("clients")
        people = [people[k] for k in sorted(people, key=int)] if isinstance(people, dict) else people
        return (
            [row["sha256"] for row in people if isinstance(row, dict) and "sha256" in row]
            if isinstance(people, list)
            else []
        )

    def model(self) -> nn.Module:
        """The global model with its final weights, on the CPU, in eval mode.

        Raises StateError where the run has none (a method without a global model, a run that has not ended),
        ConfigError where its model is a user's own that is not loaded.
        """
        from safetensors import safe_open

        from fednet import models

        path = self.dir / "model.safetensors"
        if not path.exists():
            raise StateError(f"{path} is missing: the run has not ended, or its method keeps no global model.")
        with safe_open(str(path), framework="pt") as file:
            facts = {**self.partition, **self.summary, **(file.metadata() or {})}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shape, classes = facts.get("input_shape"), facts.get("classes")
        shape = json.loads(shape) if isinstance(shape, str) else shape
        if shape is None or classes is None:
            raise StateError(f"{path}: neither its metadata nor summary.json says the model's input_shape and classes.")
        module = models.build(self.config["model"], tuple(shape), int(classes), self.seed)
        missing, extra = module.load_state_dict(tensors, strict=False)
        trained = self.config["model"].get("trainable", "*") == "*"
        if extra or (missing and trained):
            raise StateError(
                f"{path}: its tensors are not those of model {self.config['model']['name']!r}: "
                f"{', '.join([*missing, *extra][:4])}."
            )
        return module.eval()

    def frame(self, what: str) -> Any:
        """A pandas DataFrame of `rounds`, `clients`, `wire` or `events`."""
        if what not in FIELDS:
            raise ConfigError(unknown("frame", what, FIELDS))
        try:
            import pandas
        except ImportError:
            raise ConfigError("Run.frame needs pandas, which is not installed: pip install 'fednet[pandas]'.") from None
        return pandas.DataFrame(list(self.lines(what)))


def open_run(path: str | Path) -> Run:
    """The run in that directory. Raises ConfigError where there is none."""
    folder = Path(path)
    if folder.is_file() and folder.name == "config.yaml":
        folder = folder.parent
    if not (folder / "config.yaml").exists():
        near = sorted(str(p.parent) for p in folder.parent.glob("*/config.yaml")) if folder.parent.is_dir() else []
        hint = f" Runs beside it: {', '.join(near[:6])}." if near else ""
        raise ConfigError(f"{folder}: expected a run directory, one that holds config.yaml.{hint}")
    return Run(folder.resolve())


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict)
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise StateError(f"{path}: expected a JSON object; {error}.") from None
