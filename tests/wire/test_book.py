"""The book in sums: what it comes to is what it comes to message by message, whenever its server
dies.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fednet.files import plain_line
from fednet.records import Wire
from fednet.report import costs, open_run
from fednet.wire import book
from fednet.wire.book import Book, summed
from tests.rooms import hashes, lines, run, summary

VIRTUAL = {"clock": "virtual", "up_mbps": 8.0, "step_ms": 10.0}


def row(round: int, client: int, direction: str = "up", **more) -> dict:
    kinds, envelope = more.pop("kinds", {"state": 10}), 3
    type = "reply" if direction == "up" else "task"
    return Wire(
        round=round,
        client=client,
        direction=direction,
        type=more.pop("type", type),
        kinds=kinds,
        envelope=envelope,
        bytes=sum(kinds.values()) + envelope,
        raw_bytes=20,
        incarnation=more.pop("incarnation", 1),
        **more,
    ).line()


def read(folder: Path) -> list[dict]:
    return list(book.rows(folder))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    return tmp_path


def test_rows_that_are_alike_become_one():
    rows = [
        *(row(1, c) for c in (0, 1, 2)),
        row(1, 0, type="evaluate", purpose="evaluate", kinds={"accuracy": 4}),
        row(1, 3, useful=False, reason="refused: too long"),
        row(1, 4, useful=False, reason="refused: no number"),
        row(1, 6, "down"),
    ]
    found = {(r["type"], r["useful"]): r for r in summed(rows)}
    assert len(found) == 4
    replies = found["reply", True]
    assert (replies["messages"], replies["kinds"], replies["bytes"]) == (3, {"state": 30}, 39)
    assert (replies["envelope"], replies["raw_bytes"], replies["client"]) == (9, 60, -1)
    refused = found["reply", False]
    assert (refused["messages"], refused["reason"], refused["bytes"]) == (2, "refused", 26)
    assert sum(r["bytes"] for r in found.values()) == sum(r["bytes"] for r in rows)
    assert summed(summed(rows)) == summed(rows)


def test_of_a_payload_that_two_servers_had_the_newer_counts():
    rows = [row(2, 0), row(2, 1), row(2, 1, incarnation=2), row(2, 2, incarnation=2)]
    found = summed(rows)
    assert [(r["incarnation"], r.get("twice", False), r["messages"]) for r in found] == [
        (1, False, 1),
        (1, True, 1),
        (2, False, 2),
    ]


def test_only_what_a_checkpoint_holds_is_summed(folder):
    kept = Book(folder, "sums")
    for r in (row(1, 0), row(1, 1), row(2, 0), row(1, 2)):
        kept.append(r)
    assert kept.flush() == 0
    assert not kept.due
    kept.held(1, {(1, 2)})
    told: list[dict] = []
    kept.sum_up(told.extend)
    assert [(r["round"], r["client"]) for r in told] == [(1, 0), (1, 1)]
    assert [r.get("messages") for r in read(folder)] == [2, None, None]
    assert kept.flush() == (folder / "wire.jsonl").stat().st_size > 0
    kept.append(row(3, 0))
    kept.finish()
    assert [r["messages"] for r in lines(folder / "wire.jsonl")] == [2, 1, 1, 1]
    assert list((folder / "checkpoint").iterdir()) == []


@pytest.mark.parametrize("at", ["write_aside", "open", "half", "unlink"])
def test_whenever_its_server_dies_every_byte_is_there_once(folder, monkeypatch, at):
    kept = Book(folder, "sums")
    for t in (1, 2):
        for r in (row(t, 0), row(t, 1), row(t + 1, 0)):
            kept.append(r)
        kept.held(t)
        if t == 2:
            break
        kept.sum_up()
    before = sum(r["bytes"] for r in read(folder)) + 0
    kept.flush()
    before = sum(r["bytes"] for r in read(folder))
    assert before == 6 * 13

    class Died(Exception):
        pass

    def dies(*_, **__):
        raise Died

    if at == "write_aside":
        monkeypatch.setattr(book, "write_aside", dies)
    elif at == "unlink":
        monkeypatch.setattr(Path, "unlink", dies)
    elif at == "open":
        monkeypatch.setattr(Path, "open", dies)
    else:  # a part of the sums is on the disk
        whole = Path.open

        def torn(self, *more):
            with whole(self, *more) as file:
                file.write(b'{"round":2,')
            raise Died

        monkeypatch.setattr(Path, "open", torn)
    with pytest.raises(Died):
        kept._exchange(b"".join(book.plain_line(r) for r in summed([row(2, 0)])), [])
    monkeypatch.undo()
    assert sum(r["bytes"] for r in read(folder)) == before  # as a report reads it
    again = Book(folder, "sums")
    assert sum(r["bytes"] for r in read(folder)) == before
    again.finish()
    assert sum(r["bytes"] for r in lines(folder / "wire.jsonl")) == before


def test_a_runs_costs_in_sums_are_those_message_by_message(tmp_path):
    changes = {"rounds": 3, "link": VIRTUAL, "evaluate": {"clients": "all"}}
    whole = run(tmp_path / "messages", **changes)
    made = run(tmp_path / "sums", record={"wire": "sums"}, **changes)
    assert hashes(made) == hashes(whole)
    assert not list((made / "checkpoint").glob("book-*"))
    # To the byte they are the same but for the words of the configuration in the welcome.
    mine, theirs = (costs.ledger(open_run(d)) for d in (made, whole))
    assert (mine.method, mine.raw, mine.messages) == (theirs.method, theirs.raw, theirs.messages)
    said = summary(made)
    assert said["useful"] == said["predicted"] == mine.method
    assert said["bytes"]["total"] == sum(r["bytes"] for r in read(made))
    rows = read(whole)
    shutil.copytree(whole, tmp_path / "again")
    (tmp_path / "again" / "summary.json").unlink()  # which says how long the file was
    shutil.rmtree(tmp_path / "again" / "checkpoint")
    (tmp_path / "again" / "wire.jsonl").write_bytes(b"".join(map(plain_line, summed(rows))))
    assert costs.ledger(open_run(tmp_path / "again")) == theirs
    assert 3 * len(summed(rows)) < 2 * len(rows)
    sent = [
        sum(r["bytes"] for r in lines(next(d.glob("state/*/wire*"))) if r["type"] == "reply")
        for d in (made, whole)
    ]
    assert sent[0] == sent[1] > 0


def test_a_lighter_directory_says_what_it_has_not(tmp_path):
    from fednet.report import verify

    light = {"record": {"clients": "last", "tensors": False}, "evaluate": {"clients": "all"}}
    directory = run(tmp_path / "a", **light)
    rows = lines(directory / "clients.jsonl")
    assert [(r["client"], r["final"]) for r in rows] == [(c, True) for c in range(3)]
    assert not any("tensor_sha256" in r for r in lines(directory / "rounds.jsonl"))
    same = run(tmp_path / "b", **light)
    assert verify.compare(open_run(directory), open_run(same)).same
    other = verify.compare(open_run(directory), open_run(run(tmp_path / "c", seed=1, **light)))
    assert other.tensor is None
    assert "set record.tensors to see which tensors differ" in other.text


def test_a_stopped_run_is_read_whole_and_goes_on(tmp_path):
    changes = {"record": {"wire": "sums"}, "link": VIRTUAL, "evaluate": {"clients": "none"}}

    class Stops(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stops

    with pytest.raises(Stops):
        run(tmp_path / "a", rounds=4, callback=stop, **changes)
    directory = tmp_path / "a" / "r"
    assert {r.round for r in open_run(directory).messages() if r.type == "reply"} >= {1, 2}
    run(tmp_path / "a", rounds=4, resume=True, **changes)
    whole = run(tmp_path / "b", rounds=4, **changes)
    assert hashes(directory) == hashes(whole)
    mine, theirs = (costs.ledger(open_run(d)) for d in (directory, whole))
    assert mine.method == theirs.method
    said = summary(directory)
    assert said["useful"] == said["predicted"] == mine.method
    assert said["bytes"]["total"] == sum(r["bytes"] for r in lines(directory / "wire.jsonl"))
