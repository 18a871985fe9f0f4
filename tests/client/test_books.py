"""The book of a site's messages, and the account of what its clients answered with noise on it,
which several processes share.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet.client.books import Answers, MaskedAccount, MessageFile, account_of
from fednet.config import Config, PrivacySection
from fednet.errors import ConfigError, LeftRound, StateError
from fednet.experiment.privacy import Noise, Question, epsilon
from fednet.secagg import Terms
from tests.processes import lines

QUESTION = Question("r", 1, 0, b"asked")
SECTION = PrivacySection(clip=1.0, noise=8.0, where="client")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "answers.jsonl"


def opened(folder, name="one"):
    made = MessageFile()
    made.open(folder, name)
    return made


def row(round, client):
    same = {"type": "reply", "direction": "up", "purpose": "train", "useful": True}
    task = {"round": round, "client": client, "phase": 0, "attempt": 1, "incarnation": 1}
    return {**same, **task, "kinds": {"state": 10}, "envelope": 3, "bytes": 13}


def test_a_line_that_a_process_was_killed_in_is_cut_off_before_another_one_adds_its_own(tmp_path):
    path = tmp_path / "wire.jsonl"
    for client in (0, 1, 2):
        mine = opened(tmp_path)
        mine.add(row(1, client))
        mine.close()
        with path.open("ab") as killed:
            killed.write(b'{"round":1,"cl')
    opened(tmp_path).close()
    assert [r["client"] for r in lines(path)] == [0, 1, 2]


def test_processes_that_share_a_folder_write_a_file_each_and_the_next_one_goes_on_with_the_first(
    tmp_path,
):
    first = opened(tmp_path)
    second = opened(tmp_path, "two")
    for client, book in enumerate((first, second)):
        book.add(row(1, client))
        book.flush()
    first.close()
    third = opened(tmp_path, "three")
    third.add(row(1, 2))
    second.close()
    third.close()
    found = {path.name: [r["client"] for r in lines(path)] for path in tmp_path.iterdir()}
    assert found == {"wire.jsonl": [0, 2], "wire-two.jsonl": [1]}


def test_each_answer_is_on_account_before_it_leaves_and_the_same_one_once(file):
    answers = Answers(file)
    for answer in ("a", "b", "a"):
        answers.account(QUESTION, answer, SECTION)
    Answers(file).account(QUESTION, "b", SECTION)
    rows = [(r["run"], r["round"], r["client"], r["answer"], r["noise"]) for r in lines(file)]
    assert rows == [("r", 1, 0, "a", 8.0), ("r", 1, 0, "b", 8.0)]


def test_a_budget_holds_over_runs_and_processes_and_what_would_spend_more_does_not_leave(file):
    pytest.importorskip("dp_accounting")
    two, three = (epsilon({8.0: n}, 1e-3) for n in (2, 3))
    assert two < three
    one = Answers(file, (two, 1e-3))
    other = Answers(file, (two, 1e-3))
    one.account(QUESTION, "first", SECTION)
    other.account(QUESTION, "first", SECTION)  # the same
    other.account(Question("another", 1, 0, b"asked"), "second", SECTION)
    for account in (one, Answers(file, (two, 1e-3))):
        with pytest.raises(ConfigError, match=r"client 0: one more answer would spend epsilon"):
            account.account(QUESTION, "third", SECTION)
        account.account(QUESTION, "second", SECTION)  # given before
    one.account(Question("r", 1, 7, b"asked"), "third", SECTION)  # another client's
    assert [row["answer"] for row in lines(file)] == ["first", "second", "third"]


def test_a_line_that_a_process_ended_in_spoils_no_other_s(file):
    one = Answers(file)
    one.account(QUESTION, "first", SECTION)
    with file.open("ab") as ended:
        ended.write(b'{"run":"r","round"')
    one.account(QUESTION, "second", SECTION)
    Answers(file).account(QUESTION, "third", SECTION)
    assert [row["answer"] for row in lines(file)] == ["first", "second", "third"]


def test_an_account_that_is_gone_or_another_lets_nothing_leave(file):
    answers = Answers(file)
    answers.account(QUESTION, "first", SECTION)
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(StateError, match=r"answers\.jsonl: the account .* is gone"):
        answers.account(QUESTION, "second", SECTION)
    file.write_bytes(kept.replace(b'"client":0', b'"client":1'))
    with pytest.raises(StateError, match=r"answers\.jsonl:1: not what was written there"):
        Answers(file)


def test_a_process_that_begins_beside_another_takes_its_account_for_no_lost_one(
    tmp_path, monkeypatch
):
    root = tmp_path / "run"
    glob = Path.glob

    def begun_meanwhile(path, pattern):
        monkeypatch.setattr(Path, "glob", glob)
        Answers(tmp_path / "answers.jsonl")
        Noise(root / "noise.key")
        return path.glob(pattern)

    monkeypatch.setattr(Path, "glob", begun_meanwhile)
    assert account_of(SECTION, None, root) is not None


# -- secure aggregation ----------------------------------------------------------------------------
def test_keys_are_with_one_process_alone_and_for_one_round(tmp_path):
    terms = Terms("secagg", tuple(range(4)), 0.6, 3, 10, b"run")
    here, elsewhere = (MaskedAccount(tmp_path / "masked.jsonl", Config()) for _ in range(2))
    machine = here.machine(terms, 1, 0, fresh=True)
    assert here.machine(terms, 1, 0, fresh=True) is machine  # asked again
    assert here.machine(terms, 1, 0, fresh=False) is machine
    with pytest.raises(LeftRound, match="another process"):
        elsewhere.machine(terms, 1, 0, fresh=False)
    here.machine(terms, 2, 1, fresh=True)
    with pytest.raises(LeftRound):  # the round before is forgotten, with all its keys
        here.machine(terms, 1, 0, fresh=False)


def test_a_vector_leaves_once_in_a_round_and_in_no_other_from_any_process(tmp_path):
    def leaves(client: int, round: int, vector: bytes, seed: int = 0) -> None:
        """From a process that has just started."""
        configuration = Config(name=f"run {round}", seed=seed)
        MaskedAccount(tmp_path / "masked.jsonl", configuration).leaves(client, round, vector)

    leaves(0, 3, b"first")
    for round in (2, 3):
        with pytest.raises(LeftRound, match="left in round 3 of this configuration already"):
            leaves(0, round, b"second")
    with pytest.raises(LeftRound, match=r"left before already, .* give another --state"):
        leaves(0, 1, b"first", seed=1)
    # Nobody repeats a run here: small updates have become the same whole numbers.
    with pytest.raises(LeftRound, match=r"is that of round 3, .* raise privacy\.secagg\.bits"):
        leaves(0, 4, b"first")
    leaves(0, 4, b"fourth")
    leaves(1, 3, b"first")
    leaves(0, 1, b"of another", 1)
    written = (tmp_path / "masked.jsonl").read_bytes()
    assert not any(vector in written for vector in (b"first", b"fourth", b"of another"))
    assert written.count(b"\n") == 4
