"""Compressors by hand, and what makes no sense; what each promises is in `test_laws`."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet import registry
from fednet.errors import ConfigError, RemoteProtocolError
from fednet.loading import WrongPart
from fednet.wire import compress
from fednet.wire.compressors.base import (
    Feedback,
    Lossless,
    Select,
    Values,
    index_bytes,
    pack_indices,
    unpack_indices,
)
from fednet.wire.compressors.selecting import TopK


def rng(k: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(k))


def sent(chain: compress.Chain, x: torch.Tensor, k: int = 0) -> torch.Tensor:
    return chain.decode(chain.encode(x, rng(k)), x.numel())


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng(seed).standard_normal(n, dtype=np.float32))


# -- of one's own ----------------------------------------------------------------------------------
def test_a_part_of_ones_own_that_gives_back_another_number_of_values_is_refused():
    class Short(TopK):
        def expand(self, head, numbers, n):
            return numbers

    with pytest.raises(RemoteProtocolError, match=r"of shape \(5,\), expected \(10,\)"):
        sent(compress.Chain(select=Short(0.5)), normal(10))


@pytest.mark.parametrize(
    ("base", "function", "returned", "said"),
    [
        (Feedback, "target", 1, "target of Own .* returned int, expected a tensor"),
        (Select, "select", [0], "select of Own .* returned list, expected an array"),
        (Values, "nbytes", 0.5, "nbytes of Own .* returned float, expected a whole number"),
        (Values, "encode", "x", "encode of Own .* returned str, expected bytes"),
        (Values, "decode", b"x", "decode of Own .* returned bytes, expected an array"),
        (Lossless, "decode", None, "decode of Own .* returned NoneType, expected bytes"),
    ],
)
def test_what_a_compressor_of_ones_own_returns_wrongly_is_told_with_its_place(
    base, function, returned, said, monkeypatch
):
    returns = {"nbytes": 40, "encode": b"\0" * 40, function: returned}
    functions = {name: lambda self, *given, v=v: v for name, v in returns.items()}
    own = type("Own", (base,), {"contracts": True, **functions})
    monkeypatch.setitem(registry.compressor._parts, "own", own)
    with pytest.raises(WrongPart, match=said.replace(".*", r"\(test_compress\.py, line \d+\)")):
        compress.parse(["own"]).send(normal(10), rng(), compress.Memory({}, {}, "x"))


# -- by hand ---------------------------------------------------------------------------------------
BF16_MOST = torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize(
    ("items", "x", "wanted"),
    [
        # Eleven bits; beyond its range the largest.
        (
            ["fp16"],
            [1.0, 1 + 2**-10, 1 + 2**-12, -70000.0, 1e38, 2**-24],
            [1.0, 1 + 2**-10, 1.0, -65504.0, 65504.0, 2**-24],
        ),
        # Eight bits, to the even one.
        (
            ["bf16"],
            [1.0, 1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8, -3.4028235e38],
            [1.0, 1 + 2**-7, 1.0, 1 + 2**-6, -BF16_MOST],
        ),
        # The largest, and of equal ones the first.
        (["topk(0.5)"], [1.0, -2.0, 2.0, 2.0, 0.5, -3.0], [0, -2, 2, 0, 0, -3]),
        (["topk(0.5)"], [1.0] * 4, [1, 1, 0, 0]),
        (["topk(0.5)"], [0.0] * 3, [0, 0, 0]),
        # The mean magnitude.
        (["sign"], [1.0, -3.0, 0.0, 4.0], [2, -2, 2, 2]),
        # What is left is written by the codec that follows.
        (["topk(0.5)", "sign"], [1.0, -3.0, 0.0, 5.0], [0, -4, 0, 4]),
    ],
    ids=str,
)
def test_a_chain_sends_what_its_definition_says(items, x, wanted):
    assert sent(compress.parse(items), torch.tensor(x)).tolist() == wanted


@pytest.mark.parametrize(
    ("items", "n", "nbytes"),
    [
        (["qsgd(8)"], 1025, 1025 + 3 * 4),  # a byte a value and a scale a bucket
        (["qsgd(4)"], 5, 3 + 4),
        (["int8(16)"], 33, 4 + 3 * 2 + 33),
        (["int4"], 65, 4 + 2 * 2 + 33),
        (["sign"], 9, 4 + 2),
        (["topk(0.5)", "sign"], 4, 1 + 4 + 1),  # a bitmap, a scale, two signs
        (["randk(0.1)"], 1000, 8 + 4 * 100),  # no index crosses
    ],
    ids=str,
)
def test_a_message_takes_so_many_bytes(items, n, nbytes):
    assert compress.parse(items).nbytes(n) == (nbytes, True)


ONE = np.array([1.0], dtype="<f4").tobytes()
HALF = np.array([0.5], dtype="<f2").tobytes()
# 0, 14 (or 15) and 7, of four bits.
CODES = bytes([0xE0, 0x07])
ABOVE = bytes([0xF0, 0x07])


@pytest.mark.parametrize(
    ("chain", "scale", "found"),
    [("qsgd(4)", ONE, [-1.0, 1.0, 0.0]), ("int4(16)", ONE + HALF, [-0.5, 0.5, 0.0])],
)
def test_codes_are_shares_of_their_scale_and_one_that_there_cannot_be_is_refused(
    chain, scale, found
):
    assert compress.parse([chain]).decode(scale + CODES, 3).tolist() == found
    with pytest.raises(RemoteProtocolError, match="above 14"):
        compress.parse([chain]).decode(scale + ABOVE, 3)


# -- indices ---------------------------------------------------------------------------------------
def test_indices_take_the_lowest_bits_and_a_mark_each():
    # 3 of 32: l = 3, so that 3, 9 and 30 are (0, 3), (1, 1) and (3, 6), marks at 0, 1+1 and 3+2
    found = pack_indices(np.array([3, 9, 30], dtype=np.uint32), 32)
    assert found == bytes([0b10001011, 0b1, 0b100101])
    assert unpack_indices(memoryview(found), 32, 3).tolist() == [3, 9, 30]
    assert index_bytes(32, 3) == 3


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 70_000), data=st.data())
def test_indices_come_back_in_the_bytes_that_were_predicted(n, data):
    k = data.draw(st.integers(0, min(n, 400)))
    chosen = np.random.default_rng(n).choice(n, k, replace=False)
    chosen.sort()
    found = pack_indices(chosen.astype(np.uint32), n)
    assert len(found) == index_bytes(n, k)
    assert unpack_indices(memoryview(found), n, k).tolist() == chosen.tolist()
    assert 8 * len(found) <= k * (2 + math.log2(n / k)) + 16 if k else found == b""


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_that_are_no_indices_are_refused_or_give_some_that_ascend(data):
    n, k = data.draw(st.sampled_from([(9, 4), (32, 3), (1000, 20), (1, 1)]))
    size = index_bytes(n, k)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    try:
        found = unpack_indices(memoryview(raw), n, k)
    except RemoteProtocolError:
        return
    assert found.size == k
    assert bool((np.diff(found) > 0).all())
    assert 0 <= found[0] <= found[-1] < n


# -- blocks of whole numbers -----------------------------------------------------------------------
def test_int8_has_the_scale_of_its_block_and_rounds_to_the_nearest():
    x = torch.zeros(32)
    x[:3] = torch.tensor([127.0, 1.6, -0.4])  # in steps of 1
    # Of 0.1, whose share of 127 float16 has as 0.1 and a little.
    x[16:18] = torch.tensor([12.7, 0.06])
    y = sent(compress.parse(["int8(16)"]), x)
    assert y[:3].tolist() == [127.0, 2.0, 0.0]
    assert y[16].item() == pytest.approx(12.7, rel=1e-3)
    assert y[17].item() == pytest.approx(0.1, rel=1e-3)


# -- randk and threshold ---------------------------------------------------------------------------
def test_randk_keeps_its_share_scaled_up_and_another_with_each_draw():
    chain = compress.parse(["randk(0.1)"])
    x = normal(1000)
    y = sent(chain, x)
    kept = y != 0
    assert int(kept.sum()) == 100
    assert torch.equal(y[kept], x[kept] * 10)
    other = sent(chain, x, k=1) != 0
    assert not torch.equal(kept, other)


def test_which_values_randk_keeps_is_the_same_everywhere():
    seed = (5).to_bytes(8, "little")
    data = seed + np.array([1, 2, 3], dtype="<f4").tobytes()
    found = compress.parse(["ef", "randk(0.3)"]).decode(data, 10)
    draws = np.random.Philox(key=5).random_raw(10)
    assert sorted(np.argsort(draws)[:3].tolist()) == found.nonzero().flatten().tolist()


def test_threshold_sends_what_is_large_and_how_many_that_are():
    chain = compress.parse(["threshold(2)"])
    x = torch.tensor([1.0, -2.0, 3.0, 0.0] + [0.0] * 28)
    data = chain.encode(x, rng())
    assert chain.decode(data, 32)[:4].tolist() == [0, -2, 3, 0]
    assert len(data) == 4 + index_bytes(32, 2) + 8
    assert chain.nbytes(32) == (4 + 4 + 4 * 32, False)
    assert len(chain.encode(torch.zeros(32), rng())) == 4
    for k in (33, 2**32 - 1):
        with pytest.raises(RemoteProtocolError, match="announced of 32"):
            chain.decode(k.to_bytes(4, "little") + data[4:], 32)


# -- zstd ------------------------------------------------------------------------------------------
def test_a_zstd_bomb_is_refused_by_its_announcement_before_anything_is_allocated():
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    with pytest.raises(RemoteProtocolError, match="bytes, expected at most 4000"):
        compress.parse(["zstd"]).decode(bomb, 1000)
    unannounced = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))
    with pytest.raises(RemoteProtocolError, match="announces"):
        compress.parse(["zstd"]).decode(unannounced, 1000)
    with pytest.raises(RemoteProtocolError, match="announces"):
        compress.parse(["threshold(1)", "zstd"]).decode(bomb, 32)


def test_bytes_after_the_zstd_frame_are_refused():
    chain = compress.parse(["zstd"])
    with pytest.raises(RemoteProtocolError):
        chain.decode(chain.encode(normal(10), rng()) + b"x", 10)


def test_without_its_package_zstd_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        compress.parse(["zstd"])


# -- configuration ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["topk"], r"topk.*expected topk\(share\)"),
        (["topk(2)"], r"above 0 and at most 1"),
        (["topk(0)"], r"above 0 and at most 1"),
        (["qsgd(3)"], r"2, 4, 8 or 16"),
        (["qsgd(8, 2)"], r"expected qsgd\(bits\)"),
        (["fp16(2)"], r"expected fp16\."),
        (["zstd(40)"], r"from 1 to 19"),
        (["topk(many)"], r"'many' is not a number"),
        (["topk(nan)"], r"'nan' is not a number"),
        (["fp61"], r"unknown compressor 'fp61'.*Did you mean 'fp16'"),
        (["topk(0.1"], r"in parentheses"),
        ([8], r"expected a name"),
        (["int8(3)"], r"16 to 65536"),
        (["randk(0)"], r"above 0 and at most 1"),
        (["threshold(0)"], r"above 0"),
        (["ef", "zstd"], r"ef has nothing to feed back"),
        (["ef", "qsgd(4)"], r"ef needs a compressor that contracts.*diana"),
        (["noef", "qsgd(4)"], r"noef turns nothing off"),
        (["topk(0.1)", "ef"], r"'ef' cannot follow"),
        (["zstd", "fp16"], r"\[zstd\]: 'fp16' cannot follow"),
        (["topk(0.1)", "topk(0.1)"], r"cannot follow"),
        (["fp16", "topk(0.1)"], r"cannot follow"),
        (["fp16", "qsgd(8)"], r"cannot follow"),
    ],
)
def test_a_chain_that_makes_no_sense_says_why(items, words):
    with pytest.raises(ConfigError, match=words):
        compress.parse(items)


def test_the_chains_of_a_section_are_by_kind_and_name_their_place():
    found = compress.chains({"delta": ["topk(0.01)", "qsgd(8)"], "state": ["fp16"], "control": []})
    assert {k: str(v) for k, v in found.items()} == {
        "delta": "[topk(0.01), qsgd(8)]",
        "state": "[fp16]",
    }
    with pytest.raises(ConfigError, match=r"wire\.down\.delta: unknown compressor"):
        compress.chains({"delta": ["gzip"]}, "wire.down")


@pytest.mark.parametrize(
    ("share", "n", "k"), [(0.01, 1000, 10), (0.01, 10, 1), (0.25, 10, 3), (1, 7, 7), (0.5, 0, 0)]
)
def test_topk_keeps_its_share_rounded_and_at_least_one(share, n, k):
    assert int((sent(compress.parse([f"topk({share})"]), normal(n)) != 0).sum()) == k
