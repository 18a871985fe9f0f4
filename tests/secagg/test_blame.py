"""One client that breaks the protocol of secure aggregation at each step: whom the server blames,
and whether the others' sum is found.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednet
from fednet.errors import CannotGoOn
from fednet.report.read import Run
from fednet.secagg import (
    BelowThreshold,
    SecureClient,
    Terms,
    field,
    fixed,
    primitives,
)
from fednet.secagg.messages import DIGEST, ID, SHARES, pack_entries, unpack_entries
from tests.processes import lines, settings
from tests.secagg.test_machines import Round, terms

MALICIOUS = 5
LOW_ORDER = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")
NO_ELEMENT = fixed.pack(np.array([field.Q], dtype=np.uint64), 4)
Change = Callable[[bytes], bytes]


def attacked(t: Terms, step: str, change: Change, lost: Any = ()) -> Round:
    """A round in which the malicious client's answer to one step is changed."""

    def changed(due: str, client: int, answer: bytes) -> bytes:
        return change(answer) if (due, client) == (step, MALICIOUS) else answer

    return Round(t, lost, changed)


def blamed(round: Round) -> list[int]:
    """Returns the blamed clients, whether or not the round is void."""
    try:
        assert round.is_right()
    except BelowThreshold as void:
        return list(void.blamed)
    return list(round.server.blamed)


def first(data: bytes) -> Change:
    return lambda answer: data + answer[len(data) :]


@pytest.mark.parametrize(
    ("step", "change", "why"),
    [
        ("keys", first(bytes(32)), "key"),
        ("keys", first(LOW_ORDER), "key"),
        ("keys", first(bytes([1]) + bytes(31)), "key"),
        ("keys", lambda answer: answer[:32] * 2 + answer[64:], "twice"),
        ("consistency", lambda answer: bytes(64), "signature"),
        ("unmask", lambda a: a[:ID] + NO_ELEMENT + a[ID + 4 :], "field"),
    ],
)
def test_an_invalid_answer_leaves_its_sender_out(step, change, why):
    round = attacked(terms("secagg"), step, change)
    assert round.is_right()
    assert why in round.refused.pop(MALICIOUS)
    assert not round.refused


def garbled(answer: bytes, whom: int) -> bytes:
    """Shares for the first `whom` others that nobody can open."""
    entries = unpack_entries(answer[DIGEST:], SHARES + primitives.TAG)
    for who in list(entries)[:whom]:
        entries[who] = bytes(SHARES + primitives.TAG)
    return answer[:DIGEST] + pack_entries(entries)


@pytest.mark.parametrize(("receivers", "named"), [(1, []), (3, [MALICIOUS]), (5, [MALICIOUS])])
def test_shares_that_three_cannot_decrypt_blame_their_sender(receivers, named):
    """Of six, four are needed: with one or two shares garbled the sum comes all the same."""
    round = attacked(terms("secagg"), "shares", lambda answer: garbled(answer, receivers))
    assert blamed(round) == named
    assert (round.server.step is None) is (receivers == 1)


@pytest.mark.parametrize(
    ("step", "change", "lost", "comes"),
    [
        ("unmask", lambda answer: all_flipped(answer), (), True),
        ("unmask", lambda answer: all_flipped(answer), {("masked", 7)}, True),
        ("shares", first(bytes(32)), (), False),  # committed to another seed
    ],
)
def test_a_malicious_client_is_blamed_and_the_sum_is_found_where_possible(
    step, change, lost, comes
):
    round = attacked(terms("secagg", n=10), step, change, lost)
    assert blamed(round) == [MALICIOUS]
    assert (round.server.step is None) is comes


def dealing_by(monkeypatch: pytest.MonkeyPatch, split: Callable[..., list[bytes]]) -> None:
    """The malicious client deals shares by this function."""
    honest = SecureClient.answer

    def answer(self: SecureClient, step: str, *more: Any) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            if (self.me, step) == (MALICIOUS, "shares"):
                patch.setattr(field, "split_secret", split)
            return honest(self, step, *more)

    monkeypatch.setattr(SecureClient, "answer", answer)


def test_the_dealer_of_inconsistent_shares_is_blamed(monkeypatch):
    """The shares can be decrypted, but are values of no polynomial."""
    split = field.split_secret

    def scattered(secret: bytes, n: int, k: int, *more: object) -> list[bytes]:
        return [split(bytes([i]) * 32, n, k)[i] for i in range(n)]

    dealing_by(monkeypatch, scattered)
    assert blamed(Round(terms("secagg"))) == [MALICIOUS]


def test_shares_outside_of_the_field_blame_their_dealer_alone(monkeypatch):
    """They can be decrypted, and the server would refuse whoever handed them on."""
    split = field.split_secret

    def outside(secret: bytes, n: int, k: int, *more: object) -> list[bytes]:
        return [NO_ELEMENT + share[4:] for share in split(secret, n, k)]

    dealing_by(monkeypatch, outside)
    round = Round(terms("secagg"))
    assert blamed(round) == [MALICIOUS]
    assert round.refused.keys() <= {MALICIOUS}


def test_two_accusers_are_not_enough_to_blame_a_third():
    """Shares of client 3 that two of its six holders changed: it gave four that fit together."""

    def change(step: str, client: int, answer: bytes) -> bytes:
        if step != "unmask" or client not in (MALICIOUS, 7):
            return answer
        return answer[:ID] + bytes([answer[ID] ^ 1]) + answer[ID + 1 :]

    assert blamed(Round(terms("secagg"), change=change)) == []


# -- in a run --------------------------------------------------------------------------------------
ONE = 2  # of six clients, the malicious one


def all_flipped(answer: bytes) -> bytes:
    """Every share in an answer to the step `unmask` is another one."""
    entries = unpack_entries(answer, field.SHARE)
    return pack_entries({who: bytes([s[0] ^ 1]) + s[1:] for who, s in entries.items()})


def other_shares(answer: bytes) -> bytes:
    """Every share in an answer to the step `unmask` is a random one."""
    entries = unpack_entries(answer, field.SHARE)
    return pack_entries(
        {who: field.uniform(field.LIMBS).astype("<u4").tobytes() for who in entries}
    )


def unopenable(answer: bytes) -> bytes:
    return garbled(answer, 5)


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: str, change: Change, rounds: int
) -> Run:
    """Rounds of six clients, of which one changes its answers to one step."""
    honest = SecureClient.answer

    def answer(self: Any, step: str, *more: Any) -> bytes:
        found = honest(self, step, *more)
        return change(found) if (self.me, step) == (ONE, due) else found

    monkeypatch.setattr(SecureClient, "answer", answer)
    privacy = {"secagg": {"protocol": "secagg", "clip": 4.0}}
    mapping = settings(clients=6, rounds=rounds, privacy=privacy)
    return fednet.run(mapping, out=tmp_path, in_process=True)


@pytest.mark.parametrize(
    ("due", "change", "lost"),
    [("keys", lambda answer: bytes(len(answer)), False), ("shares", unopenable, True)],
    ids=["a key that is none", "garbled shares"],
)
def test_a_blamed_client_is_left_out_of_later_rounds(tmp_path, monkeypatch, due, change, lost):
    run = run_with(tmp_path, monkeypatch, due, change, rounds=2)
    assert [r.void for r in run.rounds] == [lost, False]
    (blamed,) = [e for e in lines(run.dir / "events.jsonl") if e["type"] == "blamed"]
    assert (blamed["client"], blamed["round"]) == (ONE, 1)
    for record in run.rounds[1:]:
        assert record.completed == [c for c in range(6) if c != ONE]
        assert record.dropped == {str(ONE): f"blamed in round 1: {blamed['reason']}"}


def test_a_client_that_masks_random_numbers_ends_no_run(tmp_path, monkeypatch):
    """Nobody can know which client it is. Such rounds have no result, however many there are."""
    sent: list[int] = []

    def random_numbers(answer: bytes) -> bytes:
        sent.append(len(answer))
        return answer if len(sent) == 5 else secrets.token_bytes(len(answer))

    run = run_with(tmp_path, monkeypatch, "masked", random_numbers, rounds=5)
    assert [r.void for r in run.rounds] == [True] * 4 + [False]
    assert len({r.model_sha256 for r in run.rounds[:4]}) == 1
    assert run.rounds[4].completed == [0, 1, 2, 3, 4, 5]
    for record in run.rounds[:4]:
        (warning,) = record.algorithm["warnings"]
        assert "was something else" in warning


def test_two_clients_that_return_wrong_shares_end_no_run(tmp_path, monkeypatch):
    """Five shares of six are needed: no round has a sum."""
    honest = SecureClient.answer

    def answer(self: Any, step: str, *more: Any) -> bytes:
        found = honest(self, step, *more)
        return other_shares(found) if step == "unmask" and self.me in (1, ONE) else found

    monkeypatch.setattr(SecureClient, "answer", answer)
    privacy = {"secagg": {"protocol": "secagg", "clip": 4.0, "threshold": 0.8}}
    mapping = settings(clients=6, rounds=4, privacy=privacy)
    run = fednet.run(mapping, out=tmp_path, in_process=True)
    assert [r.void for r in run.rounds] == [True] * 4
    assert not [e for e in lines(run.dir / "events.jsonl") if e["type"] == "blamed"]


def test_rounds_that_too_few_clients_answer_end_a_run_and_say_so(tmp_path):
    privacy = {"secagg": {"protocol": "secagg", "clip": 4.0, "threshold": 1.0}}
    gone = [{"round": r, "client": ONE, "kind": "drop_before_sending"} for r in (1, 2)]
    lost = {"void_rounds": 2, "lost": {"closed": 0.02}}
    mapping = settings(clients=6, rounds=5, privacy=privacy, faults={"schedule": gone}, round=lost)
    with pytest.raises(CannotGoOn, match="5 of 6 clients answered the step 'masked'"):
        fednet.run(mapping, out=tmp_path, in_process=True)


def test_a_repeated_masked_vector_blames_its_sender(tmp_path, monkeypatch):
    sent: list[bytes] = []

    def repeated(answer: bytes) -> bytes:
        sent.append(answer)
        return sent[0]

    run = run_with(tmp_path, monkeypatch, "masked", repeated, rounds=3)
    assert [r.void for r in run.rounds] == [False] * 3
    assert "masked vector of round 1 once more" in run.rounds[1].dropped[str(ONE)]
    assert run.rounds[2].dropped[str(ONE)].startswith("blamed in round 2: ")
