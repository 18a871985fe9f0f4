"""Named parts: algorithms, models, datasets, partitioners, selections, compressors, tasks, metrics.

A part is one file with a decorator, `@algorithm("scaffold")`. Names in fednet's own packages are
found in the text of their files, so that they are known without importing torch; a part is imported
when it is asked for. Installed packages offer theirs by the entry point groups `fednet.algorithms`,
`fednet.models`, ...; a user's own file (`--load`) registers as it is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fednet.descriptors import reaching
from fednet.errors import ConfigError, unknown

P = TypeVar("P")
# The class or function under a decorator, of any type. A user's part is tried before it is used.
Part = Any

LOADED = "fednet_user_"  # begins the name of the module that a user's file becomes
# By kind and name, the parts of files that are loaded apart, see `loading.apart`; None outside.
# They stand in front of those of the process.
apart: ContextVar[dict[str, dict[str, Part]] | None] = ContextVar("apart", default=None)


@dataclass(frozen=True, slots=True)
class Entry:
    """A part that need not be imported.

    summary: the first paragraph of its docstring, in `Registry.entries` only.
    attribute: its name in the module, where an entry point gives one.
    """

    name: str
    module: str
    summary: str = ""
    attribute: str = ""


class Registry:
    """Holds the parts of one kind. kind: the decorator's name. package: has fednet's own parts."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._parts: dict[str, Part] = {}
        self._index: dict[str, Entry] | None = None

    def __call__(self, name: str) -> Callable[[P], P]:
        """Returns the decorator, `@algorithm("mine")`. Raises ConfigError if another part has the
        name.
        """
        if not isinstance(name, str):
            raise ConfigError(f'@{self.kind} is given a name: @{self.kind}("mine").')
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
            raise ConfigError(
                f"{self.kind} name {name!r}: use lower-case letters, digits, - and _ only."
            )

        def keep(part: P) -> P:
            held = self._parts
            aside = self._apart()
            if aside is not None and part.__module__.startswith(LOADED):
                held = aside
            old = held.get(name)
            if old is not None and not _same(old, part):
                raise ConfigError(
                    f"the {self.kind} {name!r} is registered twice: in {_file_and_name(old)[0]} "
                    f"and in {_file_and_name(part)[0]}."
                )
            held[name] = part
            return part

        return keep

    def _apart(self) -> dict[str, Part] | None:
        """Returns the parts of this kind that are loaded apart, None outside of `loading.apart`."""
        found = apart.get()
        return None if found is None else found.setdefault(self.kind, {})

    def _imported(self) -> dict[str, Part]:
        """Returns the imported parts by name."""
        return {**self._parts, **(self._apart() or {})}

    def get(self, name: str) -> Part:
        """Returns the part of that name. Raises ConfigError, which names the nearest and all
        others.
        """
        part = self.loaded(name)
        if part is None:
            entry = self.index().get(name)
            if entry is None:
                raise ConfigError(unknown(self.kind, name, self.names()))
            try:
                module = reaching(functools.partial(importlib.import_module, entry.module))
                part = self.loaded(name)
                if part is None:  # an entry point may name the part itself
                    part = self._parts[name] = getattr(module, entry.attribute or name)
            except Exception as broken:  # another package may raise anything
                if entry.module.startswith(f"{self.package}."):
                    raise
                raise ConfigError(
                    f"the {self.kind} {name!r}, which an installed package offers, cannot be "
                    f"imported from {entry.module} ({type(broken).__name__}: {broken})."
                ) from broken
        return part

    def loaded(self, name: str) -> Part:
        """Returns the part of that name if it was imported, else None."""
        return self._imported().get(name)

    def names(self) -> list[str]:
        return sorted({*self.index(), *self._imported()})

    def own(self) -> dict[str, Part]:
        """Returns the parts that are not fednet's: of loaded files and of installed packages."""
        names = {
            *self._imported(),
            *(e.name for e in self.index().values() if not shipped(e.module)),
        }
        found = {name: self.get(name) for name in sorted(names)}
        return {name: part for name, part in found.items() if not shipped(part.__module__)}

    def entries(self) -> list[Entry]:
        """Returns an entry for each part, sorted by name. Imports nothing."""
        known = dict(self.index())
        for module, text in self._files():
            for node in ast.parse(text).body:
                if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    continue
                for mark in node.decorator_list:
                    match mark:
                        case ast.Call(ast.Name(self.kind), [ast.Constant(str(name))]):
                            about = first_paragraph(ast.get_docstring(node))
                            known[name] = Entry(name, module, about)
        for name in self.names():
            if name not in known:
                part = self.get(name)
                known[name] = Entry(name, part.__module__, first_paragraph(part.__doc__))
        return [known[name] for name in sorted(known)]

    def index(self) -> dict[str, Entry]:
        """Returns an entry for each part of fednet and of installed packages, by name."""
        if self._index is None:
            self._index = reaching(self._read_index)
        return self._index

    def _read_index(self) -> dict[str, Entry]:
        # A tenth of the start of a command that asks for no names.
        from importlib.metadata import entry_points

        mark = re.compile(rf'^@{self.kind}\("([^"]+)"', re.MULTILINE)
        found = dict[str, Entry]()
        for module, text in self._files():
            found |= {name: Entry(name, module) for name in mark.findall(text)}
        for point in entry_points(group=f"fednet.{self.kind}s"):
            module, _, attribute = point.value.partition(":")
            found.setdefault(point.name, Entry(point.name, module, "", attribute))
        return found

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each module of fednet's own package."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None
        for folder in spec.submodule_search_locations or []:
            for path in sorted(Path(folder).glob("*.py")):
                yield f"{self.package}.{path.stem}", path.read_text(encoding="utf-8")


def shipped(module: str) -> bool:
    """Returns whether a module is one of fednet's own."""
    return module.partition(".")[0] == __name__.partition(".")[0]


def _file_and_name(part: Part) -> tuple[str, str]:
    """Returns the file and name of a part, which are the same where a file is imported twice."""
    module = sys.modules.get(part.__module__)
    return getattr(module, "__file__", None) or part.__module__, getattr(part, "__qualname__", "")


def _same(one: Part, other: Part) -> bool:
    """Whether two parts are one, of a file that was imported twice or of a copy of it."""
    file, name = _file_and_name(one)
    copy, named = _file_and_name(other)
    if name != named or file == copy:
        return (file, name) == (copy, named)
    try:
        return Path(file).read_bytes() == Path(copy).read_bytes()
    except OSError:
        return False


def first_paragraph(docstring: str | None) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


algorithm = Registry("algorithm", "fednet.algorithms")
model = Registry("model", "fednet.models")
dataset = Registry("dataset", "fednet.data.datasets")
partitioner = Registry("partitioner", "fednet.data.partitioners")
selection = Registry("selection", "fednet.experiment.selection")  # fednet has no such part itself
compressor = Registry("compressor", "fednet.wire.compressors")
task = Registry("task", "fednet.training.tasks")
metric = Registry("metric", "fednet.training.metrics")

ALL = {
    "algorithms": algorithm,
    "models": model,
    "datasets": dataset,
    "partitions": partitioner,
    "selections": selection,
    "compressors": compressor,
    "tasks": task,
    "metrics": metric,
}


def homes() -> set[str]:
    """Returns the top-level modules of the imported parts that are not fednet's own."""
    parts = (part for kind in ALL.values() for part in kind._imported().values())
    return {part.__module__.partition(".")[0] for part in parts} - {__name__.partition(".")[0]}


def forget(module: str) -> None:
    """Removes what the module registered: its file was edited, or failed to load."""
    for kind in ALL.values():
        for held in (kind._parts, kind._apart() or {}):
            for name in [n for n, part in held.items() if part.__module__ == module]:
                del held[name]
