"""The state that a method keeps between rounds, and its files.

A method declares its state as a `State`: a frozen record of tensors, numbers, strings, None, and
tuples, lists and dicts of these. One pair of functions, `dump` and `load`, serves every checkpoint
and every client's version: tensors go into a flat dict (for safetensors), the rest into JSON.
Nothing is pickled and nothing in a file is executed: a file is read against the types that the
method declares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from fednet.descriptors import reaching
from fednet.errors import StateError
from fednet.files import digest, write_aside
from fednet.plain import JsonDict, JsonMapping
from fednet.tensors import Layout, PerClient, Rows, Slot, Tensors
from fednet.tensors.layout import Role

S = TypeVar("S", bound="State")
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Base of what a method keeps: `Server`, `Client` and `Accumulator`. Subclasses become frozen
    dataclasses. A field holds Tensors, torch tensors, PerClient, numbers, strings, None, or lists,
    tuples and dicts of these; in an Accumulator also a Sum.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)

    def replace(self: S, **changes: object) -> S:
        """This state with some fields changed."""
        return dataclasses.replace(self, **changes)


class Empty(State):
    """No state."""


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the parts of a state that are no collections, each with its place in the state."""
    if isinstance(value, State):
        for field in dataclasses.fields(value):
            place = f"{name}.{field.name}" if name else field.name
            yield from leaves(place, getattr(value, field.name))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(f"{name}[{key!r}]", part)
    elif isinstance(value, (tuple, list)):
        for at, part in enumerate(value):
            yield from leaves(f"{name}[{at}]", part)
    else:
        yield name, value


def fingerprints(value: object) -> dict[str, object]:
    """Returns, by its place in a state or a dict, what tells whether a tensor was changed: the
    digest of its bytes, since a change by way of `.data` or NumPy leaves no other trace. On a GPU
    how often torch wrote into it.
    """
    found: dict[str, object] = {}
    for name, part in leaves("", value):
        tensors = {name: part}
        if isinstance(part, Tensors):
            kinds = ("vector", "buffers", "counters")
            tensors = {f"{name}.{kind}": getattr(part, kind) for kind in kinds}
        for place, one in tensors.items():
            if not isinstance(one, torch.Tensor):
                continue
            on_gpu = one.device.type != "cpu"
            found[place] = one._version if on_gpu else digest([_bytes(one.detach())])
    return found


# -- to and from files -----------------------------------------------------------------------------
def dump(value: object) -> tuple[object, dict[str, torch.Tensor]]:
    """Returns (tree, tensors): a tree for JSON (a dict if value is a State), with references to the
    tensors of the flat dict. Raises StateError for a value that no State may hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _to_tree(value, "", tensors), tensors


def _bytes(value: torch.Tensor) -> memoryview:
    flat = value.reshape(-1)
    if flat.stride(0) != 1:  # one element of an expanded tensor, which counts as contiguous
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8).numpy().data


def content_sha256(value: object) -> str:
    """SHA-256 of a state's content, from the hashes that its Tensors know of themselves."""
    return hashlib.sha256(
        json.dumps(_to_tree(value, "", None), sort_keys=True).encode()
    ).hexdigest()


def _to_tree(value: object, path: str, out: dict[str, torch.Tensor] | None) -> object:
    """out: the dict that gets the tensors; None: the tree has their hashes instead."""

    def inside(name: object, part: object) -> object:
        return _to_tree(part, f"{path}.{name}", out)

    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}  # JSON has no text for it
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        whole = value.detach().to("cpu").contiguous()
        if out is None:
            return {
                "$sha256": hashlib.sha256(_bytes(whole)).hexdigest(),
                "dtype": str(whole.dtype),
                "shape": list(whole.shape),
            }
        out[path] = whole
        return {"$tensor": path}
    if isinstance(value, Tensors):
        if out is None:
            return {"$sha256": value.sha256(), "layout": value.layout.digest}
        parts = {p: inside(p, getattr(value, p)) for p in ("vector", "buffers", "counters")}
        return {"$tensors": _slots(value.layout), **parts}
    if isinstance(value, PerClient):
        rows = {
            str(c): r if isinstance(r, str) else inside(c, r) for c, r in sorted(value.rows.items())
        }
        return {"$rows": rows, "layout": _slots(value.layout)}
    if isinstance(value, dict):
        return {"$dict": [[name, inside(name, part)] for name, part in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"$list": [inside(n, part) for n, part in enumerate(value)]}
    if isinstance(value, State):
        names = [f.name for f in dataclasses.fields(value)]  # type: ignore[arg-type]
        return {"$record": {name: inside(name, getattr(value, name)) for name in names}}
    raise StateError(
        f"state field {path.lstrip('.')!r} holds a {type(value).__name__}; allowed are tensors, "
        f"Tensors, PerClient, numbers, strings, None, and lists, tuples and dicts of these."
    )


def _slots(layout: Layout) -> list[object]:
    return [[s.name, list(s.shape), s.role] for s in layout.slots]


def load(
    kind: type, tree: object, tensors: Mapping[str, torch.Tensor], store: Rows | None = None
) -> object:
    """Inverts `dump`: returns a value of the declared `kind`. Raises StateError where file
    and declaration differ.
    """
    try:
        if isinstance(tree, dict) and "$record" in tree:
            fields = tree["$record"].items()
            return kind(**{name: _from_tree(part, tensors, store) for name, part in fields})
        return _from_tree(tree, tensors, store)
    except (AttributeError, KeyError, TypeError, ValueError) as broken:
        raise StateError(
            f"a saved {kind.__qualname__} does not fit its declaration: {broken}"
        ) from broken


def _layout(slots: Iterable[tuple[str, Iterable[int], Role]]) -> Layout:
    made = Layout(
        tuple(Slot(str(name), tuple(int(n) for n in shape), role) for name, shape, role in slots)
    )
    if not {s.role for s in made.slots} <= {"parameter", "buffer", "counter"}:
        raise ValueError("a tensor of no known role")
    return made


def _tensors(tree: JsonMapping, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    layout = _layout(tree["$tensors"])
    parts = [tensors[tree[p]["$tensor"]] for p in ("vector", "buffers", "counters")]
    sizes = tuple(p.numel() for p in parts)
    if layout.sizes != sizes:
        raise ValueError(f"a layout of {layout.sizes} elements over vectors of {sizes}")
    return Tensors(layout, *parts)


def _from_tree(tree: object, tensors: Mapping[str, torch.Tensor], store: Rows | None) -> object:
    if not isinstance(tree, dict):
        return tree
    if "$float" in tree:
        return float(tree["$float"])
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$tensors" in tree:
        return _tensors(tree, tensors)
    if "$rows" in tree:
        rows = {
            int(c): (r if isinstance(r, str) else _tensors(r, tensors))
            for c, r in tree["$rows"].items()
        }
        return PerClient(_layout(tree["layout"]), rows, store)
    if "$dict" in tree:
        return {k: _from_tree(v, tensors, store) for k, v in tree["$dict"]}
    return tuple(_from_tree(v, tensors, store) for v in tree["$list"])


def write_state(
    path: Path, value: State, fsync: bool = False, beside: JsonMapping | None = None
) -> str:
    """Writes one state as a safetensors file, aside and then renamed: its tree in the metadata,
    `beside` among the tree's own keys, and the digest of it all, which is returned. Raises OSError.
    """
    tree, tensors = dump(value)
    assert isinstance(tree, dict)
    text = json.dumps({**tree, **(beside or {})}, sort_keys=True)
    check = check_of(text, tensors)
    write_aside(path, file_of(tensors, {"tree": text, "check": check}), fsync=fsync)
    return check


# The names of torch's types in a safetensors file.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def file_of(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yields the parts of a safetensors file. about: its metadata. The package's own function
    writes under a name that a killed process would leave behind, and the metadata in another order
    each time: here equal tensors are equal files.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: JsonDict = {"__metadata__": dict(sorted(about.items()))}
    end = 0
    for name in names:
        one = tensors[name]
        if one.dtype not in TYPES:
            raise StateError(f"a tensor of {one.dtype} cannot be kept; use float32 or int64.")
        place = [end, end + one.nbytes]
        header[name] = {"dtype": TYPES[one.dtype], "shape": [*one.shape], "data_offsets": place}
        end = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        if tensors[name].numel():
            yield _bytes(tensors[name])


@contextlib.contextmanager
def _reading_state_file(path: Path, what: str) -> Iterator[None]:
    """Inside, whatever is wrong with the file at `path` raises StateError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as broken:
        raise StateError(
            f"{path}: not a whole {what} ({broken}); put back what was there."
        ) from broken


def read_header(path: Path) -> tuple[JsonDict, str]:
    """Reads (tree, digest) of such a file, without its tensors. Raises StateError."""
    from safetensors import safe_open

    with _reading_state_file(path, "fednet state file"):
        with reaching(lambda: safe_open(path, "pt")) as file:
            about = file.metadata() or {}
        return json.loads(about["tree"]), about["check"]


def check_of(tree: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the digest of a state's file; it does not depend on the order of the tensors."""
    segments: list[bytes | memoryview] = [tree.encode()]
    for name in sorted(tensors):
        one = tensors[name]
        segments.append(f"{name} {one.dtype} {tuple(one.shape)}".encode())
        if one.numel():
            segments.append(_bytes(one))
    return digest(segments).hex()


def read_state(path: Path, kind: type[K], store: Rows | None = None) -> K:
    """Reads what `write_state` wrote. Raises StateError for a torn or foreign file."""
    tree, tensors = read_tree(path)
    try:
        value = load(kind, tree, tensors, store)
    except StateError as other:
        raise StateError(f"{path}: {other}") from other
    if not isinstance(value, kind):
        raise StateError(f"{path}: holds a {type(value).__name__}, expected a {kind.__qualname__}.")
    return value


def read_tree(path: Path) -> tuple[JsonDict, dict[str, torch.Tensor]]:
    """Reads (tree, tensors) as `dump` returned them; the tree also has the keys that were written
    `beside` it. Raises StateError for a torn, altered or foreign file.
    """
    with _reading_state_file(path, "fednet state file"):
        about, tensors = _read(path)
        if about.get("check") != check_of(about["tree"], tensors):
            raise ValueError("its content was changed")
        return json.loads(about["tree"]), tensors


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    from safetensors import safe_open

    with reaching(lambda: safe_open(path, "pt")) as file:
        # (safe_open is no mapping)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return dict(file.metadata() or {}), tensors


def read_named(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Reads the named tensors of a model's file, and its digest. Raises StateError for a file that
    was changed.
    """
    with _reading_state_file(path, "file of a model"):
        about, tensors = _read(path)
        check = about.pop("check", "")
        if check != check_of(json.dumps(about, sort_keys=True), tensors):
            raise ValueError("its content was changed")
        return tensors, check


def state_sha256(value: object) -> str:
    """SHA-256 of a state's content, independent of files: its tree and its tensors' bytes."""
    tree, tensors = dump(value)
    whole = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].view(-1).numpy().data)
    return whole.hexdigest()
