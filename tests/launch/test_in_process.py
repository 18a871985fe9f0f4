"""The whole run in one process and one thread."""

from __future__ import annotations

import pytest

import fednet
from fednet import data
from fednet.server.inbox import Inbox


def test_server_and_clients_have_the_data_in_memory_once(tmp_path, monkeypatch):
    loaded = []
    load = data.load

    def counted(*of):
        loaded.append(load(*of))
        return loaded[-1]

    monkeypatch.setattr(data, "load", counted)
    section = {
        "rounds": 1,
        "clients": 3,
        "model": {"name": "mlp", "hidden": [4]},
        "data": {"dataset": "synthetic", "samples": 60, "shape": [4], "classes": 2},
        "report": False,
    }
    run = fednet.run(section, in_process=True, out=tmp_path)
    assert len(run.rounds) == 1
    assert len(loaded) == 1


def test_a_crash_between_large_replies_changes_neither_the_model_nor_the_useful_payloads(
    tmp_path, monkeypatch
):
    """Payloads of 1.5 MB, more than a part: in one process none of them is on disk."""
    section = {
        "name": "large",
        "rounds": 2,
        "clients": 3,
        "participation": 1.0,
        "model": {"name": "mlp", "hidden": [600, 600]},
        "data": {"dataset": "synthetic", "samples": 60, "shape": [4], "classes": 2},
        "report": False,
    }
    calm = fednet.run(section, in_process=True, out=tmp_path / "calm")
    take, taken = Inbox.take, []

    def taken_in(inbox, reply, *more):
        if reply.key.purpose == "train":
            taken.append(reply.key.round)
            if len(taken) == 5:
                raise KeyError("a crash in the second round")
        return take(inbox, reply, *more)

    monkeypatch.setattr(Inbox, "take", taken_in)
    with pytest.raises(KeyError):
        fednet.run(section, in_process=True, out=tmp_path / "cut")
    assert not list((tmp_path / "cut").rglob("*.bin"))
    again = fednet.run(section, in_process=True, out=tmp_path / "cut", resume=True)
    assert [r.model_sha256 for r in again.rounds] == [r.model_sha256 for r in calm.rounds]
    useful = [
        sorted(
            (r["round"], r["client"], r["direction"], r["kinds"]["state"])
            for r in run.lines("wire")
            if r["useful"] and "state" in r["kinds"]
        )
        for run in (again, calm)
    ]
    assert useful[0] == useful[1]
    assert taken == [1, 1, 1] + [2] * (2 + 3)
