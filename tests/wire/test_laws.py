"""What every compressor promises: one table of chains, and five laws that each is held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednet import registry
from fednet.errors import RemoteProtocolError
from fednet.wire import compress
from fednet.wire.compressors.base import Memory
from fednet.wire.compressors.selecting import values_of

# (x, what is decoded of it): asserts that the error is within what the compressor's page says.
Bound = Callable[[torch.Tensor, torch.Tensor], None]
TINY = 1e-44  # a few of the smallest float32 that there are


# -- what is lost ----------------------------------------------------------------------------------
def nothing(x: torch.Tensor, y: torch.Tensor) -> None:
    assert x.numpy().tobytes() == y.numpy().tobytes()


def rounding(bits: int, dtype: torch.dtype) -> Bound:
    """To so many significant bits; beyond the largest of that type it is the largest."""
    info = torch.finfo(dtype)

    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        a = x.double().clamp(-info.max, info.max)
        step = (a.abs() * 2.0**-bits).clamp(min=info.smallest_normal * 2.0**-bits)
        assert bool(((a - y.double()).abs() <= step).all())

    return within


def step_of_block(bits: int, block: int) -> Bound:
    """Half a step of its block, and never more than the value; block scales have 11 bits, and
    below 2**-14 of the largest of all steps of 2**-24 of it.
    """

    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        largest = greatest(x)
        for a, b in zip(x.double().split(block), y.double().split(block)):
            m = greatest(a)
            m = max(m * (1 + 2**-10), m + largest * 2**-24)
            half = m / (2 ** (bits - 1) - 1) / 2
            assert bool(((a - b).abs() <= half * 1.0001 + TINY).all())
            assert bool(((a - b).abs() <= a.abs() * 1.0001 + m * 1e-6 + TINY).all())

    return within


def level_of_bucket(bits: int) -> Bound:
    """Below one level of its bucket of 512, and never of another sign."""

    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        for a, b in zip(x.double().split(512), y.double().split(512)):
            level = greatest(a) / (2 ** (bits - 1) - 1)
            assert greatest(a - b) <= level * (1 + 1e-5) + TINY
            assert bool((a * b >= 0).all())

    return within


def mean_magnitude(x: torch.Tensor, y: torch.Tensor) -> None:
    mean = x.abs().double().sum() / max(1, x.numel())
    wanted = torch.where(x < 0, -mean, mean)
    assert torch.allclose(y.double(), wanted, rtol=1e-6, atol=TINY)


def all_but_the_largest(share: float) -> Bound:
    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        k = values_of(share, x.numel())
        kept = y != 0
        assert torch.equal(y[kept], x[kept])
        assert int(kept.sum()) == min(k, int((x != 0).sum()))
        if bool(kept.any()) and not bool(kept.all()):
            assert float(x[~kept].abs().max()) <= float(x[kept].abs().min())

    return within


def the_small(least: float) -> Bound:
    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        assert torch.equal(y, torch.where(x.abs() >= least, x, 0.0))

    return within


def all_but_some(share: float, scaled: bool) -> Bound:
    def within(x: torch.Tensor, y: torch.Tensor) -> None:
        n = x.numel()
        k = values_of(share, n)
        factor = np.float32(n / k if scaled and k else 1.0)
        kept = y != 0
        assert int(kept.sum()) <= k
        # beyond float32's range a value that is scaled up is not finite
        assert torch.equal(y[kept], (x * factor)[kept])

    return within


def no_more_than_there_was(x: torch.Tensor, y: torch.Tensor) -> None:
    """Which error feedback needs: what is left out then stays bounded."""
    if greatest(x) < 1e15:
        left = float(((x.double() - y.double()) ** 2).sum())
        assert left <= float((x.double() ** 2).sum()) * (1 + 1e-5) + 1e-38


def greatest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def as_found(x: torch.Tensor, y: torch.Tensor) -> None:
    """A random choice that is written with fewer bits: nothing is said of one draw."""


# -- the table -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Promise:
    loses: Bound
    omega: float | None = None
    """E||C(x) - x||^2 <= omega ||x||^2, and E C(x) = x; None: it has a bias, or is not random."""
    exact_size: bool = True
    remembers: bool = False
    """What is left out of a message comes with the next ones."""
    shares: bool = False
    """Both ends remember the same."""
    random: bool = False


def of_qsgd(bits: int) -> Promise:
    levels = 2 ** (bits - 1) - 1
    omega = min(512 / (2 * levels) ** 2, 512**0.5 / levels)
    return Promise(level_of_bucket(bits), omega, random=True)


TABLE: dict[tuple[str, ...], Promise] = {
    (): Promise(nothing),
    ("zstd",): Promise(nothing, exact_size=False),
    ("fp16",): Promise(rounding(11, torch.float16)),
    ("bf16",): Promise(rounding(8, torch.bfloat16)),
    ("int8(16)",): Promise(step_of_block(8, 16)),
    ("int4(32)",): Promise(step_of_block(4, 32)),
    ("int8",): Promise(step_of_block(8, 64)),
    ("qsgd(2)",): of_qsgd(2),
    ("qsgd(4)",): of_qsgd(4),
    ("qsgd(8)",): of_qsgd(8),
    ("qsgd(16)",): of_qsgd(16),
    ("sign",): Promise(mean_magnitude, remembers=True),
    ("topk(0.3)",): Promise(all_but_the_largest(0.3), remembers=True),
    ("noef", "topk(0.3)"): Promise(all_but_the_largest(0.3)),
    ("threshold(0.5)",): Promise(the_small(0.5), exact_size=False, remembers=True),
    ("randk(0.1)",): Promise(all_but_some(0.1, True), 9.0, random=True),
    ("ef", "randk(0.2)"): Promise(all_but_some(0.2, False), remembers=True, random=True),
    ("powersgd(2)",): Promise(no_more_than_there_was, remembers=True, random=True),
    ("dgc(0)", "topk(0.2)"): Promise(all_but_the_largest(0.2), remembers=True),
    ("ef21", "topk(0.5)"): Promise(all_but_the_largest(0.5), shares=True),
    ("delta", "int8"): Promise(step_of_block(8, 64), shares=True),
    ("diana(0.1)", "randk(0.2)"): Promise(all_but_some(0.2, True), 4.0, shares=True, random=True),
    # two or three of them, one behind the other
    ("topk(0.3)", "fp16"): Promise(no_more_than_there_was, remembers=True),
    ("topk(0.5)", "sign"): Promise(no_more_than_there_was, remembers=True),
    ("topk(0.02)", "int8(128)"): Promise(no_more_than_there_was, remembers=True),
    ("topk(0.1)", "qsgd(4)", "zstd"): Promise(
        as_found, exact_size=False, remembers=True, random=True
    ),
    ("ef", "int4"): Promise(step_of_block(4, 64), remembers=True),
    ("qsgd(8)", "zstd(1)"): Promise(level_of_bucket(8), exact_size=False, random=True),
    ("fp16", "zstd"): Promise(rounding(11, torch.float16), exact_size=False),
    ("ef", "randk(0.2)", "qsgd(8)"): Promise(as_found, remembers=True, random=True),
    ("randk(0.3)", "int8", "zstd"): Promise(as_found, exact_size=False, random=True),
    ("powersgd(2)", "fp16"): Promise(as_found, remembers=True, random=True),
    ("threshold(0.5)", "int8", "zstd"): Promise(
        no_more_than_there_was, exact_size=False, remembers=True
    ),
}
table = pytest.mark.parametrize(
    ("items", "promise"), TABLE.items(), ids=["+".join(items) or "none" for items in TABLE]
)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-1000, 1000, width=32)  # as of a model: hardly a list of all floats has them
vectors = st.one_of(st.lists(floats, max_size=1200), st.lists(ordinary, max_size=1200)).map(
    lambda v: torch.tensor(v, dtype=torch.float32)
)


def rng(k: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(k))


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng(seed).standard_normal(n, dtype=np.float32))


class End:
    """A sender, or a receiver, by a chain."""

    def __init__(self, items: tuple[str, ...]) -> None:
        self.chain = compress.parse(items)
        self.known: dict[str, torch.Tensor] = {}
        self.rng = rng(1)

    @property
    def memory(self) -> Memory:
        return Memory(self.known, self.known, "x")

    def sends(self, x: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        return self.chain.send(x, self.rng, self.memory)

    def hears(self, data: bytes, n: int) -> torch.Tensor:
        return self.chain.receive(memoryview(data), n, self.memory)


def test_every_compressor_is_in_the_table():
    named = {item.partition("(")[0] for items in TABLE for item in items}
    assert named == set(registry.compressor.names())


# -- the laws --------------------------------------------------------------------------------------
@table
@settings(max_examples=20, deadline=None)
@given(x=vectors)
@example(x=torch.tensor([3.8e23] + [0.0] * 15 + [2.4e16]))
@example(x=torch.tensor([0.0, -0.0, 1e-42, 1.0]))
def test_what_is_decoded_differs_by_no_more_than_is_documented(items, promise, x):
    chain = compress.parse(items)
    y = chain.decode(chain.encode(x, rng()), x.numel())
    assert (y.dtype, y.shape) == (torch.float32, x.shape)
    # beyond fp16's range a value that is scaled up may leave float32's
    assert bool(torch.isfinite(y).all()) or any(i.startswith("randk") for i in items)
    promise.loses(x, y)
    assert chain.lossy == (promise.loses is not nothing)


@table
@settings(max_examples=15, deadline=None)
@given(x=vectors)
def test_a_message_is_as_long_as_was_predicted(items, promise, x):
    end = End(items)
    data, seen = end.sends(x)
    assert torch.equal(End(items).hears(data, x.numel()).nan_to_num(), seen.nan_to_num())
    size, exact = end.chain.nbytes(x.numel())
    assert exact == promise.exact_size
    assert len(data) == size if exact else len(data) <= size


UNBIASED = {items: p.omega for items, p in TABLE.items() if p.omega is not None}


@pytest.mark.parametrize(("items", "omega"), UNBIASED.items(), ids=map("+".join, UNBIASED))
def test_the_mean_of_many_draws_is_the_value_where_there_is_no_bias(items, omega):
    x = normal(700)
    chain = compress.parse(items)
    source = rng(1)
    draws = 400
    total = torch.zeros(700, dtype=torch.float64)
    spread = 0.0
    for _ in range(draws):
        y = chain.decode(chain.encode(x, source), 700).double()
        total += y
        spread += float(((y - x) ** 2).sum()) / draws
    assert spread <= omega * float((x**2).sum()) * 1.05
    # The mean's error is its draws' divided by their number, but for what 700 values scatter.
    assert float(((total / draws - x) ** 2).sum()) <= 1.3 * spread / draws


@table
def test_what_is_left_out_is_sent_later_where_it_is_remembered(items, promise):
    sender = End(items)
    receiver = End(items)
    n = 130
    wanted = torch.zeros(n, dtype=torch.float64)
    got = torch.zeros(n, dtype=torch.float64)
    for k in range(30):
        x = normal(n, k)
        data, seen = sender.sends(x)
        heard = receiver.hears(data, n)
        assert torch.equal(heard, seen)
        assert receiver.known.keys() <= sender.known.keys()
        for name, value in receiver.known.items():
            assert torch.equal(value, sender.known[name])
        wanted += x.double()
        got += heard.double()
    assert sender.chain.remembers == (promise.remembers or promise.shares)
    assert sender.chain.shared == promise.shares == bool(receiver.known)
    if promise.shares:  # what both know comes as near to a value that stays the same as one likes
        for _ in range(80):
            heard = receiver.hears(sender.sends(x)[0], n)
        assert float((heard - x).norm()) < 0.01 * float(x.norm())
    if promise.remembers:
        assert torch.allclose(got + sender.known["x"].double(), wanted, atol=1e-4)
    elif not promise.shares:
        assert sender.known == {}


@table
@settings(max_examples=10, deadline=None)
@given(x=vectors, seed=st.integers(0, 99))
def test_the_same_seed_gives_the_same_bits_and_only_a_random_chain_draws(items, promise, x, seed):
    chain = compress.parse(items)
    source = rng(seed)
    data = chain.encode(x, source)
    assert compress.parse(items).encode(x, rng(seed)) == data
    y = chain.decode(data, x.numel())
    assert chain.decode(data, x.numel()).numpy().tobytes() == y.numpy().tobytes()
    drew = source.random() != rng(seed).random()
    assert not drew or promise.random
    x = normal(700)
    if promise.random:
        assert chain.encode(x, rng(seed)) != chain.encode(x, rng(seed + 1))


# -- what is not right -----------------------------------------------------------------------------
@table
def test_a_value_that_is_not_finite_is_never_hidden(items, promise):
    for bad in (math.nan, math.inf, -math.inf):
        sender = End(items)
        receiver = End(items)
        for k in range(2):  # also not by what is remembered
            x = normal(600)
            if k:
                x[7] = bad
            data, _ = sender.sends(x)
            try:
                y = receiver.hears(data, 600)
            except RemoteProtocolError:
                assert k
                continue
            assert bool(torch.isfinite(y).all()) == (k == 0)


@table
@pytest.mark.parametrize("by", [-40, 40])
def test_a_length_that_does_not_fit_the_number_of_values_is_refused(items, promise, by):
    chain = compress.parse(items)
    data = chain.encode(normal(700), rng())
    with pytest.raises(RemoteProtocolError):
        chain.decode(data, 700 + by)


@table
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_bytes_are_decoded_or_refused_but_never_crash(items, promise, data):
    chain = compress.parse(items)
    n = data.draw(st.sampled_from([0, 1, 5, 700]))
    good = bytearray(chain.encode(normal(n), rng()))
    for _ in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(["flip", "cut", "grow", "replace"]))
        at = data.draw(st.integers(0, max(0, len(good) - 1)))
        if what == "flip" and good:
            good[at] ^= data.draw(st.integers(1, 255))
        elif what == "cut":
            del good[at:]
        elif what == "grow":
            good[at:at] = data.draw(st.binary(max_size=16))
        else:
            good = bytearray(data.draw(st.binary(max_size=64)))
    try:
        y = chain.decode(bytes(good), n)
    except RemoteProtocolError:
        return
    assert y.shape == (n,)
