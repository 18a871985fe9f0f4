"""One client that breaks the protocol of secure aggregation, step by step: whom the server names,
and that the others' sum comes of the round where it can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednet
from fednet.errors import RemoteProtocolError
from fednet.secagg import (
    BelowThreshold,
    PairwiseClient,
    SecureClient,
    Terms,
    client,
    field,
    fixed,
    light,
    primitives,
    server,
)
from fednet.secagg.steps import ID, Gathered, joined, parted
from tests import federation
from tests.processes import lines
from tests.secagg.test_machines import terms, vectors

LIAR = 5
BOTH = ("secagg", "lightsecagg")
LOW_ORDER = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")
Change = Callable[[bytes], bytes]


class Play:
    """A round in which the liar's answer to one step is changed. Who is refused at a step is left
    out of the rest, as a server does it.
    """

    def __init__(self, t: Terms, step: str, change: Change, lost: tuple[str, int] = ("", 0)):
        self.t, self.x = t, vectors(t)
        self.clients = {c: client(t, c) for c in t.cohort}
        self.refused: dict[int, str] = {}
        self.server = server(t)
        while self.server.step is not None:
            gathered, due = Gathered(), self.server.step
            for c in self.server.asked:
                question = self.server.question(c)
                answer = self.clients[c].answer(due, question, self.x[c])
                if (due, c) == (step, LIAR):
                    answer = change(answer)
                if (due, c) == lost:
                    continue
                try:
                    self.server.take(gathered, c, answer)
                except RemoteProtocolError as wrong:
                    self.refused[c] = str(wrong)
            self.server = self.server.finish(gathered)

    def right(self) -> bool:
        """Whether the sum is that of the survivors."""
        expected = sum(self.x[c] for c in self.server.survivors)
        return np.array_equal(self.server.total, expected)


def first(data: bytes) -> Change:
    return lambda answer: data + answer[len(data) :]


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("key", [bytes(32), LOW_ORDER, bytes([1]) + bytes(31)])
def test_a_key_that_agrees_on_nothing_leaves_its_sender_out(protocol: str, key: bytes) -> None:
    play = Play(terms(protocol), "keys", first(key))
    assert "key" in play.refused.pop(LIAR)
    assert not play.refused
    assert play.right()


def test_a_key_that_stands_twice_leaves_its_sender_out() -> None:
    play = Play(terms("secagg"), "keys", lambda answer: answer[:32] * 2 + answer[64:])
    assert "twice" in play.refused.pop(LIAR)
    assert not play.refused
    assert play.right()


def test_a_signature_that_is_none_leaves_its_sender_out() -> None:
    play = Play(terms("secagg"), "consistency", lambda answer: bytes(64))
    assert "signature" in play.refused.pop(LIAR)
    assert play.right()


@pytest.mark.parametrize(
    ("protocol", "step"), [("lightsecagg", "masked"), ("lightsecagg", "unmask")]
)
def test_a_number_outside_of_the_field_leaves_its_sender_out(protocol: str, step: str) -> None:
    none = fixed.pack(np.array([field.Q], dtype=np.uint64), 4)
    play = Play(terms(protocol), step, first(none))
    assert "field" in play.refused.pop(LIAR)
    assert play.right()


def test_a_share_outside_of_the_field_leaves_its_sender_out() -> None:
    none = fixed.pack(np.array([field.Q], dtype=np.uint64), 4)
    play = Play(terms("secagg"), "unmask", lambda a: a[:ID] + none + a[ID + 4 :])
    assert "field" in play.refused.pop(LIAR)
    assert play.right()


def garbled(answer: bytes, head: int, size: int, whom: int) -> bytes:
    """Shares for the first `whom` others that nobody can open."""
    entries = parted(answer[head:], size)
    for who in list(entries)[:whom]:
        entries[who] = bytes(size)
    return answer[:head] + joined(entries)


def sealed(protocol: str, t: Terms) -> tuple[int, int]:
    """(bytes ahead of the shares, of one) in an answer to the step `shares`."""
    if protocol == "lightsecagg":
        return 0, light._sealed_size(t)
    return 32, 2 * field.SHARE + primitives.TAG


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize(("whom", "named"), [(1, False), (3, True), (5, True)])
def test_shares_that_three_cannot_open_name_their_sender(
    protocol: str, whom: int, named: bool
) -> None:
    """Of six, four are needed: with one or two shares garbled the sum comes all the same."""
    t = terms(protocol)
    change = lambda answer: garbled(answer, *sealed(protocol, t), whom)  # noqa: E731
    if whom == 1:
        play = Play(t, "shares", change)
        assert play.right()
        assert (LIAR in play.server.named) is named
        return
    with pytest.raises(BelowThreshold) as void:
        Play(t, "shares", change)
    assert list(void.value.named) == [LIAR]
    assert "3" in void.value.named[LIAR] or "5" in void.value.named[LIAR]


@pytest.mark.parametrize("lost", [("", 0), ("masked", 7)])
def test_a_reporter_of_wrong_shares_is_named_and_the_sum_comes(lost: tuple[str, int]) -> None:
    play = Play(terms("secagg"), "unmask", all_flipped, lost)
    assert list(play.server.named) == [LIAR]
    assert play.right()


def test_an_answer_of_wrong_pieces_is_named_and_the_sum_comes() -> None:
    play = Play(terms("lightsecagg"), "unmask", lambda a: bytes([a[0] ^ 1]) + a[1:])
    assert list(play.server.named) == [LIAR]
    assert play.right()


def test_a_commitment_to_another_seed_names_its_sender() -> None:
    with pytest.raises(BelowThreshold) as void:
        Play(terms("secagg"), "shares", first(bytes(32)))
    assert list(void.value.named) == [LIAR]


def test_shares_of_many_secrets_name_their_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed as they should be, and of no polynomial: what each got of the liar is random."""
    t = terms("secagg")
    split = field.split

    def scattered(secret: bytes, n: int, k: int, *more: object) -> list[bytes]:
        return [split(bytes([i]) * 32, n, k)[i] for i in range(n)]

    share = PairwiseClient._share

    def lying(self: PairwiseClient, keys: Any) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            if self.me == LIAR:
                patch.setattr(field, "split", scattered)
            return share(self, keys)

    monkeypatch.setattr(PairwiseClient, "_share", lying)
    with pytest.raises(BelowThreshold) as void:
        Play(t, "", lambda answer: answer)
    assert list(void.value.named) == [LIAR]


def test_two_who_agree_to_lie_about_a_third_do_not_name_it() -> None:
    """Shares of client 3 that two of its six holders changed: it gave four that fit together."""
    t = dataclasses.replace(terms("secagg", n=6))
    changed = (LIAR, 7)
    clients, due, x = {c: client(t, c) for c in t.cohort}, server(t), vectors(t)
    while due.step is not None:
        gathered = Gathered()
        for c in due.asked:
            answer = clients[c].answer(due.step, due.question(c), x[c])
            if due.step == "unmask" and c in changed:
                answer = answer[:ID] + bytes([answer[ID] ^ 1]) + answer[ID + 1 :]
            due.take(gathered, c, answer)
        due = due.finish(gathered)
    assert not due.named
    assert np.array_equal(due.total, sum(x.values()))


# -- in a run --------------------------------------------------------------------------------------
ONE = 2  # of six clients, the one that lies


def flipped(answer: bytes, question: bytes) -> bytes:
    return bytes([answer[0] ^ 1]) + answer[1:]


def all_flipped(answer: bytes) -> bytes:
    """Every share in an answer to the step `unmask` is another one."""
    entries = parted(answer, field.SHARE)
    return joined({who: flipped(share, b"") for who, share in entries.items()})


def unopenable(answer: bytes, question: bytes) -> bytes:
    return garbled(answer, 32, 2 * field.SHARE + primitives.TAG, 5)


# Of each lie: the step, what it makes of the answer, whether a round is lost before it is known.
LIES: dict[str, tuple[str, Callable[[bytes, bytes], bytes], bool]] = {
    "a key that is none": ("keys", lambda answer, _: bytes(len(answer)), False),
    "garbled shares": ("shares", unopenable, True),
    "a wrong commitment": ("shares", flipped, True),
    "wrong signature": ("consistency", flipped, False),
    "wrong shares": ("unmask", lambda answer, _: all_flipped(answer), False),
}


def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Any, **sets: Any) -> fednet.Run:
    """Four rounds of six clients, of which one answers with what `lie` makes of its answers."""
    honest = SecureClient.answer

    def answer(self: Any, step: str, question: bytes, vector: Any = None) -> bytes:
        found = honest(self, step, question, vector)
        return lie(self, step, found, question) if self.me == ONE else found

    monkeypatch.setattr(SecureClient, "answer", answer)
    mapping = federation.settings(
        clients=6, rounds=4, privacy={"secagg": {"protocol": "secagg", "clip": 4.0, **sets}}
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
    assert [r.void for r in run.rounds] == [lost, False, False, False]
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

    run = run_with(tmp_path, monkeypatch, lie)
    assert [r.void for r in run.rounds] == [False] * 4
    assert "masked vector of round 1 once more" in run.rounds[1].dropped[str(ONE)]
    assert run.rounds[3].dropped[str(ONE)].startswith("blamed in round 2: ")


def test_without_blame_a_liar_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(machine: Any, step: str, answer: bytes, question: bytes) -> bytes:
        return bytes(len(answer)) if step == "keys" else answer

    run = run_with(tmp_path, monkeypatch, lie, blame=False)
    assert all("key" in r.dropped[str(ONE)] for r in run.rounds)
    assert not any(r.dropped[str(ONE)].startswith("blamed") for r in run.rounds)
