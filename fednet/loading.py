"""Imports a user's own files by path, and checks what their functions take and return."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from fednet import registry
from fednet.errors import ConfigError, FednetError
from fednet.places import expand_home


class UserFileError(ConfigError):
    """A user's own file raised an exception, which is the `__cause__`. The command line shows its
    traceback.
    """


class WrongPart(ConfigError):
    """A user's own function, named with its file and line, takes or returns something wrong."""


@dataclass(frozen=True, slots=True)
class Loaded:
    path: Path
    sha256: str
    module: str  # the name of the module that the file became


_loaded: dict[str, Loaded] = {}  # by resolved path
# What was loaded apart, by the SHA-256 of the files: the files by resolved path, and their parts.
_aside: dict[frozenset[str], tuple[dict[str, Loaded], dict[str, dict[str, Any]]]] = {}
# The files that are loaded apart, by resolved path; None outside of `apart`.
_files: ContextVar[dict[str, Loaded] | None] = ContextVar("files", default=None)


def load_parts(paths: Sequence[Path | str]) -> list[Loaded]:
    """Imports each file once, and again when it was edited; its decorators register its parts.
    Raises ConfigError, UserFileError.
    """
    return [_load(expand_home(p, "--load").resolve()) for p in paths]


@contextmanager
def apart(files: Sequence[Path | str]) -> Iterator[None]:
    """Inside, what is loaded of these files, such as a run's copies, has its parts for itself: a
    part of the same name that the process has is neither replaced nor in the way. The same bytes
    are loaded once, however often this is entered.
    """
    digests = frozenset(_sha256(Path(file)) for file in files)
    own, parts = _aside.setdefault(digests, ({}, {}))
    before = _files.set(own), registry.apart.set(parts)
    try:
        yield
    finally:
        _files.reset(before[0])
        registry.apart.reset(before[1])


def _here() -> dict[str, Loaded]:
    """Returns the files that are loaded, by resolved path: inside of `apart` those loaded there."""
    own = _files.get()
    return _loaded if own is None else own


def loaded_files() -> dict[str, str]:
    """Returns the files loaded in this process, {name: SHA-256}. A client and a server compare
    them.
    """
    entries = list(_here().values())
    return dict(zip(names([e.path for e in entries]), (e.sha256 for e in entries)))


def names(files: Sequence[Path | str]) -> list[str]:
    """Returns a different name for each file: `a.py`, and `a-2.py` for another `a.py`."""
    given = list[str]()
    for path in map(Path, files):
        n = 1
        name = path.name
        while name in given:
            n += 1
            name = f"{path.stem}-{n}{path.suffix}"
        given.append(name)
    return given


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as wrong:
        absent = isinstance(wrong, FileNotFoundError)
        raise ConfigError(
            f"{path}: {'there is no such file to load' if absent else wrong.strerror}; expected a "
            f"Python file of your own parts."
        ) from None


def _load(path: Path) -> Loaded:
    sha256 = _sha256(path)
    here = _here()
    known = here.get(str(path))
    if known is not None and known.sha256 == sha256:
        return known
    if known is not None:  # edited since
        _drop(known.module)
        del here[str(path)]
    for other in (
        *here.values(),
        *_loaded.values(),
    ):  # a copy, such as that in a run's code/, is the same file
        if other.sha256 == sha256:
            return other
    name = f"{registry.LOADED}{path.stem}_{sha256[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded; expected a file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: classes find their module's names there
    try:
        spec.loader.exec_module(module)
    except FednetError:
        _drop(name)
        raise
    except (Exception, SystemExit) as broken:
        # A file may raise anything; the user sees it.
        _drop(name)
        raise UserFileError(f"{path}: raised {type(broken).__name__}: {broken}") from broken
    here[str(path)] = Loaded(path, sha256, name)
    return here[str(path)]


def _drop(module: str) -> None:
    sys.modules.pop(module, None)
    registry.forget(module)


def paths() -> list[Path]:
    """Returns the files that were loaded."""
    return [known.path for known in _here().values()]


def own_frames(broken: BaseException) -> Iterator[TracebackType]:
    """Returns the entries of an exception's traceback in a user's own code, outermost first: in a
    loaded file, in a package that offers parts, or in a notebook that defined one.
    """
    homes = registry.homes()
    at = broken.__traceback__
    while at is not None:
        home = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if home in homes or home.startswith(registry.LOADED):
            yield at
        at = at.tb_next


def place(part: Callable[..., object]) -> str:
    """Returns the file and line of a function or a class, without the folder."""
    code = getattr(inspect.unwrap(part), "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    return Path(getattr(sys.modules.get(part.__module__), "__file__", None) or part.__module__).name


def error_text(broken: BaseException, anywhere: bool = False) -> str:
    """Returns an exception's message, and in which line of a user's own code it arose, without the
    folder. anywhere: or of any code.
    """
    ours = isinstance(broken, FednetError)
    found = [(at.tb_frame.f_code.co_filename, at.tb_lineno) for at in own_frames(broken)]
    if not found and anywhere and not ours:
        found = [(at.filename, at.lineno or 0) for at in traceback.extract_tb(broken.__traceback__)]
    where = f" ({Path(found[-1][0]).name}, line {found[-1][1]})" if found else ""
    return f"{broken if ours else f'{type(broken).__name__}: {broken}'}{where}"


# -- what a user's own functions take and return ---------------------------------------------------
Arguments = tuple[Any, ...]  # positional arguments, of any types
# (the part, its function's arguments, what it returned) -> None, or what was expected
Check = Callable[[Any, Arguments, object], "str | None"]


def check_returns(kind: type, returns: Mapping[str, Check]) -> None:
    """Makes each function of a user's class with a name in `returns` check what it returns. It then
    raises WrongPart, which says what was expected and in which line, not what goes wrong later.
    """
    for name, check in returns.items():
        own = inspect.getattr_static(kind, name, None)
        users = isinstance(own, FunctionType) and own.__module__.partition(".")[0] != "fednet"
        if users and not hasattr(own, "__wrapped__"):
            setattr(kind, name, _with_check(name, own, check))


def _with_check(name: str, own: FunctionType, check: Check) -> Callable[..., object]:
    @functools.wraps(own)
    def call(part: object, *given: object, **named: object) -> object:
        found = own(part, *given, **named)
        if (expected := check(part, given, found)) is not None:
            shown = type(found).__name__
            if isinstance(found, tuple):
                shown = f"({', '.join(type(value).__name__ for value in found)})"
            raise WrongPart(
                f"{name} of {type(part).__name__} ({place(own)}) returned {shown}, "
                f"expected {expected}"
            )
        return found

    return call
