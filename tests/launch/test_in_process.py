"""The whole run in one process and one thread."""

from __future__ import annotations

import pytest

from fednet import data
from fednet.server.inbox import Inbox
from tests.rooms import hashes, lines, run


def test_server_and_clients_have_the_data_in_memory_once(tmp_path, monkeypatch):
    loaded = []
    load = data.load

    def counted(*of):
        loaded.append(load(*of))
        return loaded[-1]

    monkeypatch.setattr(data, "load", counted)
    assert len(lines(run(tmp_path, rounds=1) / "rounds.jsonl")) == 1
    assert len(loaded) == 1


def test_a_crash_between_large_replies_changes_neither_the_model_nor_the_useful_payloads(
    tmp_path, monkeypatch
):
    """Payloads of 1.5 MB, more than a part: in one process none of them is on disk."""
    large = {"model": {"name": "mlp", "hidden": [600, 600]}}
    calm = run(tmp_path / "calm", **large)
    take, taken = Inbox.take, []

    def taken_in(inbox, reply, *more):
        if reply.key.purpose == "train":
            taken.append(reply.key.round)
            if len(taken) == 5:
                raise KeyError("a crash in the second round")
        return take(inbox, reply, *more)

    monkeypatch.setattr(Inbox, "take", taken_in)
    with pytest.raises(KeyError):
        run(tmp_path / "cut", **large)
    assert not list((tmp_path / "cut").rglob("*.bin"))
    again = run(tmp_path / "cut", resume=True, **large)
    assert hashes(again) == hashes(calm)
    useful = [
        sorted(
            (r["round"], r["client"], r["direction"], r["kinds"]["state"])
            for r in lines(directory / "wire.jsonl")
            if r["useful"] and "state" in r["kinds"]
        )
        for directory in (again, calm)
    ]
    assert useful[0] == useful[1]
    assert taken == [1, 1, 1] + [2] * (2 + 3)
