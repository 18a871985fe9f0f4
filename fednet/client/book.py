"""A client process's own books: of all messages, wire.jsonl, and of what its clients have answered
with noise on it, answers.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fednet.client.policy import BudgetSection
from fednet.config import PrivacySection
from fednet.errors import ConfigError, StateError
from fednet.experiment.lock import alone
from fednet.experiment.privacy import Question, accounting, epsilon
from fednet.files import Lines, line, opened, repair, unchecked, write_all
from fednet.plain import JsonDict
from fednet.wire.book import OwnBook


class Book:
    """Rows written before it is known where the book lies are in it too."""

    def __init__(self) -> None:
        self.rows: list[JsonDict] = []  # that wait for a file
        self._file: Lines | None = None

    def open(self, path: Path, sums: bool = False) -> None:
        """The rows to come are written there, until another book is opened. sums: see `OwnBook`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        if self._file is not None:
            self._file.close()
        self._file = OwnBook(path) if sums else Lines(path)
        for row in self.rows:
            self._file.append(row)
        self.rows.clear()

    def write(self, row: JsonDict) -> None:
        if self._file is None:
            self.rows.append(row)
        else:
            self._file.append(row)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # said already, where it was met
                self._file.close()


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
            os.fsync(file)

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
