"""The errors of fednet, and whose fault each one is.

FednetError
├── ConfigError    the command line, the configuration or a user's part is wrong (exit status 2)
├── DataError      a dataset, partition or site is not what was declared (exit status 2)
├── StateError     a checkpoint or a client's state is missing, torn or foreign (exit status 2)
│   └── StateAbsent         of a client, here; another process that hosts it may have it
│       └── BaseAbsent      the model that training starts from; the server sends it again
├── LocalProtocolError      this side asked for what the protocol does not allow: a fault of fednet
├── RemoteProtocolError     the other side sent what it does not allow: refused and counted
├── LeftRound      a client takes no further part in a round, which goes on without it
├── RoundVoid      a round has no result; the next one begins from the same state
├── CannotGoOn     the federation could not go on (exit status 3)
├── ClientsJoin    clients join a run that goes on: its server starts again with more clients
└── Stopped        stopped cleanly with rounds left to do (exit status 4, or 130 by Ctrl-C)

StopRequested is none of them: a request to stop before there is anything to save.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NoReturn

NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory")
_PATH = re.compile(r"""(?<![\w/.<])(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s'"`,;:()<>]+""")


LONGEST = 4000  # characters of a sentence: a message has room for 4096


def shorten(sentence: str) -> str:
    """Returns a sentence; of a long one its beginning and its length."""
    if len(sentence) <= LONGEST:
        return sentence
    return f"{sentence[:LONGEST]}... ({len(sentence)} characters)"


class FednetError(Exception):
    """Base of everything fednet raises on purpose. Its text is one or two sentences a user can act
    on.
    """

    exit_status = 3

    def __str__(self) -> str:
        return shorten(super().__str__())


class ConfigError(FednetError):
    exit_status = 2


class DataError(FednetError):
    exit_status = 2


class StateError(FednetError):
    exit_status = 2
    resuming = 5  # exit status of `fednet run --resume`


class StateAbsent(StateError):
    pass


class BaseAbsent(StateAbsent):
    pass


class LocalProtocolError(FednetError):
    pass


class RemoteProtocolError(FednetError):
    again = True  # a task that met it is tried again: it may have been the line


class LeftRound(FednetError):
    pass


class SharedChanged(ConfigError):
    """A method has written to tensors that several tasks had: what came of any may be wrong."""


class RoundVoid(FednetError):
    """spoiled: whether what a client sent is the reason, and not that too few have answered."""

    def __init__(self, text: str, spoiled: bool = False) -> None:
        super().__init__(text)
        self.spoiled = spoiled


class CannotGoOn(FednetError):
    pass


class ClientsJoin(FednetError):
    """Raised where the run goes on with another number of clients: at the end of a round after
    which clients join, or before the first round of some of which one has gone again. clients: how
    many there are then.
    """

    def __init__(self, before: int, clients: int) -> None:
        text = f"{clients - before} more client(s) join the run"
        if clients < before:
            text = f"{before - clients} client(s) asked to join the run, and did not"
        super().__init__(text)
        self.clients = clients


class Stopped(FednetError):
    """Raised where a run ends early on request; `by_keyboard` tells Ctrl-C from the rest."""

    exit_status = 4

    def __init__(self, reason: str, by_keyboard: bool = False) -> None:
        super().__init__(reason)
        if by_keyboard:
            self.exit_status = 130


class StopRequested(KeyboardInterrupt):
    """A signal asked for a stop before there was anything to save. Like KeyboardInterrupt it is no
    Exception: code that tries something, as imports of torch do, does not take it for a failure.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped: {signal_name(number)}")
        self.exit_status = 130 if number == signal.SIGINT else Stopped.exit_status


def raise_stop(number: int, _: object = None) -> NoReturn:
    """Raises StopRequested. A signal handler."""
    raise StopRequested(number)


def signal_name(number: int) -> str:
    """Returns SIGTERM, or "signal 40": most real-time signals have no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask for a clean stop. SIGHUP, which comes when a terminal is closed,
    is not one for a process that `nohup` started.
    """
    found = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


@contextlib.contextmanager
def last_work(ends: bool) -> Iterator[None]:
    """Wraps the work of a process. ends: the process ends after it. Then a request to stop raises
    StopRequested until that work handles such requests itself; afterwards Ctrl-C ends the process
    at once, and other requests are ignored, so that it ends with its own status.
    """
    numbers = stop_signals() if ends else []
    if ends:  # if the parent ignored it, the system keeps no exit status of child processes
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in numbers:
        signal.signal(number, raise_stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name closest to `name`, or the first that begins with it; None if none is
    close enough to be meant.
    """
    spelled = {k.lower(): k for k in known}
    typed = name.lower()
    found = difflib.get_close_matches(typed, list(spelled), n=1, cutoff=0.6)
    begun = [k for k in spelled if len(typed) > 1 and k.startswith(typed)]
    return next((spelled[k] for k in (*found, *begun)), None)


def lacking(what: str, package: str) -> str:
    """Returns the sentence for an optional package that is not installed."""
    return f"{what} needs the package {package}, which is not installed: pip install {package}."


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Returns the sentences for an unknown name: what was found, the nearest valid name, all valid
    ones, in quotes where a space at their ends would not be seen.
    """
    names = sorted(known)
    listed = ", ".join(name if name == name.strip() else repr(name) for name in names)
    guess = nearest(str(name), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {what} {name!r}.{hint} Known: {listed}."


def without_paths(text: str) -> str:
    """Returns a reason as it may leave this site, without what looks like a path: nobody elsewhere
    learns which files there are.
    """
    return _PATH.sub("(a path)", text)


def why(broken: OSError) -> str:
    """Returns the system's reason, and the file."""
    return f"{broken.strerror or broken}{f' ({broken.filename})' if broken.filename else ''}"


def no_memory(broken: BaseException) -> bool:
    """Returns whether memory was not enough. The loader of libraries, and torch, say so in words
    only.
    """
    if isinstance(broken, OSError):
        return broken.errno == errno.ENOMEM
    return isinstance(broken, MemoryError) or (
        isinstance(broken, (ImportError, RuntimeError))
        and any(words in str(broken).lower() for words in NO_MEMORY)
    )


# A disk, or a server of files, is full or has failed: what is to be kept cannot be.
NO_STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EIO, errno.ESTALE),
)
# Errors that are no fault of fednet: the machine refuses something, or a path is of another kind.
REFUSED = (
    *NO_STORAGE,
    errno.EACCES,
    *(errno.EMFILE, errno.ENFILE),  # ulimit -n
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO),
)
LACKS_MEMORY = "no memory is left here, or by a limit of this process (ulimit -v, a container's)"


def machine_error(broken: BaseException) -> str | None:
    """Returns the sentence for an error that is the machine's; None for any other."""
    if isinstance(broken, OSError) and broken.errno in REFUSED:
        return f"{broken.strerror}{f': {broken.filename}' if broken.filename else ''}."
    if not no_memory(broken):
        return None
    return f"{LACKS_MEMORY}{f' ({str(broken).splitlines()[0]})' if str(broken) else ''}."


def complain(text: str, whole: bool = False) -> None:
    """Prints a sentence on stderr, if that can be written to. whole: a traceback, printed whole."""
    try:
        print(text.rstrip("\n") if whole else shorten(text), file=sys.stderr, flush=True)
    except OSError:
        nowhere(sys.stderr)


def with_time(text: str) -> str:
    """Returns a line of the console with the time of day before it."""
    return f"{time.strftime('%H:%M:%S')}  {text}"


def log_line(text: str) -> str:
    """Returns a line about a round for stdout: with the time of day, unless that is a terminal."""
    return text if sys.stdout.isatty() else with_time(text)


def speaker(quiet: bool) -> Callable[[str], None]:
    """Returns a function that prints a line on stdout, and goes on where nobody can read it."""

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:  # a pipe whose reader has gone, a terminal that was closed, a full disk
            nowhere(sys.stdout)

    return (lambda line: None) if quiet else say


def nowhere(stream: IO[str]) -> None:
    """Drops what is still written to the stream, also when the process flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
