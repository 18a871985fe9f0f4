"""What a run does with the journal of the servers before."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from fednet.errors import StateError, Stopped
from fednet.records import Round
from fednet.records.manifest import read_manifest
from tests.processes import lines
from tests.rooms import hashes, run

CHANGES = {"algorithm": {"name": "scaffold"}, "rounds": 4, "evaluate": {"clients": "all"}}


def stopped(tmp_path: Path, after: int = 2) -> Path:
    """A run that was stopped after this round."""

    def stop(record: Round) -> None:
        if record.round == after:
            raise Stopped("stopped: enough")

    with pytest.raises(Stopped):
        run(tmp_path, callback=stop, **CHANGES)
    return tmp_path / "r"


@pytest.mark.parametrize("left", [0, 0.3, 1])
def test_the_rows_of_wire_jsonl_are_made_again_from_the_journal(
    tmp_path: Path, left: float
) -> None:
    directory = stopped(tmp_path)
    book = directory / "wire.jsonl"
    rows = lines(book)
    assert len(rows) > 20
    if left:
        os.truncate(book, int(left * book.stat().st_size))
    else:
        book.unlink()
    run(tmp_path, resume=True, **CHANGES)
    found = lines(book)
    assert found[: len(rows)] == rows
    assert {r["incarnation"] for r in found[len(rows) :]} == {2}


def test_more_rounds_after_the_end_add_rows_to_those_of_a_journal_that_was_written_anew(
    tmp_path: Path,
) -> None:
    directory = run(tmp_path, **CHANGES)
    rows = lines(directory / "wire.jsonl")
    journal = directory / "checkpoint" / "journal"
    assert journal.stat().st_size < 1000
    generation, size = read_manifest(directory / "checkpoint")[0].journal
    assert size > 1000
    run(tmp_path, resume=True, **{**CHANGES, "rounds": 5})
    assert read_manifest(directory / "checkpoint")[0].journal[0] > generation
    found = lines(directory / "wire.jsonl")
    assert found[: len(rows)] == rows
    records = lines(directory / "rounds.jsonl")
    spent = sum(r["bytes_up"] + r["bytes_down"] for r in records)
    assert 0 < spent < sum(r["bytes"] for r in found)


def test_what_is_missing_of_rows_that_the_journal_does_not_give_is_an_error(
    tmp_path: Path,
) -> None:
    directory = run(tmp_path, **CHANGES)
    book = directory / "wire.jsonl"
    os.truncate(book, book.stat().st_size - 10)
    with pytest.raises(StateError, match=r"wire\.jsonl: .* bytes, and the run's journal knows of"):
        run(tmp_path, resume=True, **{**CHANGES, "rounds": 5})


@pytest.mark.parametrize("spoilt", ["missing", "older", "cut", "changed"])
def test_a_journal_that_is_not_that_of_the_checkpoint_is_refused_by_name(
    tmp_path: Path, spoilt: str
) -> None:
    older = stopped(tmp_path / "older", after=1) / "checkpoint" / "journal"
    directory = stopped(tmp_path / "run")
    whole = shutil.copytree(directory, tmp_path / "whole" / "r")
    journal = directory / "checkpoint" / "journal"
    if spoilt == "missing":
        journal.unlink()
    elif spoilt == "older":
        shutil.copy(older, journal)
    elif spoilt == "cut":
        os.truncate(journal, read_manifest(directory / "checkpoint")[0].journal[1] - 1)
    else:
        data = bytearray(journal.read_bytes())
        data[len(data) // 2] ^= 1
        journal.write_bytes(data)
    with pytest.raises(StateError, match=re.escape(str(journal))):
        run(tmp_path / "run", resume=True, **CHANGES)
    (directory / "checkpoint" / "journal").write_bytes(
        (whole / "checkpoint" / "journal").read_bytes()
    )
    resumed = run(tmp_path / "run", resume=True, **CHANGES)
    assert hashes(resumed) == hashes(run(tmp_path / "calm", **CHANGES))


@pytest.mark.parametrize("name", ["flight.jsonl", "round-3/replies.log"])
def test_a_run_of_a_version_with_other_logs_is_refused_in_a_sentence(
    tmp_path: Path, name: str
) -> None:
    directory = stopped(tmp_path)
    old = directory / "checkpoint" / name
    old.parent.mkdir(exist_ok=True)
    old.touch()
    with pytest.raises(StateError, match=f"{name}: written by an earlier development version"):
        run(tmp_path, resume=True, **CHANGES)
