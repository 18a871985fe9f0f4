"""A client process's own books: of all messages, wire.jsonl, and of what its clients have answered
with noise on it, answers.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from fednet.client.policy import BudgetSection
from fednet.config import PrivacySection
from fednet.descriptors import named, synced
from fednet.errors import ConfigError, StateError
from fednet.experiment.lock import alone
from fednet.experiment.privacy import Question, accounting, epsilon
from fednet.files import line, opened, plain_line, repair, unchecked, write_all
from fednet.plain import JsonDict
from fednet.wire.book import summed


class Book:
    """Rows written before it is known where the book lies are in it too. Several processes may have
    one file: a line is added by one at a time, and what another was killed in is cut off first.
    """

    def __init__(self) -> None:
        self.rows: list[JsonDict] = []  # that wait for a file, or in sums for the end of a round
        self._file, self._path = -1, Path()
        self._sums, self._round = False, 0

    def open(self, path: Path, sums: bool = False) -> None:
        """The rows to come are written there, until another book is opened. sums: a line for all
        messages of a round that are alike, once it is over; of a process that is killed, those of
        the round under way are not in it.
        """
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        self._file, self._path = opened(named(path, there=False), flags), path
        self._sums, self._round = sums, 0
        rows, self.rows = self.rows, []
        self._add([])
        for row in rows:
            self.write(row)

    def write(self, row: JsonDict) -> None:
        if self._sums and row["round"] > self._round:
            self._round = row["round"]
            self._sum_up()
        if self._sums or self._file < 0:
            self.rows.append(row)
        else:
            self._add([row])

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):  # said already, where it was met
                self._sum_up()
            os.close(self._file)
            self._file = -1

    def _sum_up(self) -> None:
        rows, self.rows = self.rows, []
        self._add(summed(rows))

    def _add(self, rows: Iterable[JsonDict]) -> None:
        text = b"".join(map(plain_line, rows))
        with alone(self._file):
            end = os.fstat(self._file).st_size
            if end and os.pread(self._file, 1, end - 1) != b"\n":
                repair(self._path)
            write_all(self._file, text)


class Answers:
    """A site's own account of what its clients have answered with noise of their own, over all runs
    that its state directory has seen: a line an answer, on disk before the answer leaves. Each call
    may come from any thread, and several processes may have that directory, for other runs or as
    workers of one launcher: what one has noted counts with all.

    most: (epsilon, delta) that a client's answers may amount to, None: without end.
    """

    def __init__(self, path: Path, most: tuple[float, float] | None = None) -> None:
        if most is not None:
            accounting()  # what is missing is said now, not in a task
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._most, self._lock = path, most, threading.Lock()
        self._known = set[tuple[int, str]]()
        self._runs = set[str]()
        self._noises = dict[int, Counter[float]]()
        self._lines = self._bytes = 0  # of it that are counted
        with self._alone(os.O_CREAT):
            pass

    def of(self, run: str) -> bool:
        """Whether a client has answered in that run before this process was started."""
        return run in self._runs

    def account(self, question: Question, answer: str, section: PrivacySection) -> None:
        """The same answer again costs nothing. Raises ConfigError, and notes nothing, where it
        would be one too many; StateError where the account is not what was written there.
        """
        client = question.client
        with self._alone() as file:
            if (client, answer) in self._known:
                return
            if self._most is not None:
                noises = self._noises.get(client, Counter()) + Counter({section.noise: 1})
                spent = epsilon(noises, self._most[1])
                if spent > self._most[0]:
                    raise ConfigError(
                        f"client {client}: one more answer would spend epsilon {spent:.3g} at "
                        f"delta {self._most[1]:g}, and this site's policy has {self._most[0]:g}."
                    )
            asked = {"run": question.run, "round": question.round, "client": client}
            said = {"answer": answer, "noise": section.noise, "clip": section.clip}
            write_all(file, line({**asked, **said}))
            synced(file, self._path)

    @contextlib.contextmanager
    def _alone(self, create: int = 0) -> Iterator[int]:
        """Inside, nobody else writes there, and what was written is counted. Gives the file."""
        with self._lock:
            try:
                file = opened(self._path, os.O_RDWR | os.O_APPEND | create)
            except FileNotFoundError:
                raise _gone(self._path) from None
            try:
                with alone(file):
                    self._count(file)
                    yield file
            finally:
                os.close(file)

    def _count(self, file: int) -> None:
        """What came since; a last line that a process ended in is cut off."""
        with os.fdopen(file, "rb", closefd=False) as held:
            held.seek(self._bytes)
            for text in held:
                if not text.endswith(b"\n"):
                    os.ftruncate(file, self._bytes)
                    return
                self._lines += 1
                try:
                    row = msgspec.json.decode(unchecked(text), type=_Answer)
                except ValueError as broken:
                    raise StateError(
                        f"{self._path}:{self._lines}: not what was written there ({broken}); put "
                        f"the file back as it was."
                    ) from None
                self._bytes += len(text)
                self._known.add((row.client, row.answer))
                self._runs.add(row.run)
                self._noises.setdefault(row.client, Counter())[row.noise] += 1


class _Answer(msgspec.Struct):
    """A line, as far as it counts."""

    run: str
    client: int
    answer: str
    noise: float


def account_of(section: PrivacySection, own: BudgetSection | None, root: Path) -> Answers | None:
    """The site's account of answers with noise of its own; None where there are none. section: the
    run's, own: the policy's.
    """
    if not section.noise or section.where != "client":
        return None
    most = None if own is None or own.epsilon is None else (own.epsilon, own.delta)
    path = root.parent / "answers.jsonl"
    # In this order: another process, that begins now, has its account before its noise.
    if any(root.parent.glob("*/noise.key")) and not path.exists():
        raise _gone(path)
    return Answers(path, most)


def _gone(path: Path) -> StateError:
    return StateError(
        f"{path}: the account of what this site's clients have answered with noise is gone, and "
        f"what they may still spend is not known without it; put it back, or give another --state."
    )
