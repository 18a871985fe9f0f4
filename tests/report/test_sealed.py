"""A file of records from which something is missing, or in which lines are doubled or swapped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fednet.cli import main
from fednet.errors import StateError, Stopped
from fednet.report import open_run
from tests.rooms import run

CHANGES = {"rounds": 3, "evaluate": {"clients": "all", "every": 1}}
DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "cut after a line": lambda lines: lines[:-1],
    "a line doubled": lambda lines: [lines[0], *lines],
    "lines swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "one line in place of another": lambda lines: [lines[0], lines[0], *lines[2:]],
    "empty": lambda lines: [],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole"), **CHANGES)


def damaged(path: Path, how: str) -> None:
    path.write_bytes(b"".join(DAMAGE[how](path.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize("name", ["rounds", "clients", "wire", "events"])
@pytest.mark.parametrize("how", [*DAMAGE, "deleted"])
def test_a_damaged_file_of_records_is_an_error_that_names_it(
    whole: Path, tmp_path: Path, name: str, how: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "r")
    path = copy / f"{name}.jsonl"
    path.unlink() if how == "deleted" else damaged(path, how)
    with pytest.raises(StateError, match=rf"{name}\.jsonl.*put the file back"):
        list(open_run(copy).lines(name))


@pytest.mark.parametrize("verb", ["compare", "verify", "report"])
def test_no_table_is_made_of_damaged_records(
    whole: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(whole, tmp_path / "r")
    damaged(copy / "rounds.jsonl", "a line doubled")
    words = [str(copy), str(whole)] if verb != "report" else [str(copy)]
    assert main.main([verb, *words]) == 2
    said = capsys.readouterr()
    assert "rounds.jsonl" in said.err
    assert not said.out


def test_the_rounds_of_a_run_that_is_not_over_are_as_many_as_its_checkpoint_knows(
    tmp_path: Path,
) -> None:
    def stop(record) -> None:
        if record.round == 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run(tmp_path, callback=stop, **CHANGES)
    rounds = tmp_path / "r" / "rounds.jsonl"
    first, second = rounds.read_bytes().splitlines(keepends=True)
    rounds.write_bytes(first)
    with pytest.raises(StateError, match=r"rounds\.jsonl: \d+ bytes, and \d+ were written"):
        _ = open_run(tmp_path / "r").rounds
    rounds.write_bytes(second + first)
    with pytest.raises(StateError, match=r"rounds\.jsonl: round 1 follows round 2"):
        _ = open_run(tmp_path / "r").rounds
    rounds.write_bytes(first + second)
    assert [r.round for r in open_run(tmp_path / "r").rounds] == [1, 2]
