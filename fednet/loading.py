"""A user's own files: imported by path, known by their SHA-256."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from fednet import registry
from fednet.descriptors import named
from fednet.errors import ConfigError, FednetError, nearest


class UserFileError(ConfigError):
    """An exception within a user's own file; `__cause__` is that exception, whose traceback the
    command line shows.
    """


class WrongPart(ConfigError):
    """A function of a user's own takes or returns what it cannot; named with its file and line."""


@dataclass(frozen=True, slots=True)
class Loaded:
    path: Path
    sha256: str


PREFIX = "fednet_user_"  # of the modules that the loaded files become
_loaded: dict[str, Loaded] = {}  # by resolved path
_tried: list[Path] = []


def load_parts(paths: Sequence[Path | str]) -> list[Loaded]:
    """Imports each file once, and again when it was edited; its decorators register its parts.
    Raises ConfigError, UserFileError.
    """
    return [_load(Path(p).resolve()) for p in paths]


def loaded() -> dict[str, str]:
    """The files loaded in this process: {name: SHA-256}, which is what a client and a server
    compare.
    """
    entries = list(_loaded.values())
    return dict(zip(names([e.path for e in entries]), (e.sha256 for e in entries)))


def names(files: Sequence[Path | str]) -> list[str]:
    """A name for each file that no other of them has: `a.py`, and `a-2.py` for another `a.py`."""
    given = list[str]()
    for path in map(Path, files):
        n, name = 1, path.name
        while name in given:
            n += 1
            name = f"{path.stem}-{n}{path.suffix}"
        given.append(name)
    return given


def _load(path: Path) -> Loaded:
    try:
        sha256 = hashlib.sha256(named(path).read_bytes()).hexdigest()
    except OSError as wrong:
        absent = isinstance(wrong, FileNotFoundError)
        raise ConfigError(
            f"{path}: {'there is no such file to load' if absent else wrong.strerror}; expected a "
            f"Python file of your own parts."
        ) from None
    known = _loaded.get(str(path))
    if known is not None and known.sha256 == sha256:
        return known
    if known is not None:  # edited since
        _drop(_module(known.path, known.sha256))
        del _loaded[str(path)]
    for other in _loaded.values():  # the copy in a run's code/, by whatever name, is the same file
        if other.sha256 == sha256:
            return other
    name = _module(path, sha256)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded; expected a file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    _tried.append(path)
    sys.modules[name] = module  # before running it: classes find their module's names there
    try:
        spec.loader.exec_module(module)
    except FednetError:
        _drop(name)
        raise
    except (Exception, SystemExit) as broken:
        # Whatever a user's own file raises is the user's to see.
        _drop(name)
        raise UserFileError(
            f"{path}: raised {type(broken).__name__}: {broken}{_beside(path, broken)}"
        ) from broken
    _loaded[str(path)] = Loaded(path, sha256)
    return _loaded[str(path)]


def _beside(path: Path, broken: BaseException) -> str:
    """What can be done where the file imports another that lies beside it."""
    name = (broken.name or "").partition(".")[0] if isinstance(broken, ImportError) else ""
    if not name or not any((path.parent / place).exists() for place in (f"{name}.py", name)):
        return ""
    return (
        f". {name} lies beside it, but a run keeps and compares the loaded files alone: write the "
        f"parts into one file, or install {name}, or set PYTHONPATH={path.parent}."
    )


def _drop(module: str) -> None:
    sys.modules.pop(module, None)
    registry.forget(module)


def _module(path: Path, sha256: str) -> str:
    return f"{PREFIX}{path.stem}_{sha256[:12]}"


def module_of(path: Path) -> str | None:
    """Under which name this process has the file; None where it was not loaded."""
    known = _loaded.get(str(path.resolve()))
    return _module(known.path, known.sha256) if known else None


def partless(kind: str) -> str:
    """A sentence on the loaded files that register nothing, for whoever misses a part of that kind;
    empty where there are none.
    """
    bare = [
        e.path.name for e in _loaded.values() if not registry.of_module(_module(e.path, e.sha256))
    ]
    return f' {bare[0]} registers nothing: is @fednet.{kind}("NAME") missing?' if bare else ""


def paths() -> list[Path]:
    """The files that were loaded, or were being loaded when they raised."""
    return list(_tried)


def own_frames(broken: BaseException) -> Iterator[TracebackType]:
    """Of an exception's traceback what lies in a user's own code, outermost first: in a file that
    was loaded, in a package that offers parts, in a notebook that defined one.
    """
    homes, at = registry.homes(), broken.__traceback__
    while at is not None:
        home = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if home in homes or home.startswith(PREFIX):
            yield at
        at = at.tb_next


def place(part: Callable[..., object]) -> str:
    """Where a function or a class was written, without the file's folder."""
    code = getattr(inspect.unwrap(part), "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    return Path(getattr(sys.modules.get(part.__module__), "__file__", None) or part.__module__).name


def raised(broken: BaseException, anywhere: bool = False) -> str:
    """What an exception says, and in which line of a user's own code it arose, without the file's
    folder. anywhere: or of any file.
    """
    ours = isinstance(broken, FednetError)
    found = [(at.tb_frame.f_code.co_filename, at.tb_lineno) for at in own_frames(broken)]
    if not found and anywhere and not ours:
        found = [(at.filename, at.lineno or 0) for at in traceback.extract_tb(broken.__traceback__)]
    where = f" ({Path(found[-1][0]).name}, line {found[-1][1]})" if found else ""
    return f"{broken if ours else f'{type(broken).__name__}: {broken}{_meant(broken)}'}{where}"


def _meant(broken: BaseException) -> str:
    """The attribute that is nearest to the one that was not there."""
    if not isinstance(broken, AttributeError) or not isinstance(broken.name, str):
        return ""
    known = [name for name in dir(broken.obj) if not name.startswith("_")]
    guess = nearest(broken.name, known)
    return f"; did you mean {guess!r}?" if guess else ""


# -- what a user's own functions take and return ---------------------------------------------------
Given = tuple[Any, ...]  # Any: what a function was given by position, which its own check knows
# (the part, what its function was given, what it returned) to None, or what was expected. Any: a
# part of any kind.
Check = Callable[[Any, Given, object], "str | None"]


def held(kind: type, base: type, returns: Mapping[str, Check]) -> None:
    """Every function of a user's own class, in the place of one of `base`, raises WrongPart from
    now on where it returns what it cannot. Raises it at once for what it takes. So whoever writes a
    part reads what was expected, and in which of their lines, in place of what went wrong later.
    """
    for name, check in returns.items():
        own = inspect.getattr_static(kind, name, None)
        users = isinstance(own, FunctionType) and own.__module__.partition(".")[0] != "fednet"
        if users and not hasattr(own, "__wrapped__"):
            _takes(kind, own, getattr(base, name))
            setattr(kind, name, _held(name, own, check))


def _held(name: str, own: FunctionType, check: Check) -> Callable[..., object]:
    @functools.wraps(own)
    def call(part: object, *given: object, **named: object) -> object:
        found = own(part, *given, **named)
        if (expected := check(part, given, found)) is not None:
            raise WrongPart(
                f"{name} of {type(part).__name__} ({place(own)}) returned {_shown(found)}, "
                f"expected {expected}"
            )
        return found

    return call


def _takes(kind: type, own: FunctionType, base: Callable[..., object]) -> None:
    expected, found = inspect.signature(base), inspect.signature(own)
    try:
        found.bind(*expected.parameters)
    except TypeError:
        raise WrongPart(
            f"{own.__name__} of {kind.__name__} ({place(own)}) takes "
            f"({', '.join(found.parameters)}), expected ({', '.join(expected.parameters)})"
        ) from None


def _shown(found: object) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(value).__name__ for value in found)})"
    return type(found).__name__
