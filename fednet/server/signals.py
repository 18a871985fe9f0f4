"""What the signals that stop a process do to a server, before and after there is something to be
saved.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from fednet.errors import Asked, Stopped, ask, signal_name, stops

if TYPE_CHECKING:
    from fednet.server.watch import Watch

Handler = Callable[[int, FrameType | None], None]
Before = Handler | int | signal.Handlers | None  # what a signal did


def stop_later(watch: Watch, number: int, _: FrameType | None) -> None:
    """Once there is something to be saved: the rounds look for this."""
    watch.requested = signal_name(number), number == signal.SIGINT


def on_stop(handler: Handler) -> dict[int, Before]:
    """What the signals that ask for a stop do from now on; returns what they did."""
    before: dict[int, Before] = {}
    for number in stops():
        with contextlib.suppress(ValueError):  # in a thread of a caller's own, who has the signals
            before[number] = signal.signal(number, handler)
    return before


@contextlib.contextmanager
def while_stopping(handler: Handler) -> Iterator[None]:
    """As `on_stop`, and afterwards they do again what they did."""
    before = on_stop(handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


TOGETHER_S = 0.3
"""One press of Ctrl-C may come twice: from the terminal, and passed on by whoever started this
process.
"""


def thrice_kills(handler: Handler) -> Handler:
    """Does what `handler` does, but the third Ctrl-C ends what is going on where it stands: a
    method's own part may never come to its end.
    """
    presses = list[float]()

    def on(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and (not presses or now - presses[-1] > TOGETHER_S):
            presses.append(now)
        if len(presses) >= 3:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        handler(number, frame)

    return on


@contextlib.contextmanager
def stopped_early() -> Iterator[None]:
    """Before there is anything to be saved, a request to stop is Stopped once it comes out here."""
    try:
        with while_stopping(ask):
            yield
    except Asked as asked:
        raise early(asked) from None


def early(asked: Asked) -> Stopped:
    """Of a run, of which there may be a checkpoint."""
    return Stopped(f"{asked}; go on with --resume.", asked.exit_status == 130)
