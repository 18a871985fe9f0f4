"""Messages on hold until a time, in the order in which they came: a connection delays, it does not
reorder.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class DelayQueue(Generic[T]):
    def __init__(self) -> None:
        self._held: deque[tuple[float, T]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, due: float, item: T) -> None:
        """Holds an item back until second `due`, or until what came before has left, if that is
        later.
        """
        if self._held:
            due = max(due, self._held[-1][0])
        self._held.append((due, item))

    def ready(self, now: float) -> list[T]:
        """Takes out what is due."""
        out = []
        while self._held and self._held[0][0] <= now:
            out.append(self._held.popleft()[1])
        return out

    def due(self) -> float | None:
        """When the next is."""
        return self._held[0][0] if self._held else None

    def clear(self) -> None:
        self._held.clear()


def wait(timeout_s: float | None, now: float, dues: list[float | None]) -> float | None:
    """How long a poll may wait: no longer than `timeout_s`, and not past what is due."""
    waits = [max(0.0, due - now) for due in dues if due is not None]
    if timeout_s is not None:
        waits.append(timeout_s)
    return min(waits, default=None)
