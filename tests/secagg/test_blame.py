"""One client that breaks the protocol of secure aggregation, step by step: whom the server names,
and that the others' sum comes of the round where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednet
from fednet.secagg import (
    BelowThreshold,
    PairwiseClient,
    SecureClient,
    Terms,
    field,
    fixed,
    primitives,
    server,
)
from fednet.secagg.steps import ID, pack_entries, unpack_entries
from tests.processes import lines, settings
from tests.secagg.test_machines import Round, terms

LIAR = 5
BOTH = ("secagg", "lightsecagg")
LOW_ORDER = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")
NO_ELEMENT = fixed.pack(np.array([field.Q], dtype=np.uint64), 4)
Change = Callable[[bytes], bytes]


def lying(t: Terms, step: str, change: Change, lost: Any = ()) -> Round:
    """A round in which the liar's answer to one step is changed."""

    def changed(due: str, client: int, answer: bytes) -> bytes:
        return change(answer) if (due, client) == (step, LIAR) else answer

    return Round(t, lost, changed)


def blamed(round: Round) -> list[int]:
    """Whom the server names; the sum comes, or the round is void."""
    try:
        assert round.is_right()
    except BelowThreshold as void:
        return list(void.blamed)
    return list(round.server.blamed)


def first(data: bytes) -> Change:
    return lambda answer: data + answer[len(data) :]


@pytest.mark.parametrize(
    ("protocol", "step", "change", "why"),
    [
        *((p, "keys", first(bytes(32)), "key") for p in BOTH),
        *((p, "keys", first(LOW_ORDER), "key") for p in BOTH),
        *((p, "keys", first(bytes([1]) + bytes(31)), "key") for p in BOTH),
        ("secagg", "keys", lambda answer: answer[:32] * 2 + answer[64:], "twice"),
        ("secagg", "consistency", lambda answer: bytes(64), "signature"),
        ("secagg", "unmask", lambda a: a[:ID] + NO_ELEMENT + a[ID + 4 :], "field"),
        ("lightsecagg", "masked", first(NO_ELEMENT), "field"),
        ("lightsecagg", "unmask", first(NO_ELEMENT), "field"),
    ],
)
def test_an_answer_that_is_none_leaves_its_sender_out(protocol, step, change, why) -> None:
    round = lying(terms(protocol), step, change)
    assert round.is_right()
    assert why in round.refused.pop(LIAR)
    assert not round.refused


def garbled(answer: bytes, head: int, size: int, whom: int) -> bytes:
    """Shares for the first `whom` others that nobody can open."""
    entries = unpack_entries(answer[head:], size)
    for who in list(entries)[:whom]:
        entries[who] = bytes(size)
    return answer[:head] + pack_entries(entries)


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize(("receivers", "named"), [(1, []), (3, [LIAR]), (5, [LIAR])])
def test_shares_that_three_cannot_open_name_their_sender(protocol, receivers, named) -> None:
    """Of six, four are needed: with one or two shares garbled the sum comes all the same."""
    t = terms(protocol)
    machine = server(t)
    sealed = machine.share + primitives.TAG
    round = lying(t, "shares", lambda answer: garbled(answer, machine.head, sealed, receivers))
    assert blamed(round) == named
    assert (round.server.step is None) is (receivers == 1)


@pytest.mark.parametrize(
    ("protocol", "step", "change", "lost", "comes"),
    [
        ("secagg", "unmask", lambda answer: all_flipped(answer), (), True),
        ("secagg", "unmask", lambda answer: all_flipped(answer), {("masked", 7)}, True),
        ("lightsecagg", "unmask", lambda a: bytes([a[0] ^ 1]) + a[1:], (), True),
        ("secagg", "shares", first(bytes(32)), (), False),  # committed to another seed
    ],
)
def test_a_liar_is_named_and_the_sum_comes_where_it_can(protocol, step, change, lost, comes):
    round = lying(terms(protocol), step, change, lost)
    assert blamed(round) == [LIAR]
    assert (round.server.step is None) is comes


def test_shares_of_many_secrets_name_their_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed as they should be, and of no polynomial: what each got of the liar is random."""
    split = field.split

    def scattered(secret: bytes, n: int, k: int, *more: object) -> list[bytes]:
        return [split(bytes([i]) * 32, n, k)[i] for i in range(n)]

    share = PairwiseClient._share

    def lies(self: PairwiseClient, question: bytes) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            if self.me == LIAR:
                patch.setattr(field, "split", scattered)
            return share(self, question)

    monkeypatch.setattr(PairwiseClient, "_share", lies)
    assert blamed(Round(terms("secagg"))) == [LIAR]


def test_two_who_agree_to_lie_about_a_third_do_not_name_it() -> None:
    """Shares of client 3 that two of its six holders changed: it gave four that fit together."""

    def change(step: str, client: int, answer: bytes) -> bytes:
        if step != "unmask" or client not in (LIAR, 7):
            return answer
        return answer[:ID] + bytes([answer[ID] ^ 1]) + answer[ID + 1 :]

    assert blamed(Round(terms("secagg"), change=change)) == []


# -- in a run --------------------------------------------------------------------------------------
ONE = 2  # of six clients, the one that lies


def flipped(answer: bytes, question: bytes) -> bytes:
    return bytes([answer[0] ^ 1]) + answer[1:]


def all_flipped(answer: bytes) -> bytes:
    """Every share in an answer to the step `unmask` is another one."""
    entries = unpack_entries(answer, field.SHARE)
    return pack_entries({who: flipped(share, b"") for who, share in entries.items()})


def unopenable(answer: bytes, question: bytes) -> bytes:
    return garbled(answer, 32, 2 * field.SHARE + primitives.TAG, 5)


# Of each lie: the step, what it makes of the answer, whether a round is lost before it is known.
LIES: dict[str, tuple[str, Callable[[bytes, bytes], bytes], bool]] = {
    "a key that is none": ("keys", lambda answer, _: bytes(len(answer)), False),
    "garbled shares": ("shares", unopenable, True),
    "wrong shares": ("unmask", lambda answer, _: all_flipped(answer), False),
}


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Any, rounds: int = 2, **sets: Any
) -> fednet.Run:
    """Rounds of six clients, of which one answers with what `lie` makes of its answers."""
    honest = SecureClient.answer

    def answer(self: Any, step: str, question: bytes, vector: Any = None) -> bytes:
        found = honest(self, step, question, vector)
        return lie(self, step, found, question) if self.me == ONE else found

    monkeypatch.setattr(SecureClient, "answer", answer)
    mapping = settings(
        clients=6, rounds=rounds, privacy={"secagg": {"protocol": "secagg", "clip": 4.0, **sets}}
    )
    return fednet.run(mapping, out=tmp_path, in_process=True)


@pytest.mark.parametrize("name", LIES)
def test_a_liar_is_left_out_of_the_rounds_to_come_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    due, change, lost = LIES[name]

    def lie(machine: Any, step: str, answer: bytes, question: bytes) -> bytes:
        return change(answer, question) if step == due else answer

    run = run_with(tmp_path, monkeypatch, lie)
    assert [r.void for r in run.rounds] == [lost, False]
    (blamed,) = [e for e in lines(run.dir / "events.jsonl") if e["type"] == "blamed"]
    assert (blamed["client"], blamed["round"]) == (ONE, 1)
    for record in run.rounds[1:]:
        assert record.completed == [c for c in range(6) if c != ONE]
        assert record.dropped == {str(ONE): f"blamed in round 1: {blamed['reason']}"}


def test_a_masked_vector_that_comes_again_names_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[bytes] = []

    def lie(machine: Any, step: str, answer: bytes, question: bytes) -> bytes:
        if step != "masked":
            return answer
        first.append(answer)
        return first[0]

    run = run_with(tmp_path, monkeypatch, lie, rounds=3)
    assert [r.void for r in run.rounds] == [False] * 3
    assert "masked vector of round 1 once more" in run.rounds[1].dropped[str(ONE)]
    assert run.rounds[2].dropped[str(ONE)].startswith("blamed in round 2: ")
