"""A type for the rows of each file of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, KeysView, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from fednet.errors import unknown
from fednet.plain import JsonDict

R = TypeVar("R", bound="Row")
Text = bytes  # rows have a field of that name

# The types of columns; of all others: string.
DTYPES: dict[object, str] = {
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
    bool: "bool",
    bool | None: "boolean",
}
# The evaluations of a client: the global model, its own, its own on class-balanced samples, its own
# after a few more epochs, and that on class-balanced samples.
EVALUATED_MODELS = ("global", "personal", "balanced", "finetuned", "finetuned_balanced")


# The parts of a round's `seconds_by_phase`. Of the clients' parts, those of the client that
# finished last count.
TIMES = ("training", "encoding", "sending", "waiting", "aggregating", "evaluating", "recording")


class Row(msgspec.Struct, kw_only=True):
    """A row, read by attribute or by key; what was not measured is None."""

    NULLABLE: ClassVar[frozenset[str]] = frozenset()  # written as null where it is None
    KEYS: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # of mappings that have the same ones always

    @classmethod
    def of(cls: type[R], record: Mapping[str, object]) -> R:
        """Raises msgspec.ValidationError for a field of another type."""
        return msgspec.convert(record, cls)

    @classmethod
    def parse(cls: type[R], text: Text) -> R:
        """Returns the row of a line's text. Raises as `of` does, and ValueError for other text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # a NaN, which msgspec does not read
            return cls.of(json.loads(text))

    def line(self) -> JsonDict:
        """Returns the row as it is written."""
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None or name in self.NULLABLE
        }

    @classmethod
    def columns(cls) -> dict[str, str]:
        """Returns the columns of a flat table of such rows, with their types as pandas names them:
        a number, a text or a truth value has one, and a mapping with KEYS has one for each, called
        `field.key`. All other fields are JSON text.
        """
        found: dict[str, str] = {}
        for field in msgspec.structs.fields(cls):
            if field.name in cls.KEYS:
                found |= {f"{field.name}.{key}": "float64" for key in cls.KEYS[field.name]}
            else:
                found[field.name] = DTYPES.get(field.type, "string")
        return found

    def flat(self) -> JsonDict:
        """Returns the values of `columns`."""
        found: JsonDict = {}
        for name, value in msgspec.structs.asdict(self).items():
            if name in self.KEYS:
                found |= {f"{name}.{key}": (value or {}).get(key) for key in self.KEYS[name]}
            elif isinstance(value, list | dict):
                found[name] = json.dumps(value)
            else:
                found[name] = value
        return found

    def set(self, **fields: object) -> None:
        """Sets several fields. Raises AttributeError for one that the row does not have."""
        for name, value in fields.items():
            setattr(self, name, value)

    # -- by key ------------------------------------------------------------------------------------
    # Of any field's type.
    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as unknown_field:
            raise KeyError(str(unknown_field)) from None

    def get(self, name: str, default: object = None) -> Any:
        found = getattr(self, name, None)
        return default if found is None else found

    def __contains__(self, name: object) -> bool:
        return name in self.line()

    def __bool__(self) -> bool:
        return any(value is not None for value in self.line().values())

    def keys(self) -> KeysView[str]:
        """Returns the names, so that dict() makes a dictionary of the row."""
        return self.line().keys()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(unknown("field", name, self.__struct_fields__))


class Round(Row, kw_only=True):
    """A line of rounds.jsonl. Accuracies are 0..1, times seconds; `bytes_*` are all bytes spent;
    `useful` and `predicted` are the payload of tasks and of replies, by direction and kind, with
    the evaluations within them; without those of all clients.
    """

    NULLABLE = frozenset(("seconds_virtual", "seconds_virtual_by_phase", "predicted"))
    KEYS = {
        "client_accuracy": (*EVALUATED_MODELS, "received"),
        "held_out": EVALUATED_MODELS,
        "seconds_by_phase": TIMES,
    }

    round: int = 0
    selected: list[int] = []
    completed: list[int] = []
    completed_by_phase: list[list[int]] = []
    # In an asynchronous run: of each client in `completed`, in order of arrival, the updates since
    # the model that it started from.
    staleness: list[int] | None = None
    dropped: dict[str, str] = {}  # client -> why
    restarted: list[int] | None = None  # clients that lost their state and began again
    void: bool = False
    train_loss: float | None = None  # as the method weighs its clients
    test_loss: float | None = None
    test_accuracy: float | None = None
    validation_accuracy: float | None = None
    correct_by_class: list[int] | None = None
    total_by_class: list[int] | None = None
    # over all evaluated clients, by EVALUATED_MODELS, and `received`: the global model before the
    # round
    client_accuracy: dict[str, float] | None = None
    # the same over the clients that never train (`evaluate.held_out`), which are not among those
    held_out: dict[str, float] | None = None
    metrics: dict[str, float] | None = None  # `evaluate.metrics` of the global model
    client_metrics: dict[str, dict[str, float]] | None = None  # as `client_accuracy`, by metric
    # What `personal` means: `personal`, or `local`, the last local model, where the method keeps no
    # personal one.
    own_model: str | None = None
    # `public` or `test`: the inputs of BatchNorm's statistics, where the clients' do not come up
    batch_norm_measured_over: str | None = None
    seconds: float | None = None
    seconds_virtual: float | None = None
    # second of the run at which the round began, and how many clients were there then
    second: float | None = None
    here: int | None = None
    training_s: float | None = None  # of all devices that completed, where a trace has their pace
    seconds_by_phase: dict[str, float] | None = None
    seconds_virtual_by_phase: dict[str, float] | None = None
    # By part of the run (server, clients, GPU 0, ...) on the server's machine, see `Resources`:
    # `busy_s` and `memory_mb`.
    resources: dict[str, dict[str, float]] | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    useful: dict[str, dict[str, int]] = {}
    predicted: dict[str, dict[str, int]] | None = None
    model_sha256: str | None = None
    tensor_sha256: dict[str, str] | None = None
    clients_sha256: str | None = None
    evaluated_sha256: str | None = None  # of the model that was evaluated, where it is another
    algorithm: JsonDict = {}  # what the method reports, and its warnings


class Client(Row, kw_only=True):
    """A line of clients.jsonl: the accuracies of a client's models, and, where it trained in this
    round, its training. `received` is the global model that it got in this round.
    """

    NULLABLE = frozenset(
        ("samples", "train_loss", "steps", "seconds", "host", "device")
        + tuple(f"accuracy_{name}" for name in EVALUATED_MODELS)
    )

    round: int = 0
    client: int = -1
    final: bool | None = None
    """Evaluated after the last round."""
    took_part: bool | None = None
    """In any round until then."""
    held_out: bool | None = None
    """It never trains."""
    test_samples: int | None = None
    accuracy_global: float | None = None
    correct_global: int | None = None
    tested_global: int | None = None
    accuracy_received: float | None = None
    correct_received: int | None = None
    tested_received: int | None = None
    accuracy_personal: float | None = None
    correct_personal: int | None = None
    tested_personal: int | None = None
    accuracy_balanced: float | None = None
    correct_balanced: int | None = None
    tested_balanced: int | None = None
    accuracy_finetuned: float | None = None
    correct_finetuned: int | None = None
    tested_finetuned: int | None = None
    accuracy_finetuned_balanced: float | None = None
    correct_finetuned_balanced: int | None = None
    tested_finetuned_balanced: int | None = None
    metrics: dict[str, dict[str, float]] | None = None  # by model and `evaluate.metrics`
    samples: int | None = None
    train_loss: float | None = None
    steps: int | None = None
    reported: dict[str, float] | None = None  # by the method, of this client (`host.report`)
    seconds: float | None = None
    host: str | None = None
    device: str | None = None


class _Crossed(Row, kw_only=True):
    """What a message has in common with all that are alike."""

    round: int = 0
    direction: str = ""
    type: str = ""
    bytes: int = 0
    useful: bool = True
    purpose: str = "train"
    incarnation: int = 0
    phase: int = 0
    attempt: int = 0
    count: int | None = None
    """Of several equal messages."""
    worker: str | None = None
    """Whose heartbeats they are."""
    reason: str | None = None
    """Why it was not useful."""
    lost: bool | None = None
    """It may not have arrived."""
    final: bool | None = None


class Wire(_Crossed, kw_only=True):
    """A message: its bytes by kind, and whether it was useful. A line of wire.jsonl has one or
    several, see `Messages`.
    """

    client: int = -1
    kinds: dict[str, int] = {}
    envelope: int = 0
    raw_bytes: int = 0
    staleness: int | None = None
    """Of a reply in an asynchronous run, the updates since its model."""


Each = int | list[int]  # one number for all messages, or one for each


class Messages(_Crossed, kw_only=True):
    """A line of wire.jsonl: a message, or those of several clients that are alike. `bytes` is that
    of all together. What differs between them is a list, in the order of `clients`.

    Raises ValueError for a list of another length.
    """

    client: int | None = None
    """Of one message."""
    clients: list[int | tuple[int, int]] | None = None
    """Of several messages, ascending, with runs of ids as (first, last)."""
    kinds: dict[str, Each] = {}
    envelope: Each = 0
    raw_bytes: Each = 0
    staleness: Each | None = None

    def __post_init__(self) -> None:
        for ids in self.clients or ():
            if not isinstance(ids, int) and ids[0] > ids[1]:
                raise ValueError(f"clients: {ids[0]} to {ids[1]}")
        n = len(self)
        for value in (*self.kinds.values(), self.envelope, self.raw_bytes, self.staleness):
            if isinstance(value, list) and len(value) != n:
                raise ValueError(f"{len(value)} numbers for {n} messages")

    def __len__(self) -> int:
        """How many messages these are."""
        if self.clients is None:
            return 1
        return sum([1 if isinstance(i, int) else i[1] - i[0] + 1 for i in self.clients])

    def each(self) -> Iterator[Wire]:
        """Yields one message after the other."""
        same = {name: getattr(self, name) for name in _Crossed.__struct_fields__}
        for k, client in enumerate(self._ids()):
            kinds = {kind: _at(n, k) for kind, n in self.kinds.items()}
            envelope = _at(self.envelope, k)
            if self.clients is not None:
                same["bytes"] = envelope + sum(kinds.values())
            staleness = None if self.staleness is None else _at(self.staleness, k)
            own: JsonDict = {"client": client, "kinds": kinds, "envelope": envelope}
            yield Wire(**same, **own, raw_bytes=_at(self.raw_bytes, k), staleness=staleness)

    def _ids(self) -> Iterator[int]:
        if self.clients is None:
            yield -1 if self.client is None else self.client
        for ids in self.clients or ():
            if isinstance(ids, int):
                yield ids
            else:
                yield from range(ids[0], ids[1] + 1)

    def total(self) -> Wire:
        """Returns one message of no client, with the bytes of all together."""
        same = {name: getattr(self, name) for name in _Crossed.__struct_fields__}
        n = len(self)
        kinds = {kind: _sum(one, n) for kind, one in self.kinds.items()}
        envelope = _sum(self.envelope, n)
        return Wire(**same, kinds=kinds, envelope=envelope, raw_bytes=_sum(self.raw_bytes, n))


def _at(value: Each, k: int) -> int:
    return value[k] if isinstance(value, list) else value


def _sum(value: Each, n: int) -> int:
    return sum(value) if isinstance(value, list) else n * value


class Event(Row, kw_only=True):
    """A line of events.jsonl."""

    round: int = 0
    client: int = -1
    type: str = ""
    bytes: int = 0
    elapsed: float = 0.0
    time: float | None = None
    details: JsonDict = {}
    """The fields of this type of event; in the file, by key and by attribute they stand beside the
    others.
    """

    @classmethod
    def of(cls, record: Mapping[str, object]) -> Event:
        more = {k: v for k, v in record.items() if k not in cls.__struct_fields__}
        return msgspec.convert({**record, "details": more}, cls)

    @classmethod
    def parse(cls, text: Text) -> Event:
        try:
            record = msgspec.json.decode(text)
        except msgspec.DecodeError:  # a NaN, which msgspec does not read
            record = json.loads(text)
        return cls.of(record)

    def line(self) -> JsonDict:
        whole = super().line()
        more: JsonDict = whole.pop("details")
        return {**whole, **more}

    # The details, by attribute.
    def __getattr__(self, name: str) -> Any:
        if name in self.details:
            return self.details[name]
        raise AttributeError(unknown("field", name, self.line()))


class Contents(msgspec.Struct, frozen=True):
    """A file of records. bytes: of the whole file; xxh3: their digest."""

    bytes: int
    xxh3: str


class Summary(Row, kw_only=True):
    """summary.json: the server's part (`fednet.server.summary`), and the metrics
    (`fednet.report.metrics.summarise`).
    """

    NULLABLE = frozenset(
        ("predicted", "stopped", "seconds_virtual", "model_sha256", "clients_sha256")
    )

    name: str | None = None
    algorithm: str | None = None
    seed: int | None = None
    rounds: int | None = None
    void_rounds: int | None = None
    accuracy: JsonDict | None = None
    loss: JsonDict | None = None  # the same of the test loss, where the task has no accuracy
    personal: dict[str, float] | None = None
    personal_of_participants: dict[str, float] | None = None  # of those who ever took part
    # the same of the clients that never train, which are not among those above
    held_out: dict[str, float] | None = None
    own_model: str | None = None  # what `personal` is there, see `Round`
    metrics: dict[str, float] | None = None  # of the global model, in the last evaluated round
    client_metrics: dict[str, dict[str, float]] | None = None  # at the end, see `Round`
    # Of the model at the end, if a metric counts one: `model`, `tested_on` (server or clients), and
    # `counts`, samples by true class (row) and predicted class.
    confusion: JsonDict | None = None
    judged: JsonDict | None = None  # how many clients at the end, of how many
    personal_spread: JsonDict | None = None
    train_loss: float | None = None
    bytes: JsonDict | None = None
    useful: dict[str, dict[str, int]] | None = None
    predicted: dict[str, dict[str, int]] | None = None
    predicted_is: str | None = None
    stopped: str | None = None
    seconds: float | None = None
    seconds_per_round: float | None = None
    seconds_by_phase: dict[str, float] | None = None
    seconds_virtual: float | None = None
    model_sha256: str | None = None
    model_check: str | None = None  # the digest that model.safetensors carries
    # of the model that training starts from, where a part of it stays frozen or the server sends it
    base_sha256: str | None = None
    clients_sha256: str | None = None
    refused: int | None = None
    wasted: dict[str, int] | None = None  # bytes that were not used, by reason
    privacy: JsonDict | None = None
    provenance: JsonDict | None = None
    records: dict[str, Contents] | None = None  # by file of records


FILES: dict[str, type[Row]] = {"rounds": Round, "clients": Client, "wire": Wire, "events": Event}
