"""Rounds with clients that are late, lost or away, in one process: what counts, what is recorded,
what is left behind.
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednet.algorithms.fedavg import FedAvg
from fednet.algorithms.scaffold import Scaffold
from fednet.errors import CannotGoOn
from fednet.experiment.store import ClientStore
from fednet.records.manifest import read_manifest
from fednet.server.aggregation import Aggregation
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import Inbox
from fednet.server.rounds import Rounds
from fednet.tensors import Tensors
from tests import rooms
from tests.books import read_book
from tests.rooms import Killed, lost

VIRTUAL = {"clock": "virtual", "step_ms": 10, "up_mbps": 8.0}


BASE: dict[str, Any] = {
    "rounds": 3,
    "clients": 4,
    "data": {"samples": 160, "shape": [1, 8, 8]},
    "train": {"batch_size": 16},
    "round": {"lost": {"closed": 0.02}},
    "evaluate": {"every": 0},
    "name": "run",
}


def run(out: Path, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    """resume, callback: as `rooms.run` has them."""
    directory = rooms.run(out, **rooms.merged(BASE, changes))
    return directory, rounds(directory)


def rounds(directory: Path) -> list[dict[str, Any]]:
    return rooms.lines(directory / "rounds.jsonl")


def hashes(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(r["model_sha256"], r["clients_sha256"]) for r in records]


def test_a_round_below_the_minimum_is_void_and_changes_nothing(tmp_path: Path) -> None:
    _, records = run(
        tmp_path,
        algorithm={"name": "scaffold"},
        faults=lost((2, 1), (2, 3)),
        round={"min_results": 3, "lost": {"closed": 0.02}},
    )
    assert [r["void"] for r in records] == [False, True, False]
    assert records[1]["completed"] == []
    assert hashes(records)[1] == hashes(records)[0] != hashes(records)[2]


@pytest.mark.parametrize(("method", "keep"), [("fedavg", set()), ("scaffold", {0, 1, 2, 3})])
def test_only_clients_that_kept_a_state_have_a_version_of_it(
    tmp_path: Path, method: str, keep: set[int]
) -> None:
    directory, _ = run(tmp_path, algorithm=method, rounds=1)
    assert read_manifest(directory / "checkpoint")[0].versions.keys() == keep


def test_after_so_many_void_rounds_the_run_ends_with_everything_saved(tmp_path: Path) -> None:
    everybody = lost(*((t, c) for t in (2, 3) for c in range(4)))
    changes: dict[str, Any] = {
        "rounds": 4,
        "faults": everybody,
        "round": {"void_rounds": 2, "lost": {"closed": 0.02}},
        "checkpoint": {"every": 5},
    }
    with pytest.raises(CannotGoOn, match="2 rounds in a row had fewer than 1 results") as ended:
        run(tmp_path, **changes)
    assert ended.value.exit_status == 3
    assert [r["void"] for r in rounds(tmp_path / "run")] == [False, True, True]
    assert read_manifest(tmp_path / "run" / "checkpoint")[0].round == 3
    _, records = run(tmp_path, resume=True, **changes)
    assert [r["void"] for r in records] == [False, True, True, False]


def test_on_the_virtual_clock_who_is_late_is_the_same_every_time_and_nothing_sleeps(
    tmp_path: Path,
) -> None:
    slow = {**VIRTUAL, "per_client": {"2": {"step_ms": 100_000}}}  # three steps: five minutes
    changes: dict[str, Any] = {
        "algorithm": {"name": "scaffold"},
        "link": slow,
        "round": {"deadline": 60.0},
    }
    _, first = run(tmp_path / "a", **changes)
    _, again = run(tmp_path / "b", **changes)
    assert [r["completed"] for r in first] == [[0, 1, 3]] * 3
    assert first[0]["dropped"] == {"2": "deadline"}
    assert [r["seconds_virtual"] for r in first] == [60.0] * 3
    assert hashes(first) == hashes(again)


def test_of_those_over_selected_the_first_k_count(tmp_path: Path) -> None:
    steps = {str(c): {"step_ms": 10 * (4 - c)} for c in range(4)}  # 3 is the fastest
    _, records = run(
        tmp_path,
        link={**VIRTUAL, "per_client": steps},
        participation=0.5,
        round={"ask": 2.0},
    )
    assert [r["selected"] for r in records] == [[0, 1, 2, 3]] * 3
    assert [r["completed"] for r in records] == [[2, 3]] * 3
    assert records[0]["dropped"] == {"0": "not among the first 2", "1": "not among the first 2"}


def test_replies_are_aggregated_in_ascending_client_id_though_they_arrive_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[int] = []
    added: list[int] = []
    accept = Inbox.accept
    add = Aggregation.add

    def taken(self: Inbox, replies: Any) -> Any:
        found = accept(self, replies)
        arrived.extend(r.message.key.client for r in found if not isinstance(r, Exception))
        return found

    def adding(self: Aggregation, replies: Any) -> None:
        added.extend(client for client, _ in replies)
        add(self, replies)

    monkeypatch.setattr(Inbox, "accept", taken)
    monkeypatch.setattr(Aggregation, "add", adding)
    # Client 0's first reply is damaged, and its second one comes after those of others.
    run(tmp_path, rounds=1, faults={"schedule": [{"round": 1, "client": 0, "kind": "corrupt"}]})
    assert arrived != sorted(arrived) == added == [0, 1, 2, 3]


def test_what_was_spent_on_lost_clients_is_told_from_what_was_useful(tmp_path: Path) -> None:
    slow = {**VIRTUAL, "per_client": {"2": {"step_ms": 100_000}}}
    directory, _ = run(
        tmp_path, faults=lost((2, 1)), link=slow, round={"deadline": 60.0, "lost": {"closed": 0.02}}
    )
    rows = rooms.lines(directory / "wire.jsonl")
    useless = {
        (r["round"], r["client"], r["type"])
        for r in rows
        if r["type"] in ("task", "reply") and not r["useful"]
    }
    assert useless == {
        (2, 1, "task"),
        *((t, 2, what) for t in (1, 2, 3) for what in ("task", "reply")),
    }


@pytest.mark.parametrize("method", ["fedavg", "fedga"])
def test_a_round_whose_spool_is_gone_does_not_lend_its_replies_to_the_next(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two checkpoints the replies of one round are on disk. Round 2's are there when the
    run goes on and round 1's are not: each is folded from its own.
    """
    # No round opens early.
    changes: dict[str, Any] = {
        "algorithm": {"name": method},
        "checkpoint": {"every": 3},
        "stop": {"megabytes": 1000.0},
    }
    _, calm = run(tmp_path / "calm", **changes)

    conclude = Rounds.conclude

    def dies(self: Rounds, round: Any) -> None:
        if round.number == 2:
            raise RuntimeError("as if the process had died")
        conclude(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "conclude", dies)
        with pytest.raises(RuntimeError):
            run(tmp_path / "died", **changes)
    assert {round for round, *_ in read_book(tmp_path / "died" / "run").accepted} == {2}
    _, records = run(tmp_path / "died", resume=True, **changes)
    assert hashes(records) == hashes(calm)


def test_states_of_the_last_checkpoint_are_kept_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies two rounds after its checkpoint: clients start again from the states that
    they had then, though they have two newer ones.
    """
    changes: dict[str, Any] = {
        "algorithm": {"name": "scaffold"},
        "rounds": 5,
        "checkpoint": {"every": 2},
        "stop": {"megabytes": 1000.0},  # no round opens early
    }
    _, calm = run(tmp_path / "calm", **changes)
    append = Rounds._append

    def dies(self: Rounds, lines: Any) -> None:
        if self.progress.round == 3 and lines:
            append(self, lines)
            monkeypatch.setattr(Aggregation, "result", killed)
            return
        append(self, lines)

    def killed(self: Aggregation, least: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "_append", dies)
        with pytest.raises(Killed):
            run(tmp_path / "died", **changes)
    monkeypatch.undo()
    assert read_manifest(tmp_path / "died" / "run" / "checkpoint")[0].round == 2
    _, records = run(tmp_path / "died", resume=True, **changes)
    assert hashes(records) == hashes(calm)


def killed_before_its_end(out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A run that has all replies of its first round on the disk, and makes nothing of them."""

    def dies(self: Aggregation, least: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Aggregation, "result", dies)
        with pytest.raises(Killed):
            run(out, **changes)


def test_of_replies_that_come_at_one_moment_the_first_k_count_and_all_are_in_the_book(
    tmp_path: Path,
) -> None:
    directory, records = run(tmp_path, participation=0.5, round={"ask": 2.0})
    rows = [r for r in rooms.lines(directory / "wire.jsonl") if r["client"] >= 0]
    for record in records:
        assert [len(record["completed"]), record["void"]] == [2, False]
        assert list(record["dropped"].values()) == ["not among the first 2"] * 2
        theirs = [r for r in rows if r["round"] == record["round"] and r["useful"]]
        assert sorted(r["client"] for r in theirs if r["type"] == "reply") == record["completed"]
        assert sorted(r["client"] for r in theirs if r["type"] == "task") == record["completed"]
    total = sum(r["bytes"] for r in rooms.lines(directory / "wire.jsonl"))
    assert rooms.summary(directory)["bytes"]["total"] == total


def test_a_resume_that_finds_the_first_k_replies_asks_nobody_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"rounds": 1, "participation": 0.5, "round": {"ask": 2.0}}
    killed_before_its_end(tmp_path, monkeypatch, **changes)
    directory, (record,) = run(tmp_path, resume=True, **changes)
    assert len(record["completed"]) == 2
    assert list(record["dropped"].values()) == ["not among the first 2"] * 2
    rows = rooms.lines(directory / "wire.jsonl")
    assert {r["incarnation"] for r in rows if r["type"] == "task"} == {1}


def test_a_resume_that_finds_one_of_the_first_k_replies_takes_the_rest_of_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"rounds": 1, "participation": 0.5, "round": {"ask": 2.0}}
    killed_before_its_end(tmp_path, monkeypatch, **changes)
    found = Inbox.earlier_replies
    monkeypatch.setattr(Inbox, "earlier_replies", lambda *which: dict([*found(*which).items()][:1]))
    _, (record,) = run(tmp_path, resume=True, **changes)
    assert [len(record["completed"]), len(record["dropped"])] == [2, 2]


def test_a_replay_without_a_client_is_the_run_in_which_it_never_replied(tmp_path: Path) -> None:
    """What is left is the same to the bit, as unlearning a client by retraining asks for."""
    changes: dict[str, Any] = {"rounds": 4, "participation": 0.5, "algorithm": "scaffold"}
    whole, rows = run(tmp_path / "whole", **changes)
    first = next(row["round"] for row in rows if 2 in row["selected"])
    gone = {"round": first, "client": 2, "kind": "crash", "rounds": 1000}
    _, found = run(
        tmp_path / "without", faults={"replay": str(whole), "schedule": [gone]}, **changes
    )
    _, expected = run(tmp_path / "never", faults=lost(*((t, 2) for t in range(1, 5))), **changes)
    assert [row["completed"] for row in found] == [
        [client for client in row["completed"] if client != 2] for row in rows
    ]
    assert hashes(found) == hashes(expected) != hashes(rows)


def test_a_replay_counts_who_is_on_record_whatever_the_virtual_clock_says(tmp_path: Path) -> None:
    first, calm = run(tmp_path / "first")
    _, again = run(
        tmp_path / "again",
        faults={"replay": str(first)},
        link={**VIRTUAL, "per_client": {"2": {"step_ms": 100_000}}},
        round={"deadline": 60.0},
    )
    assert [r["completed"] for r in again] == [[0, 1, 2, 3]] * 3
    assert hashes(again) == hashes(calm)


def test_a_reply_that_an_earlier_server_received_does_not_answer_another_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"rounds": 1, "algorithm": "fedavg"}
    killed_before_its_end(tmp_path / "killed", monkeypatch, **changes)
    broadcast = FedAvg.broadcast

    def doubled(self: FedAvg, server: Any, phase: int, client_id: int) -> Any:
        down = broadcast(self, server, phase, client_id)
        return dataclasses.replace(down, x=down.x * 2)

    monkeypatch.setattr(FedAvg, "broadcast", doubled)
    _, expected = run(tmp_path / "expected", **changes)
    directory, records = run(tmp_path / "killed", resume=True, **changes)
    assert hashes(records) == hashes(expected)
    replies = [r for r in rooms.lines(directory / "wire.jsonl") if r["type"] == "reply"]
    assert [r.get("reason", "") for r in replies] == ["the answer to another task"] * 4 + [""] * 4


def left_between_two_exchanges(tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """A round in which client 1 leaves between the two: client 0 takes 1.5 s, the others 0.03 s."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,0,99\n1,0,1\n2,0,99\n3,0,99\n")
    directory, (record,) = run(
        tmp_path,
        rounds=1,
        algorithm="fedga",
        availability={"trace": str(trace)},
        link={**VIRTUAL, "per_client": {"0": {"step_ms": 500}}},
        **changes,
    )
    assert record["completed_by_phase"] == [[0, 1, 2, 3], [0, 2, 3]]
    return directory, record


def test_a_client_that_left_between_two_exchanges_is_not_asked_in_the_second(
    tmp_path: Path,
) -> None:
    directory, record = left_between_two_exchanges(tmp_path)
    assert record["dropped"] == {"1": "left"}
    rows = rooms.lines(directory / "wire.jsonl")
    assert sum((r["client"], r["type"]) == (1, "task") for r in rows) == 1


def test_a_round_that_is_void_in_its_second_exchange_changes_nothing_of_the_first(
    tmp_path: Path,
) -> None:
    directory, record = left_between_two_exchanges(tmp_path, round={"min_results": 4})
    assert record["void"]
    assert record["completed"] == []
    assert read_manifest(directory / "checkpoint")[0].versions == {}


def test_rounds_in_which_nobody_is_there_are_void(tmp_path: Path) -> None:
    away = {"model": "bernoulli", "p": 0.0}
    with pytest.raises(CannotGoOn, match="fewer than 1 results"):
        run(tmp_path, availability=away)
    assert [r["selected"] for r in rounds(tmp_path / "run")] == [[]] * 3


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.1, 0.3, 0.6]),
    share=st.sampled_from([0.5, 1.0]),
)
def test_scaffold_c_is_the_mean_of_the_c_i_after_any_sequence_of_dropouts(
    tmp_path_factory: Any, seed: int, rate: float, share: float
) -> None:
    faults = {
        "random": dict.fromkeys(
            ("drop_before_training", "drop_before_sending", "drop_during_upload", "crash"), rate / 4
        )
        | {"corrupt": 0.1, "duplicate": 0.1, "disconnect": 0.1},
    }
    directory, records = run(
        tmp_path_factory.mktemp("property"),
        seed=seed,
        algorithm={"name": "scaffold"},
        participation=share,
        rounds=4,
        faults=faults,
        round={"void_rounds": 9, "lost": {"closed": 0.02}},
    )
    server, progress, _ = Checkpoints(directory / "checkpoint").load(Scaffold.Server)
    store = ClientStore(next((directory / "state").iterdir()), Scaffold.Client)
    total = server.c.zeros_like()
    for client, version in progress.versions.items():
        record = store.load(client, version)
        assert record.algorithm is not None
        total = total + record.algorithm.c  # type: ignore[attr-defined]
    assert (server.c - 0.25 * total).norm() <= 1e-6 * max(1.0, server.c.norm())
    assert {c for r in records for c in r["completed"]} == set(progress.versions)


@pytest.mark.parametrize(
    "changes", [{"algorithm": "scaffold"}, {"evaluate": {"every": 1, "clients": "all"}}]
)
def test_models_of_earlier_rounds_are_let_go_of_without_a_garbage_collector(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    held: list[int] = []

    def count(record: Any) -> None:
        held.append(sum(type(found) is Tensors for found in gc.get_objects()))

    gc.disable()
    try:
        run(tmp_path, rounds=8, callback=count, **changes)
    finally:
        gc.enable()
    assert held[-1] - held[3] < 4  # of the four rounds between, less than one of each is held
