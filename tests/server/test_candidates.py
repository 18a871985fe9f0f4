"""Selections of one's own: what they are told of each client, and what they may return."""

from __future__ import annotations

from pathlib import Path

import pytest

import fednet
from fednet import Algorithm, Exchange, Payload, Statistics, Sum, Weights
from fednet.errors import ConfigError
from tests.conftest import forgotten
from tests.rooms import lines, lost, run, site_data

TOLD: dict[int, list[fednet.Candidate]] = {}


@pytest.fixture(autouse=True)
def parts():
    TOLD.clear()
    with forgotten():
        yield


def lowest(name: str = "lowest") -> None:
    """Registers a selection that takes those of the lowest ids, and keeps what it was told."""

    @fednet.selection(name)
    def part(round, available, asked):
        TOLD[round] = available
        return [one.id for one in available[:asked]]


def test_a_selection_is_told_what_the_last_reply_that_counted_said(tmp_path: Path) -> None:
    lowest()
    faults = lost((2, 1))
    directory = run(
        tmp_path, rounds=3, clients=3, participation=2 / 3, selection="lowest", faults=faults
    )
    assert [row["selected"] for row in lines(directory / "rounds.jsonl")] == [[0, 1]] * 3
    assert [one.id for one in TOLD[1]] == [0, 1, 2]
    assert all(one.round == one.times == 0 and one.loss is None for one in TOLD[1])
    losses = [row["train_loss"] for row in lines(directory / "rounds.jsonl")]
    first, second, third = TOLD[3]
    assert (first.round, first.times, first.loss) == (2, 2, pytest.approx(losses[1]))
    assert (second.round, second.times) == (1, 1)  # its second reply was lost
    assert second.loss == TOLD[2][1].loss != TOLD[2][0].loss
    assert (third.round, third.loss, third.seconds) == (0, None, None)
    assert all(one.n > 0 for one in TOLD[1])


def test_a_selection_is_told_how_long_tasks_took_in_simulated_time(tmp_path: Path) -> None:
    lowest()
    link = {"clock": "virtual", "step_ms": 100}
    train = {"steps": 3}
    run(
        tmp_path, rounds=2, clients=2, participation=1.0, selection="lowest", link=link, train=train
    )
    assert [one.seconds for one in TOLD[2]] == pytest.approx([0.3, 0.3], abs=0.01)


def test_the_samples_of_a_site_are_known_once_it_has_replied(tmp_path: Path) -> None:
    lowest()
    data = site_data(tmp_path / "data", 0, 1)
    run(tmp_path, rounds=2, clients=2, participation=1 / 2, selection="lowest", data=data)
    assert [one.n for one in TOLD[1]] == [None, None]
    assert [one.n for one in TOLD[2]] == [20, None]


def method(name: str) -> None:
    """Registers a method of two exchanges that selects who reported least, by its own state."""

    @fednet.algorithm(name)
    class Own(Algorithm):
        class Ask(Payload):
            x: Weights

        class Answer(Payload):
            run: Statistics

        class Accumulator(fednet.State):
            x: Sum

        exchanges = (Exchange(Ask, Answer, "ask"), Exchange(Algorithm.Down, Algorithm.Up, "train"))

        def select(self, server, round, available, asked, rng):
            assert isinstance(server, self.Server)
            TOLD[round] = available
            order = sorted(available, key=lambda one: (one.reported.get("turn", 0), one.id))
            return [one.id for one in order[:asked]]

        def client_update(self, phase, client, down, host):
            if phase == 0:
                host.report(turn=host.round)
                return client, self.Answer(run=host.gradient(down.x).run)
            return super().client_update(phase, client, down, host)

        def accumulate(self, accumulator, server, client_id, up, host):
            if host.phase == 0:
                return accumulator
            return super().accumulate(accumulator, server, client_id, up, host)

        def server_update(self, accumulator, server, cohort, host):
            if host.phase == 0:
                return server
            return super().server_update(accumulator, server, cohort, host)


def test_a_method_of_two_exchanges_selects_by_what_its_clients_reported(tmp_path: Path) -> None:
    method("turns")
    directory = run(tmp_path, rounds=4, clients=4, participation=2 / 4, algorithm="turns")
    selected = [row["selected"] for row in lines(directory / "rounds.jsonl")]
    assert selected == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [one.times for one in TOLD[4]] == [2, 2, 1, 1]  # a round counts once
    assert [one.reported for one in TOLD[4]] == [{"turn": 3}, {"turn": 3}, {"turn": 2}, {"turn": 2}]


def test_the_configurations_selection_goes_before_the_methods(tmp_path: Path) -> None:
    method("turns")
    lowest()
    directory = run(
        tmp_path, rounds=2, clients=4, participation=2 / 4, algorithm="turns", selection="lowest"
    )
    assert [row["selected"] for row in lines(directory / "rounds.jsonl")] == [[0, 1]] * 2


@pytest.mark.parametrize(
    "found",
    [[], [0, 0], [7], [0, 1, 2], ["0", "1"], [0.0], None, "01", {0: 1}, [True]],
    ids=repr,
)
def test_anything_but_ids_of_available_clients_is_refused_by_the_selections_name(
    tmp_path: Path, found: object
) -> None:
    @fednet.selection("wrong")
    def wrong():
        return found

    with pytest.raises(ConfigError, match=r"the selection .*wrong.*expected a list of 1 to 2"):
        run(tmp_path, clients=3, participation=2 / 3, selection="wrong")


def test_an_exception_of_a_selection_says_its_line(tmp_path: Path) -> None:
    @fednet.selection("broken")
    def broken(available):
        return available[99]

    with pytest.raises(ConfigError, match=r"selection .*broken: IndexError.*test_candidates.py, l"):
        run(tmp_path, clients=3, participation=2 / 3, selection="broken")


def test_a_selection_takes_its_options_and_no_others(tmp_path: Path) -> None:
    @fednet.selection("picky")
    def picky(available, *, client: int = 0):
        return [client]

    chosen = {"name": "picky", "client": 2}
    directory = run(tmp_path, rounds=1, clients=3, participation=2 / 3, selection=chosen)
    assert lines(directory / "rounds.jsonl")[0]["selected"] == [2]
    with pytest.raises(ConfigError, match="selection"):
        run(tmp_path, clients=3, selection={"name": "picky", "cleint": 2})
    with pytest.raises(ConfigError, match="expected its name too"):
        run(tmp_path, clients=3, selection={"client": 2})
