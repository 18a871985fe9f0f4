"""`fednet check FILE`: tests a user's own parts for what every part must do.

Each check yields a line. The first that fails raises ConfigError with what was expected, and the
next part is tested. An exception in the file itself is passed on, so that the command line shows
where it was raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fednet import loading, registry
from fednet.config import PrivacySection
from fednet.errors import ConfigError, FednetError
from fednet.plain import JsonDict
from fednet.tools import killed, parts
from fednet.tools.parts import CLIENTS, built_of, must

if TYPE_CHECKING:
    from fednet.algorithms.base import Algorithm


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
            lines = parts.dataset(name, data) if kind == "datasets" else CHECKS[kind](name)
            for line in lines:
                yield f"  ok  {line}"
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
    import sys

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


CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "algorithms": algorithm,
    "models": parts.model,
    "partitions": parts.partitioner,
    "compressors": parts.compressor,
    "tasks": parts.task,
}
