"""A client process's own books: of all messages, wire.jsonl; and the site's accounts, beside the
folders of its runs: of what its clients have answered with noise on it, answers.jsonl, and of what
they have sent under masks, masked.jsonl.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fednet.client.policy import BudgetSection
from fednet.config import Config, PrivacySection
from fednet.descriptors import named, synced
from fednet.errors import ConfigError, LeftRound, StateError
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


class Account:
    """A site's own account of what has left it, over all runs that its state directory has seen: a
    line each, on disk before it leaves. Each call may come from any thread, and several processes
    may have that directory, for other runs or as workers of one launcher: what one has noted counts
    with all. `what`: is in it; `Line`: the fields of a line that count, for `_take`.
    """

    what = ""
    Line: type[msgspec.Struct] = msgspec.Struct

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        self._lines = self._bytes = 0  # of it that are counted
        with self._alone(os.O_CREAT):
            pass

    def _take(self, row: Any) -> None:
        """Counts a line."""
        raise NotImplementedError

    def _note(self, file: int, row: JsonDict) -> None:
        """Writes a line, which is counted when the account is opened next."""
        write_all(file, line(row))
        synced(file, self._path)

    @contextlib.contextmanager
    def _alone(self, create: int = 0) -> Iterator[int]:
        """Inside, nobody else writes there, and what was written is counted. Gives the file."""
        with self._lock:
            try:
                file = opened(self._path, os.O_RDWR | os.O_APPEND | create)
            except FileNotFoundError:
                raise gone(self._path, self.what) from None
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
                    row = msgspec.json.decode(unchecked(text), type=self.Line)
                except ValueError as broken:
                    raise StateError(
                        f"{self._path}:{self._lines}: not what was written there ({broken}); put "
                        f"the file back as it was."
                    ) from None
                self._bytes += len(text)
                self._take(row)


class _Answer(msgspec.Struct):
    run: str
    client: int
    answer: str
    noise: float


class Answers(Account):
    """The account of what clients have answered with noise of their own. most: (epsilon, delta)
    that a client's answers may amount to, None: without end.
    """

    what = "what this site's clients have answered with noise, and may still spend"
    Line = _Answer

    def __init__(self, path: Path, most: tuple[float, float] | None = None) -> None:
        if most is not None:
            accounting()  # what is missing is said now, not in a task
        self._most = most
        self._known = set[tuple[int, str]]()
        self._runs = set[str]()
        self._noises = dict[int, Counter[float]]()
        super().__init__(path)

    def _take(self, row: _Answer) -> None:
        self._known.add((row.client, row.answer))
        self._runs.add(row.run)
        self._noises.setdefault(row.client, Counter())[row.noise] += 1

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
            self._note(file, {**asked, **said})


class _Vector(msgspec.Struct):
    client: int
    configuration: str
    round: int
    vector: str


class Masked(Account):
    """The account of vectors that have left under masks. A second sum with the same vector in it,
    over other clients, would show the difference of the two sums: so a vector leaves once, and a
    client has one in each round of a configuration, whatever the run is called and whoever asks.
    """

    what = "what this site's clients have sent under masks, and must not send again"
    Line = _Vector

    def __init__(self, path: Path) -> None:
        self._rounds = dict[tuple[int, str], int]()  # by client and configuration, the last one
        self._vectors = set[tuple[int, str]]()  # of a client, by its digest
        super().__init__(path)

    def _take(self, row: _Vector) -> None:
        last = self._rounds.get((row.client, row.configuration), 0)
        self._rounds[row.client, row.configuration] = max(last, row.round)
        self._vectors.add((row.client, row.vector))

    def leaves(self, client: int, configuration: str, round: int, vector: bytes) -> None:
        """Notes that this vector leaves. Raises LeftRound where it must not: then another one of
        its round did before, or the same in another round.
        """
        digest = hashlib.sha256(vector).hexdigest()
        with self._alone() as file:
            last = self._rounds.get((client, configuration), 0)
            known = (client, digest) in self._vectors
            if round <= last or known:
                before = f"in round {last} of this configuration" if round <= last else "before"
                raise LeftRound(
                    f"secure aggregation: client {client}'s vector left {before} already, under "
                    f"other keys; a second time would show it. To repeat a run, give another "
                    f"--state ({self._path} has what was sent)"
                )
            said = {"configuration": configuration, "vector": digest}
            self._note(file, {"round": round, "client": client, **said})


# Of a site, beside the folders of its runs: no run may have such a name.
ANSWERS, MASKED = "answers.jsonl", "masked.jsonl"


def configuration_of(config: Config) -> str:
    """A digest of what a client's training follows from, whatever else the server may call it."""
    shapes = config.seed, config.algorithm, config.model, config.data, config.train
    return hashlib.sha256(msgspec.json.encode(shapes, order="sorted")).hexdigest()


def account_of(section: PrivacySection, own: BudgetSection | None, root: Path) -> Answers | None:
    """The site's account of answers with noise of its own; None where there are none. section: the
    run's, own: the policy's.
    """
    if not section.noise or section.where != "client":
        return None
    most = None if own is None or own.epsilon is None else (own.epsilon, own.delta)
    path = root.parent / ANSWERS
    # In this order: another process, that begins now, has its account before its noise.
    if any(root.parent.glob("*/noise.key")) and not path.exists():
        raise gone(path, Answers.what)
    return Answers(path, most)


def gone(path: Path, what: str) -> StateError:
    """The error for an account that was there before."""
    return StateError(
        f"{path}: the account of {what}, is gone; put it back, or give another --state."
    )
