"""Finds out whether a method writes to tensors that clients of one process may share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fednet.algorithms.state import fingerprints
from fednet.errors import ConfigError, SharedChanged
from fednet.tensors import Tensors


@dataclass(eq=False, slots=True)
class _Lent:
    tensors: Tensors
    before: dict[str, object]
    """Their digests."""
    tasks: int = 0
    """That have them now."""
    most: int = 0
    """That had them at once."""


class Untouched:
    """The tensors that tasks have now, with their digests from before the first of these tasks.
    They are compared when the last one gives them back: once for all clients that are trained
    together. Any thread may call it.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._lent: dict[int, _Lent] = {}  # by identity
        self._lock = threading.Lock()

    def lend(self, given: Sequence[Tensors]) -> None:
        """A task begins to work with these."""
        with self._lock:
            for x in given:
                held = self._lent.get(id(x))
                if held is None:
                    held = self._lent[id(x)] = _Lent(x, fingerprints(x))
                held.tasks += 1
                held.most = max(held.most, held.tasks)

    def take_back(self, given: Sequence[Tensors]) -> None:
        """The task is over. Raises ConfigError if any that no other task has were changed."""
        changed = 0  # tasks that had such
        with self._lock:
            for x in given:
                held = self._lent[id(x)]
                held.tasks -= 1
                if not held.tasks:
                    del self._lent[id(x)]
                    if fingerprints(x) != held.before:
                        changed = max(changed, held.most)
        if changed:
            error = ConfigError if changed == 1 else SharedChanged
            raise error(
                f"client_update of {self._method} changes tensors that it was sent, or "
                f"host.initial, in place. Clients of one process may share them: clone them first."
            )
