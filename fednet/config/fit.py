"""Fits a tree to a declared type, and says in one sentence where it does not."""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from fednet.config.tree import Node
from fednet.errors import ConfigError, nearest

S = TypeVar("S", bound=msgspec.Struct)

# What other systems call our keys, so that a habit meets an answer.
ELSEWHERE = {
    "comm_round": "rounds",
    "comm_rounds": "rounds",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "n_rounds": "rounds",
    "num_server_rounds": "rounds",
    "communication_rounds": "rounds",
    "total_rounds": "rounds",
    "join_ratio": "participation",
    "fraction_fit": "participation",
    "fraction_train": "participation",
    "frac": "participation",
    "sample_rate": "participation",
    "sample_fraction": "participation",
    "client_fraction": "participation",
    "c": "participation",
    "num_clients": "clients",
    "n_clients": "clients",
    "client_num_in_total": "clients",
    "num_users": "clients",
    "n_parties": "clients",
    "client_num_per_round": "clients_per_round",
    "num_join_clients": "clients_per_round",
    "min_fit_clients": "clients_per_round",
    "local_epochs": "train.epochs",
    "local_epoch": "train.epochs",
    "local_ep": "train.epochs",
    "epochs": "train.epochs",
    "e": "train.epochs",
    "local_steps": "train.steps",
    "lr_local": "train.lr",
    "local_lr": "train.lr",
    "learning_rate": "train.lr",
    "local_learning_rate": "train.lr",
    "eta": "train.lr",
    "batch": "train.batch_size",
    "local_bs": "train.batch_size",
    "bs": "train.batch_size",
    "client_optimizer": "train.optimizer",
    "wd": "train.weight_decay",
    "reg": "train.weight_decay",
    "rho": "train.momentum",
    "grad_clip": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "lr_decay": "train.schedule",
    "lr_scheduler": "train.schedule",
    "eval_gap": "evaluate.every",
    "eval_every": "evaluate.every",
    "frequency_of_the_test": "evaluate.every",
    "eval_batch_size": "evaluate.batch_size",
    "dir_alpha": "data.partition.alpha",
    "dirichlet_alpha": "data.partition.alpha",
    "partition_alpha": "data.partition.alpha",
    "partition_method": "data.partition.scheme",
    "partitioner": "data.partition.scheme",
    "data_dir": "data.root",
    "datadir": "data.root",
    "random_seed": "seed",
    "init_seed": "seed",
    "strategy": "algorithm",
    "federated_optimizer": "algorithm",
    "alg": "algorithm",
    "aggregator": "algorithm",
    "method": "algorithm",
    "arch": "model",
    "net": "model",
    "net_config": "model",
    "backbone": "model",
    "timeout": "round.deadline",
    "round_timeout": "round.deadline",
    "exp_name": "name",
    "run_name": "name",
    "job_name": "name",
    "target_accuracy": "stop.accuracy",
    "compression": "wire",
    "save_every": "checkpoint.every",
    "noise_multiplier": "privacy.noise",
    "clipping_norm": "privacy.clip",
    "user_files": "load",
    "plugins": "load",
}


def wrong(node: Node, path: str, expected: str, got: Any = ...) -> ConfigError:
    """The error for a value that does not fit: place, key, what is allowed, what was found."""
    return ConfigError(
        f"{node.at}: {path or 'the configuration'}: expected {expected}, got "
        f"{_show(node.value if got is ... else got)}."
    )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return (
        "null"
        if value is None
        else ("true" if value else "false")
        if isinstance(value, bool)
        else repr(value)
    )


def fit(node: Node, kind: Any, path: str = "") -> Any:
    """`node` as a value of the declared type. Raises ConfigError for the first thing that does not
    fit.
    """
    plain, origin = _bare(kind), get_origin(_bare(kind))
    if origin in (Union, types.UnionType):
        options = get_args(plain)
        if node.value is None and type(None) in options:
            return None
        structured = [o for o in options if _shape(o) in ("struct", "list", "dict")]
        if structured and isinstance(node.value, (dict, list)):
            return fit(node, structured[0], path)
        return _leaf(node, kind, path)
    shape = _shape(plain)
    if shape == "struct":
        return struct(node, plain, path)
    if shape == "list":
        if not isinstance(node.value, list):
            raise wrong(node, path, describe(plain))
        item = get_args(plain)[0] if get_args(plain) else Any
        made = [fit(child, item, f"{path}[{i}]") for i, child in enumerate(node.value)]
        return tuple(made) if origin is tuple else made
    if shape == "dict":
        if not isinstance(node.value, dict):
            raise wrong(node, path, describe(plain))
        item = get_args(plain)[1] if get_args(plain) else Any
        return {key: fit(child, item, f"{path}.{key}") for key, child in node.value.items()}
    return _leaf(node, kind, path)


def struct(node: Node, kind: type[S], path: str) -> S:
    """A mapping as a msgspec Struct. One that has a field `options` takes unknown keys into it; see
    `parts` for their check.
    """
    if not isinstance(node.value, dict):
        raise wrong(node, path, f"a mapping with the keys {', '.join(keys(kind))}")
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    is_open = "options" in fields
    made: dict[str, Any] = {}
    for key, child in node.value.items():
        here = f"{path}.{key}" if path else key
        if key in fields and not (is_open and key == "options"):
            made[fields[key].name] = fit(child, fields[key].type, here)
        elif is_open:
            made.setdefault("options", {})[key] = child.plain()
        else:
            raise unknown_key(child, key, path, keys(kind))
    for name, field in fields.items():
        if field.name not in made and field.required:
            raise ConfigError(
                f"{node.key_at or node.at}: {path}.{name} is missing; expected "
                f"{describe(field.type)}."
            )
    return kind(**made)


def keys(kind: Any) -> list[str]:
    return [f.encode_name for f in msgspec.structs.fields(kind) if f.name != "options"]


def unknown_key(node: Node, key: str, path: str, known: list[str]) -> ConfigError:
    """The error for a key that nobody reads, with the nearest that somebody does."""
    guess = _guess(key, path, known)
    hint = f" Did you mean {guess}?" if guess else ""
    inside = (
        f"; {path or 'the top level'} has {', '.join(known)}."
        if known
        else f"; {path} has no options."
    )
    return ConfigError(
        f"{node.key_at or node.at}: unknown key {f'{path}.{key}' if path else key}{inside}{hint}"
    )


def _guess(key: str, path: str, known: list[str]) -> str | None:
    found = _likely(key, path, known)
    return found if found != (f"{path}.{key}" if path else key) else None


def _likely(key: str, path: str, known: list[str]) -> str | None:
    low = key.lower().replace("-", "_")
    if low in known:
        return low
    named = ELSEWHERE.get(low)
    if named and named != f"{path}.{key}":
        return named
    from fednet.config.sections import homes  # a key of ours that stands in the wrong section

    close = nearest(low, known)
    at_home = [h for h in homes().get(low, []) if h != (f"{path}.{key}" if path else key)]
    if close is None and at_home:
        return at_home[0]
    if close is None:
        far = nearest(low, ELSEWHERE)
        return ELSEWHERE[far] if far else None
    return f"{path}.{close}" if path else close


# -- words for types -------------------------------------------------------------------------------
def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _shape(kind: Any) -> str:
    kind = _bare(kind)
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return "struct"
    if origin is list or (
        origin is tuple and (not get_args(kind) or get_args(kind)[-1] is Ellipsis)
    ):
        return "list"
    return "dict" if origin is dict else "leaf"


def _leaf(node: Node, kind: Any, path: str) -> Any:
    value = node.plain()
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(node, path, "a finite number")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _misfit(node, kind, path, value) from None
    except TypeError:  # an annotation of a user's function that msgspec does not know
        return value


def _misfit(node: Node, kind: Any, path: str, value: Any) -> ConfigError:
    error = wrong(node, path, describe(kind))
    choices = [str(c) for c in _choices(kind)]
    guess = nearest(value, choices) if isinstance(value, str) and choices else None
    if guess:
        return ConfigError(f"{error} Did you mean {guess}?")
    if isinstance(value, (int, float, bool)) and str in (
        _bare(kind),
        *map(_bare, get_args(_bare(kind))),
    ):
        return ConfigError(f"{error} Put it in quotes to make it text.")
    return error


def _choices(kind: Any) -> list[Any]:
    kind = _bare(kind)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return (
        [c for option in get_args(kind) for c in _choices(option)]
        if get_origin(kind) in (Union, types.UnionType)
        else []
    )


def describe(kind: Any) -> str:
    """A type in words: `a float >= 0 or null`."""
    bare, limits = _bare(kind), []
    for mark in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            bound = getattr(mark, name, None)
            if bound is not None:
                limits.append(f"{sign} {bound}")
        if getattr(mark, "description", None):
            return str(mark.description)
    origin = get_origin(bare)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(o) for o in get_args(bare))
    if origin is Literal:
        return (
            "one of " + ", ".join(str(c) for c in get_args(bare))
            if len(get_args(bare)) > 1
            else str(get_args(bare)[0])
        )
    shape = _shape(bare)
    if shape == "struct":
        return "a mapping"
    if shape == "list":
        return (
            f"a list, each item {describe(get_args(bare)[0])}"
            if get_args(bare) and get_args(bare)[0] is not Any
            else "a list"
        )
    if shape == "dict":
        return "a mapping"
    words = {
        int: "a whole number",
        float: "a float",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "a value",
    }
    return " ".join(
        [words.get(bare, getattr(bare, "__name__", str(bare))), " and ".join(limits)]
    ).strip()
