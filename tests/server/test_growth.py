"""Clients that join a run when it resumes: `clients` grew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fednet import config as configuration
from fednet.algorithms.base import State
from fednet.errors import ConfigError, Stopped
from fednet.experiment import build
from fednet.server.checkpoint import Checkpoints
from tests.processes import Processes
from tests.rooms import SMALL, hashes, lines, merged, run, site_data, small

ASYNC = {"schedule": {"mode": "async"}, "link": {"clock": "virtual", "step_ms": 5}}


def changes(folder: Path, **more):
    """A run whose clients have their own data, in folder/client-K."""
    data = site_data(folder, *range(5))
    own = {"clients": 3, "rounds": 2, "participation": 1.0, "report": False}
    return merged({**SMALL, "data": data, "evaluate": {"clients": "auto"}, **own}, more)


def checkpoint(directory: Path, mapping) -> State:
    config = configuration.from_mapping(mapping, where="the test")
    method = build.build(config, directory.parent).algorithm
    return Checkpoints(directory / "checkpoint").load(method.Server)[0]


def times(directory: Path) -> list[float | None]:
    return [r["seconds_virtual"] for r in lines(directory / "rounds.jsonl")]


def stop(record) -> None:
    if record.round == 3:
        raise Stopped("enough")


@pytest.mark.parametrize(
    "method",
    [
        "fedvarp",
        pytest.param("fedper", marks=pytest.mark.long),
        pytest.param("ca2fl", marks=pytest.mark.long),
    ],
)
def test_clients_join_at_a_resume_and_every_placement_goes_on_alike(tmp_path, method):
    more = {"algorithm": {"name": method}, **(ASYNC if method == "ca2fl" else {})}
    first = changes(tmp_path / "data", **more)
    grown = merged(first, {"clients": 5, "rounds": 5})
    directory = run(tmp_path / "one", **first)
    before = checkpoint(directory, first)
    run(tmp_path / "one", **grown, resume=True)
    rounds = lines(directory / "rounds.jsonl")
    if method != "ca2fl":
        assert [len(r["completed"]) for r in rounds] == [3, 3, 5, 5, 5]
    assert {c for r in rounds[2:] for c in r["completed"]} == {0, 1, 2, 3, 4}
    events = lines(directory / "events.jsonl")
    (added,) = [e for e in events if e["type"] == "clients_added"]
    assert (added["round"], added["clients"]) == (2, [3, 4])
    # What the server holds as a mean over all clients still is one.
    state = checkpoint(directory, grown)
    if method in ("fedvarp", "ca2fl"):
        total = sum(row.vector.double() for row in state.y.values())
        assert len(state.y) == 5
        torch.testing.assert_close(state.ybar.vector.double() * 5, total)
        assert not torch.equal(state.ybar.vector, before.ybar.vector)
    # Killed after the first round with the new clients.
    killed = run(tmp_path / "two", **first)
    with pytest.raises(Stopped):
        run(tmp_path / "two", **grown, resume=True, callback=stop)
    run(tmp_path / "two", **grown, resume=True)
    assert hashes(killed) == hashes(directory)
    assert times(killed) == times(directory)
    assert sum(e["type"] == "clients_added" for e in lines(killed / "events.jsonl")) == 1
    # In processes.
    (tmp_path / "three").mkdir()
    with Processes(tmp_path / "three") as all_of_it:
        for name, mapping, words in (("a", first, ()), ("b", grown, ("--resume",))):
            text = tmp_path / f"{name}.yaml"
            text.write_text(json.dumps(mapping), encoding="utf-8")
            options = ("--out", tmp_path / "three", "--workers", 2, "--device", "cpu", "--quiet")
            status, said = all_of_it.run("main", "run", text, *options, *words)
            assert status == 0, said
    assert hashes(tmp_path / "three" / directory.name) == hashes(directory)


@pytest.mark.parametrize(
    ("method", "field"),
    [("fedvarp", "ybar"), ("ca2fl", "ybar"), ("feddyn", "h"), ("scaffold", "c")],
)
def test_a_mean_over_all_clients_is_divided_by_their_new_number(method, field):
    experiment = build.build(small(algorithm={"name": method}), None)
    server = experiment.algorithm.init_server(experiment.setting.initial)
    start = getattr(server, field)
    ones = start.with_vector(torch.ones_like(start.vector))
    grown = experiment.algorithm.with_more_clients(server.replace(**{field: ones}), 3, 4)
    assert getattr(grown, field).vector.unique().tolist() == [0.75]
    assert grown.x is server.x


@pytest.mark.parametrize(
    ("clients", "given", "says"),
    [
        (2, {}, "clients: 2, and the run has 3: clients can be added"),
        (5, {"privacy": {"clip": 1.0, "noise": 1.0}}, "privacy.noise: its guarantee"),
        (
            5,
            {"privacy": {"secagg": {"protocol": "secagg", "max_samples": 20}}},
            "privacy.secagg.protocol: a round that",
        ),
        (5, {"algorithm": {"name": "scaffold-random"}}, "algorithm.name: no client can join"),
        (5, {"train": {"per_client": {"1/2": {"epochs": 2}}}}, "train.per_client: it would be"),
        (5, {"faults": {"malicious": {"clients": 0.4}}}, "faults.malicious.clients: it would be"),
        (5, {"evaluate": {"held_out": 0.3}}, "evaluate.held_out: it would be another for client"),
    ],
)
@pytest.mark.usefixtures("readings")
def test_clients_do_not_join_where_the_earlier_ones_would_change(tmp_path, clients, given, says):
    first = changes(tmp_path / "data", rounds=1, **given)
    directory = run(tmp_path / "run", **first)
    names = ("config.yaml", "summary.json", "rounds.jsonl", "partition.json")
    before = {p: p.read_bytes() for p in (directory / name for name in names) if p.exists()}
    with pytest.raises(ConfigError, match=re.escape(says)):
        run(tmp_path / "run", **merged(first, {"clients": clients, "rounds": 2}), resume=True)
    assert {path: path.read_bytes() for path in before} == before
    run(tmp_path / "run", **merged(first, {"rounds": 2}), resume=True)  # goes on as it was
    assert len(hashes(directory)) == 2


@pytest.mark.usefixtures("readings")
def test_a_run_whose_method_lets_no_client_join_is_not_open(tmp_path):
    method = {"algorithm": {"name": "scaffold-random"}}
    with pytest.raises(ConfigError, match=r"algorithm.name: no client can join the run"):
        run(tmp_path, **changes(tmp_path / "data", round={"open": 4}, **method))


def test_a_division_of_common_data_changes_and_one_given_by_a_file_need_not(tmp_path):
    rest = {"evaluate": {"clients": "auto"}, "rounds": 1, "participation": 1.0, "clients": 3}
    iid = merged(SMALL, {**rest, "name": "iid"})
    run(tmp_path, **iid)
    with pytest.raises(ConfigError, match=r"data.partition: client\(s\) 0-2 would have other"):
        run(tmp_path, **merged(iid, {"clients": 4, "rounds": 2}), resume=True)
    lists = tmp_path / "lists.json"
    ten = [list(range(k, k + 10)) for k in range(0, 50, 10)]
    tests = [[k] for k in range(5)]

    def write(n: int) -> None:
        lists.write_text(json.dumps({"train": ten[:n], "test": tests[:n]}))

    given = merged(
        iid, {"data": {"partition": {"scheme": "file", "path": str(lists)}}, "name": "by"}
    )
    write(3)
    directory = run(tmp_path, **given)
    write(5)
    run(tmp_path, **merged(given, {"clients": 5, "rounds": 3}), resume=True)
    assert [len(r["completed"]) for r in lines(directory / "rounds.jsonl")] == [3, 5, 5]
    assert json.loads((directory / "partition.json").read_text())["samples"] == [10] * 5
    # A run that grew is not replayed with one number of clients.
    again = merged(given, {"clients": 5, "rounds": 3, "name": "again"})
    with pytest.raises(ConfigError, match=r"clients joined .* after round 1; a run whose number"):
        run(tmp_path, **merged(again, {"faults": {"replay": str(directory)}}))
