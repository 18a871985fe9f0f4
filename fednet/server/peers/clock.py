"""The time by which a server is patient with its peers: seconds in which it listened."""

from __future__ import annotations

import time

PAUSE_S = 1.0  # of what passes between two times that a server listens, at most so much counts


class ListeningClock:
    """A clock that stands while the server hears nobody: one that was stopped, or whose machine
    slept, would else take what its clients sent meanwhile, and it has not read yet, for silence.
    """

    def __init__(self) -> None:
        self._missed, self._listened, self._counts = 0.0, time.monotonic(), False

    def __call__(self) -> float:
        now = time.monotonic()
        # A pause is none of theirs wherever it struck, also before this server listens again.
        return (min(now, self._listened + PAUSE_S) if self._counts else now) - self._missed

    def listened(self, counts: bool = True, alone: bool = False) -> None:
        """What had come was taken in. alone: nobody was waited for until now, so that all of it
        counts. counts: False in one process, where clients train in this very thread, and nobody
        ever is silent.
        """
        now = time.monotonic()
        if counts and not alone:
            self._missed += max(0.0, now - self._listened - PAUSE_S)
        self._listened, self._counts = now, counts
