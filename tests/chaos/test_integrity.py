"""Whatever happens to bytes on the disk, what is read is what was written, or it is
refused with an error that names the place.

FEDNET_TRIALS=10000 tries so many damages of each, instead of 150.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fednet.algorithms.fedvarp import FedVARP
from fednet.algorithms.scaffold import Scaffold
from fednet.algorithms.state import PerClient, content_sha256, state_sha256
from fednet.client.loop import read_server
from fednet.errors import FednetError, StateError
from fednet.experiment.privacy import Noise
from fednet.experiment.rundir import check_records, cut
from fednet.experiment.store import ClientStore, Record
from fednet.files import Lines, digest, read_lines, write_record
from fednet.journal.events import Accepted
from fednet.journal.file import JournalFile
from fednet.journal.journal import Journal
from fednet.records.manifest import RunProgress
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import Inbox
from fednet.server.rows import on_disk
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire import messages as m
from fednet.wire.body import Body
from tests.books import journal_in
from tests.rooms import hashes, run

TRIALS = int(os.environ.get("FEDNET_TRIALS", "150"))
LAYOUT = Layout(
    (Slot("w", (40,), "parameter"), Slot("mean", (6,), "buffer"), Slot("n", (), "counter"))
)
Reader = Callable[[], object]


def tensors(seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    parameters = torch.randn(40, generator=draw)
    buffers = torch.randn(6, generator=draw)
    return Tensors(LAYOUT, parameters, buffers, torch.tensor([seed]))


# -- damage ----------------------------------------------------------------------------------------
def damaged(draw: random.Random, data: bytes) -> bytes:
    """Return other bytes, nearly these."""
    if not data:
        return b"x"
    out = bytearray(data)
    while out == data:
        start = draw.randrange(len(data))
        piece = slice(start, min(len(data), start + draw.choice((1, 4, 64, 512))))
        kind = draw.randrange(5)
        if kind == 0:
            out[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[start] = draw.randrange(256)
        elif kind == 2:
            del out[piece]
        elif kind == 3:  # a block in the place of another
            size = piece.stop - piece.start
            there = draw.randrange(len(data) - size + 1)
            out[there : there + size] = out[piece]
        else:  # as a power cut leaves a block that was never written
            out[piece] = bytes(piece.stop - piece.start)
    return bytes(out)


def spoil(draw: random.Random, folder: Path, gone: bool) -> Callable[[], object]:
    """Damage one of a folder's files, or (gone) delete it. Return what puts it back."""
    path = draw.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    whole = path.read_bytes()
    if gone and draw.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(damaged(draw, whole))
    return lambda: path.write_bytes(whole)


# -- what is damaged: each writes files in a folder, and returns what reads them -------------------
def spool(draw: random.Random, folder: Path) -> Reader:
    journal = journal_in(folder)
    made = Inbox(folder, journal, lambda replies, bodies: [None] * len(replies))
    for client, size in enumerate((200, 200, 70_000, 200)):  # the third has a file of its own
        key = m.Key(1, 0, client % 2, client)
        data = draw.randbytes(size)
        form = [m.Field("x", "state", size, size)]
        check = digest([data])
        message = m.Reply(
            key=key, form=form, size=size, check=check, state="ab" * 32, kept=True, seconds=0.5
        )
        conns = b"down", b"up"
        record = Accepted(message, *conns, (bytes(16), "0-0-0"), {"host": "h"})
        made.accept([(record, Body([data]))])
    journal.flush()
    journal.close()

    def found() -> dict[int, Any]:
        journal = Journal(list[object]().append, JournalFile(folder / "journal"))
        journal.recall()
        logged = (
            Inbox(folder, journal, lambda replies, bodies: [None] * len(replies))
            .earlier_replies(1, 0)
            .items()
        )
        return {c: (r.record, bytes(r.body())) for c, r in logged}

    whole = found()

    def read() -> object:
        assert found().items() <= whole.items()  # clients that it lacks are asked again
        return True

    return read


def state(draw: random.Random, folder: Path) -> Reader:
    store = ClientStore(folder, Scaffold.Client)
    record = Record(algorithm=Scaffold.Client(c=tensors(1)), residuals={"0/dy": torch.ones(40)})
    store.save(3, "2-0-0", record, tensors(2))

    def read() -> object:
        kept = store.load(3, "2-0-0", record.sha256)
        local = store.local(3, "2-0-0")
        assert local is not None
        return state_sha256(kept), local.sha256()

    return read


def checkpoint(draw: random.Random, folder: Path) -> Reader:
    made = Checkpoints(folder)
    server = FedVARP.Server(x=tensors(0), y=PerClient(LAYOUT), ybar=tensors(9))
    server = on_disk(server, made.rows)
    y = PerClient(LAYOUT, None, made.rows)
    for client in range(5):
        y = y.put(client, tensors(client))
    progress = RunProgress(run="r", round=3, versions={0: "3-0-0"}, states={0: "ab"}, best=0.5)
    left_out = {"0/x": torch.ones(40), "client 2/up/0/dx/h": torch.ones(30)}
    made.save(server.replace(y=y), progress, left_out)
    Noise(folder / "noise.key")
    first = []

    def read() -> object:
        if not made.exists:
            raise StateError("a run without a checkpoint is not continued, see `process`")
        again = Checkpoints(folder)
        server, progress, left = again.load(FedVARP.Server)
        rows = [server.y.known(c).sha256() for c in sorted(server.y.rows)]
        secret = Noise(folder / "noise.key", drawn=bool(first))
        noise = secret.add(torch.zeros(3), 1.0, b"asked")[0]
        first.append(noise)
        sums = {name: float(value.sum()) for name, value in left.items()}
        return content_sha256(server), progress, sums, rows, noise.tolist()

    return read


def server_file(draw: random.Random, folder: Path) -> Reader:
    said = {"address": "tcp://127.0.0.1:5555", "host": "h", "pid": 7, "public_key": "k" * 40}
    write_record(folder / "server.json", said, 0o600)

    def read() -> object:
        found = read_server(folder)
        if found is None:
            raise StateError("there is no server yet")
        return found

    return read


def book(name: str, rows: list[dict[str, Any]]) -> Callable[[random.Random, Path], Reader]:
    """A file of lines that a checkpoint knows in full."""

    def make(draw: random.Random, folder: Path) -> Reader:
        lines = Lines(folder / name)
        for row in rows:
            lines.append(row)
        known = {name: lines.flush()}
        lines.close()

        def read() -> object:
            cut(folder, known)
            for other in {"rounds.jsonl", "clients.jsonl"} - {name}:
                (folder / other).touch()
            check_records(folder, len(rows) if name == "rounds.jsonl" else 0)
            for other in {"rounds.jsonl", "clients.jsonl"} - {name}:
                (folder / other).unlink()
            return list(read_lines(folder / name))

        return read

    return make


ROUNDS = [
    {"round": r, "selected": [0, 2], "train_loss": 1 / r, "model_sha256": f"{r:064x}"}
    for r in range(1, 7)
]
ROW = {"type": "task", "kinds": {"state": 1000}, "bytes": 1050, "useful": True}
WIRE = [
    {"round": r, "client": c, "direction": d, **ROW}
    for r in (1, 2)
    for c in (0, 1)
    for d in ("up", "down")
]
EVENTS = [{"round": r, "client": 1, "type": "fault", "kind": "crash"} for r in range(5)]
BOOKS = {"rounds": ROUNDS, "clients": ROUNDS, "wire": WIRE, "events": EVENTS}
THINGS = {
    "spool": spool,
    "state": state,
    "checkpoint": checkpoint,
    "server.json": server_file,
    **{name: book(f"{name}.jsonl", rows) for name, rows in BOOKS.items()},
}


@pytest.mark.timeout(0 if TRIALS > 150 else 300)
@pytest.mark.parametrize("name", THINGS)
def test_what_was_damaged_is_the_same_or_an_error(name, tmp_path):
    draw = random.Random(name)
    found = Counter[str]()
    read = THINGS[name](draw, tmp_path)
    whole = read()
    for _ in range(TRIALS):
        put_back = spoil(draw, tmp_path, gone=True)
        try:
            now = read()
            assert now == whole, f"{name}: something else was read, and nothing was said"
            found["the same"] += 1
        except StateError:
            found["an error"] += 1
        put_back()
    assert read() == whole
    assert found["an error"] > 0 or name == "spool"
    print(f"\n{name}: {dict(found)}")


@pytest.mark.timeout(0 if TRIALS > 150 else 300)
@pytest.mark.parametrize("name", ["fedvarp", "scaffold"])
def test_a_run_of_which_a_file_was_damaged_continues_as_it_would_or_says_so(name, tmp_path):
    """It stopped after its second round of four; one file is damaged each time."""
    changes = {"algorithm": {"name": name}, "participation": 0.67, "evaluate": {"clients": "auto"}}
    whole = hashes(run(tmp_path / "whole", rounds=4, **changes))
    stopped = run(tmp_path / "stopped", rounds=2, **changes)
    again = tmp_path / "again" / stopped.name
    outcomes = ("log", "code", "personal")
    made_again = ("summary.json", "status.json", "partition.json", "model.safetensors")
    draw = random.Random(5)
    found = Counter[str]()
    for _ in range(TRIALS // 15):
        shutil.rmtree(again, ignore_errors=True)
        ignored = shutil.ignore_patterns(*outcomes, *made_again, "config.yaml")
        shutil.copytree(stopped, again, ignore=ignored)
        spoil(draw, again, gone=False)
        shutil.copy(stopped / "config.yaml", again)
        try:
            run(tmp_path / "again", rounds=4, resume=True, **changes)
            assert hashes(again) == whole
            found["the same"] += 1
        except FednetError as refused:
            found[type(refused).__name__] += 1
    assert set(found) <= {"the same", "StateError", "CannotGoOn"}
    print(f"\n{name}: {dict(found)}")


@pytest.mark.parametrize("left", [b"", b"2", None])
def test_the_count_of_servers_continues_from_the_events_where_it_was_lost(left, tmp_path):
    events = Lines(tmp_path / "events.jsonl")
    made = Checkpoints(tmp_path / "checkpoint")
    made.folder.mkdir(exist_ok=True)
    for _ in range(2):
        events.append({"type": "started", "incarnation": made.incarnation(tmp_path)})
        events.flush()
    path = made.folder / "incarnation"
    with contextlib.suppress(FileNotFoundError):
        path.unlink() if left is None else path.write_bytes(left)
    assert made.incarnation(tmp_path) > 2
