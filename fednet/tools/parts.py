"""The checks of `fednet check` for a model, a dataset, a partition, a compressor and a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from fednet import registry
from fednet import seeds as streams
from fednet.errors import ConfigError
from fednet.options import options_of, takes

T = TypeVar("T")

if TYPE_CHECKING:
    from fednet.tensors import Inputs

CLIENTS = 3  # of a partition


def model(name: str) -> Iterator[str]:
    import torch

    from fednet import models
    from fednet.config.parts import declared_options
    from fednet.experiment.trial import tensor
    from fednet.tensors import Layout

    options = declared_options(registry.model.get(name), "model")
    own = None if options is None else built_of(options, f"options of {name}", "model")
    yield f"options build: {'any' if own is None else msgspec.to_builtins(own) or 'none'}"
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
            out = tensor(f"model {name}", built.eval()(inputs))
        except (RuntimeError, ValueError, ConfigError) as wrong:  # not for inputs of this shape
            tried.setdefault(str(wrong).removesuffix("."), f"{shape}{kind}")
            built = None
            continue
        break
    if built is None:
        said = [f"{shape}: {wrong}" for wrong, shape in tried.items()]
        raise ConfigError(
            f"{name}: takes none of the usual inputs ({'; '.join(said)})."
            if len(said) > 1
            else f"{next(iter(tried))}."
        )
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
    from fednet.config.parts import declared_options
    from fednet.data.loading import made, place

    root = place(None, data)
    if takes(registry.dataset.get(name), "root"):
        yield f"its root is {root} (--data, else FEDNET_DATA, else the user's cache)"
    declared = declared_options(registry.dataset.get(name), "dataset")
    options = (
        {}
        if declared is None
        else msgspec.to_builtins(built_of(declared, f"options of {name}", "dataset"))
    )
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
        {k: tuple(v.shape) for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(inputs.shape[1:])
    )
    yield f"inputs of a model: {shown}"


def partitioner(name: str) -> Iterator[str]:
    from fednet.config.parts import declared_options
    from fednet.data.loading import call

    part = registry.partitioner.get(name)
    declared = declared_options(part, "partitioner")
    options = (
        {}
        if declared is None
        else msgspec.to_builtins(built_of(declared, f"options of {name}", "partitioner"))
    )
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
