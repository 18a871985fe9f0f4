"""How many clients are at work on a device at once: found by measuring one, never guessed.

    one slot ── its first task is done, alone: the peak is known ──> as many as fit
    as many as are packed (`train.pack`), from the first on
    either ── a task ran out of memory ──> one less

Whoever has no slot waits. A task that ran out of memory is done again from its start, which gives
the same bits; it fails only where it ran out of memory alone, again and again. Plain logic: what is
asked of a device is a `Card`, the threads are the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SPARE = 0.9  # of the room is filled: not every client's peak is the first one's
MOST = 16  # at a card at once: beyond, threads of one Python process only wait for each other
IN_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Until a task that ran out of memory alone is tried again. Another process may have the memory,
and there is no event for its giving it back."""


class Card(Protocol):
    """A device, as far as its memory goes. Bytes."""

    name: str

    def need(self) -> int:
        """What this process has taken at most so far: after its first task, what one client
        needs.
        """

    def room(self) -> int:
        """What this process could have altogether: what is free, and what it has already."""

    def release(self) -> None:
        """Gives back what is kept for later but not in use."""


@dataclass(slots=True)
class _Side:
    """A card's slots. limit: tasks that may be at it; open: threads that serve it."""

    limit: int = 1
    open: int = 0
    at_work: int = 0
    measured: bool = False
    together: bool = False
    short: int = 0  # how often in a row a task ran out of memory while it was alone


class Slots:
    """The slots at all cards of a process. Each call may come from any thread. most: clients that
    this process hosts.
    """

    def __init__(self, cards: Sequence[Card], most: int) -> None:
        self.cards = list(cards)
        self._most = max(1, min(most, MOST))
        self._sides = [_Side() for _ in cards]
        self._lock = threading.Lock()

    def together(self, n: int) -> None:
        """n tasks are to be at each card at once from now on, because they are trained as one:
        nothing is measured. 1: as ever.
        """
        with self._lock:
            for side in self._sides:
                if n > 1 or side.together:
                    side.limit, side.measured, side.together = n, n > 1, n > 1

    def limit(self, card: int) -> int:
        """Tasks that may be at the card at once."""
        with self._lock:
            return self._sides[card].limit

    @property
    def total(self) -> int:
        """Tasks that may be at work at once, as far as is known."""
        with self._lock:
            return sum(side.limit for side in self._sides)

    def open(self, card: int) -> bool:
        """Whether another thread may come to the card now; it then counts."""
        with self._lock:
            side = self._sides[card]
            found = side.open < side.limit
            side.open += found
            return found

    def leave(self, card: int) -> bool:
        """Whether a thread is to go, because fewer fit than there are; it then no longer counts."""
        with self._lock:
            side = self._sides[card]
            gone = side.open > side.limit
            side.open -= gone
            return gone

    def closed(self, card: int) -> None:
        """A thread has gone because there is nothing to do; it no longer counts."""
        with self._lock:
            self._sides[card].open -= 1

    def begin(self, card: int) -> int:
        """A task begins. Returns how many may be at the card: to be handed to `short`."""
        with self._lock:
            self._sides[card].at_work += 1
            return self._sides[card].limit

    def end(self, card: int) -> bool:
        """A task has gone well. Whether it was the one to measure, and more may come now."""
        with self._lock:
            side = self._sides[card]
            side.at_work -= 1
            side.short = 0
            if side.measured:
                return False
            side.measured = True
            need = self.cards[card].need()
            side.limit = (
                max(1, min(self._most, int(self.cards[card].room() * SPARE) // need))
                if need > 0
                else 1
            )
            return side.limit > 1

    def given_up(self, card: int) -> None:
        """A task has ended otherwise: cancelled, or failed."""
        with self._lock:
            self._sides[card].at_work -= 1

    def ran_short(self, card: int, limit: int) -> float | None:
        """A task ran out of memory. Returns after how many seconds to do it again, None if it is
        not to be. limit: what `begin` returned: of several that ran out of memory together, the
        first makes it one less.
        """
        with self._lock:
            side = self._sides[card]
            side.at_work -= 1
            others = side.at_work
            if limit > 1 and limit == side.limit:
                side.limit -= 1
            self.cards[card].release()
            if others or limit > 1:  # there will be fewer, or were more than there are by now
                return 0.0
            side.short += 1
            return PAUSES_S[side.short - 1] if side.short <= len(PAUSES_S) else None


class Cpu:
    """A processor: one client at a time, which has all the cores that its process has, unless
    clients are packed.
    """

    name = "cpu"

    def need(self) -> int:
        return 0

    def room(self) -> int:
        return 0

    def release(self) -> None:
        pass


class Gpu:
    """A CUDA device. share: of its memory, where other workers are known to be on it too."""

    def __init__(self, name: str, share: float = 1.0) -> None:
        import torch

        self.name, self._share = name, share
        self._cuda = torch.cuda

    def need(self) -> int:
        # With what lies between: that cannot be another's either.
        return int(self._cuda.max_memory_reserved(self.name))

    def room(self) -> int:
        free, total = self._cuda.mem_get_info(self.name)
        return int(min(free + self._cuda.memory_reserved(self.name), total * self._share))

    def release(self) -> None:
        self._cuda.empty_cache()


def card_of(device: str, share: float = 1.0) -> Card:
    return Gpu(device, share) if device.startswith("cuda") else Cpu()


def out_of_memory(broken: BaseException) -> bool:
    """Whether a device's memory was not enough. cuBLAS and cuDNN say it in words."""
    import torch

    return isinstance(broken, torch.OutOfMemoryError) or (
        isinstance(broken, RuntimeError) and any(word in str(broken) for word in IN_WORDS)
    )
