"""From files, flags and mappings to a checked `Config`, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fednet import loading
from fednet.config import fit, parts, rules
from fednet.config.schema import DIVIDES, RATES, SITE, Config, DataSection
from fednet.config.tree import Node, compose, dump, wrap
from fednet.errors import ConfigError
from fednet.plain import JsonDict, JsonMapping, fields


def load(
    path: Path | str | None = None,
    sets: Sequence[str] | JsonMapping = (),
    load_files: Sequence[Path | str] = (),
) -> Config:
    """Returns the configuration of a file (None: all defaults) with its `--set`s; its parts are
    imported and checked.

    sets: `key.path=value` texts, or a mapping from dotted keys to values. load_files: user's files
    in addition to those under `load:`, whose paths are relative to the configuration file. Raises
    ConfigError.
    """
    tree = read(Path(path)) if path is not None else Node({}, "the configuration")
    return build(tree, sets, load_files)


def build(
    tree: Node, sets: Sequence[str] | JsonMapping = (), load_files: Sequence[Path | str] = ()
) -> Config:
    """Does what `load` does, for a tree that `read` returned."""
    tree = merge(tree, overrides(sets))
    named = fit.fit(tree.value["load"], tuple[str, ...], "load") if "load" in tree.value else ()
    files = [*named, *(str(Path(f).resolve()) for f in load_files)]
    files = list(dict.fromkeys(files))
    for i, file in enumerate(named):
        if not Path(file).is_file():
            node = tree.value["load"].value[i]
            raise ConfigError(f"{node.at}: load[{i}]: there is no file {file}.")
    loading.load_parts(files)
    if files:
        tree = set_key(
            tree, "load", wrap(files, tree.value["load"].at if "load" in tree.value else "--load")
        )
    return _check(tree)


def load_mapping(mapping: JsonMapping, where: str, load_files: Sequence[Path | str] = ()) -> Config:
    """Does what `load` does, for plain values. Paths under `load` are relative to the working
    directory.
    """
    return build(_absolute_loads(expand(wrap(mapping, where)), Path.cwd()), (), load_files)


def from_mapping(
    mapping: JsonMapping, where: str = "the configuration", *, check_parts: bool = True
) -> Config:
    """Returns a configuration from plain values. Files under its `load` are not imported.

    check_parts: false imports no part and leaves the parts' options as they are.
    """
    return _check(expand(wrap(mapping, where)), check_parts)


def from_text(
    text: str, where: str, *, before: Callable[[Config], None] = lambda config: None
) -> Config:
    """Returns a configuration from YAML that a server sent. Files under its `load` are not
    imported.

    before: is called when the types are checked and before any part is made, and may raise.
    """
    tree = compose(text, where)
    if not isinstance(tree.value, dict):
        raise fit.wrong(tree, "", "a mapping of keys to values")
    return _check(expand(tree), before=before)


def _check(
    tree: Node, check_parts: bool = True, before: Callable[[Config], None] = lambda config: None
) -> Config:
    config: Config = fit.fit(tree, Config)
    inside = tree.value
    if config.clients_per_round is not None and "participation" not in inside:
        config = config.replace(participation=None)
    if not config.name:
        config = config.replace(name=f"{config.algorithm.name}-{config.data.dataset}")
    if config.train.lr is None:
        train = msgspec.structs.replace(config.train, lr=RATES[config.train.optimizer])
        config = config.replace(train=train)
    if check_parts:
        config = parts.scheduled(config, tree)
    rules.check(config, tree)
    if check_parts:
        config = parts.complete(config, tree)
        before(config)
        parts.check_chains(config, tree, rules.check_method(config, tree))
    return config


def text_of(path: Path, expected: str) -> str:
    """Returns the text of a file that a user named. Raises ConfigError if there is none, and says
    that `expected` was expected, or if it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; expected {expected}.") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(
            f"{path}: cannot be read as text ({getattr(wrong, 'strerror', wrong)})."
        ) from None


def read(path: Path, above: tuple[Path, ...] = ()) -> Node:
    """Returns the tree of a file, merged into the one that it `extends`. Paths under `load` become
    absolute.
    """
    path = path.resolve() if above else path
    tree = expand(compose(text_of(path, "a YAML configuration"), _relative(path)))
    if tree.value is None:
        tree = Node({}, tree.at)
    if not isinstance(tree.value, dict):
        raise fit.wrong(tree, "", "a mapping of keys to values")
    inside = dict(_absolute_loads(tree, path.parent).value)
    base = inside.pop("extends", None)
    tree = Node(inside, tree.at)
    if base is None:
        return tree
    if not isinstance(base.value, str):
        raise fit.wrong(base, "extends", "a file's name")
    target = (path.parent / base.value).resolve()
    if target in (*above, path.resolve()):
        raise ConfigError(f"{base.at}: extends: {base.value} leads back to itself.")
    if not target.is_file():
        raise ConfigError(f"{base.at}: extends: there is no file {target}.")
    return merge(read(target, (*above, path.resolve())), tree)


def _absolute_loads(tree: Node, folder: Path) -> Node:
    """Returns the tree with absolute paths under `load`. folder: what they are relative to."""
    named = tree.value.get("load")
    if named is None or not isinstance(named.value, list):
        return tree
    files = [
        replace(n, value=str((folder / n.value).resolve())) if isinstance(n.value, str) else n
        for n in named.value
    ]
    return Node({**tree.value, "load": replace(named, value=files)}, tree.at)


def _relative(path: Path) -> str:
    """Returns the path relative to the working directory, if it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def overrides(sets: Sequence[str] | JsonMapping) -> Node:
    """Returns all `--set`s as one layer: their order matters only if they set the same key."""
    tree = Node({}, "--set")
    if isinstance(sets, Mapping):
        for key, value in sets.items():
            tree = set_key(tree, str(key), wrap(value, f"set {key}"))
        return expand(tree)
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text}: expected key.path=value, such as train.lr=0.1.")
        tree = set_key(tree, key.strip(), compose(value, f"--set {text}", one_place=True))
    return expand(tree)


# -- layers: `extends`, then the file, then `--set` ------------------------------------------------
# The key that names a part. If a layer names another part, the earlier part's options are dropped.
SELECTORS = {section: key for section, (_, key) in parts.SECTIONS.items() if key}
SELECTORS |= {"availability": "model", "schedule": "mode"}
# Two keys for one thing: the later layer's key replaces the other.
RIVALS = {"participation": "clients_per_round", "clients_per_round": "participation"}


def expand(node: Node, path: str = "") -> Node:
    """Writes short forms in full: `algorithm: fedprox` is short for `algorithm: {name: fedprox}`;
    likewise model, data, data.partition, availability, schedule.
    """
    if isinstance(node.value, str) and path in SELECTORS:
        return Node({SELECTORS[path]: Node(node.value, node.at, node.key_at)}, node.at, node.key_at)
    if path == "model":
        node = _with_others(node)
    if path in ("", "data") and isinstance(node.value, dict):
        inner = {k: expand(n, f"{path}.{k}" if path else k) for k, n in node.value.items()}
        return Node(inner, node.at, node.key_at, node.fresh)
    return node


def _with_others(node: Node) -> Node:
    """Returns a list of models as the first one with the rest under `others`."""
    if not isinstance(node.value, list) or not node.value:
        return node
    first, *rest = node.value
    if not isinstance(first.value, dict):
        return node
    others = Node(rest, node.at, node.key_at)
    own = dict(first.value)
    if "clients" in own and isinstance(own["clients"].value, int):
        own["clients"] = Node(str(own["clients"].value), own["clients"].at, own["clients"].key_at)
    return Node({**own, "others": others}, node.at, node.key_at)


def merge(base: Node, over: Node, path: str = "") -> Node:
    """Returns `base` with the keys of `over`; lists and scalars are replaced."""
    if over.fresh or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    kept = dict(base.value)
    selector = SELECTORS.get(path, "")
    old, new = kept.get(selector), over.value.get(selector)
    if old is not None and new is not None and old.value != new.value:
        # With another dataset only the old one's options are dropped; partition and splits stay if
        # the run divides the new one.
        stay = set(DataSection.__struct_encode_fields__) if path == "data" else set()
        if new.value == SITE:
            stay -= set(DIVIDES)
        kept = {k: n for k, n in kept.items() if k in stay}
    for key, node in over.value.items():
        rival = RIVALS.get(key, "") if not path else ""
        if rival and rival not in over.value:
            kept.pop(rival, None)
        if key in kept:
            kept[key] = merge(kept[key], node, f"{path}.{key}" if path else key)
        else:
            kept[key] = node
    return Node(kept, over.at, over.key_at or base.key_at)


def set_key(tree: Node, dotted: str, value: Node, above: str = "") -> Node:
    """Returns `tree` with `value` at the dotted key; a mapping given as the value replaces what was
    there, a part's bare name joins it.
    """
    first, _, rest = dotted.partition(".")
    if not first:
        raise ConfigError(f"{value.at}: expected key.path=value, got an empty key.")
    path = f"{above}.{first}" if above else first
    inside = dict(tree.value) if isinstance(tree.value, dict) else {}
    there = expand(inside[first], path) if first in inside else Node({}, value.at, value.at)
    if rest:
        inside[first] = set_key(there, rest, value, path)
    elif isinstance(value.value, str) and path in SELECTORS and there.value:
        inside[first] = set_key(there, SELECTORS[path], value, path)
    else:
        inside[first] = Node(value.value, value.at, value.at, fresh=isinstance(value.value, dict))
    return Node(inside, value.at, tree.key_at or value.at, tree.fresh)


# -- back ------------------------------------------------------------------------------------------
def to_mapping(config: Config) -> JsonDict:
    """Returns the whole configuration as plain values under the names of the file's keys, every
    default filled in.
    """
    return _plain(config)


def _plain(section: msgspec.Struct) -> JsonDict:
    made: JsonDict = {}
    for field in fields(type(section)):
        value = getattr(section, field.name)
        if field.name == "options":
            continue
        made[field.encode_name] = _value(value)
    return {**made, **{k: _value(v) for k, v in getattr(section, "options", {}).items()}}


def _value(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    if isinstance(value, dict):
        return {k: _value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(v) for v in value]
    return value


def to_yaml(config: Config) -> str:
    """Returns the text of a run's `config.yaml`; `load` reads it back to an equal configuration."""
    return dump(to_mapping(config))
