"""The errors of fednet, and whose fault each one is.

FednetError
├── ConfigError    the command line, the configuration or a user's part is wrong (exit status 2)
├── DataError      a dataset, partition or site is not what was declared (exit status 2)
├── StateError     a checkpoint or a client's state is missing, torn or foreign (exit status 2)
│   └── StateAbsent         of a client, here; another process that hosts it may have it
│       └── BaseAbsent      the model that training starts from; the server sends it again
├── ProtocolError
│   ├── LocalProtocolError  this side asked for what the protocol does not allow: a fault of fednet
│   └── RemoteProtocolError the other side sent what it does not allow: refused and counted
├── LeftRound      a client has no further part in a round, which goes on without it
├── RoundVoid      nothing comes of a round; the next one begins from where it did
├── CannotGoOn     the federation could not go on (exit status 3)
└── Stopped        stopped cleanly with rounds left to do (exit status 4, or 130 by Ctrl-C)

Asked is none of them: a request to stop that comes before there is anything to be saved.
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


# Characters of a value, a key or a path in a sentence, and of a sentence: what is longer is no
# list of names, but a text that someone gave.
LONGEST, WHOLE = 300, 4000
_LONG = re.compile(rf"""'[^'\n]{{{LONGEST},}}'(?!\w)|"[^"\n]{{{LONGEST},}}"|\S{{{LONGEST + 1},}}""")


def brief(text: str, most: int = LONGEST) -> str:
    """The text, of a long one its beginning, its length and its last words, which are whole: half
    of a path would not be seen to be one.
    """
    if len(text) <= most:
        return text
    end = text[-most // 4 :].partition(" ")
    return f"{text[: most // 2]}... ({len(text)} characters){end[1]}{end[2]}"


def shortened(sentence: str) -> str:
    """A sentence in which whatever is quoted is brief."""
    return brief(_LONG.sub(lambda found: brief(found[0]), sentence), WHOLE)


class FednetError(Exception):
    """Base of everything fednet raises on purpose. Its text is one or two sentences a user can act
    on.
    """

    exit_status = 3

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(FednetError):
    exit_status = 2


class DataError(FednetError):
    exit_status = 2


class StateError(FednetError):
    exit_status = 2


class StateAbsent(StateError):
    """A client's state is not here; another process that hosts the client may have it."""


class BaseAbsent(StateAbsent):
    """The model that training starts from is not here; the server sends it again."""


class ProtocolError(FednetError):
    pass


class LocalProtocolError(ProtocolError):
    pass


class RemoteProtocolError(ProtocolError):
    again = True  # a task that met it is tried again: it may have been the line


class Forgotten(RemoteProtocolError):
    """What compressors at both ends should remember of earlier messages is not there."""

    says = "what was left of earlier messages is lost here"
    again = False

    def __init__(self) -> None:
        super().__init__(f"{self.says}; the next comes whole.")


class LeftRound(FednetError):
    """A client has no further part in a round: the others go on without it."""


class RoundVoid(FednetError):
    """Nothing comes of a round, and nobody is to blame: the next one begins where it did."""


class CannotGoOn(FednetError):
    exit_status = 3


class Stopped(FednetError):
    """Raised where a run ends early on request; `by_keyboard` tells Ctrl-C from the rest."""

    exit_status = 4

    def __init__(self, reason: str, by_keyboard: bool = False) -> None:
        super().__init__(reason)
        if by_keyboard:
            self.exit_status = 130


class Asked(KeyboardInterrupt):
    """A signal asks for a stop before there is anything to be saved. As Ctrl-C it is no Exception,
    so that what tries something, as imports of torch do, does not take it for that thing's failure.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped: {signal_name(number)}")
        self.exit_status = 130 if number == signal.SIGINT else Stopped.exit_status


def ask(number: int, _: object = None) -> NoReturn:
    """What such a signal does."""
    raise Asked(number)


def signal_name(number: int) -> str:
    """SIGTERM, or "signal 40": most of the real-time signals have no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stops() -> list[signal.Signals]:
    """The signals that ask for a clean stop. What `nohup` started goes on where its terminal is
    closed, by which SIGHUP comes.
    """
    found = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


@contextlib.contextmanager
def last_work(ends: bool) -> Iterator[None]:
    """What a process is there for. ends: a request to stop is `Asked` until that work knows better;
    the process ends afterwards, with its status, and no request meets it halfway to that; Ctrl-C
    ends it at once.
    """
    for number in stops() if ends else []:
        signal.signal(number, ask)
    try:
        yield
    except Exception as broken:  # a library in C makes its own of what came while it was imported
        if isinstance(broken.__cause__, KeyboardInterrupt):
            raise broken.__cause__ from None
        raise
    finally:
        for number in stops() if ends else []:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or the first that begins with it; None if none is close
    enough to be meant.
    """
    spelled, typed = {k.lower(): k for k in known}, name.lower()
    found = difflib.get_close_matches(typed, list(spelled), n=1, cutoff=0.6)
    begun = [k for k in spelled if len(typed) > 1 and k.startswith(typed)]
    return next((spelled[k] for k in (*found, *begun)), None)


def lacking(what: str, package: str) -> str:
    """The sentence for an optional package that is not installed. Its own name: there need be no
    fednet in a package index, whose extra would bring it.
    """
    return f"{what} needs the package {package}, which is not installed: pip install {package}."


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The sentences for an unknown name: what was found, the nearest valid name, what is allowed,
    which may be a long list.
    """
    names = sorted(known)
    guess = nearest(str(name), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(names)}."


def without_paths(text: str) -> str:
    """A reason as it may leave this site: what looks like a path is left out, so that no text says
    which files there are.
    """
    return _PATH.sub("(a path)", text)


def why(broken: OSError) -> str:
    """What the system said, and of which file."""
    return f"{broken.strerror or broken}{f' ({broken.filename})' if broken.filename else ''}"


def no_memory(broken: BaseException) -> bool:
    """Whether this machine's memory, or what a limit leaves this process of it, was not enough.
    What loads libraries, and torch, say so in words.
    """
    if isinstance(broken, OSError):
        return broken.errno == errno.ENOMEM
    return isinstance(broken, MemoryError) or (
        isinstance(broken, (ImportError, RuntimeError))
        and any(words in str(broken).lower() for words in NO_MEMORY)
    )


# What the machine refuses is no fault of fednet, nor is what lies at a path of the user's.
REFUSED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE),  # ulimit -n
    *(errno.EIO, errno.ESTALE),  # a disk, or a server of files, that has failed
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO),
)
LACKS_MEMORY = "no memory is left here, or by a limit of this process (ulimit -v, a container's)"


def refused(broken: BaseException) -> str | None:
    """A sentence about what the machine refused; None for any other error."""
    if isinstance(broken, OSError) and broken.errno in REFUSED:
        return f"{broken.strerror}{f': {broken.filename}' if broken.filename else ''}."
    if not no_memory(broken):
        return None
    return f"{LACKS_MEMORY}{f' ({str(broken).splitlines()[0]})' if str(broken) else ''}."


def complain(text: str, whole: bool = False) -> None:
    """A sentence on stderr, where that takes it. whole: a traceback, of which nothing is cut."""
    try:
        print(text.rstrip("\n") if whole else shortened(text), file=sys.stderr, flush=True)
    except OSError:
        nowhere(sys.stderr)


def timed(text: str) -> str:
    """A line of the console with the time of day before it."""
    return f"{time.strftime('%H:%M:%S')}  {text}"


def speaker(quiet: bool) -> Callable[[str], None]:
    """What writes a line on stdout about work that goes on, whether anybody is left to read it or
    not.
    """

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:  # a pipe whose reader has gone, a terminal that was closed, a full disk
            nowhere(sys.stdout)

    return (lambda line: None) if quiet else say


def nowhere(stream: IO[str]) -> None:
    """What is still written there, and flushed at the end of the process, is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
