"""`fednet check FILE`: tests a user's own parts for what every part must do.

Each check yields a line. The first that fails raises ConfigError with what was expected, and the
next part is tested. An exception in the file itself is passed on, so that the command line shows
where it was raised.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from fednet import loading, registry
from fednet import seeds as streams
from fednet.config import PrivacySection
from fednet.errors import ConfigError, FednetError
from fednet.options import options_of, takes
from fednet.plain import JsonDict
from fednet.tools import killed

T = TypeVar("T")

if TYPE_CHECKING:
    from fednet.algorithms.base import Algorithm
    from fednet.tensors import Inputs

CLIENTS = 3  # of a partition


def check(path: Path, say: Callable[[str], None], data: Path | None = None) -> Iterator[str]:
    """Loads the file and checks every part that it registers. Raises ConfigError, UserFileError.
    say: is called with each error but the last, which is raised. data: the folder that datasets
    read (default: as `fednet run` finds it).
    """
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
    refused: list[tuple[str, Exception]] = []
    for kind, name in found:
        part = f"{registry.ALL[kind].kind} {name!r}"
        yield part
        try:
            lines = dataset(name, data) if kind == "datasets" else CHECKS[kind](name)
            for line in lines:
                yield f"  {line}" if line.startswith("NOTE: ") else f"  ok  {line}"
        except Exception as wrong:
            refused.append((part, wrong))
    # Last an exception of the file itself, whose traceback is printed.
    refused.sort(key=lambda one: not isinstance(one[1], FednetError))
    for part, first in refused[:-1]:
        own = isinstance(first, FednetError)
        say(f"{part}: {'' if own else f'{type(first).__name__}: '}{first}")
    if refused:
        raise refused[-1][1]


def _file_of(part: object) -> str:
    module = sys.modules.get(getattr(part, "__module__", ""))
    return str(getattr(module, "__file__", None) or "")


def _own_file(part: object) -> list[Path]:
    """The file that another process has to load to know that part; none for fednet's own."""
    own = part.__module__.partition(".")[0] == "fednet"
    return [] if own else [Path(_file_of(part))]


# -- algorithms ------------------------------------------------------------------------------------
def algorithm(name: str) -> Iterator[str]:
    from fednet.algorithms.base import Algorithm

    method = registry.algorithm.get(name)
    must(
        isinstance(method, type) and issubclass(method, Algorithm),
        f"{name}: expected a subclass of fednet.Algorithm, got {method!r}.",
    )
    yield from _declared(name, method)
    yield from _roles(name, method)
    changes: JsonDict = {"algorithm": {"name": name}}
    if method.needs_public:
        changes["data"] = {**killed.SMALL["data"], "public": {"samples": 20}}
    first, second = killed.trained(changes), killed.trained(changes)
    # Dropped clients first: a round without replies has no loss either.
    left_out = [f"round {r['round']}: {r['dropped']}" for r in first if r["dropped"]]
    must(not left_out, f"{name}: clients were left out of {'; '.join(left_out[:1])}.")
    lost = [
        r["round"] for r in first if r.get("train_loss") is None or not np.isfinite(r["train_loss"])
    ]
    must(not lost, f"{name}: the training loss of round {lost[0] if lost else ''} is not finite.")
    losses = first[0]["train_loss"], first[-1]["train_loss"]
    yield (
        f"{len(first)} rounds in one process, two of four clients each, with BatchNorm: training "
        "loss {:.4f}, then {:.4f}".format(*losses)
    )
    yield from _repeats(name, first, second, changes, _own_file(method))
    if method.asynchronous:
        yield from _without_rounds(name, changes, _own_file(method))
    other = _differ(first, killed.trained({**changes, "algorithm": {"name": "fedavg"}}))
    yield (
        "NOTE: the same bits as fedavg in every round: with these options it is fedavg"
        if other is None
        else f"results differ from fedavg from round {other}"
    )
    if method.has_global and _keeps_statistics(first):
        yield (
            "NOTE: the global model's BatchNorm statistics never change. +, -, * and / on Tensors "
            "keep the buffers of the left operand: x + update has those of x. For the mean of the "
            "clients' buffers use accumulator.FIELD.step(x), or x.with_buffers(mean)"
        )
    must(
        first[0]["model_sha256"] != first[-1]["model_sha256"] or not method.has_global,
        f"{name}: model_sha256 is the same after both rounds, so {name}.Server."
        f"{method.model_field or '*'} is not what is trained, or is changed in place; declare "
        f"the shared model as Weights, and return a new Server.",
    )


def _repeats(
    name: str,
    first: list[JsonDict],
    second: list[JsonDict],
    changes: JsonDict,
    files: list[Path],
) -> Iterator[str]:
    """Checks that runs repeat. first, second: the rounds of two runs of one configuration."""
    so, round = ("without rounds, ", "update") if "schedule" in changes else ("", "round")
    must(
        _differ(first, second) is None,
        f"{name}: {so}the same configuration gave other bits the second time; draw from "
        f"host.rng(purpose) only, and keep nothing on self.",
    )
    yield "the same configuration gives the same bits"
    again = _differ(first, killed.resumed(changes, files))
    must(
        again is None,
        f"{name}: {so}killed in {round} {killed.KILLED} and resumed, it gave other bits from "
        f"{round} {again}; what lives between {round}s belongs in Server or Client, and not on "
        f"self.",
    )
    yield f"killed in {round} {killed.KILLED} and resumed, it gives the same bits"


def _without_rounds(name: str, changes: JsonDict, files: list[Path]) -> Iterator[str]:
    """Checks the method with asynchronous training: each reply is an update, and some are stale."""
    asked = {**changes, **killed.ASYNCHRONOUS}
    first = killed.trained(asked)
    left_out = [f"update {r['round']}: {r['dropped']}" for r in first if r["dropped"]]
    must(not left_out, f"{name}: without rounds clients were left out of {left_out[:1]}.")
    stale = max(max(r["staleness"], default=0) for r in first)
    must(stale > 0, f"{name}: no reply was stale in {len(first)} updates without rounds.")
    losses = [r.get("train_loss") for r in first]
    must(
        all(loss is not None and np.isfinite(loss) for loss in losses),
        f"{name}: without rounds (schedule: async) a training loss is not finite: {losses}.",
    )
    yield f"{len(first)} updates without rounds (schedule: async), replies up to {stale} stale"
    yield from _repeats(name, first, killed.trained(asked), asked, files)


def _declared(name: str, method: type[Algorithm]) -> Iterator[str]:
    """Checks a method's declarations."""
    from fednet.algorithms.state import State
    from fednet.wire.payload import Payload

    settings = built_of(method.Config, f"{name}.Config")
    made = method(settings, CLIENTS)
    if re.search("arXiv:|https?://|doi", vars(method).get("paper", "")) is None:
        yield (
            "NOTE: paper has no link, which `fednet list algorithms` shows: write it as "
            'paper = "Authors, Venue Year (arXiv:1602.05629)"'
        )
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
            isinstance(kind, type) and issubclass(kind, State),
            f"{name}.{side}: expected a subclass of fednet.State, got {kind!r}.",
        )
        must(dataclasses.is_dataclass(kind), f"{name}.{side}: expected a declared record.")
    kept = set(vars(made)) - {"config", "clients"}
    must(
        not kept,
        f"{name}: __init__ keeps {', '.join(sorted(kept))} on self; what lives between rounds "
        f"belongs in Server or Client.",
    )
    yield "states are declared, and __init__ keeps nothing on self"


def _roles(name: str, method: type[Algorithm]) -> Iterator[str]:
    """Checks what clipping, `security.max_norm` and the hashes work on, which follows from the
    declared types of the fields.
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
        values: dict[str, object] = dict.fromkeys(exchange.up.fields, Run(3, 1, 0.0))
        for n, f in exchange.up.fields.items():
            if f.form in ("tensors", "parameters"):
                values[n] = x + change if f.kind == "state" else change
        up, sent = exchange.up(**values), weights_of(down)
        for field, _, norm in privacy.updates(up, sent):
            must(
                norm == change.norm(),
                f"{name}: {field} of {exchange.label} is sent up as weights, and nothing that goes "
                f"down is declared Weights: its update could not be measured.",
            )
            measured.append(field)
        run = run_of(privacy.received(up, sent, PrivacySection(clip=1.0)))
        must(
            run is not None or not method.sums_updates,
            f"{name}: sums_updates, and nothing in {exchange.label} is declared Statistics: "
            f"privacy.clip could not make every client count the same.",
        )
    yield f"updates that security.max_norm bounds: {', '.join(measured) or 'none is sent'}"


def _keeps_statistics(rounds: list[JsonDict]) -> bool:
    """Whether the shared model has BatchNorm statistics, and they are the same after all rounds."""
    before, after = (rounds[n].get("tensor_sha256") or {} for n in (0, -1))
    statistics = [name for name in before if name.endswith((".running_mean", ".running_var"))]
    return bool(statistics) and all(before[name] == after.get(name) for name in statistics)


def _differ(a: list[JsonDict], b: list[JsonDict]) -> int | None:
    """The first round whose model or clients differ; None if all are the same."""
    for left, right in zip(a, b, strict=True):
        if any(left[k] != right[k] for k in ("model_sha256", "clients_sha256")):
            return int(left["round"])
    return None


# -- other parts ----------------------------------------------------------------------------------
def model(name: str) -> Iterator[str]:
    import torch

    from fednet import models
    from fednet.experiment.trial import tensor
    from fednet.models.calls import required
    from fednet.tensors import Layout

    own = _default_options("model", name)
    yield f"options build: {'any' if own is None else own or 'none'}"
    tried: dict[str, str] = {}
    built = None
    for shape, inputs, kind in (
        ((3, 32, 32), torch.zeros(2, 3, 32, 32), ""),
        ((1, 28, 28), torch.zeros(2, 1, 28, 28), ""),
        ((16,), torch.zeros(2, 16), ""),
        ((16,), torch.zeros(2, 16, dtype=torch.int64), " of whole numbers (tokens)"),
    ):
        try:
            built = models.build({"name": name}, shape, 5, 0)
            if len(named := required(built)) > 1:
                break
            out = tensor(f"model {name}", built.eval()(inputs))
        # It is not for inputs of this shape, or takes a dict.
        except (RuntimeError, ValueError, TypeError, IndexError, ConfigError) as wrong:
            tried.setdefault(str(wrong).removesuffix("."), f"{shape}{kind}")
            built = None
            continue
        break
    if built is None:
        said = [f"{shape}: {wrong}" for wrong, shape in tried.items()]
        raise ConfigError(
            f"{name}: takes none of the usual inputs ({'; '.join(said)}). If its dataset gives a "
            f"dict, let its forward have a parameter for each input, and it is called by name."
            if len(said) > 1
            else f"{next(iter(tried))}."
        )
    if len(named) > 1:
        yield (
            f"NOTE: its forward takes {' and '.join(named)}, so its dataset has to give a dict of "
            f"these as x; it is tried when a run starts"
        )
    else:
        free = not takes(registry.model.get(name), "classes")
        # A class for each input, or one at each of its positions.
        alike = 5 in (out.shape[-1], *out.shape[1:2])
        must(
            tuple(out.shape[:1]) == (2,) and (free or alike),
            f"{name}: two inputs in 5 classes gave {tuple(out.shape)}, expected (2, 5).",
        )
        yield f"inputs {shape}{kind} give outputs {tuple(out.shape[1:])}"
        yield from _parted(name, built, inputs)
    again, other = (
        models.build({"name": name}, shape, 5, 0),
        models.build({"name": name}, shape, 5, 1),
    )
    a, b, c = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (built, again, other)
    )
    must(
        torch.equal(a, b),
        f"{name}: one seed gave two initialisations; draw from torch's own generator only.",
    )
    must(not torch.equal(a, c), f"{name}: two seeds gave one initialisation.")
    yield f"initialised by the seed: {Layout.of(built).nbytes / 1e6:.3f} MB"


def _parted(name: str, built: Any, x: Inputs) -> Iterator[str]:
    """Checks a model that has a separate head. Yields what it found."""
    import torch

    from fednet import models

    head, features = getattr(built, "head", None), getattr(built, "features", None)
    must(
        head is None or isinstance(head, torch.nn.Linear),
        f"{name}: expected .head, the last nn.Linear.",
    )
    # A plain module may have one of the two names for another part.
    lacks = [".head"] * (head is None) + ["features(x)"] * (not callable(features))
    if lacks:
        yield (
            f"NOTE: without {' and '.join(lacks)}: methods that look at features, such as moon and "
            f"fedproto, refuse it; those that split a model take its last nn.Linear for the head"
        )
        return
    inner = built.projection(x) if hasattr(built, "projection") else built.features(x)
    must(
        inner.shape[-1] == built.head.in_features,
        f"{name}: features(x) ends in {inner.shape[-1]}, .head takes {built.head.in_features}.",
    )
    yield f"body and head: {', '.join(models.head_names(built))}"


def dataset(name: str, data: Path | None = None) -> Iterator[str]:
    """data: the folder that it reads (default: as `fednet run` finds it)."""
    from fednet.data.base import IGNORED
    from fednet.data.loading import made, place

    root = place(None, data)
    if takes(registry.dataset.get(name), "root"):
        yield f"its root is {root} (--data, else FEDNET_DATA, else the user's cache)"
    options = _default_options("dataset", name) or {}
    first, second = (made(name, options, root, False, 0) for _ in range(2))
    sizes = f"{len(first.train[1])} training and {len(first.test[1])} test samples"
    yield f"{sizes}, classes {first.classes}"
    must(len(first.test[1]) > 0, f"{name}: has no test samples.")
    must(
        first.sha256() == second.sha256(),
        f"{name}: two readings gave other samples; draw from torch's, NumPy's or Python's own "
        f"generator, which have a fixed seed while a dataset is made, or from one with a seed.",
    )
    yield "loading the data twice gives the same data"
    yield from (f"NOTE: {note}" for note in first.notes)
    x = first.train[0]
    some = {k: v[:2] for k, v in x.items()} if isinstance(x, dict) else x[:2]
    inputs = first.inputs(some)
    shown = (
        {k: tuple(v.shape[1:]) for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(inputs.shape[1:])
    )
    yield f"inputs of a model: {shown}"
    y = first.train[1]
    if y.ndim > 1 and first.classes is not None:
        none = int((y == IGNORED).sum()) / y.numel()
        yield f"labels of a sample: {tuple(y.shape[1:])}, {none:.1%} of them without a label (-100)"


def partitioner(name: str) -> Iterator[str]:
    from fednet.data.loading import call

    part = registry.partitioner.get(name)
    options = _default_options("partitioner", name) or {}
    y = np.arange(200) % 4

    def divided() -> list[np.ndarray]:
        given = {
            "y": y,
            "groups": np.arange(200) % CLIENTS,
            "clients": CLIENTS,
            "rng": streams.rng(0, "partition"),
            "pool": np.arange(200),
        }
        return [np.sort(np.asarray(p)) for p in call(part, given, options, name)]

    first, second = divided(), divided()
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


def compressor(name: str) -> Iterator[str]:
    from fednet.wire import compress

    options = options_of(registry.compressor.get(name))
    needed = [f.name for f in msgspec.structs.fields(options) if f.required] if options else []
    if needed:
        yield f"takes ({', '.join(needed)}): nothing more is tried without them"
        return
    chain = compress.parse([name])
    import torch

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

    from fednet.experiment.trial import counted, scalar

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
        counts = counted(name, made, outputs, y)
        found = (
            f"loss {loss.item():.4f}, accuracy {int(counts[0].sum()) / int(counts[1].sum()):.4f}"
        )
        yield f"{found} on four easy samples"
        if hasattr(made, "accuracy"):
            yield "NOTE: accuracy() is not called: accuracy is correct over total of counts"
        return
    # neither classes nor values: the shapes of its targets are unknown
    yield "has loss, losses and counts"


# -- helpers --------------------------------------------------------------------------------------
def _default_options(kind: str, name: str) -> JsonDict | None:
    """The options of a part with their defaults; None: it takes any. Raises ConfigError if one has
    no default.
    """
    from fednet.config.parts import declared_options

    parts: registry.Registry = getattr(registry, kind)
    declared = declared_options(parts.get(name), kind)
    if declared is None:
        return None
    made: JsonDict = msgspec.to_builtins(built_of(declared, f"options of {name}", kind))
    return made


def metric(name: str) -> Iterator[str]:
    import torch

    from fednet.training import metrics
    from fednet.training.evaluation import evaluate

    needed = metrics.needed([name])
    yield f"needs {', '.join(needed) or 'loss'}"
    task = registry.task.get("classification")()
    if any(count != "n" and not hasattr(task, f"count_{count}") for count in needed):
        return  # counts of the user's own task
    samples = torch.eye(4)[[0, 1, 2, 3, 0]], torch.tensor([0, 1, 2, 3, 1])
    counts = evaluate(torch.nn.Identity(), samples, task, more=needed)
    for value in counts.metrics([name]).values():
        yield f"{value:.4f} on five samples, one of them wrong"


def built_of(make: Callable[[], T], what: str, kind: str = "") -> T:
    try:
        return make()
    except TypeError as wrong:
        from fednet.config.parts import gives

        given = f"; {gives(kind)}" if kind else ""
        raise ConfigError(
            f"{what}: every option needs a default to be checked here ({wrong}){given}."
        ) from None


def must(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "algorithms": algorithm,
    "models": model,
    "partitions": partitioner,
    "compressors": compressor,
    "tasks": task,
    "metrics": metric,
}
