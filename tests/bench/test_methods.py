"""What it measures is what it says; how long it took is nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fednet import registry
from fednet.errors import ConfigError
from fednet.experiment.store import RowStore
from tests.bench import methods, pack

TINY = pack.Size("a small one", {"name": "lenet5"}, 16, 8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pack.SIZES, "cnn", TINY)


@pytest.mark.parametrize("name", registry.algorithm.names())
def test_both_halves_of_every_method_can_be_measured(name: str, tmp_path: Path) -> None:
    server = methods.ServerHalf(methods.made(name, TINY, 4), 2, RowStore(tmp_path))
    seconds, inside = zip(*(server.round() for _ in range(2)))
    assert all(s > i >= 0 for s, i in zip(seconds, inside))
    client = methods.ClientHalf(methods.made(name, TINY, 2), TINY)
    steps, whole = client.task()
    assert (len(steps) > 0) == (name != "fedsgd")
    assert whole > 0
    last = server.server.x.vector if hasattr(server.server, "x") else torch.zeros(1)
    assert torch.isfinite(last).all()


def test_what_is_received_is_counted_against_fedavg() -> None:
    received = {
        r["method"]: r["received"]
        for r in methods.servers(["fedavg", "scaffold", "fedga", "lgfedavg"], "cnn", 2, 1)
    }
    assert received["fedavg"] == 1.0
    assert received["scaffold"] == received["fedga"] == 2.0
    assert received["lgfedavg"] < 1.0


def test_the_plain_loop_takes_the_same_steps() -> None:
    plain = methods.Plain(TINY, forwards=2)
    trained, *others = [[p.detach().clone() for p in m.parameters()] for m in plain.models]
    assert len(plain.task()[0]) == 1  # two steps, one interval
    assert not torch.equal(trained[0], next(plain.models[0].parameters()))
    assert all(torch.equal(o[0], next(m.parameters())) for o, m in zip(others, plain.models[1:]))


def test_it_prints_a_line_a_record_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = "--size cnn --method fedprox,moon --repeat 1 --replies 2 --json"
    methods.main([*words.split(), str(file)])
    lines, records = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert "cores" in lines[0]
    assert len(lines) - 1 == len(records) == 4
    assert [(r["half"], r["method"]) for r in records] == [
        ("server", "fedprox"),
        ("server", "moon"),
        ("client", "fedprox"),
        ("client", "moon"),
    ]
    assert [r["forwards"] for r in records[2:]] == [1, 3]
    assert "and two forwards" in lines[4]


def test_an_unknown_method_or_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedprox"):
        list(methods.bench(["fedprx"], ["cnn"], ["server"], 2, 1))
    with pytest.raises(ConfigError, match="--size"):
        list(methods.bench(None, ["W9"], ["server"], 2, 1))
