"""Replies that pass for what is declared and are of no use: they are left out, and the run is that
of the others.
"""

from __future__ import annotations

import pytest
import torch

from fednet.algorithms.base import LocalRun, Samples
from fednet.algorithms.fedavg import FedAvg
from fednet.algorithms.feddc import FedDC
from fednet.errors import CannotGoOn
from fednet.loading import WrongPart
from fednet.server.guards import lower_counts
from fednet.server.rounds import Rounds
from tests.rooms import SMALL, Killed, hashes, lines, lost, run, summary
from tests.server.test_bounds import federation

LIAR = 1


def lies(monkeypatch, method, change) -> None:
    """The liar's replies are change(up)."""
    honest = method.client_update

    def client_update(self, phase, client, down, host):
        state, up = honest(self, phase, client, down, host)
        return state, change(up) if host.client_id == LIAR else up

    monkeypatch.setattr(method, "client_update", client_update)


def others_alone(tmp_path, **changes):
    faults = lost((1, LIAR), (2, LIAR))
    return run(tmp_path / "alone", faults=faults, round={"lost": {"closed": 0.02}}, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run without the liar, but for its data."""
    return others_alone(tmp_path_factory.mktemp("alone"))


def reasons(directory) -> list[str]:
    return [r["dropped"].get(str(LIAR), "") for r in lines(directory / "rounds.jsonl")]


CONDENSING = {
    "algorithm": {"name": "feddc", "iterations": 1, "ft_epochs": 1},
    "data": {
        "dataset": "synthetic",
        "samples": 60,
        "shape": [1, 4, 4],
        "classes": 3,
        "partition": {"scheme": "iid"},
    },
}
IMAGES = {
    "float labels": lambda s: Samples(s.x, s.y.float()),
    "labels beyond the classes": lambda s: Samples(s.x, s.y + 3),
    "labels of two dimensions": lambda s: Samples(s.x[:1], s.y[:1].view(1, 1)),
    "a mapping": lambda s: Samples({"x": s.x}, s.y),
    "another shape": lambda s: Samples(s.x[:, :, :2], s.y),
}


@pytest.mark.parametrize("what", IMAGES)
def test_condensed_images_that_are_none_are_refused_and_the_round_goes_on(
    tmp_path, monkeypatch, what
):
    lies(monkeypatch, FedDC, lambda up: type(up)(x=up.x, s=IMAGES[what](up.s), run=up.run))
    lied_to = run(tmp_path, **CONDENSING)
    assert all(r.startswith("refused: field s") for r in reasons(lied_to))
    assert [r["completed"] for r in lines(lied_to / "rounds.jsonl")] == [[0, 2]] * 2


def test_images_that_ruin_the_servers_training_cost_their_sender_the_round(tmp_path, monkeypatch):
    alone = others_alone(tmp_path, **CONDENSING)
    huge = torch.finfo(torch.float32).max
    lies(
        monkeypatch,
        FedDC,
        lambda up: type(up)(x=up.x, s=Samples(torch.full_like(up.s.x, huge), up.s.y), run=up.run),
    )
    lied_to = run(tmp_path / "lied_to", **CONDENSING)
    assert hashes(lied_to) == hashes(alone)
    assert all("its reply gives no model" in r for r in reasons(lied_to))
    kept = sorted(path.stem for path in (lied_to / "condensed").glob("client-*"))
    assert kept == ["client-0", "client-2"]


def test_a_reply_of_which_a_model_that_is_not_finite_is_made_is_left_out(tmp_path, monkeypatch):
    alone = others_alone(tmp_path)
    fold = FedAvg.accumulate

    def folding(self, total, server, client_id, up, host):
        up = type(up)(x=up.x * torch.nan, run=up.run) if client_id == LIAR else up
        return fold(self, total, server, client_id, up, host)

    monkeypatch.setattr(FedAvg, "accumulate", folding)
    left_out = run(tmp_path / "left_out")
    assert hashes(left_out) == hashes(alone)
    assert all("its reply gives no model: x is not finite" in r for r in reasons(left_out))


def test_a_reply_that_makes_the_model_grow_beyond_any_use_is_left_out(tmp_path, monkeypatch):
    """Each of its numbers is finite, and no bound on the replies' norms is set."""
    unbounded = {"security": {"max_norm": None}}
    alone = others_alone(tmp_path, **unbounded)
    lies(monkeypatch, FedAvg, lambda up: type(up)(x=up.x * 1e8, run=up.run))
    lied_to = run(tmp_path / "lied_to", **unbounded)
    assert hashes(lied_to) == hashes(alone)
    assert all("times its first" in r for r in reasons(lied_to))


def spoil_unless_alone(monkeypatch):
    """What comes of the liar's reply and another one is no model."""
    finish = FedAvg.server_update

    def finishing(self, total, server, cohort, host):
        after = finish(self, total, server, cohort, host)
        spoilt = LIAR in cohort and len(cohort) > 1
        return after.replace(x=after.x * torch.nan) if spoilt else after

    monkeypatch.setattr(FedAvg, "server_update", finishing)


def test_of_replies_that_give_a_model_each_but_none_together_the_largest_is_left_out(
    tmp_path, monkeypatch
):
    alone = others_alone(tmp_path)
    lies(monkeypatch, FedAvg, lambda up: type(up)(x=up.x * 10, run=up.run))
    spoil_unless_alone(monkeypatch)
    left_out = run(tmp_path / "left_out")
    assert hashes(left_out) == hashes(alone)
    assert all("its reply gives no model: x is not finite" in r for r in reasons(left_out))


def test_a_server_update_that_fails_with_every_reply_is_the_methods_fault(tmp_path, monkeypatch):
    """No client is told that it sent something wrong."""

    def finishing(self, total, server, cohort, host):
        return server.replace(x=server.x + undefined)  # noqa: F821

    monkeypatch.setattr(FedAvg, "server_update", finishing)
    says = r"FedAvg: server_update fails with every client's reply: NameError.*line \d+"
    with pytest.raises(WrongPart, match=says):
        run(tmp_path)
    assert not (tmp_path / "r" / "rounds.jsonl").read_text()


def test_a_server_update_that_fails_with_one_reply_leaves_its_sender_out(tmp_path, monkeypatch):
    finish = FedAvg.server_update

    def finishing(self, total, server, cohort, host):
        if LIAR in cohort:
            raise ValueError("no")
        return finish(self, total, server, cohort, host)

    monkeypatch.setattr(FedAvg, "server_update", finishing)
    left_out = run(tmp_path)
    assert all("server_update fails with its reply: ValueError: no" in r for r in reasons(left_out))


def test_a_round_whose_sum_under_masks_gives_no_model_is_void(tmp_path, monkeypatch):
    """Nobody knows what each reply gives."""
    spoil_unless_alone(monkeypatch)
    masks = {"secagg": {"protocol": "secagg", "max_samples": 200}}
    (record,) = lines(run(tmp_path, rounds=1, privacy=masks) / "rounds.jsonl")
    assert (record["void"], record["dropped"]) == (True, {})
    assert record["algorithm"]["warnings"] == ["its reply gives no model: x is not finite"]


def test_a_round_that_is_void_after_an_exchange_has_no_further_one(tmp_path):
    patience = {"lost": {"closed": 0.02}}
    masks = {"secagg": {"protocol": "secagg", "max_samples": 200}}
    changes = {"rounds": 1, "privacy": masks, "round": patience}
    first = [one | {"exchange": 0} for one in lost((1, 0), (1, LIAR))["schedule"]]
    directory = run(tmp_path, faults={"schedule": first}, **changes)
    assert [row["void"] for row in lines(directory / "rounds.jsonl")] == [True]
    rows = lines(directory / "wire.jsonl")
    assert {row["phase"] for row in rows if row["type"] == "task"} == {0}


def said(**changes):
    def change(up):
        run = {"n": up.run.n, "steps": up.run.steps, "loss": up.run.loss, **changes}
        return type(up)(x=up.x, run=LocalRun(**run))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (said(n=21), "it reports 21 samples, but has 20"),
        (said(n=1 << 62), "samples, but has 20"),
        (said(steps=2001), "it says it took 2001 steps; 2000 would be 100 times"),
        (said(steps=1 << 62), "steps; "),
        (said(loss=1.7e308), "loss=1.7e+308"),
        (lambda up: type(up)(x=up.x * 1e17, run=up.run), "security.max_norm: auto allows"),
    ],
    ids=["one sample too many", "n", "one step too many", "steps", "loss", "norm"],
)
def test_what_cannot_be_is_refused(tmp_path, monkeypatch, alone, change, reason):
    lies(monkeypatch, FedAvg, change)
    lied_to = run(tmp_path / "lied_to")
    assert hashes(lied_to) == hashes(alone)
    assert all(reason in r for r in reasons(lied_to))


def the_liar_is_of_no_use(directory, answers: int) -> None:
    """Its bytes are spent, nothing of them is of use, and nothing was lost. answers: how often it
    answered in round 1.
    """
    said = summary(directory)
    book = lines(directory / "wire.jsonl")
    whole = 4 * sum(r["useful"] for r in book if r["type"] == "reply")
    assert said["useful"] == said["predicted"]
    assert said["useful"]["up"] == {"state": 131 * whole, "statistics": 6 * whole}
    assert said["bytes"]["total"] == sum(r["bytes"] for r in book)
    rows = [r for r in book if r["client"] == LIAR and r["round"] == 1]
    assert not any(r["useful"] or r.get("lost") for r in rows)
    assert [r["type"] for r in rows] == ["task", "reply"] * answers
    assert all(r["bytes"] > 131 * 4 for r in rows)


def die(rounds, round) -> None:
    raise Killed


@pytest.mark.parametrize("at", ["fold", "finish"])
def test_a_reply_at_which_the_method_raises_is_left_out_and_a_resume_asks_again(
    tmp_path, monkeypatch, alone, at
):
    federation(monkeypatch, failing=LIAR, malicious=-1, by=at)
    local = FedAvg.client_update
    asked = []

    def training(self, phase, client, down, host):
        asked.append((host.round, host.client_id))
        return local(self, phase, client, down, host)

    monkeypatch.setattr(FedAvg, "client_update", training)
    lied_to = run(tmp_path / "lied_to")
    assert hashes(lied_to) == hashes(alone)
    assert summary(lied_to)["model_sha256"] == summary(alone)["model_sha256"]
    assert all("test_bounds.py, line" in r for r in reasons(lied_to))
    asked.clear()
    with monkeypatch.context() as killing:
        killing.setattr(Rounds, "conclude", die)
        with pytest.raises(Killed):
            run(tmp_path / "killed", checkpoint={"every": 2})
    resumed = run(tmp_path / "killed", resume=True, checkpoint={"every": 2})
    assert hashes(resumed) == hashes(alone)
    assert reasons(resumed) == reasons(lied_to)
    assert sorted(c for t, c in asked if t == 1) == [0, LIAR, LIAR, 2]
    the_liar_is_of_no_use(lied_to, 1)
    the_liar_is_of_no_use(resumed, 2)
    with pytest.raises(CannotGoOn, match="client 1 could not do its task in round 1"):
        run(tmp_path / "stop", round={"on_error": "stop"})


def test_memory_that_the_server_lacks_is_not_laid_to_the_reply_that_it_folds(tmp_path, monkeypatch):
    def fold(self, *_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 TB")

    monkeypatch.setattr(FedAvg, "accumulate", fold)
    with pytest.raises(RuntimeError, match="4 TB"):
        run(tmp_path)


def test_one_client_that_fails_is_left_out_by_default_and_its_reason_shown(
    tmp_path, monkeypatch, alone
):

    def fails(up):
        raise RuntimeError("no\nluck")

    lies(monkeypatch, FedAvg, fails)
    went_on = run(tmp_path / "went_on")
    assert hashes(went_on) == hashes(alone)
    assert all(r.startswith("failed: ") for r in reasons(went_on))
    with pytest.raises(CannotGoOn, match="client 1 could not do its task in round 1"):
        run(tmp_path / "stop", round={"on_error": "stop"})


def test_where_all_fail_the_run_ends_at_once_with_the_reason(tmp_path, monkeypatch):
    def client_update(self, phase, client, down, host):
        raise RuntimeError(f"client {host.client_id}: a mistake in the method.")

    monkeypatch.setattr(FedAvg, "client_update", client_update)
    said = (
        r"^no client could do its task in round 1: client 0: failed: RuntimeError: a mistake in "
        r"the method; the last checkpoint is intact\.$"
    )
    with pytest.raises(CannotGoOn, match=said):
        run(tmp_path)
    assert len(lines(tmp_path / "r" / "rounds.jsonl")) == 1


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({0: 10, 1: 10, 2: 1000}, 0.5, {2: 20}),
        ({0: 10, 1: 10, 2: 20}, 0.5, {}),
        ({0: 1, 1: 2, 2: 1000, 3: 2000}, 0.3, {2: 2, 3: 2}),
        ({0: 5, 1: 7, 2: 9}, 0.1, {1: 5, 2: 5}),  # no three can each have a tenth
        ({0: 4}, 0.5, {}),
        ({}, 0.5, {}),
    ],
)
def test_counts_are_lowered_to_the_share(counts, share, expected):
    assert lower_counts(counts, share) == expected


@pytest.mark.parametrize("where", ["server_update", "accumulate"])
def test_a_method_that_writes_into_the_state_before_is_refused(tmp_path, monkeypatch, where):
    """In one process clients and a checkpoint may still read that state: other bits than apart."""
    right = getattr(FedAvg, where)

    def wrong(self, *given):
        after = right(self, *given)
        server = given[1]
        server.x.vector.zero_()
        return after

    monkeypatch.setattr(FedAvg, where, wrong)
    with pytest.raises(WrongPart, match=r"FedAvg: .* changed server\.x\.vector in place"):
        run(tmp_path)


# Longer tasks go out first, and replies are added in the order of client ids: others wait for a
# client with a short task, and are added together with it.
@pytest.mark.parametrize(("epochs", "most"), [({"0": 1}, 3), ({"0": 3, "1": 1}, 2)])
def test_of_replies_that_are_added_together_the_one_that_fails_is_left_out(
    tmp_path, monkeypatch, epochs, most
):
    each = {client: {"epochs": n} for client, n in epochs.items()}
    shortest = {"train": {**SMALL["train"], "epochs": 2, "per_client": each}}
    alone = others_alone(tmp_path, **shortest)
    together: list[int] = []
    weight = FedAvg.weight
    add_all = FedAvg.add_all

    def adding(self, accumulator, ups):
        together.append(len(ups))
        return add_all(self, accumulator, ups)

    def weighing(self, run):
        if run.loss == 7.0:
            raise RuntimeError("no weight for such a loss")
        return weight(self, run)

    lies(monkeypatch, FedAvg, lambda up: type(up)(x=up.x, run=LocalRun(up.run.n, 1, 7.0)))
    monkeypatch.setattr(FedAvg, "weight", weighing)
    monkeypatch.setattr(FedAvg, "add_all", adding)
    left_out = run(tmp_path / "left_out", **shortest)
    assert hashes(left_out) == hashes(alone)
    assert max(together) == most
    assert all("could not be aggregated" in r for r in reasons(left_out))
    assert all("no weight for such a loss" in r for r in reasons(left_out))
