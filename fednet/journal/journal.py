"""Takes down what happens: each event is applied to the book at once, and is on disk once `flush`
has returned.
"""

from __future__ import annotations

from collections.abc import Callable

from fednet.journal.book import Book
from fednet.journal.events import Accepted, Event, Forgotten, Snapshot
from fednet.journal.file import LONG, JournalFile
from fednet.journal.rows import Row


class Journal:
    """The journal of one process."""

    def __init__(
        self,
        write: Callable[[Row], object],  # is handed the rows
        file: JournalFile | None = None,  # where a server has the events
        # hands all rows so far to the operating system, and returns how long their file is
        written: Callable[[], int] = lambda: 0,
        by_round: bool = True,  # see `Book`
    ) -> None:
        self.book = Book(by_round)
        self._write = write
        self._file = file
        self._written = written

    def note(self, event: Event, payload: bytes | memoryview = b"") -> None:
        """Takes an event down. payload: of an accepted reply, to be kept in the file."""
        if self._file is not None:
            self._file.add(event, payload)
        for row in self.book.apply(event):
            self._write(row)

    def flush(self) -> None:
        """All events are on disk."""
        if self._file is not None:
            self._file.flush()
            if self._file.is_long:
                self.renew()

    def renew(self) -> None:
        """Writes the file anew: what is open and what waits, in place of all that has happened."""
        if self._file is not None:
            self._file.renew(lambda generation: self.book.snapshot(generation, self._written()))

    def recall(self, cut: Callable[[int], object] = lambda length: None) -> None:
        """Takes in what earlier servers wrote, and writes the rows that follow from it again.
        cut(length): leaves so many bytes of the file of rows, which the file here does not give.
        """
        assert self._file is not None
        for event in self._file.read():
            if isinstance(event, Snapshot):
                cut(event.rows)
            for row in self.book.apply(event):
                self._write(row)
        if not self._file.generation:
            self.renew()

    def forget(self, event: Forgotten) -> None:
        """Takes down that replies are not needed any more, and gives back their space."""
        self.note(event)
        self.flush()
        if self._file is not None and self._file.size > LONG:
            self.renew()

    def payload(self, reply: Accepted) -> memoryview:
        """The payload that is in the file."""
        assert self._file is not None
        return self._file.payload(reply)

    @property
    def position(self) -> tuple[int, int]:
        """(generation, bytes) of the file, once all events are on disk."""
        assert self._file is not None
        self.flush()
        return self._file.generation, self._file.size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
