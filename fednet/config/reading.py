"""From files, flags and mappings to a checked `Config`, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fednet import loading, registry
from fednet.config import fit, parts, rules
from fednet.config.schema import DIVIDES, RATES, SITE, Config, DataSection
from fednet.config.tree import Node, compose, dump, wrap
from fednet.errors import ConfigError
from fednet.places import expand_home
from fednet.plain import JsonDict, JsonMapping


def load(
    source: Path | str | JsonMapping | None = None,
    sets: Sequence[str] | JsonMapping = (),
    load_files: Sequence[Path | str] = (),
    where: str = "the configuration",
    typed: Callable[[Config], None] = lambda config: None,
) -> Config:
    """Returns the configuration of a file or of plain values (None: all defaults) with its
    `--set`s; its parts are imported and checked.

    sets: `key.path=value` texts, or a mapping from dotted keys to values. load_files: user's files
    in addition to those under `load:`, whose paths are relative to the configuration file, or to
    the working directory. where: the place of plain values, for errors. typed: is called when the
    types are checked, and before any part is imported. Raises ConfigError.
    """
    if isinstance(source, Mapping):
        tree = _absolute_loads(expand(wrap(source, where)), Path.cwd())
    elif source is None:
        tree = Node({}, where)
    else:
        tree = read(expand_home(source, "the configuration"))
    tree = merge(tree, overrides(sets))
    listed = tree.value.get("load", Node([], "--load"))
    named = fit.fit(listed, tuple[str, ...], "load")
    for i, file in enumerate(named):
        if not Path(file).is_file():
            raise ConfigError(f"{listed.value[i].at}: load[{i}]: there is no file {file}.")
    files = list(
        dict.fromkeys([*named, *(str(expand_home(f, "--load").resolve()) for f in load_files)])
    )
    loading.load_parts(files)
    if files:
        tree = set_key(tree, "load", wrap(files, listed.at))
    return _check(tree, typed=typed)


def from_mapping(mapping: JsonMapping, where: str = "the configuration") -> Config:
    """Returns a configuration from plain values. Files under its `load` are not imported."""
    return _check(expand(wrap(mapping, where)))


def from_text(
    text: str, where: str, *, before: Callable[[Config], None] = lambda config: None
) -> Config:
    """Returns a configuration from YAML that a server sent. Files under its `load` are not
    imported.

    before: is called when the types are checked and before any part is made, and may raise.
    """
    return _check(expand(compose(text, where)), before)


def _check(
    tree: Node,
    before: Callable[[Config], None] = lambda config: None,
    typed: Callable[[Config], None] = lambda config: None,
) -> Config:
    config: Config = fit.fit(tree, Config)
    typed(config)
    inside = tree.value
    if config.clients_per_round is not None and "participation" not in inside:
        config = config.replace(participation=None)
    if not config.name:
        config = config.replace(name=f"{config.algorithm.name}-{config.data.dataset}")
    if config.train.lr is None:
        train = msgspec.structs.replace(config.train, lr=RATES[config.train.optimizer])
        config = config.replace(train=train)
    given = inside["schedule"].value if "schedule" in inside else {}
    if "mode" not in given and config.algorithm.name in registry.algorithm.names():
        # An asynchronous method has a schedule of its own.
        own = dict(registry.algorithm.get(config.algorithm.name).own_schedule)
        chosen = {key: value for key, value in own.items() if key not in given}
        config = config.replace(schedule=msgspec.structs.replace(config.schedule, **chosen))
    rules.check(config, tree)
    config = parts.complete(config, tree)
    before(config)
    rules.check_method(config, tree)
    return config


def text_of(path: Path, expected: str) -> str:
    """Returns the text of a file that a user named. Raises ConfigError if there is none, and says
    that `expected` was expected, or if it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = ""
        if re.match(r"[a-z_.]+=", str(path)):  # --set A=1 B=2
            hint = f" A key is set by a --set of its own: --set {path}."
        raise ConfigError(f"{path}: there is no such file; expected {expected}.{hint}") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(
            f"{path}: cannot be read as text ({getattr(wrong, 'strerror', wrong)})."
        ) from None


def read(path: Path, above: tuple[Path, ...] = ()) -> Node:
    """Returns the tree of a file, merged into the one that it `extends`. Paths under `load` become
    absolute. above: the files that extend it.
    """
    whole = path.resolve()
    path = whole if above else path
    shown = whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else path
    tree = expand(compose(text_of(path, "a YAML configuration"), str(shown)))
    if tree.value is None:
        tree = Node({}, tree.at)
    if not isinstance(tree.value, dict):
        raise fit.wrong(tree, "", "a mapping of keys to values")
    tree = _absolute_loads(tree, path.parent)
    base = tree.value.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base.value, str):
        raise fit.wrong(base, "extends", "a file's name")
    target = (path.parent / expand_home(base.value, "extends")).resolve()
    if target in (*above, whole):
        raise ConfigError(f"{base.at}: extends: {base.value} leads back to itself.")
    if not target.is_file():
        raise ConfigError(f"{base.at}: extends: there is no file {target}.")
    return merge(read(target, (*above, whole)), tree)


def _absolute_loads(tree: Node, folder: Path) -> Node:
    """Returns the tree with absolute paths under `load`. folder: what they are relative to."""
    named = tree.value.get("load")
    if named is None or not isinstance(named.value, list):
        return tree
    files = []
    for node in named.value:
        if isinstance(node.value, str):
            file = folder / expand_home(node.value, f"{node.at}: load")
            node = replace(node, value=str(file.resolve()))
        files.append(node)
    return Node({**tree.value, "load": replace(named, value=files)}, tree.at)


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
    likewise model, data, data.partition, selection, availability, schedule. A list of models is the
    first one, with the rest under `others`.
    """
    value = node.value
    if isinstance(value, str) and path in SELECTORS:
        return replace(node, value={SELECTORS[path]: Node(value, node.at, node.key_at)})
    if path == "model" and isinstance(value, list) and value and isinstance(value[0].value, dict):
        first, *rest = value
        made = {**first.value, "others": Node(rest, node.at, node.key_at)}
        clients = made.get("clients")
        if clients is not None and isinstance(clients.value, int):
            made["clients"] = replace(clients, value=str(clients.value))
        return replace(node, value=made)
    if path in ("", "data") and isinstance(value, dict):
        inner = {k: expand(n, f"{path}.{k}" if path else k) for k, n in value.items()}
        return replace(node, value=inner)
    return node


def merge(base: Node, over: Node, path: str = "") -> Node:
    """Returns `base` with the keys of `over`; lists and scalars are replaced."""
    if over.fresh or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    kept = dict(base.value)
    selector = SELECTORS.get(path, "")
    old = kept.get(selector)
    new = over.value.get(selector)
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
    """Returns the configuration with all defaults, as plain values under the names of the keys."""
    whole: JsonDict = msgspec.json.decode(msgspec.json.encode(config))
    data = whole["data"]
    named = whole["algorithm"], whole["model"], data, data["partition"], whole["selection"]
    for section in named:
        section |= section.pop("options")
    return whole


def to_yaml(config: Config) -> str:
    """Returns the text of a run's `config.yaml`; `load` reads it back to an equal configuration."""
    return dump(to_mapping(config))


# -- comparing -------------------------------------------------------------------------------------
def flat(config: JsonMapping, aside: Sequence[str] = (), above: str = "") -> JsonDict:
    """Returns {"a": {"b": 1}} as {"a.b": 1}; an empty mapping is a value. aside: keys and sections
    that are left out.
    """
    found: JsonDict = {}
    for key, value in config.items():
        path = f"{above}{key}"
        if path in aside:
            continue
        if isinstance(value, Mapping) and value:
            found |= flat(value, aside, f"{path}.")
        else:
            found[path] = value
    return found


def differing(configs: Sequence[JsonMapping], aside: Sequence[str] = ()) -> dict[str, list[object]]:
    """Returns the values of each key in which configurations differ, by dotted key, ascending."""
    flats = [flat(config, aside) for config in configs]
    values = {key: [one.get(key) for one in flats] for key in sorted(set().union(*flats))}
    return {k: found for k, found in values.items() if any(one != found[0] for one in found)}
