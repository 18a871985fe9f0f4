"""`fednet check FILE`: tests a user's own parts for what every part must do.

Each check yields a line. The first that fails raises ConfigError with what was expected. An
exception in the file itself is passed on, so that the command line shows where it was raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from fednet import loading, registry
from fednet import seeds as streams
from fednet.config import from_mapping
from fednet.config.reading import expand, merge, overrides
from fednet.config.tree import wrap
from fednet.errors import CannotGoOn, ConfigError, DataError
from fednet.options import options_of, takes
from fednet.plain import JsonDict, JsonMapping

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Generator

    from fednet.algorithms.base import Algorithm
    from fednet.data.base import Data
    from fednet.records import Round
    from fednet.tensors import Inputs

CLIENTS = 3  # of a partition
KILLED = 3  # the round after which a run is killed, which is in no checkpoint
# Four clients, two per round, and a model with BatchNorm: not all take part, and buffers are sent.
# It is larger than `wire.body.SMALL_BYTES`, so that its tensors are handed over without a copy.
SMALL: JsonDict = {
    "name": "check",
    "rounds": 5,
    "clients": 4,
    "participation": 0.5,
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.05},
    "model": {"name": "mlp", "hidden": [288], "norm": "batch"},
    "checkpoint": {"every": 2},
    "data": {
        "dataset": "synthetic",
        "samples": 120,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "iid"},
    },
}
# Two clients train at a time at different speeds; each reply is an update, every other one stale.
ASYNCHRONOUS: JsonDict = {
    "schedule": {"mode": "async", "buffer": 1},
    "link": {"clock": "virtual", "step_ms": "lognormal(50, 0.7)"},
}
CHILD = "import sys; from fednet.tools import check; check.die(*sys.argv[1:])"


@dataclass(frozen=True)
class File:
    """What a user's file is checked with."""

    path: Path
    root: Path | None = None
    """The folder that datasets read (default: as `fednet run` finds it)."""
    sets: Sequence[str] = ()
    """`key.path=value` texts for the small runs."""
    models: Sequence[str] = ()
    """The names of the models that the file registers."""
    datasets: Sequence[str] = ()
    """The names of the datasets that the file registers."""

    @cached_property
    def data(self) -> dict[str, Data]:
        """By name, the dataset in `sets`, else the file's that can be made with their defaults."""
        from fednet.data.loading import load, make_data

        if overrides(self.sets).value.get("data"):
            section = from_mapping(self.config({}), "fednet check").data
            return {section.dataset: load(section, self.root)}
        found = {}
        for name in self.datasets:
            with contextlib.suppress(ConfigError, DataError):  # its own check says why
                options = _default_options(registry.dataset, name)
                found[name] = make_data(name, options, self.root, False, 0)
        return found

    @cached_property
    def own(self) -> JsonDict:
        """The keys of a configuration of the file's first model that takes a dataset of the file,
        or else SMALL's; empty if there is none.
        """
        if overrides(self.sets).value.keys() & {"model", "data"}:
            return {}
        import torch

        for model in self.models:
            for name, data in self.data.items():
                if _takes(model, data.input_shape, data.outputs, _inputs(data)):
                    keys: JsonDict = {
                        "model": {"name": model},
                        "data": {"dataset": name, "partition": {"scheme": "iid"}},
                    }
                    if self.root is not None:
                        keys["data"]["root"] = str(self.root)
                    if data.classes is None:
                        keys["task"] = "regression"
                    return keys
            shape = tuple(SMALL["data"]["shape"])
            if _takes(model, shape, SMALL["data"]["classes"], torch.zeros(2, *shape)):
                return {"model": {"name": model}}
        return {}

    def config(self, changes: JsonMapping) -> JsonDict:
        """The configuration of a small run of a method of this file."""
        base = expand(wrap({**SMALL, **self.own, **changes}, "fednet check"))
        made: JsonDict = merge(base, overrides(self.sets)).plain()
        return made


def check(path: Path, root: Path | None = None, sets: Sequence[str] = ()) -> Iterator[str]:
    """Loads the file and checks every part that it registers. Raises ConfigError, UserFileError.
    root, sets: see `File`.
    """
    (known,) = loading.load_parts([path])
    yield f"{path}: loads (SHA-256 {known.sha256[:16]})"
    found = [
        (kind, name)
        for kind, parts in registry.ALL.items()
        for name, part in parts.own().items()
        if part.__module__ == known.module
    ]
    file = File(
        path,
        root,
        sets,
        models=[name for kind, name in found if kind == "models"],
        datasets=[name for kind, name in found if kind == "datasets"],
    )
    if not found:
        raise ConfigError(
            f'{path}: registers nothing; expected a decorator such as @fednet.algorithm("mine").'
        )
    checks: dict[str, Callable[[str], Iterator[str]]] = {
        "algorithms": functools.partial(algorithm, file=file),
        "models": functools.partial(model, file=file),
        "datasets": functools.partial(dataset, root=root),
        "partitions": partitioner,
        "selections": functools.partial(selection, file=file),
        "compressors": compressor,
        "tasks": task,
        "metrics": metric,
    }
    for kind, name in found:
        yield f"{registry.ALL[kind].kind} {name!r}"
        for line in checks[kind](name):
            yield f"  {line}" if line.startswith("NOTE: ") else f"  ok  {line}"


# -- algorithms ------------------------------------------------------------------------------------
def algorithm(name: str, file: File) -> Iterator[str]:
    """Checks a method. file: defines it; another process loads it too."""
    from fednet.algorithms.base import Algorithm

    method = registry.algorithm.get(name)
    must(
        isinstance(method, type) and issubclass(method, Algorithm),
        f"{name}: expected a subclass of fednet.Algorithm, got {method!r}.",
    )
    yield from _check_declarations(name, method)
    own: JsonDict = {"algorithm": {"name": name}}
    if method.needs_public:
        data: JsonDict = file.own.get("data") or SMALL["data"]
        own["data"] = {**data, "public": {"samples": 20}}
    changes = file.config(own)
    used = changes["model"]["name"], changes["data"]["dataset"]
    yield f"tried with the model {used[0]} and the dataset {used[1]}"
    first = yield from _repeats(name, changes, file.path, "round")
    if method.asynchronous:
        yield from _repeats(name, file.config({**own, **ASYNCHRONOUS}), file.path, "update")
    other = _differ(first, run_small_federation({**changes, "algorithm": {"name": "fedavg"}}))
    yield (
        "NOTE: the same bits as fedavg in every round: with these options it is fedavg"
        if other is None
        else f"results differ from fedavg from round {other}"
    )
    before, after = (first[n].get("tensor_sha256") or {} for n in (0, -1))
    statistics = [name for name in before if name.endswith((".running_mean", ".running_var"))]
    kept = statistics and all(before[name] == after.get(name) for name in statistics)
    if method.has_global and kept:
        yield (
            "NOTE: the global model's BatchNorm statistics never change. +, -, * and / on Tensors "
            "keep the buffers of the left operand: x + update has those of x. For the mean of the "
            "clients' buffers use accumulator.FIELD.step(x), or x.with_buffers(mean)"
        )
    code = getattr(inspect.unwrap(method.server_update), "__code__", None)
    uses_n = code is not None and "clients" in code.co_names
    if uses_n and method.with_more_clients is Algorithm.with_more_clients:
        yield (
            "NOTE: server_update uses the number of clients, and with_more_clients is not defined. "
            "If Server keeps a mean over all clients, define it: clients may join a run"
        )
    must(
        first[0]["model_sha256"] != first[-1]["model_sha256"] or not method.has_global,
        f"{name}: model_sha256 is the same after both rounds, so {name}.Server."
        f"{method.model_field or '*'} is not what is trained, or is changed in place; declare "
        f"the shared model as Weights, and return a new Server.",
    )


def _check_declarations(name: str, method: type[Algorithm]) -> Iterator[str]:
    """Checks a method's declarations."""
    from fednet.algorithms.state import State
    from fednet.wire.payload import Payload

    settings = _with_defaults(method.Config, f"{name}.Config")
    made = method(settings, CLIENTS)
    yield f"Config() builds: {msgspec.to_builtins(settings) or 'no hyper-parameters'}"
    for exchange in method.exchanges:
        for way, payload in (("down", exchange.down), ("up", exchange.up)):
            must(
                isinstance(payload, type) and issubclass(payload, Payload),
                f"{name}: {way} of {exchange.label} is {payload!r}, expected a Payload.",
            )
            crosses = ", ".join(f"{n} ({f.kind})" for n, f in payload.fields.items())
            yield f"{way}: {crosses or 'nothing'}"
    for side in ("Server", "Client", "Accumulator"):
        kind = getattr(method, side)
        must(
            isinstance(kind, type) and issubclass(kind, State) and dataclasses.is_dataclass(kind),
            f"{name}.{side}: expected a subclass of fednet.State, got {kind!r}.",
        )
    kept = set(vars(made)) - {"config", "clients"}
    must(
        not kept,
        f"{name}: __init__ keeps {', '.join(sorted(kept))} on self; what lives between rounds "
        f"belongs in Server or Client.",
    )
    yield "states are declared, and __init__ keeps nothing on self"


def _repeats(
    name: str, changes: JsonDict, file: Path, step: str
) -> Generator[str, None, list[JsonDict]]:
    """Checks that a small run trains, and that it gives the same bits again, also when it is killed
    and resumed. Returns its rounds. step: what a row of its rounds is, a round or an update.
    """
    first = run_small_federation(changes)
    so = "" if step == "round" else "without rounds (schedule: async), "
    # Dropped clients first: a round without replies has no loss either.
    left_out = [f"{step} {r['round']}: {r['dropped']}" for r in first if r["dropped"]]
    must(not left_out, f"{name}: {so}clients were left out of {'; '.join(left_out[:1])}.")
    losses = [r.get("train_loss") for r in first]
    must(
        all(loss is not None and np.isfinite(loss) for loss in losses),
        f"{name}: {so}a training loss is not finite: {losses}.",
    )
    yield f"{so}{len(first)} {step}s: training loss {losses[0]:.4f}, then {losses[-1]:.4f}"
    must(
        _differ(first, run_small_federation(changes)) is None,
        f"{name}: {so}the same configuration gave other bits the second time; draw from "
        f"host.rng(purpose) only, and keep nothing on self.",
    )
    yield f"{so}the same configuration gives the same bits"
    again = _differ(first, run_killed_and_resumed(changes, [file]))
    must(
        again is None,
        f"{name}: {so}killed in {step} {KILLED} and resumed, it gave other bits from "
        f"{step} {again}; what lives between {step}s belongs in Server or Client, and not on "
        f"self.",
    )
    yield f"{so}killed in {step} {KILLED} and resumed, it gives the same bits"
    return first


def _differ(a: list[JsonDict], b: list[JsonDict]) -> int | None:
    """The first round whose model or clients differ; None if all are the same."""
    for left, right in zip(a, b, strict=True):
        if any(left[k] != right[k] for k in ("model_sha256", "clients_sha256")):
            return int(left["round"])
    return None


# -- other parts ----------------------------------------------------------------------------------
def model(name: str, file: File) -> Iterator[str]:
    """Checks a model. file: its datasets are tried before the usual inputs."""
    import torch

    from fednet import models
    from fednet.experiment.trial import tensor
    from fednet.models.calls import required_arguments
    from fednet.tensors import Layout

    yield f"options build: {_default_options(registry.model, name) or 'none'}"
    refused: list[str] = []
    built = None
    tries: list[tuple[tuple[int, ...], int, Inputs, str]] = [
        (data.input_shape, data.outputs, _inputs(data), f"samples of the dataset {shown!r}")
        for shown, data in file.data.items()
    ]
    tries += [
        ((3, 32, 32), 5, torch.zeros(2, 3, 32, 32), "images of shape (3, 32, 32)"),
        ((1, 28, 28), 5, torch.zeros(2, 1, 28, 28), "images of shape (1, 28, 28)"),
        ((16,), 5, torch.zeros(2, 16), "vectors of shape (16,)"),
        ((16,), 5, torch.zeros(2, 16, dtype=torch.int64), "tokens of shape (16,)"),
    ]
    for shape, classes, inputs, kind in tries:
        try:
            built = models.build({"name": name}, shape, classes, 0)
            if not isinstance(inputs, dict) and len(named := required_arguments(built)) > 1:
                yield (
                    f"NOTE: its forward takes {' and '.join(named)}, so its dataset has to give a "
                    f"dict of these as x; it is tried when a run starts, or here with --set "
                    f"data=DATASET"
                )
                break
            out = tensor(f"model {name}", built.eval()(inputs))
            yield f"{kind} give outputs {tuple(out.shape[1:])}"
            break
        # It is not for inputs of this shape.
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, ConfigError) as wrong:
            refused.append(f"{kind}: {wrong}")
            built = None
    if built is None:
        raise ConfigError(f"{name}: takes none of these inputs: {'; '.join(refused)}")
    head = getattr(built, "head", None)
    features = getattr(built, "features", None)
    if head is None or not callable(features):
        yield (
            "NOTE: without .head and features(x): methods that look at features, such as moon and "
            "fedproto, refuse it; those that split a model take its last nn.Linear for the head"
        )
    a, b, c = (
        torch.cat([p.detach().flatten() for p in m.parameters()])
        for m in (models.build({"name": name}, shape, classes, seed) for seed in (0, 0, 1))
    )
    must(
        torch.equal(a, b),
        f"{name}: one seed gave two initialisations; draw from torch's own generator only.",
    )
    must(not torch.equal(a, c), f"{name}: two seeds gave one initialisation.")
    yield f"initialised by the seed: {models.bytes_of(built) / 1e6:.3f} MB"
    trained = [(n, p.dtype) for n, p in built.named_parameters() if p.requires_grad]
    if not all(kind == torch.float32 for _, kind in trained):
        yield (
            "NOTE: not all parameters are float32: this model can be trained in a part only, by "
            "model.adapters or train.only"
        )
    else:
        Layout.of(built)


def _takes(model: str, shape: tuple[int, ...], classes: int, inputs: Inputs) -> bool:
    """Whether the model gives outputs for these inputs."""
    from fednet import models
    from fednet.experiment.trial import tensor

    try:
        tensor(model, models.build({"name": model}, shape, classes, 0).eval()(inputs))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, ConfigError):
        return False
    return True


def _inputs(data: Data) -> Inputs:
    """Returns two training samples as a model's inputs."""
    from fednet.experiment.trial import samples

    return data.inputs(samples(data)[0])


def dataset(name: str, root: Path | None) -> Iterator[str]:
    """root: the folder that it reads (default: as `fednet run` finds it)."""
    from fednet.data.loading import make_data
    from fednet.data.reading import place

    if takes(registry.dataset.get(name), "root"):
        yield f"its root is {place(root)} (--data, else FEDNET_DATA, else the user's cache)"
    options = _default_options(registry.dataset, name)
    first, second = (make_data(name, options, root, False, 0) for _ in range(2))
    sizes = f"{len(first.train[1])} training and {len(first.test[1])} test samples"
    yield f"{sizes}, classes {first.classes}, inputs of shape {first.input_shape}"
    must(len(first.test[1]) > 0, f"{name}: has no test samples.")
    must(
        first.sha256() == second.sha256(),
        f"{name}: two readings gave other samples; draw from torch's, NumPy's or Python's own "
        f"generator, which have a fixed seed while a dataset is made, or from one with a seed.",
    )
    yield "loading the data twice gives the same data"
    yield from (f"NOTE: {note}" for note in first.notes)


def partitioner(name: str) -> Iterator[str]:
    from fednet.data.reading import call

    part = registry.partitioner.get(name)
    options = _default_options(registry.partitioner, name)

    def divided() -> list[np.ndarray]:
        given = {
            "y": np.arange(200) % 4,
            "groups": np.arange(200) % CLIENTS,
            "clients": CLIENTS,
            "rng": streams.rng(0, "partition"),
            "pool": np.arange(200),
        }
        return [np.sort(np.asarray(p)) for p in call(part, given, options, name)]

    first = divided()
    second = divided()
    must(len(first) == CLIENTS, f"{name}: {len(first)} parts for {CLIENTS} clients.")
    everything = np.concatenate(first)
    must(len(np.unique(everything)) == len(everything), f"{name}: a sample was given twice.")
    must(
        len(everything) > 0 and everything.min() >= 0 and everything.max() < 200,
        f"{name}: an index is outside the 200 samples.",
    )
    yield f"{CLIENTS} disjoint parts of {', '.join(str(len(p)) for p in first)} samples"
    must(
        all(np.array_equal(a, b) for a, b in zip(first, second)),
        f"{name}: one seed gave two divisions; draw from `rng` only.",
    )
    yield "the same seed gives the same division"


def selection(name: str, file: File) -> Iterator[str]:
    """Checks a selection, on made-up clients and in small runs. file: defines it."""
    from fednet.data.reading import call
    from fednet.records.manifest import Candidate
    from fednet.server import candidates

    part = registry.selection.get(name)
    options = _default_options(registry.selection, name)
    known = [
        Candidate(
            id=i, n=10 + i, round=1 + i % 4, times=1, loss=1 / (1 + i), seconds=float(1 + i % 3)
        )
        for i in range(0, 20, 2)
    ]
    known += [Candidate(id=i, n=10 + i) for i in range(1, 20, 2)]
    known.sort(key=lambda one: one.id)

    def chosen() -> list[int]:
        rng = streams.rng(0, "selection", 5)
        given = {"round": 5, "available": list(known), "asked": 4, "rng": rng}
        return candidates.check_selected(part, call(part, given, options, "selection"), known, 4)

    first = chosen()
    must(first == chosen(), f"{name}: one seed gave two selections; draw from `rng` only.")
    yield f"of 20 clients selects {', '.join(map(str, first))}"
    yield from _repeats(name, file.config({"selection": {"name": name}}), file.path, "round")


def compressor(name: str) -> Iterator[str]:
    import torch

    from fednet.wire import compress

    options = options_of(registry.compressor.get(name))
    needed = [f.name for f in msgspec.structs.fields(options) if f.required] if options else []
    if needed:
        yield f"takes ({', '.join(needed)}): nothing more is tried without them"
        return
    chain = compress.parse([name])
    vector = torch.from_numpy(streams.rng(0, "check").standard_normal(1000).astype("float32"))
    data = chain.encode(vector, streams.rng(0, "compress"))
    size, exact = chain.nbytes(1000)
    must(
        len(data) == size if exact else len(data) <= size,
        f"{name}: 1000 values took {len(data)} bytes, {size} were announced.",
    )
    back = chain.decode(data, 1000)
    must(tuple(back.shape) == (1000,), f"{name}: 1000 values came back as {tuple(back.shape)}.")
    error = float((back - vector).abs().max())
    yield f"1000 values in {len(data)} of 4000 bytes, largest error {error:.3g}"


def task(name: str) -> Iterator[str]:
    import torch

    from fednet.experiment.trial import check_counts, scalar, unlike_losses

    made = registry.task.get(name)()
    for method in ("loss", "losses", "counts"):
        must(callable(getattr(made, method, None)), f"{name}: expected the method {method}.")
    classes = torch.eye(4, requires_grad=True), torch.arange(4)
    values = torch.linspace(0, 1, 4, requires_grad=True), torch.linspace(0, 1, 4)
    for outputs, y in (classes, values):
        outputs.loss = outputs.mean()  # type: ignore[attr-defined]  # as some models compute it
        try:
            given = made.loss(outputs, y)
        except (RuntimeError, ValueError, ConfigError):
            continue
        loss = scalar(name, made, given)
        correct, total = check_counts(name, made, outputs, y).sum(1).tolist()
        yield f"loss {loss.item():.4f}, accuracy {correct / total:.4f} on four easy samples"
        yield from (f"NOTE: {remark}" for remark in unlike_losses(name, made, outputs, y))
        return
    # neither classes nor values: the shapes of its targets are unknown
    yield "has loss, losses and counts"


def metric(name: str) -> Iterator[str]:
    import torch

    from fednet.training import metrics
    from fednet.training.evaluation import evaluate

    needed = metrics.counts_needed([name])
    yield f"needs {', '.join(needed) or 'loss'}"
    task = registry.task.get("classification")()
    if any(count != "n" and not hasattr(task, f"count_{count}") for count in needed):
        return  # counts of the user's own task
    samples = torch.eye(4)[[0, 1, 2, 3, 0]], torch.tensor([0, 1, 2, 3, 1])
    counts = evaluate(torch.nn.Identity(), samples, task, more=needed)
    for value in counts.metrics([name]).values():
        yield f"{value:.4f} on five samples, one of them wrong"


# -- small federations ----------------------------------------------------------------------------
def run_small_federation(changes: JsonMapping) -> list[JsonDict]:
    """The rounds of a small federation."""
    with tempfile.TemporaryDirectory(prefix="fednet-check-") as folder:
        return _run(changes, Path(folder))


def run_killed_and_resumed(changes: JsonMapping, files: Sequence[Path]) -> list[JsonDict]:
    """The rounds of a run whose process is killed when round `KILLED` is recorded and not yet in a
    checkpoint, so that all it kept in memory is lost. files: to be loaded there.
    """
    with tempfile.TemporaryDirectory(prefix="fednet-check-") as folder:
        words = [json.dumps(dict(changes)), folder, *map(str, files)]
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False
        )
        if child.returncode != -signal.SIGKILL:
            last = "".join(child.stderr.strip().splitlines()[-1:])
            raise CannotGoOn(
                f"the run that was to be killed in round {KILLED} ended with status "
                f"{child.returncode}: {last}"
            )
        return _run(changes, Path(folder), resume=True)


def die(changes: str, folder: str, *files: str) -> None:
    """Runs in a process of its own, and kills it during the run."""

    def kill(record: Round) -> None:
        if record.round == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    loading.load_parts(files)
    _run(json.loads(changes), Path(folder), kill)


def _run(
    changes: JsonMapping,
    out: Path,
    callback: Callable[[Round], None] | None = None,
    resume: bool = False,
) -> list[JsonDict]:
    from fednet.files import read_lines
    from fednet.launch import start
    from fednet.server.watch import ServerOptions

    config = from_mapping({**SMALL, **changes}, where="fednet check")
    how = ServerOptions(start.Silent(), ["fednet", "check"], "cpu", callback=callback)
    with start.open_directory(config, out, resume) as (own, directory, _):
        start.run_in_process(own, directory, how)
        return list(read_lines(directory / "rounds.jsonl"))


# -- helpers --------------------------------------------------------------------------------------
def _default_options(parts: registry.Registry, name: str) -> JsonDict:
    """The options of a part with their defaults. Raises ConfigError if one has no default."""
    from fednet.config.parts import declared_options

    declared = declared_options(parts.get(name), parts.kind)
    if declared is None:  # it takes any
        return {}
    made: JsonDict = msgspec.to_builtins(_with_defaults(declared, f"options of {name}"))
    return made


def _with_defaults(make: Callable[[], T], what: str) -> T:
    try:
        return make()
    except TypeError as wrong:
        raise ConfigError(
            f"{what}: every option needs a default to be checked here ({wrong})."
        ) from None


def must(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)
