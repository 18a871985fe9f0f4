"""How large the books of a run of many clients are, and what a report of them takes.

Nothing is trained or sent: the events of each round are those of a server whose clients all answer
at once, and the rows are what its book makes of them.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import msgpack

from fednet.files import Lines, plain_line
from fednet.journal.events import Accepted, Crossed, Forgotten, Name, Over, Verdict
from fednet.journal.journal import Journal
from fednet.plain import JsonDict, JsonMapping
from fednet.wire import messages as m
from tests.bench.run import ENVIRONMENT, cell, spread

# Bytes of payload.
TASK = {"state": 9640}
REPLY = {"state": 9640, "statistics": 24}
HEADER = 180  # bytes of a message's header and framing, without client and round


def bench(sizes: Sequence[int], rounds: int, repeat: int, folder: Path) -> Iterator[JsonDict]:
    """One record a number of clients."""
    for clients in sizes:
        run = folder / f"books-{clients}"
        book_s = write(run, rounds, clients)
        reports = [report(run) for _ in range(repeat)]
        yield {
            "clients": clients,
            "rounds": rounds,
            "repeat": repeat,
            "mb": (run / "wire.jsonl").stat().st_size / 1e6,
            "book_us": 1e6 * book_s / (rounds * clients),
            "report_s": spread(reports),
        }
        shutil.rmtree(run)


def write(run: Path, rounds: int, clients: int) -> float:
    """Writes the directory of a run in which all clients take part in each round. Returns the
    processor's seconds that the book and its rows took.
    """
    from tests.report import fake_run

    taken = 0.0
    rows = Lines(run.with_suffix(".jsonl"), plain_line)
    journal = Journal(rows.append)

    def spend(round: int, cohort: Sequence[int]) -> dict[str, int]:
        nonlocal taken
        keys = [m.Key(round, 0, 0, client) for client in cohort]
        begun = time.process_time()
        for key in keys:
            header = HEADER + len(msgpack.encode((key.round, key.client)))
            conn = b"%d" % (key.client % 16)
            down: Name = (conn, "down", "task", key)
            up: Name = (conn, "up", "reply", key)
            journal.note(Crossed([down], "task", header, TASK, 9640))
            journal.note(Crossed([up], "reply", header + 40, REPLY, 9664))
            journal.note(Accepted(m.Reply(key=key, form=[], size=9664), conn, conn))
        journal.note(Verdict([(key, "", None) for key in keys]))
        journal.note(Over(round))
        journal.note(Forgotten(round))
        taken += time.process_time() - begun
        return journal.book.recorded.spent

    accuracy = [None] * (rounds - 1) + [0.8]
    sizes = {"rounds": rounds, "clients": clients, "share": 1.0}
    fake_run.write(run, accuracy=accuracy, spend=spend, **sizes)
    rows.close()
    rows.path.rename(run / "wire.jsonl")
    return taken


def report(run: Path) -> float:
    """The processor's seconds of `fednet report`."""
    page = run / "page.html"
    words = [sys.executable, "-m", "fednet.cli.main", "report", str(run), "--out", str(page)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    page.unlink()
    return sum(after[:2]) - sum(before[:2])


def line(record: JsonMapping) -> str:
    size = f"{record['rounds']} rounds of {record['clients']} clients: {record['mb']:.1f} MB"
    made = f"{record['book_us']:.1f} us of the processor a client and round to make it"
    report_s = cell(record, "report_s", 2)
    return f"{size} of wire.jsonl, {made}; a report {report_s} s of the processor"
