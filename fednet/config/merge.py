"""Configurations laid on one another: `extends`, then the file, then `--set`."""

from __future__ import annotations

from fednet.config.schema import DIVIDES, SITE, DataSection
from fednet.config.tree import Node
from fednet.errors import ConfigError

# A layer that names another part than the one below starts that mapping afresh, options and all.
SELECTORS = {
    "algorithm": "name",
    "model": "name",
    "data": "dataset",
    "data.partition": "scheme",
    "availability": "model",
    "schedule": "mode",
}
# Two ways to say one thing: the later layer's word holds.
RIVALS = {"participation": "clients_per_round", "clients_per_round": "participation"}


def spread(node: Node, path: str = "") -> Node:
    """`algorithm: fedprox` is short for `algorithm: {name: fedprox}`; likewise model, data,
    data.partition, availability, schedule.
    """
    if isinstance(node.value, str) and path in SELECTORS:
        return Node({SELECTORS[path]: Node(node.value, node.at, node.key_at)}, node.at, node.key_at)
    if path == "model":
        node = gathered(node)
    if path in ("", "data") and isinstance(node.value, dict):
        inner = {k: spread(n, f"{path}.{k}" if path else k) for k, n in node.value.items()}
        return Node(inner, node.at, node.key_at, node.fresh)
    return node


def gathered(node: Node) -> Node:
    """A list of models as one, and `others`."""
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
    """`over` laid on `base`, key by key; lists and scalars are replaced."""
    if over.fresh or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    kept = dict(base.value)
    selector = SELECTORS.get(path, "")
    old, new = kept.get(selector), over.value.get(selector)
    if old is not None and new is not None and old.value != new.value:
        # Of another dataset only the old one's own options go: the partition and the splits stay,
        # where it is one that the run divides.
        stay = set(DataSection.__struct_encode_fields__) if path == "data" else set()
        if new.value == SITE:
            stay -= set(DIVIDES)
        kept = {k: n for k, n in kept.items() if k in stay}
    for key, node in over.value.items():
        rival = RIVALS.get(key, "") if not path else ""
        if rival and rival not in over.value:
            kept.pop(rival, None)
        kept[key] = (
            merge(kept[key], node, f"{path}.{key}" if path else key) if key in kept else node
        )
    return Node(kept, over.at, over.key_at or base.key_at)


def put(tree: Node, dotted: str, value: Node, above: str = "") -> Node:
    """`tree` with `value` at the dotted key; a mapping given as the value replaces what was there,
    a part's bare name joins it.
    """
    first, _, rest = dotted.partition(".")
    if not first:
        raise ConfigError(f"{value.at}: expected key.path=value, got an empty key.")
    path = f"{above}.{first}" if above else first
    inside = dict(tree.value) if isinstance(tree.value, dict) else {}
    there = spread(inside[first], path) if first in inside else Node({}, value.at, value.at)
    if rest:
        inside[first] = put(there, rest, value, path)
    elif isinstance(value.value, str) and path in SELECTORS and there.value:
        inside[first] = put(there, SELECTORS[path], value, path)
    else:
        inside[first] = Node(value.value, value.at, value.at, fresh=isinstance(value.value, dict))
    return Node(inside, value.at, tree.key_at or value.at, tree.fresh)
