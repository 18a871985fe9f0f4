"""A client whose reply cannot be accumulated is left out, and the others are held to the same
bounds as without it, whichever of the clients fails and whichever is malicious.
"""

from __future__ import annotations

import itertools

import pytest

from fednet.algorithms.base import LocalRun
from fednet.algorithms.fedavg import FedAvg
from tests.rooms import hashes, lines, lost, run, site_data

MARK = 12345.0  # the loss by which the failing client's reply is known
BOUNDS = {
    "auto": {"security": {"max_norm": "auto"}},
    "number": {"security": {"max_norm": 100.0}},
    "share": {"round": {"max_share": 0.4}},
    "rule": {"security": {"max_norm": None}, "aggregation": {"rule": "median"}},
    "clipping": {"security": {"max_norm": None}, "privacy": {"clip": 0.5}},
}
REFUSED = {
    "auto": "security.max_norm: auto allows",
    "number": "security.max_norm allows 100",
    "share": "security.max_norm: auto allows",
}
PAIRS = list(itertools.permutations((0, 2, 4), 2))  # first, middle and last
UNEVEN = {"partition": {"scheme": "quantity", "alpha": 0.5}}


def federation(monkeypatch, *, failing: int | None, malicious: int, by: str) -> None:
    """One client's reply raises in `fold` or in `finish`, another client sends a huge model."""
    local = FedAvg.client_update
    fold = FedAvg.accumulate
    finish = FedAvg.server_update

    def training(self, phase, client, down, host):
        state, up = local(self, phase, client, down, host)
        if host.client_id == malicious:
            up = type(up)(x=up.x * 1e5, run=up.run)
        if host.client_id == failing:
            up = type(up)(x=up.x, run=LocalRun(up.run.n, up.run.steps, MARK))
        return state, up

    def folding(self, total, server, client_id, up, host):
        if by == "fold" and up.run.loss == MARK:
            raise KeyError("no such thing")
        return fold(self, total, server, client_id, up, host)

    def finishing(self, total, server, cohort, host):
        if by == "finish" and failing in cohort:
            raise IndexError("too many")
        return finish(self, total, server, cohort, host)

    monkeypatch.setattr(FedAvg, "client_update", training)
    monkeypatch.setattr(FedAvg, "accumulate", folding)
    monkeypatch.setattr(FedAvg, "server_update", finishing)


@pytest.mark.parametrize(
    ("bound", "by", "failing", "malicious"),
    [
        *((bound, "fold", *PAIRS[0]) for bound in BOUNDS),
        ("auto", "finish", *PAIRS[0]),
        ("share", "finish", *PAIRS[0]),
        *(
            pytest.param(*where, *pair, marks=pytest.mark.long)
            for where in (("auto", "fold"), ("share", "finish"))
            for pair in PAIRS[1:]
        ),
    ],
)
def test_a_failing_reply_leaves_the_bounds_of_the_others_as_they_are(
    tmp_path, monkeypatch, bound, by, failing, malicious
):
    common = {"rounds": 1, "clients": 5, "data": UNEVEN, **BOUNDS[bound]}
    with monkeypatch.context() as patched:
        federation(patched, failing=failing, malicious=malicious, by=by)
        found = run(tmp_path / "found", **common)
    with monkeypatch.context() as patched:
        federation(patched, failing=None, malicious=malicious, by=by)
        common["round"] = {"lost": {"closed": 0.02}, **common.get("round", {})}
        expected = run(tmp_path / "expected", faults=lost((1, failing)), **common)
    assert hashes(found) == hashes(expected)
    for row, other in zip(lines(found / "rounds.jsonl"), lines(expected / "rounds.jsonl")):
        assert row["completed"] == other["completed"]
        assert "test_bounds.py, line" in row["dropped"][str(failing)]
        assert REFUSED.get(bound, "") in row["dropped"].get(str(malicious), "")
        assert (str(malicious) in row["dropped"]) == (bound in REFUSED)
        assert row["algorithm"].get("warnings") == other["algorithm"].get("warnings")
        lowered = [w for w in other["algorithm"].get("warnings", ()) if "max_share" in w]
        assert bool(lowered) == (bound == "share")


@pytest.mark.parametrize(("failing", "malicious"), list(itertools.permutations((0, 1, 2), 2)))
def test_a_reply_that_fails_counts_among_those_that_set_the_bound(
    tmp_path, monkeypatch, failing, malicious
):
    """Of three clients one fails and one is malicious: its norm is compared with both others'."""
    federation(monkeypatch, failing=failing, malicious=malicious, by="fold")
    found = run(tmp_path / "found", rounds=1)
    monkeypatch.undo()
    expected = run(
        tmp_path / "expected",
        rounds=1,
        faults=lost((1, failing), (1, malicious)),
        round={"lost": {"closed": 0.02}},
    )
    assert hashes(found) == hashes(expected)
    for row in lines(found / "rounds.jsonl"):
        assert REFUSED["auto"] in row["dropped"][str(malicious)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_share_by_the_sites_own_word_is_bounded_though_one_of_three_replies_fails(
    tmp_path, monkeypatch, failing
):
    """Of the two that are left, with 20 samples and 300, neither may weigh more than the other."""
    largest = 1 if failing == 2 else 2
    data = site_data(tmp_path / "data", *({0, 1, 2} - {largest}))
    site_data(tmp_path / "data", largest, n=300)
    federation(monkeypatch, failing=failing, malicious=-1, by="fold")
    for row in lines(run(tmp_path, data=data) / "rounds.jsonl"):
        (warning,) = row["algorithm"]["warnings"]
        assert warning.startswith(f"client {largest}'s samples count as 20: round.max_share")


def test_a_client_whose_share_is_lowered_weighs_so_much_less(tmp_path, monkeypatch):
    """Of clients with 16, 16 and 64 samples none may have more than half: 64 count as 32."""
    data = site_data(tmp_path / "data", 0, 1, n=16)
    site_data(tmp_path / "data", 2, n=64)
    found = run(tmp_path / "found", rounds=1, data=data, round={"max_share": 0.5})
    monkeypatch.setattr(FedAvg, "weight", lambda self, run: min(run.n, 32))
    unbounded = {"rounds": 1, "data": data, "round": {"max_share": None}}
    assert hashes(found) == hashes(run(tmp_path / "expected", **unbounded))
    monkeypatch.undo()
    assert hashes(found) != hashes(run(tmp_path / "otherwise", **unbounded))
