"""The errors of fednet, and whose fault each one is.

FednetError
├── ConfigError    the command line, the configuration or a user's part is wrong (exit status 2)
├── DataError      a dataset, partition or site is not what was declared (exit status 2)
├── StateError     a checkpoint or a client's state is missing, torn or foreign (exit status 2)
│   └── StateAbsent         of a client, here; another process that hosts it may have it
├── ProtocolError
│   ├── LocalProtocolError  this side asked for what the protocol does not allow: a fault of fednet
│   └── RemoteProtocolError the other side sent what it does not allow: refused and counted
├── CannotGoOn     the federation could not go on (exit status 3)
└── Stopped        stopped cleanly with rounds left to do (exit status 4, or 130 by Ctrl-C)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FednetError(Exception):
    """Base of everything fednet raises on purpose. Its text is one or two sentences a user can act
    on.
    """

    exit_status = 3


class ConfigError(FednetError):
    exit_status = 2


class DataError(FednetError):
    exit_status = 2


class StateError(FednetError):
    exit_status = 2


class StateAbsent(StateError):
    """A client's state is not here; another process that hosts the client may have it."""


class ProtocolError(FednetError):
    pass


class LocalProtocolError(ProtocolError):
    pass


class RemoteProtocolError(ProtocolError):
    pass


class CannotGoOn(FednetError):
    exit_status = 3


class Stopped(FednetError):
    """Raised where a run ends early on request; `by_keyboard` tells Ctrl-C from the rest."""

    exit_status = 4

    def __init__(self, reason: str, by_keyboard: bool = False) -> None:
        super().__init__(reason)
        if by_keyboard:
            self.exit_status = 130


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None if none is close enough to be meant."""
    spelled = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The sentence for an unknown name: what was found, what is allowed, the nearest valid name."""
    names = sorted(known)
    guess = nearest(str(name), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {what} {name!r}; known: {', '.join(names)}.{hint}"
