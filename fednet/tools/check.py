"""`fednet check FILE`: what every registered part must do, tried on a user's own.

Each check says in a line what holds; the first that does not raises ConfigError with what was
expected. An exception in the file itself passes through, so that the command line shows where it
arose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fednet import loading, registry
from fednet import seeds as streams
from fednet.config import PrivacySection
from fednet.errors import ConfigError

CLIENTS = 3  # of a partition
KILLED = 3  # the round after which a run is killed: one that no checkpoint holds
# Four clients, two a round, of a model with BatchNorm: not all take part, and buffers cross.
SMALL: dict[str, Any] = {
    "name": "check",
    "rounds": 5,
    "clients": 4,
    "participation": 0.5,
    "train": {"batch_size": 16, "lr": 0.05},
    "model": {"name": "mlp", "hidden": [16], "norm": "batch"},
    "checkpoint": {"every": 2},
    "data": {
        "dataset": "synthetic",
        "samples": 120,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "iid"},
    },
}


def check(path: Path) -> Iterator[str]:
    """Loads the file and checks every part that it registers. Raises ConfigError, UserFileError."""
    before = {kind: set(parts.names()) for kind, parts in registry.ALL.items()}
    (known,) = loading.load_parts([path])
    yield f"{path}: loads (SHA-256 {known.sha256[:16]})"
    found = [
        (kind, name)
        for kind, parts in registry.ALL.items()
        for name in parts.names()
        if name not in before[kind] or Path(_file_of(parts.get(name))) == known.path
    ]
    if not found:
        raise ConfigError(
            f'{path}: registers nothing; expected a decorator such as @fednet.algorithm("mine").'
        )
    for kind, name in found:
        yield f"{registry.ALL[kind].kind} {name!r}"
        for line in CHECKS[kind](name):
            yield f"  ok  {line}"


def _file_of(part: Any) -> str:
    import sys

    module = sys.modules.get(getattr(part, "__module__", ""))
    return str(getattr(module, "__file__", None) or "")


# -- algorithms ------------------------------------------------------------------------------------
def algorithm(name: str) -> Iterator[str]:
    from fednet.algorithms.base import Algorithm
    from fednet.algorithms.state import State
    from fednet.wire.payload import Payload

    method = registry.algorithm.get(name)
    _must(
        isinstance(method, type) and issubclass(method, Algorithm),
        f"{name}: expected a subclass of fednet.Algorithm, got {method!r}.",
    )
    settings = _built(method.Config, f"{name}.Config")
    made = method(settings, CLIENTS)
    yield f"Config() builds: {msgspec.to_builtins(settings) or 'no hyper-parameters'}"
    for exchange in method.exchanges:
        for way, payload in (("down", exchange.down), ("up", exchange.up)):
            _must(
                isinstance(payload, type) and issubclass(payload, Payload),
                f"{name}: {way} of {exchange.label} is {payload!r}, expected a Payload.",
            )
            crosses = ", ".join(f"{n} ({f.kind})" for n, f in payload.fields.items())
            yield f"{way}: {crosses or 'nothing'}"
    for side in ("Server", "Client", "Fold"):
        kind = getattr(method, side)
        _must(
            isinstance(kind, type) and issubclass(kind, State),
            f"{name}.{side}: expected a subclass of fednet.State, got {kind!r}.",
        )
        _must(dataclasses.is_dataclass(kind), f"{name}.{side}: expected a declared record.")
    kept = set(vars(made)) - {"config", "clients"}
    _must(
        not kept,
        f"{name}: __init__ keeps {', '.join(sorted(kept))} on self; what lives between rounds "
        f"belongs in Server or Client.",
    )
    yield "states are declared, and nothing is kept on self"
    yield from _roles(name, method)

    changes: dict[str, Any] = {"algorithm": {"name": name}}
    if method.needs_public:
        changes["data"] = {**SMALL["data"], "public": {"samples": 20}}
    first, second = _trained(changes), _trained(changes)
    # First who was left out, and why: a round without replies has no loss either.
    left_out = [f"round {r['round']}: {r['dropped']}" for r in first if r["dropped"]]
    _must(not left_out, f"{name}: clients were left out of {'; '.join(left_out[:1])}.")
    lost = [
        r["round"] for r in first if r.get("train_loss") is None or not np.isfinite(r["train_loss"])
    ]
    _must(not lost, f"{name}: the training loss of round {lost[0] if lost else ''} is not finite.")
    losses = first[0]["train_loss"], first[-1]["train_loss"]
    yield (
        f"{len(first)} rounds in one process, two of four clients each, with BatchNorm: training "
        "loss {:.4f}, then {:.4f}".format(*losses)
    )
    _must(
        _differ(first, second) is None,
        f"{name}: the same configuration gave other bits the second time; draw from "
        f"host.rng(purpose) only, and keep nothing on self.",
    )
    yield "the same configuration gives the same bits"
    again = _differ(first, _trained(changes, killed=True))
    _must(
        again is None,
        f"{name}: killed in round {KILLED} and resumed from round 2, it gave other bits from round "
        f"{again}; what lives between rounds belongs in Server or Client, and not on self.",
    )
    yield f"killed in round {KILLED} and resumed, it gives the same bits"
    other = _differ(first, _trained({**changes, "algorithm": {"name": "fedavg"}}))
    yield (
        "NOTE: the same bits as fedavg in every round: with these options it is fedavg"
        if other is None
        else f"other bits than fedavg from round {other}"
    )
    _must(
        first[0]["model_sha256"] != first[-1]["model_sha256"] or not method.has_global,
        f"{name}: model_sha256 is the same after both rounds, so {name}.Server."
        f"{method.model_field or '*'} is not what is trained; declare the shared model as Weights.",
    )


def _roles(name: str, method: Any) -> Iterator[str]:
    """What clipping, `security.max_norm` and the hashes work on: it follows from the declarations,
    whatever the fields are called.
    """
    import torch

    from fednet.experiment import privacy
    from fednet.tensors import Layout, Slot, Tensors
    from fednet.wire.payload import Run, run_of, weights_of

    field = method.model_field
    yield (
        f"the shared model is Server.{field}: model_sha256 is its hash"
        if field is not None
        else "Server declares no shared model: model_sha256 is the hash of all of it"
    )
    layout = Layout((Slot("w", (4,), "parameter"),))
    x = Tensors.pack(layout, {"w": torch.full((4,), 8.0)})
    change = Tensors.pack(layout, {"w": torch.ones(4)})
    measured = []
    for exchange in method.exchanges:
        down = exchange.down(
            **{n: x if f.form == "tensors" else None for n, f in exchange.down.fields.items()}
        )
        values = {
            n: (x + change if f.kind == "state" else change)
            if f.form in ("tensors", "parameters")
            else Run(3, 1, 0.0)
            for n, f in exchange.up.fields.items()
        }
        up, sent = exchange.up(**values), weights_of(down)
        for field, _, norm in privacy.updates(up, sent):
            _must(
                norm == change.norm(),
                f"{name}: {field} of {exchange.label} is sent up as weights, and nothing that goes "
                f"down is declared Weights: its update could not be measured.",
            )
            measured.append(field)
        run = run_of(privacy.received(up, sent, PrivacySection(clip=1.0)))
        _must(
            run is not None or not method.sums_updates,
            f"{name}: sums_updates, and nothing in {exchange.label} is declared Statistics: "
            f"privacy.clip could not make every client count the same.",
        )
    yield f"updates that security.max_norm bounds: {', '.join(measured) or 'none is sent'}"


def _differ(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> int | None:
    """The first round whose model or clients have other bits; None where all are the same."""
    for left, right in zip(a, b, strict=True):
        if any(left[k] != right[k] for k in ("model_sha256", "clients_sha256")):
            return int(left["round"])
    return None


class _Killed(BaseException):
    """Ends a run where it stands, as a kill does: nothing more is written."""


class _Killer:
    """A display that kills the run when round `KILLED` is on record, and not yet in a
    checkpoint.
    """

    def __enter__(self) -> _Killer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: object) -> None:
        pass

    round_started = progress = note = finished = _nothing

    def round_done(self, record: Any) -> None:
        if record.round == KILLED:
            raise _Killed


def _trained(changes: Mapping[str, Any], killed: bool = False) -> list[dict[str, Any]]:
    """The rounds of a small federation, in this process. killed: dies in a round, and a run with
    everything built anew goes on from the checkpoint.
    """
    from fednet.config import from_mapping
    from fednet.files import read_lines
    from fednet.launch.in_process import run_in_process
    from fednet.launch.start import Silent, open_directory

    config = from_mapping({**SMALL, **changes}, where="fednet check")

    def ran(out: Path, resume: bool, display: Any) -> list[dict[str, Any]]:
        with open_directory(config, out, resume=resume) as (own, directory, _):
            run_in_process(
                own,
                directory,
                device="cpu",
                data=None,
                until=None,
                command=["fednet", "check"],
                display=display,
            )
            return list(read_lines(directory / "rounds.jsonl"))

    with tempfile.TemporaryDirectory(prefix="fednet-check-") as folder:
        if killed:
            with contextlib.suppress(_Killed):
                ran(Path(folder), False, _Killer())
        return ran(Path(folder), killed, Silent())


# -- models, datasets, partitioners, compressors, tasks --------------------------------------------
def model(name: str) -> Iterator[str]:
    import torch

    from fednet import models
    from fednet.tensors import Layout

    options = models.options(registry.model.get(name))
    yield f"options build: {msgspec.to_builtins(_built(options, f'options of {name}')) or 'none'}"
    tried: list[str] = []
    built = None
    for shape in ((3, 32, 32), (1, 28, 28), (16,)):
        try:
            built = models.build({"name": name}, shape, 5, 0)
            out = built.eval()(torch.zeros(2, *shape))
        except (
            RuntimeError,
            ValueError,
            ConfigError,
        ) as wrong:  # not a model for inputs of this shape
            tried.append(f"{shape}: {wrong}")
            built = None
            continue
        break
    if built is None:
        raise ConfigError(f"{name}: takes none of the usual inputs ({'; '.join(tried)}).")
    _must(
        tuple(out.shape[:1]) == (2,) and out.shape[-1] == 5,
        f"{name}: two inputs in 5 classes gave {tuple(out.shape)}, expected (2, 5).",
    )
    yield f"inputs {shape} give outputs {tuple(out.shape[1:])}"
    body: Any = built
    _must(
        isinstance(getattr(built, "head", None), torch.nn.Linear),
        f"{name}: expected .head, the last nn.Linear.",
    )
    _must(
        callable(getattr(built, "features", None)),
        f"{name}: expected features(x), the input of .head.",
    )
    inner = (
        body.projection(torch.zeros(2, *shape))
        if hasattr(built, "projection")
        else body.features(torch.zeros(2, *shape))
    )
    _must(
        inner.shape[-1] == body.head.in_features,
        f"{name}: features(x) ends in {inner.shape[-1]}, .head takes {body.head.in_features}.",
    )
    yield f"body and head: {', '.join(models.head_names(built))}"
    again, other = (
        models.build({"name": name}, shape, 5, 0),
        models.build({"name": name}, shape, 5, 1),
    )
    a, b, c = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (built, again, other)
    )
    _must(
        torch.equal(a, b),
        f"{name}: one seed gave two initialisations; draw from torch's own generator only.",
    )
    _must(not torch.equal(a, c), f"{name}: two seeds gave one initialisation.")
    yield f"initialised by the seed: {Layout.of(built).nbytes / 1e6:.3f} MB"


def dataset(name: str) -> Iterator[str]:
    import torch

    from fednet.config.parts import declared_options
    from fednet.data.loading import made, place

    root = place(None, None)
    declared = declared_options(registry.dataset.get(name), "dataset")
    options = (
        {} if declared is None else msgspec.to_builtins(_built(declared, f"options of {name}"))
    )
    first, second = (made(name, options, root, False, 0) for _ in range(2))
    sizes = f"{len(first.train[1])} training and {len(first.test[1])} test samples"
    yield f"{sizes}, classes {first.classes}"
    _must(len(first.test[1]) > 0, f"{name}: has no test samples.")
    _must(
        torch.equal(torch.as_tensor(first.train[1]), torch.as_tensor(second.train[1])),
        f"{name}: two readings gave other labels.",
    )
    yield "two readings are the same"
    x = first.train[0]
    some = {k: v[:2] for k, v in x.items()} if isinstance(x, dict) else x[:2]
    inputs = first.inputs(some)
    shown = (
        {k: tuple(v.shape) for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(inputs.shape[1:])
    )
    yield f"inputs of a model: {shown}"


def partitioner(name: str) -> Iterator[str]:
    from fednet.config.parts import declared_options
    from fednet.data.options import call

    part = registry.partitioner.get(name)
    declared = declared_options(part, "partitioner")
    options = (
        {} if declared is None else msgspec.to_builtins(_built(declared, f"options of {name}"))
    )
    y = np.arange(200) % 4

    def divided() -> list[Any]:
        given = {
            "y": y,
            "groups": np.arange(200) % CLIENTS,
            "clients": CLIENTS,
            "rng": streams.rng(0, "partition"),
            "pool": np.arange(200),
        }
        return [np.sort(np.asarray(p)) for p in call(part, given, options, name)]

    first, second = divided(), divided()
    _must(len(first) == CLIENTS, f"{name}: {len(first)} parts for {CLIENTS} clients.")
    everything = np.concatenate(first)
    _must(len(np.unique(everything)) == len(everything), f"{name}: a sample was given twice.")
    _must(
        len(everything) > 0 and everything.min() >= 0 and everything.max() < 200,
        f"{name}: an index lies outside the 200 samples.",
    )
    yield f"{CLIENTS} disjoint parts of {', '.join(str(len(p)) for p in first)} samples"
    _must(
        all(np.array_equal(a, b) for a, b in zip(first, second)),
        f"{name}: one seed gave two divisions; draw from `rng` only.",
    )
    yield "the same seed gives the same division"


def compressor(name: str) -> Iterator[str]:
    import inspect

    from fednet.wire import compress

    takes = inspect.signature(registry.compressor.get(name)).parameters.values()
    needed = [p for p in takes if p.default is inspect.Parameter.empty]
    if needed:
        yield f"takes ({', '.join(p.name for p in needed)}): nothing more is tried without them"
        return
    chain = compress.parse([name])
    import torch

    vector = torch.from_numpy(streams.rng(0, "check").standard_normal(1000).astype("float32"))
    data = chain.encode(vector, streams.rng(0, "compress"))
    size, exact = chain.nbytes(1000)
    _must(
        len(data) == size if exact else len(data) <= size,
        f"{name}: 1000 values took {len(data)} bytes, {size} were announced.",
    )
    back = chain.decode(data, 1000)
    _must(tuple(back.shape) == (1000,), f"{name}: 1000 values came back as {tuple(back.shape)}.")
    error = float((back - vector).abs().max())
    yield f"1000 values in {len(data)} of 4000 bytes, largest error {error:.3g}"


def task(name: str) -> Iterator[str]:
    import torch

    made = registry.task.get(name)()
    for method in ("loss", "losses", "counts", "accuracy"):
        _must(callable(getattr(made, method, None)), f"{name}: expected the method {method}.")
    outputs, y = torch.eye(4, requires_grad=True), torch.arange(4)
    try:
        loss = made.loss(outputs, y)
    except (RuntimeError, ValueError):  # not about classes: its own shapes are not ours to guess
        yield "has loss, losses, counts and accuracy"
        return
    _must(
        loss.ndim == 0 and loss.requires_grad,
        f"{name}: loss gave {tuple(loss.shape)}, expected a scalar with a graph.",
    )
    counts = made.counts(outputs, y)
    _must(
        counts.dtype == torch.int64,
        f"{name}: counts are {counts.dtype}, expected int64, so that sums are exact.",
    )
    _must(
        0 <= made.accuracy(counts) <= 1,
        f"{name}: accuracy gave {made.accuracy(counts)}, expected 0..1.",
    )
    yield f"loss {float(loss):.4f}, accuracy {made.accuracy(counts):.4f} on four easy samples"


CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "algorithms": algorithm,
    "models": model,
    "datasets": dataset,
    "partitions": partitioner,
    "compressors": compressor,
    "tasks": task,
}


def _built(kind: Any, what: str) -> Any:
    try:
        return kind()
    except TypeError as wrong:
        raise ConfigError(
            f"{what}: every option needs a default to be checked here ({wrong})."
        ) from None


def _must(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)
