"""Compressors that remember: their equations by hand, and what both ends do when one forgot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.wire import compress
from fednet.wire.compressors.base import Memory


class End:
    """A sender, or a receiver, of one field, by a chain."""

    def __init__(self, *items: str, shapes: tuple[tuple[int, ...], ...] = ()) -> None:
        self.chain = compress.parse(items, shapes)
        self.known = dict[str, torch.Tensor]()
        self.rng = np.random.default_rng(1)

    @property
    def memory(self) -> Memory:
        return Memory(self.known, self.known, "x")

    def sends(self, x: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        return self.chain.send(x, self.rng, self.memory)

    def hears(self, data: bytes, n: int) -> torch.Tensor:
        return self.chain.receive(memoryview(data), n, self.memory)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n, dtype=np.float32))


# -- ef --------------------------------------------------------------------------------------------
def test_ef_adds_what_was_left_and_noef_does_not():
    fed = End("ef", "topk(0.5)")
    free = End("noef", "topk(0.5)")
    for end in (fed, free):
        assert end.sends(vector(1, 2))[1].tolist() == [0, 2]
    assert fed.sends(vector(1.5, 2))[1].tolist() == [2.5, 0]
    assert free.sends(vector(1.5, 2))[1].tolist() == [0, 2]
    assert compress.parse(["topk(0.5)"]).remembers
    assert compress.parse(["ef", "topk(0.5)"]).remembers
    assert not compress.parse(["noef", "topk(0.5)"]).remembers


def test_topk_without_a_word_is_topk_with_ef():
    named = End("ef", "topk(0.1)", "qsgd(4)")
    plain = End("topk(0.1)", "qsgd(4)")
    for k in range(4):
        assert named.sends(normal(300, k))[0] == plain.sends(normal(300, k))[0]


# -- dgc -------------------------------------------------------------------------------------------
def test_dgc_corrects_its_momentum_and_clears_what_was_sent():
    end = End("dgc(0.5)", "topk(0.5)")
    # u = v = (4, 2): the first is sent, and cleared in both
    assert end.sends(vector(4, 2))[1].tolist() == [4, 0]
    assert end.known["x/u"].tolist() == end.known["x"].tolist() == [0, 2]
    # u = (1, 2/2 + 2) = (1, 3), v = (1, 2 + 3): the second is sent
    assert end.sends(vector(1, 2))[1].tolist() == [0, 5]
    assert end.known["x/u"].tolist() == end.known["x"].tolist() == [1, 0]
    # u = (1/2 + 1, 0) and v = (1 + 1.5, 0)
    assert end.sends(vector(1, 0))[1].tolist() == [2.5, 0]


def test_dgc_clips_and_without_momentum_and_clipping_is_topk_with_ef():
    end = End("dgc(0, 5)", "topk(0.5)")
    assert end.sends(vector(6, 8))[1].tolist() == [0, 4]  # of norm 10, halved
    assert End("dgc(0, 5)", "topk(0.5)").sends(vector(3, 4))[1].tolist() == [0, 4]
    one = End("dgc(0)", "topk(0.1)")
    other = End("ef", "topk(0.1)")
    for k in range(4):
        assert one.sends(normal(200, k))[0] == other.sends(normal(200, k))[0]


# -- powersgd --------------------------------------------------------------------------------------
def test_powersgd_sends_two_factors_of_each_matrix_and_the_rest_whole():
    # 6x8 as 6+8, a kernel 4x(2*3) as 4+6, a bias of 5, and 2x2, which two factors would not shorten
    shapes = ((6, 8), (4, 2, 3), (5,), (2, 2))
    end = End("powersgd(1)", shapes=shapes)
    assert end.chain.nbytes(48 + 24 + 5 + 4) == (4 * (14 + 10 + 5 + 4), True)
    one = torch.outer(normal(6, 1), normal(8, 2)).reshape(-1)
    kernel = torch.outer(normal(4, 3), normal(6, 4)).reshape(-1)
    x = torch.cat([one, kernel, normal(9, 5)])
    data, seen = end.sends(x)
    assert len(data) == 4 * 33
    assert torch.allclose(seen, x, atol=1e-5)  # of rank one, so in one step
    assert torch.equal(seen[72:], x[72:])
    assert end.known["x/q"].numel() == 8 + 6
    assert torch.equal(end.chain.decode(data, 81), seen)


def test_powersgd_comes_closer_to_the_best_of_its_rank_as_it_starts_warm():
    m = torch.diag(vector(4, 3, 2, 1)) @ torch.linalg.qr(normal(48).reshape(12, 4))[0].T
    end = End("noef", "powersgd(2)", shapes=((4, 12),))
    errors = [float(((end.sends(m.reshape(-1))[1] - m.reshape(-1)) ** 2).sum()) for _ in range(12)]
    assert errors[-1] == pytest.approx(2**2 + 1**2, rel=0.02)  # what a rank of two cannot hold
    assert errors[0] > 1.05 * errors[-1]
    cold = End("noef", "powersgd(2)", shapes=((4, 12),)).chain
    other = cold.decode(cold.encode(m.reshape(-1), np.random.default_rng(1)), 48)
    assert float(((other - m.reshape(-1)) ** 2).sum()) == pytest.approx(errors[0])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 5), size=st.floats(1e-6, 1e6))
def test_powersgd_leaves_no_more_than_there_was_and_what_it_made_it_makes_again(seed, rank, size):
    x = normal(91, seed) * size
    end = End("noef", f"powersgd({rank})", shapes=((7, 13),))
    y = end.sends(x)[1]
    assert float(((x - y) ** 2).sum()) <= float((x**2).sum()) * (1 + 1e-5)
    assert torch.allclose(end.sends(y)[1], y, rtol=1e-3, atol=1e-4 * size)


def test_powersgd_begins_anew_after_a_matrix_of_zeros():
    end = End("powersgd(1)", shapes=((4, 5),))
    assert end.sends(torch.zeros(20))[1].tolist() == [0.0] * 20
    x = torch.outer(vector(1, 2, 3, 4), vector(1, 0, 0, 0, 2)).reshape(-1)
    assert torch.allclose(end.sends(x)[1], x, atol=1e-5)


# -- ef21, diana, delta ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ef21", "delta"])
def test_what_is_sent_is_the_largest_part_of_the_difference_to_what_the_receiver_has(name):
    sender = End(name, "topk(0.5)")
    receiver = End(name, "topk(0.5)")
    for x, got in ((vector(4, 3), [4, 0]), (vector(5, 3), [4, 3]), (vector(5, 3), [5, 3])):
        data, seen = sender.sends(x)
        assert (len(data), True) == sender.chain.nbytes(2)
        assert seen.tolist() == receiver.hears(data, 2).tolist() == got
    assert receiver.known["x/h"].tolist() == [5, 3]


def test_diana_moves_its_shift_by_alpha_of_what_was_sent():
    client = End("diana(0.5)", "randk(1)")
    server = End("diana(0.5)", "randk(1)")
    for x, shift in ((vector(4, -2), [2, -1]), (vector(4, 1), [3, 0])):
        data, seen = client.sends(x)
        # at a share of 1 nothing is lost
        assert torch.equal(seen, x)
        assert torch.equal(server.hears(data, 2), x)
        assert server.known["x/h"].tolist() == client.known["x/h"].tolist() == shift
    # without bias: one of two is sent, doubled
    one = End("diana(0.5)", "randk(0.5)")
    assert sorted(one.sends(vector(4, 4))[1].tolist()) == [0, 8]
    assert sorted(one.known["x/h"].tolist()) == [0, 4]


@pytest.mark.parametrize("items", [("ef21", "topk(0.5)"), ("diana(0.2)", "randk(0.5)")])
def test_another_memory_than_the_senders_is_refused_and_none_begins_anew(items):
    client = End(*items)
    server = End(*items)
    data, _ = client.sends(vector(4, 3))
    server.hears(data, 2)
    later, seen = client.sends(vector(1, 2))
    with pytest.raises(RemoteProtocolError):
        End(*items).hears(later, 2)
    other = End(*items)
    other.hears(other.sends(vector(9, 9))[0], 2)
    with pytest.raises(RemoteProtocolError):
        other.hears(later, 2)
    assert torch.equal(server.hears(later, 2), seen)
    # who lost it says so by the mark, and the server follows
    anew = End(*items)
    data, seen = anew.sends(vector(8, 6))
    assert data[:8] == bytes(8)
    assert torch.equal(server.hears(data, 2), seen)
    assert torch.equal(server.known["x/h"], anew.known["x/h"])
    with pytest.raises(RemoteProtocolError, match="5 bytes for 2 values"):
        server.hears(data[:5], 2)


# -- what makes no sense ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["dgc", "randk(0.1)"], "dgc is made for topk"),
        (["dgc(1)", "topk(0.1)"], "a momentum from 0, below 1"),
        (["dgc(0.9, -1)", "topk(0.1)"], "0 or above"),
        (["ef21"], "ef21 needs a compressor after it"),
        (["delta", "zstd"], "delta needs a compressor after it that loses something"),
        (["ef21", "qsgd(2)"], "needs a compressor that contracts"),
        (["diana(0.1)", "topk(0.1)"], "diana.*without bias, randk or qsgd; ef21"),
        (["diana(0.1)", "int8"], "without bias"),
        (["diana(0.5)", "randk(0.1)"], r"an alpha of at most 1/\(1 \+ omega\), here 0\.1"),
        (["diana(0.5)", "qsgd(4)"], r"here 0\.277"),  # omega is 512/14**2
        (["diana(2)", "randk(0.1)"], "above 0 and at most 1"),
        (["diana"], r"expected diana\(alpha\)"),
        (["powersgd(0)"], "a rank from 1"),
        (["ef21", "ef", "topk(0.1)"], "'ef' cannot follow"),
    ],
)
def test_a_memory_that_makes_no_sense_there_is_refused(items, words):
    with pytest.raises(ConfigError, match=words):
        compress.parse(items)


@pytest.mark.parametrize(
    ("way", "kind", "items", "words"),
    [
        ("down", "state", ["ef21", "topk(0.1)"], "delta is for what comes down"),
        ("down", "state", ["diana(0.1)", "randk(0.1)"], "delta is for what comes down"),
        ("down", "state", ["dgc", "topk(0.1)"], "is for uploads"),
        ("up", "control", ["dgc", "topk(0.1)"], "no other kind has a momentum"),
        ("up", "state", ["delta", "topk(0.1)"], "ef21 is the same for uploads"),
    ],
)
def test_a_memory_in_the_wrong_direction_is_refused(way, kind, items, words):
    with pytest.raises(ConfigError, match=rf"wire\.{way}\.{kind}: .*{words}"):
        compress.chains({kind: items}, f"wire.{way}")
