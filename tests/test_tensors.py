"""Flat vectors in cache-sized blocks: what is computed block by block is what is computed at
once.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fednet import buffers, proc
from fednet.tensors import (
    CHUNK,
    Layout,
    Slot,
    Sum,
    Tensors,
    TwoSums,
    blockwise,
    dot,
    sums,
)
from fednet.tensors.values import BLOCK, PIECE

SIZES = (5, CHUNK, 2 * CHUNK + 7, BLOCK + 7)


def tensors(n: int, seed: int, buffers: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    slots = (
        Slot("w", (n,), "parameter"),
        *([Slot("mean", (buffers,), "buffer"), Slot("count", (), "counter")] if buffers else []),
    )
    x = Tensors.zeros(Layout(slots))
    return Tensors(
        x.layout,
        torch.randn(n, generator=draw),
        torch.randn(buffers, generator=draw),
        x.counters + seed,
    )


@pytest.mark.parametrize("n", SIZES)
def test_an_expression_in_blocks_has_the_bits_of_the_whole(n):
    a, b, c = (tensors(n, k) for k in range(3))

    def both(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return a - 0.3 * (b + c) / 7, (a.double() * b).float()

    for found, expected in zip(blockwise(both, a, b.vector, c), both(a.vector, b.vector, c.vector)):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
    assert torch.equal(blockwise(lambda a, b: a - b, a, b), a.vector - b.vector)
    assert torch.equal(a.plus(b, 0.3).vector, (a + 0.3 * b).vector)


@pytest.mark.parametrize("n", SIZES)
def test_a_product_is_that_of_float64(n):
    a = tensors(n, 1).vector
    b = tensors(n, 2).vector
    assert dot(a, b) == pytest.approx(float(a.double() @ b.double()), rel=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_a_sum_steps_as_its_mean_does(n):
    x = tensors(n, 0, 3)
    values = [(tensors(n, k, 3), float(k)) for k in (1, 2, 3)]
    total = Sum.empty()
    for value, weight in values:
        total = total.add(value, weight)
    expected = sum(w * v.vector.double() for v, w in values)
    assert torch.equal(total.mean().vector, (expected / 6).float())
    for rate in (1.0, -0.3):
        step = total.step(x, rate)
        assert torch.equal(step.vector, x.vector + rate * total.mean().vector)
        assert torch.equal(step.buffers, total.mean().buffers)
        assert torch.equal(step.counters, torch.tensor([3]))
    assert torch.equal(total.step(x, divisor=9).vector, x.vector + total.total(9).vector)


@pytest.mark.parametrize("most", [0, buffers.KEPT_BYTES])
@pytest.mark.parametrize("n", SIZES)
def test_a_sum_is_spent_for_its_mean_and_empty_then(n, most, monkeypatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", most)
    monkeypatch.setattr(sums, "PIECE", CHUNK // 2 + 3)
    total = Sum.empty().add(tensors(n, 1, 3), 2.0).add(tensors(n, 2, 3), 3.0)
    expected = total.mean()
    found = total.spend()
    assert found.layout == expected.layout
    for part in ("vector", "buffers", "counters"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    assert (total.weight, total.count) == (0.0, 0)
    with pytest.raises(ValueError, match="empty"):
        total.mean()
    again = total.add(tensors(n, 1, 3), 2.0)
    assert torch.equal(again.mean().vector, tensors(n, 1).vector)


def test_a_large_sum_and_its_mean_take_no_more_memory_than_the_sum(monkeypatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", 1 << 20)
    n = 8 * PIECE
    total = Sum.empty().add(Tensors.zeros(Layout((Slot("w", (n,), "parameter"),))))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is as much as is used now
    used = proc.memory_bytes(os.getpid(), "status", "VmHWM")
    mean = total.spend()
    assert len(mean.vector) == n
    more = proc.memory_bytes(os.getpid(), "status", "VmHWM") - used
    assert more < 4 * n / 2  # half of the mean


@pytest.mark.parametrize("n", SIZES)
def test_what_a_sum_scales_and_takes_away(n):
    values = [tensors(n, k, 2) for k in (1, 2)]
    less = tensors(n, 5)
    plain = Sum.empty().add(values[0], 2.0).add(values[1], 2.0)
    assert plain.weight == 4.0
    scaled = Sum.empty().add(values[0], 2.0, scale=0.5).add(values[1], 2.0, scale=-1.0, less=less)
    assert torch.equal(
        scaled.vector, values[0].vector.double() - 2.0 * (values[1].vector - less.vector).double()
    )
    assert torch.equal(scaled.mean().buffers, plain.mean().buffers)  # they know of weights only


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5), (0.5, 0.25, 2.0), (0.0, 3.0, 0.0)])
def test_two_sums_are_the_two(n, weights):
    values = [tensors(n, k, 2) for k in (1, 2, 3)]
    two = TwoSums.empty()
    plain = Sum.empty()
    weighted = Sum.empty()
    for value, weight in zip(values, weights):
        two = two.add(value, weight)
        plain = plain.add(value)
        weighted = weighted.add(value, weight)
    assert torch.equal(two.plain.vector, plain.vector)
    assert (two.rest is None) == (len(set(weights)) == 1)
    found = two.weighted(4.0)
    expected = weighted.total(4.0).params
    assert found.layout == expected.layout
    assert torch.allclose(found.vector, expected.vector, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("empty", [Sum.empty, TwoSums.empty])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_values_added_together_give_the_bits_of_one_after_the_other(n, flat, empty):
    values = [(tensors(n, k, 3), 0.3 + k / 7) for k in range(5)]
    if flat:
        values = [(x.params, weight) for x, weight in values]
    for cut in (0, 1, 3, 5):  # so many came before
        one = empty()
        together = empty()
        for x, weight in values:
            one = one.add(x, weight)
        for x, weight in values[:cut]:
            together = together.add(x, weight)
        together = together.add_all(values[cut:])
        if isinstance(one, TwoSums):
            assert torch.equal(together.weighted(3.0).vector, one.weighted(3.0).vector)
            one = one.plain
            together = together.plain
        assert (together.weight, together.count) == (one.weight, one.count)
        for part in ("vector", "buffers", "counters"):
            assert torch.equal(getattr(together, part), getattr(one, part))


def test_a_sum_takes_one_layout_only():
    for last in (tensors(4, 0), tensors(4, 0).params):
        with pytest.raises(ValueError, match="another layout"):
            Sum.empty().add_all([(tensors(3, 0), 1.0), (last, 1.0)])
        with pytest.raises(ValueError, match="another layout"):
            Sum.empty().add_all([(tensors(3, 0).params, 1.0)] * 2 + [(last, 1.0)])
    with pytest.raises(ValueError, match="another layout"):
        Sum.empty().add(tensors(3, 0)).add(tensors(4, 0))
    with pytest.raises(ValueError, match="empty"):
        Sum.empty().mean()


def test_a_plain_tensor_is_no_tensors_and_is_told_how_to_become_some():
    x = tensors(5, 0)
    with pytest.raises(TypeError, match=r"got Tensor; x\.with_vector"):
        x + x.vector
    assert torch.equal((x + x.with_vector(x.vector)).vector, 2 * x.vector)
