"""Both protocols, client machines joined to a server machine by hand: who is lost at which
step, what the sum is then, and what is never said.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from fednet import seeds
from fednet.errors import RemoteProtocolError
from fednet.secagg import (
    PROTOCOLS,
    BelowThreshold,
    Refused,
    SecureClient,
    SecureServer,
    Terms,
    fixed,
)
from fednet.secagg.messages import pack_entries, pack_ids, unpack_entries
from fednet.secagg.server import Gathered
from fednet.secagg.terms import STEPS, draw_order

D = 23


def terms(protocol: str, n: int = 6, threshold: float = 0.6, **more) -> Terms:
    more = {"degree": 4, "largest": 1000, "length": D} | more
    order = draw_order(n, seeds.rng(0, "secagg/graph", 1))
    cohort = tuple(range(3, 3 + n))
    return Terms(protocol, cohort, threshold, context=b"run 1", order=order, **more)


def vectors(t: Terms) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(7)
    return {c: rng.integers(-t.largest, t.largest + 1, t.length) for c in t.cohort}


class Round:
    """A round by hand. lost: (step, client) that are lost on their way to the server.
    change(step, client, answer) is what comes of an answer. A client whose answer is refused is
    left out of the rest.
    """

    def __init__(self, t: Terms, lost=(), change=lambda step, client, answer: answer):
        self.terms = t
        self.x = vectors(t)
        self.change = change
        self.clients = {c: SecureClient(t, c) for c in t.cohort}
        self.server = SecureServer(t)
        self.lost = set(lost)
        self.answers: dict[tuple[str, int], bytes] = {}
        self.refused: dict[int, str] = {}

    def step(self) -> None:
        step = self.server.step
        gathered = Gathered()
        for c in self.server.asked:
            question = self.server.question(c)
            answer = self.clients[c].answer(step, question, self.x[c])
            assert (len(question), len(answer)) == self.server.sizes(c)
            assert all(a <= b for a, b in zip(self.server.sizes(c), self.server.most(step)))
            if (step, c) in self.lost:
                continue
            self.answers[step, c] = answer = self.change(step, c, answer)
            try:
                self.server.take(gathered, c, answer)
            except RemoteProtocolError as wrong:
                self.refused[c] = str(wrong)
        self.server = self.server.finish(gathered)

    def until(self, step: str | None) -> Round:
        while self.server.step != step:
            self.step()
        return self

    def is_right(self) -> bool:
        """Runs to the end. Returns whether the sum is that of the survivors."""
        total = self.until(None).server.total
        return np.array_equal(total, sum(self.x[c] for c in self.server.survivors))


EACH = [(p, step) for p in PROTOCOLS for step in STEPS]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("largest", [100, 2**23])
def test_the_sum_is_that_of_the_vectors_bit_for_bit(protocol, largest):
    round = Round(terms(protocol, largest=largest))
    assert round.is_right()
    assert round.server.survivors == round.terms.cohort


@pytest.mark.parametrize(("protocol", "step"), EACH)
def test_who_is_lost_at_a_step_is_left_out_and_the_sum_is_that_of_the_others(protocol, step):
    gone = {3, 8}
    round = Round(terms(protocol), {(step, c) for c in gone})
    assert round.is_right()
    before = step in ("keys", "shares", "masked")
    assert set(round.server.survivors) == set(round.terms.cohort) - (gone if before else set())


@pytest.mark.parametrize(("protocol", "step"), EACH)
def test_below_the_threshold_the_round_is_void_at_that_step(protocol, step):
    t = terms(protocol)
    gone = t.cohort[: len(t.cohort) - t.needed + 1]
    round = Round(t, {(step, c) for c in gone})
    with pytest.raises(BelowThreshold, match=f"answered the step '{step}'"):
        round.until(None)
    assert round.server.step == step
    assert "total" not in round.server.known


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_client_sends_says_nothing_of_its_vector(protocol):
    """Each masked vector is uniform by itself: with the same input, every round shows another."""
    t = terms(protocol, n=4, threshold=0.75, length=2000)
    first = Round(t)
    second = Round(t)
    for round in (first, second):
        round.x = dict.fromkeys(t.cohort, np.zeros(t.length, dtype=np.int64))
        round.until(None)
    for c in t.cohort:
        one, two = (fixed.unpack(r.answers["masked", c], t.width) for r in (first, second))
        assert not np.array_equal(one, two)
        top = one >= np.uint64(t.modulus // 2)
        assert 800 < int(top.sum()) < 1200  # half of them, within nine standard deviations


def test_of_no_client_are_both_kinds_of_shares_given():
    t = terms("secagg")
    round = Round(t, {("masked", 5)}).until(None)
    shares = {c: unpack_entries(round.answers["unmask", c], 36) for c in t.cohort if c != 5}
    for c, given in shares.items():
        mine = round.clients[c]._held
        assert sorted(given) == list(t.cohort)
        for who, share in given.items():
            assert share == (mine[who][:36] if who == 5 else mine[who][36:])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_answers_for_one_set_of_survivors_only(protocol):
    t = terms(protocol)
    step = "consistency"
    round = Round(t).until(step)
    client = round.clients[4]
    honest = round.server.question(4)
    assert client.answer(step, honest) == client.answer(step, honest)
    for other in (t.cohort[:-1], t.cohort[1:]):
        with pytest.raises(Refused, match="with another question"):
            client.answer(step, pack_ids(other))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        ((3, 4, 5), "a sum of 3 clients is asked for, and 4 are the fewest"),
        ((4, 5, 6, 7, 77), "cannot be"),
        ((5, 6, 7, 8), "cannot be"),
    ],
)
def test_a_client_refuses_a_sum_of_too_few_and_of_strangers(protocol, survivors, why):
    step = "consistency"
    round = Round(terms(protocol)).until(step)
    with pytest.raises(Refused, match=why):
        round.clients[4].answer(step, pack_ids(survivors))
    with pytest.raises(Refused):  # and has no further part
        round.clients[4].answer(step, pack_ids(round.terms.cohort))


def test_a_server_that_says_different_things_of_who_survived_learns_nothing():
    """Signatures of two sets never come to the threshold together, so no shares are given."""
    t = terms("secagg", threshold=0.67)
    round = Round(t).until("consistency")
    halves = {c: t.cohort[:-1] if c < 6 else t.cohort for c in t.cohort[:-1]}
    signed = {c: round.clients[c].answer("consistency", pack_ids(s)) for c, s in halves.items()}
    for c in halves:
        others = {v: s for v, s in signed.items() if v != c}
        with pytest.raises(Refused, match="too few"):
            round.clients[c].answer("unmask", pack_entries(others))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_steps_come_in_their_order(protocol):
    client = SecureClient(terms(protocol), 4)
    with pytest.raises(Refused, match="'keys' is due"):
        client.answer("masked", b"", np.zeros(D, dtype=np.int64))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_share_that_was_changed_on_its_way_takes_nothing_from_the_sum(protocol):
    def swapped(step, client, answer):
        return answer[:-1] + bytes([answer[-1] ^ 1]) if (step, client) == ("shares", 5) else answer

    round = Round(terms(protocol), change=swapped)
    assert round.is_right()
    assert round.server.survivors == round.terms.cohort


@pytest.mark.parametrize(
    ("protocol", "liar", "lost", "why"),
    [
        ("secagg", 3, (("unmask", 7), ("unmask", 8)), "seed came, and no 4 of them"),
        ("secagg", 4, (("masked", 3), ("unmask", 8)), "key came, and no 4 of them"),
    ],
)
def test_a_wrong_share_gives_no_sum_rather_than_a_wrong_one(protocol, liar, lost, why):
    def wrong(step, client, answer):
        if (step, client) != ("unmask", liar):
            return answer
        return answer[:4] + bytes([answer[4] ^ 1]) + answer[5:]

    with pytest.raises(BelowThreshold, match=why):
        Round(terms(protocol), lost, wrong).until(None)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_that_is_none_is_refused_by_itself(protocol):
    round = Round(terms(protocol))
    round.step()
    gathered = Gathered()
    right = round.clients[3].answer("shares", round.server.question(3))
    with pytest.raises(RemoteProtocolError, match="expected"):
        round.server.take(gathered, 3, right[:-1])
    with pytest.raises(RemoteProtocolError):
        round.server.take(gathered, 3, bytes(len(right)))
    round.server.take(gathered, 3, right)
    assert list(gathered.answers) == [3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_that_copies_the_keys_of_another_is_refused(protocol):
    round = Round(terms(protocol))
    gathered = Gathered()
    keys = round.clients[3].answer("keys", round.server.question(3))
    round.server.take(gathered, 3, keys)
    with pytest.raises(RemoteProtocolError, match="a public key that occurs twice"):
        round.server.take(gathered, 4, keys)
    assert list(gathered.answers) == [3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("step", "question", "why"),
    [
        ("shares", lambda keys: keys | {5: keys[6]}, "the same"),
        ("shares", lambda keys: keys | {99: bytes(reversed(keys[6]))}, "keys of"),
        ("shares", lambda keys: {c: keys[c] for c in (5, 6)}, "keys of"),
        ("masked", lambda shares: {c: shares[c] for c in (5, 6)}, "too few"),
        ("masked", lambda shares: shares | {99: shares[5]}, "too few or of others"),
    ],
)
def test_a_client_answers_no_question_that_makes_no_sense(protocol, step, question, why):
    """Four of six are needed: keys and shares of two others are one too few."""
    t = terms(protocol, degree=6)
    round = Round(t).until(step)
    asked = round.server.question(4)
    size = round.server.sizes(4)[0] // 5 - 4
    with pytest.raises(Refused, match=why):
        round.clients[4].answer(
            step, pack_entries(question(unpack_entries(asked, size))), round.x[4]
        )


# -- the graph -------------------------------------------------------------------------------------
def test_each_client_has_its_degree_of_neighbours_and_is_theirs():
    t = terms("secagg+", n=20, degree=6)
    for u, circle in t.circle.items():
        assert len(circle) == 7
        assert u in circle
        assert all(u in t.circle[v] for v in circle)
    other = dataclasses.replace(t, order=draw_order(20, seeds.rng(0, "secagg/graph", 2)))
    assert other.circle != t.circle


def test_a_client_whose_neighbours_are_gone_makes_the_round_void():
    t = terms("secagg+", n=12, degree=4, threshold=0.6)
    circle = next(t.circle[c] for c in t.cohort)
    me = next(c for c in circle if t.circle[c] == circle)
    gone = {("unmask", c) for c in circle if c != me}
    with pytest.raises(BelowThreshold, match="shares of client"):
        Round(t, gone).until(None)


def test_terms_whose_sum_has_too_many_bits_say_so():
    assert "63 bits" in terms("secagg", largest=2**62).wrong()
    assert not terms("secagg").wrong()


def test_the_ring_is_wide_enough_for_the_largest_sum_and_no_wider():
    for n, largest in itertools.product((3, 127, 128, 129), (1, 127, 32767)):
        t = terms("secagg", n=n, largest=largest)
        assert n * largest < 1 << (8 * t.width - 1)
        assert t.width == 1 or n * largest >= 1 << (8 * t.width - 9)
