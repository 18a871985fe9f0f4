"""`tests.bench pack` measures what it says; no time is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednet.training import packed
from tests.algorithms.harness import close
from tests.bench import pack
from tests.bench.__main__ import main


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pack.SIZES, "cnn", pack.Size("a small one", {"name": "lenet5"}, 16, 8))


def test_both_ways_train_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[int] = []
    descend = packed.descend

    def counted(lanes: Any, *more: Any) -> None:
        packs.append(len(lanes))
        descend(lanes, *more)

    monkeypatch.setattr(packed, "descend", counted)
    clients = pack.Clients("cnn", 3, "cpu")
    clients.together()
    together = [scratch.values() for scratch in clients.scratches]
    assert packs == [3]
    clients.apart()  # in one scratch, which the last client leaves behind
    assert close(together[2], clients.scratches[0].values(), 1e-5)
    assert not close(together[1], together[2], 1e-3)


def test_the_command_prints_a_line_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = ["pack", "--clients", "2", "--device", "cpu", "--repeat", "2", "--json", str(file)]
    assert main(words) == 0
    (record,) = json.loads(file.read_text())
    assert (record["clients"], record["device"], record["repeat"]) == (2, "cpu", 2)
    assert record["ratio"]["min"] > 0
    assert "2 clients: one after another" in capsys.readouterr().out
