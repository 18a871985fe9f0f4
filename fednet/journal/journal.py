"""Records events: each is applied to the book at once, and is on disk once `flush` has returned."""

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
        """Records an event. payload: of an accepted reply, to be kept in the file."""
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
        """Writes the file again, with a snapshot of the book in place of all events before."""
        if self._file is not None:
            self._file.renew(lambda generation: self.book.snapshot(generation, self._written()))

    def recall(self, cut: Callable[[int], object] = lambda length: None) -> None:
        """Applies the events that earlier servers wrote, and writes the rows that follow from them
        again. cut(length): cuts the file of rows to so many bytes. A snapshot has the length of the
        rows before it; later ones follow from the events after it.
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
        """Records that replies are not needed any more, and frees their space in the file."""
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
