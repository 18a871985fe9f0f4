"""The bytes of `tests.bench secagg` are those of the messages; no time is tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednet.secagg import BelowThreshold
from tests.bench import secagg
from tests.bench.__main__ import main


def test_bytes_are_those_that_the_papers_count():
    n, d = 10, 1000
    plain, pairs, graph, coded = (secagg.machines(p, n, 0.0, d) for p in secagg.PROTOCOLS)
    assert (plain["up_bytes"], plain["down_bytes"]) == (4 * d, 4 * d)
    # keys 3 * 32; a digest and n - 1 times id, two shares of 36, tag; d entries of 4 bytes; a
    # signature; n times id and share
    shares, unmask = 32 + 9 * (4 + 72 + 16), 10 * (4 + 36)
    assert pairs["up"] == {
        "keys": 96,
        "shares": shares,
        "masked": 4 * d,
        "consistency": 64,
        "unmask": unmask,
    }
    assert graph["up_bytes"] == pairs["up_bytes"]  # twenty neighbours are all of ten
    piece = 4 * 500  # U - T = 7 - 5
    sealed = 9 * (4 + piece + 16)
    assert coded["up"] == {"keys": 32, "shares": sealed, "masked": 4 * d, "unmask": piece}


def test_a_sparse_graph_sends_less_and_the_lost_send_no_vector():
    full, sparse = (secagg.machines(p, 40, 0.1, 500) for p in ("secagg", "secagg+"))
    assert sparse["up"]["shares"] < 0.6 * full["up"]["shares"]
    assert full["up"]["masked"] == 0.9 * 4 * 500
    with pytest.raises(BelowThreshold):
        secagg.machines("secagg", 10, 0.5, 100)


def test_the_command_prints_a_row_for_each_and_writes_the_figures(tmp_path: Path, capsys):
    file = tmp_path / "out.json"
    words = ["--clients", "5,6", "--dropout", "0,0.2", "--machines", "--json", str(file)]
    assert main(["secagg", *words]) == 0
    records = json.loads(file.read_text())
    assert [(r["clients"], r["dropout"]) for r in records[::4]] == [
        (5, 0.0),
        (5, 0.2),
        (6, 0.0),
        (6, 0.2),
    ]
    said = capsys.readouterr().out
    assert sum(row.startswith("| lightsecagg") for row in said.splitlines()) == 4
