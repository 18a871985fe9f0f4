"""The benchmarks measure what they say, at a tiny size; no time is tested."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from fednet.config import from_mapping
from fednet.errors import CannotGoOn
from fednet.report import costs, open_run
from fednet.training import packed
from tests.algorithms.harness import close
from tests.bench import against, bare, books, card, pack, replies, round, secagg
from tests.bench.__main__ import main
from tests.bench.run import FLOOR, yardstick
from tests.bench.workloads import WORKLOADS

TINY = replace(WORKLOADS["W6"], clients=4, per_round=2, samples=4, batch_size=2, rounds=1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pack --workload cnn,moon", "unknown workload 'moon'"),
        ("round --repeat 0", "expected a whole number of at least 1, got '0'"),
        ("round --workload W1,moon", "unknown workload 'moon'"),
        ("card --part moon", "unknown part 'moon'"),
        ("ways --against HEAD --limit 9", "--against runs fednet alone"),
        ("pack --against HEAD --device cpu", "without --device"),
        ("moon", "invalid choice: 'moon'"),
    ],
)
def test_an_option_that_cannot_be_measured_is_refused(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_what_measures_memory_has_no_torch_of_its_own():
    """The pages of its libraries would be shared, and count half for the run that is measured."""
    seen = "import sys, tests.bench.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], check=False).returncode == 0


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=lambda w: w.name)
def test_a_workload_takes_the_steps_of_the_plain_loop_beside_it(work):
    train = from_mapping(work.config(1)).train
    assert (train.epochs, train.steps, train.batch_size) == (1, work.steps, work.batch_size)
    assert (train.optimizer, train.lr, train.momentum) == ("sgd", work.lr, 0.0)


@pytest.mark.parametrize("payloads", [1, 3])
def test_every_byte_of_a_round_crosses(payloads):
    job = {"processes": 2, "payloads": payloads, "nbytes": 100_000, "rounds": 2}
    seconds = bare.over_tcp(job)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_the_sum_is_of_training_bytes_and_mean(monkeypatch, tmp_path):
    own = ("server_cpu_s", "pss_mb", "first_task_s", "first_model_s", "utilisation")
    ours = {**dict.fromkeys(own, 1.0), "seconds": 1.6, "by_phase": {"waiting": 1.0}}
    monkeypatch.setattr(round, "yardstick", lambda *given, **more: {"seconds": 0.5})
    monkeypatch.setattr(round, "_bare", lambda work, processes: {"tcp_s": 0.2, "mean_s": 0.1})
    monkeypatch.setattr(round, "fednet", lambda *given: ours)
    monkeypatch.setattr(round, "_import", lambda: 0.25)
    record = round.bench(WORKLOADS["W2"], 2, tmp_path, 2)
    medians = {name: record[name]["median"] for name in ("ratio", "ratio_to_sum", "start_s")}
    assert medians == pytest.approx({"ratio": 3.2, "ratio_to_sum": 2.0, "start_s": 0.75})
    assert record["exchange_s"]["median"] == 0.2
    assert "2.00" in "\n".join(round.lines(record))


def test_a_way_that_fails_costs_no_other(monkeypatch, tmp_path):
    def timed(words, work, limit_s, **more):
        if words[0] == "/nowhere/python":
            return yardstick(words, work, limit_s, **more)
        return {"seconds": 1.0}

    monkeypatch.setattr(round, "fednet", lambda *given, **more: {"seconds": 2.0})
    monkeypatch.setattr(round, "yardstick", timed)
    peers = dict.fromkeys(["pfl", "blazefl"], "/nowhere/python")
    records = list(round.ways(TINY, 2, tmp_path, peers, 60.0))
    failed = [r["way"].partition(",")[0] for r in records if "failed" in r]
    assert failed == ["pfl", "blazefl", "blazefl"] * 2
    said = list(round.ways_lines(records))
    assert "fednet in process            2.000 [2.000 2.000] s a round, 2.00 of the pl" in said[0]
    assert "not measured" in said[-1]


def test_the_plain_loop_is_timed_and_watched():
    found = yardstick(FLOOR, TINY, processes=1)
    assert found["seconds"] > 0
    assert found["pss_mb"] > 10


def test_parts_of_the_card_are_apart_and_within_their_time(monkeypatch, tmp_path):
    monkeypatch.setitem(card.PARTS, "tcp", (0.2, card.tcp))
    records = list(card.bench("cpu", ["tcp"], tmp_path, 60.0))
    assert records[0]["failed"] == "stopped after 0 s"
    assert records[-1]["part"] == "tcp"


def test_a_part_prints_its_records(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "FEDDC", {"tf32": {}})
    monkeypatch.setitem(WORKLOADS, "feddc", WORKLOADS["feddc"])
    card.main("feddc", "cpu", str(tmp_path))
    (record,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert record["train"]["graphs"] is True
    assert record["apart_ms"] > 0
    assert "failed" not in record


def test_two_versions_take_turns_and_their_ratio_is_of_pairs(tmp_path):
    seen = list[str]()
    seconds = iter([1.0, 2.0, 6.0, 2.0])  # here, there; there, here

    def measure(place):
        seen.append("here" if place == against.ROOT else "there")
        return {"cpu_s": next(seconds)}

    record = against.compare(measure, tmp_path, 2, {"what": "W2", "commit": "abc"})
    assert seen == ["here", "there", "there", "here"]
    assert record["ratio"]["cpu_s"] == pytest.approx({"min": 1 / 3, "median": 5 / 12, "max": 0.5})
    assert record["here"]["cpu_s"] == {"min": 1.0, "median": 1.5, "max": 2.0}
    assert "ratio 0.42 [0.33 0.50]" in against.lines(record)[1]


def test_a_version_is_measured_in_its_own_tree(tmp_path):
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    for package in ("tests", "tests/bench"):
        (tmp_path / package / "__init__.py").touch()
    told = (
        "def fednet(work, folder, workers, train):\n"
        "    if train:\n"
        "        return {'cpu_s': work.clients + work.per_round + train['pack']}\n"
        "    return {'cpu_s': work.rounds + workers, 'other': 1}"
    )
    (tmp_path / "tests" / "bench" / "run.py").write_text(told)
    (tmp_path / "tests" / "bench" / "workloads.py").write_text(
        "import dataclasses\n"
        "Work = dataclasses.make_dataclass('Work', ['rounds', 'clients', 'per_round'])\n"
        "WORKLOADS = {'W2': Work(40, 8, 8)}"
    )
    assert against.measured(tmp_path, ("run", "W2", 2, {})) == {"cpu_s": 42}
    assert against.measured(tmp_path, ("run", "W2", 2, {"rounds": 3})) == {"cpu_s": 5}
    assert against.measured(tmp_path, ("pack", "W2", 5, {})) == {"cpu_s": 15}
    with pytest.raises(CannotGoOn, match="KeyError: 'W9'"):
        against.measured(tmp_path, ("run", "W9", 2, {}))


def test_the_books_that_are_measured_have_a_task_and_a_reply_of_each_client_and_round(tmp_path):
    books.write(tmp_path / "run", 3, 20)
    run = open_run(tmp_path / "run")
    assert costs.ledger(run).messages == {"up": 60, "down": 60}
    assert costs.ledger(run).by_round() == {r.round: r.bytes_up + r.bytes_down for r in run.rounds}
    assert len(list(run.grouped_messages())) == 6


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_that_is_none_is_named(capsys):
    assert main(["round", "--against", "moon"]) == 2
    assert "--against: 'moon' is no commit of the clone" in capsys.readouterr().err


def test_fake_clients_take_part_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(replies, "REPLIES", 12)
    (record,) = replies.bench([4], 1, tmp_path)
    assert record["a_second"]["min"] > 0
    assert record["clients_ms"]["min"] > 0
    assert record["floor_ms"]["min"] > 0
    assert record["ratio"]["median"] == record["server_ms"]["median"] / record["floor_ms"]["median"]
    assert "4 connections, 1 runs" in replies.line(record)


def test_both_ways_to_train_many_clients_train_the_same(monkeypatch):
    packs: list[int] = []
    descend = packed.descend

    def counted(lanes, *more) -> None:
        packs.append(len(lanes))
        descend(lanes, *more)

    monkeypatch.setattr(packed, "descend", counted)
    monkeypatch.setitem(WORKLOADS, "cnn", replace(WORKLOADS["cnn"], samples=16, batch_size=8))
    clients = pack.Clients("cnn", 3, "cpu")
    clients.together()
    together = clients.trained.copy()
    assert packs == [3]
    clients.apart()
    for k in range(3):
        assert close(together[k], clients.trained[k], 1e-5)
    assert not close(together[1], together[2], 1e-3)


def test_the_command_prints_a_line_and_writes_the_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "cnn", replace(WORKLOADS["cnn"], samples=16, batch_size=8))
    file = tmp_path / "out.json"
    words = ["pack", "--clients", "2", "--device", "cpu", "--repeat", "2", "--json", str(file)]
    assert main(words) == 0
    (record,) = json.loads(file.read_text())
    assert (record["clients"], record["device"], record["repeat"]) == (2, "cpu", 2)
    assert record["ratio"]["min"] > 0
    assert "2 clients: one after another" in capsys.readouterr().out


def test_bytes_of_secure_aggregation_are_those_that_the_papers_count():
    n = 10
    d = 1000
    plain, pairs, graph = (secagg.machines(p, n, 0.0, d) for p in secagg.PROTOCOLS)
    assert (plain["up_bytes"], plain["down_bytes"]) == (4 * d, 4 * d)
    # keys 3 * 32; a digest and n - 1 times id, two shares of 36, tag; d entries of 4 bytes; a
    # signature; n times id and share
    shares = 32 + 9 * (4 + 72 + 16)
    unmask = 10 * (4 + 36)
    assert pairs["up"] == {
        "keys": 96,
        "shares": shares,
        "masked": 4 * d,
        "consistency": 64,
        "unmask": unmask,
    }
    assert graph["up_bytes"] == pairs["up_bytes"]  # twenty neighbours are all of ten
