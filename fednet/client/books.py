"""A client process's own records: the book of all its messages (wire.jsonl), and two accounts of
the site, next to the folders of the runs: what its clients have answered with noise
(answers.jsonl), and what they have sent under masks (masked.jsonl); and their secrets in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fednet.client.policy import BudgetSection
from fednet.config import Config, PrivacySection
from fednet.descriptors import flush_to_disk
from fednet.errors import ConfigError, LeftRound, StateError
from fednet.experiment.privacy import Question, accounting, epsilon
from fednet.files import (
    alone,
    line,
    naming_file,
    open_descriptor,
    plain_line,
    repair,
    try_lock,
    without_digest,
    write_all,
)
from fednet.plain import JsonDict

if TYPE_CHECKING:
    from fednet.secagg import SecureClient, Terms


class MessageFile:
    """Writes the book of a process's messages. It keeps rows until it is flushed, and those that
    come before it is opened. No other process writes to its file while it is open.
    """

    def __init__(self) -> None:
        self.rows: list[JsonDict] = []  # not in the file yet
        self._file = -1
        self._path = Path()
        self._lock = threading.Lock()

    def open(self, folder: Path, name: str) -> None:
        """Writes rows to `wire.jsonl` in the folder from now on, or to `wire-NAME.jsonl` where
        another process writes to that one. name: of this process. Cuts off a line that a process
        did not finish before it was killed. Raises ConfigError for a file system without locks.
        """
        self.close()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "wire.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = open_descriptor(path, flags)
        if not try_lock(file, path):
            os.close(file)
            path = folder / f"wire-{name}.jsonl"
            file = open_descriptor(path, flags)
        repair(path)
        self._file = file
        self._path = path
        self.flush()

    def add(self, row: JsonDict) -> None:
        """Adds a row, which `flush` writes."""
        with self._lock:  # a file is opened in another thread
            self.rows.append(row)

    def flush(self) -> None:
        """Writes the rows that have come, if there is a file."""
        if self._file < 0 or not self.rows:
            return
        with self._lock:
            waiting = self.rows
            self.rows = []
        with naming_file(self._path):
            write_all(self._file, b"".join(map(plain_line, waiting)))

    def close(self) -> None:
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


class SiteAccount:
    """Keeps a site's account of what has left it, over all runs of its state directory: a line for
    each payload, on disk before the payload leaves. Any thread may call it. Several processes may
    share the directory: what one writes counts for all. what: the contents, for errors. Line: the
    fields of a line that `_count` gets.
    """

    what = ""
    Line: type[msgspec.Struct] = msgspec.Struct

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self._lines = 0  # that are counted
        self._bytes = 0  # of these
        with self._exclusive(os.O_CREAT):
            pass

    def _count(self, row: Any) -> None:
        raise NotImplementedError

    def _write(self, file: int, row: JsonDict) -> None:
        """Writes a line, which is counted the next time."""
        write_all(file, line(row))
        flush_to_disk(file, self._path)

    @contextlib.contextmanager
    def _exclusive(self, create: int = 0) -> Iterator[int]:
        """Yields the file. No other process writes to it meanwhile, and all its lines are counted.
        A last line that a killed process did not finish is cut off.
        """
        with self._lock, contextlib.ExitStack() as ending:
            try:
                file = open_descriptor(self._path, os.O_RDWR | os.O_APPEND | create)
            except FileNotFoundError:
                raise missing_account(self._path, self.what) from None
            ending.callback(os.close, file)
            ending.enter_context(alone(file, self._path))
            ending.enter_context(naming_file(self._path))
            repair(self._path)
            held = ending.enter_context(os.fdopen(file, "rb", closefd=False))
            held.seek(self._bytes)
            for text in held:
                self._lines += 1
                try:
                    row = msgspec.json.decode(without_digest(text), type=self.Line)
                except ValueError as broken:
                    raise StateError(
                        f"{self._path}:{self._lines}: not what was written there ({broken}); put "
                        f"the file back as it was."
                    ) from None
                self._bytes += len(text)
                self._count(row)
            yield file


class _Answer(msgspec.Struct):
    run: str
    client: int
    answer: str
    noise: float


class Answers(SiteAccount):
    """Keeps the account of what clients have answered with noise of their own. most: (epsilon,
    delta) that all answers of a client may spend together, None: no bound.
    """

    what = "what this site's clients have answered with noise, and may still spend"
    Line = _Answer

    def __init__(self, path: Path, most: tuple[float, float] | None = None) -> None:
        if most is not None:
            accounting()  # raises now, not in a task, if dp-accounting is not installed
        self._most = most
        self._known = set[tuple[int, str]]()
        self._runs = set[str]()
        self._noises = dict[int, Counter[float]]()
        super().__init__(path)

    def _count(self, row: _Answer) -> None:
        self._known.add((row.client, row.answer))
        self._runs.add(row.run)
        self._noises.setdefault(row.client, Counter())[row.noise] += 1

    def answered_in(self, run: str) -> bool:
        """Returns whether a client answered in that run before this process was started."""
        return run in self._runs

    def account(self, question: Question, answer: str, section: PrivacySection) -> None:
        """Writes down an answer. The same answer again costs nothing. Raises ConfigError and leaves
        it out, if it would be one too many; StateError if the account is damaged.
        """
        client = question.client
        with self._exclusive() as file:
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
            row: JsonDict = {"run": question.run, "round": question.round, "client": client}
            row |= {"answer": answer, "noise": section.noise, "clip": section.clip}
            self._write(file, row)


class _Vector(msgspec.Struct):
    client: int
    configuration: str
    round: int
    vector: str


class MaskedAccount(SiteAccount):
    """Holds the clients' secrets in the current rounds of secure aggregation, and the account of
    vectors that have left under masks.

    The secrets are only in memory: when the process ends they are gone, and its clients have
    dropped out. A second sum with the same vector, over other clients, would show the difference of
    the two sums: so a vector leaves once, and a client sends one in each round of a configuration,
    whatever the name of the run or the server.
    """

    what = "what this site's clients have sent under masks, and must not send again"
    Line = _Vector

    def __init__(self, path: Path, config: Config) -> None:
        # All that a client's training depends on, without the run's name.
        settings = config.seed, config.algorithm, config.model, config.data, config.train
        text = msgspec.json.encode(settings, order="sorted")
        self._configuration = hashlib.sha256(text).hexdigest()
        self._machines: dict[int, tuple[int, SecureClient]] = {}  # by client, with their round
        self._rounds = dict[tuple[int, str], int]()  # by client and configuration, the last one
        # Of a client, by its digest: with which configuration, in which round.
        self._vectors = dict[tuple[int, str], tuple[str, int]]()
        super().__init__(path)

    def _count(self, row: _Vector) -> None:
        last = self._rounds.get((row.client, row.configuration), 0)
        self._rounds[row.client, row.configuration] = max(last, row.round)
        self._vectors[row.client, row.vector] = row.configuration, row.round

    def machine(self, terms: Terms, round_number: int, client: int, fresh: bool) -> SecureClient:
        """Returns the client's machine of this round. fresh: makes it if there is none, and forgets
        those of earlier rounds; else raises LeftRound if it is not here.
        """
        with self._lock:
            known, machine = self._machines.get(client, (0, None))
            if machine is not None and known == round_number:
                return machine
            if not fresh:
                raise LeftRound(
                    f"secure aggregation: client {client}'s keys of round {round_number} were with "
                    f"another process, or with this one before it was started again"
                )
            for other in [c for c, (r, _) in self._machines.items() if r < round_number]:
                del self._machines[other]
            from fednet.secagg import SecureClient

            machine = SecureClient(terms, client)
            self._machines[client] = round_number, machine
            return machine

    def leaves(self, client: int, round_number: int, vector: bytes) -> None:
        """Writes down that this client's vector leaves in this round. Raises LeftRound if it must
        not, because another of its round did before, or the same in another round.
        """
        digest = hashlib.sha256(vector).hexdigest()
        with self._exclusive() as file:
            last = self._rounds.get((client, self._configuration), 0)
            configuration, other = self._vectors.get((client, digest), ("", 0))
            if round_number > last and configuration == self._configuration:
                raise LeftRound(
                    f"secure aggregation: client {client}'s vector of round {round_number} is that "
                    f"of round {other}, and sent again it would be revealed. Both updates became "
                    f"the same whole numbers: raise privacy.secagg.bits, or lower "
                    f"privacy.secagg.clip"
                )
            if round_number <= last or configuration:
                before = "before"
                if round_number <= last:
                    before = f"in round {last} of this configuration"
                raise LeftRound(
                    f"secure aggregation: client {client}'s vector left {before} already, under "
                    f"other keys; sent again it would be revealed. To repeat a run, give another "
                    f"--state ({self._path} has what was sent)"
                )
            row: JsonDict = {"round": round_number, "client": client}
            row |= {"configuration": self._configuration, "vector": digest}
            self._write(file, row)


# Files next to the folders of a site's runs: no run may have such a name.
ANSWERS = "answers.jsonl"
MASKED = "masked.jsonl"


def account_of(section: PrivacySection, own: BudgetSection | None, root: Path) -> Answers | None:
    """Returns the site's account of answers with noise of its own; None if the run has no such
    noise. section: the run's; own: the policy's.
    """
    if not section.noise or section.where != "client":
        return None
    most = None if own is None or own.epsilon is None else (own.epsilon, own.delta)
    path = root.parent / ANSWERS
    # In this order: another process, that begins now, has its account before its noise.
    if any(root.parent.glob("*/noise.key")) and not path.exists():
        raise missing_account(path, Answers.what)
    return Answers(path, most)


def missing_account(path: Path, what: str) -> StateError:
    return StateError(
        f"{path}: the account of {what}, is gone; put it back, or give another --state."
    )
