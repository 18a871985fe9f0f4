from __future__ import annotations

import contextlib
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.errors import LocalProtocolError, RemoteProtocolError
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.codec import Codec, Compression, not_finite
from fednet.wire.compress import parse
from fednet.wire.compressors.base import Memory
from fednet.wire.payload import (
    Control,
    Delta,
    LocalRun,
    Payload,
    Samples,
    Scalar,
    Statistics,
    Weights,
    kind,
)

LAYOUT = Layout(
    (
        Slot("w", (3, 4), "parameter"),
        Slot("mean", (3,), "buffer"),
        Slot("n", (), "counter"),
        Slot("b", (5,), "parameter"),
    )
)
Sketch = kind("sketch", "array")
Count = kind("count", "int")
Images = kind("condensed", "samples")  # of any type
CHAINS = (
    [],
    ["fp16"],
    ["bf16"],
    ["qsgd(8)"],
    ["sign"],
    ["topk(0.3)"],
    ["topk(0.3)", "qsgd(4)"],
    ["zstd"],
    ["topk(0.5)", "fp16", "zstd"],
)


class Everything(Payload):
    x: Weights
    dy: Delta
    dc: Control
    run: Statistics
    loss: Scalar
    s: Images
    sketch: Sketch
    count: Count


BOUNDS = {"s": 4000, "sketch": 4000}


def tensors(seed: int, layout: Layout = LAYOUT) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    p, b, i = layout.sizes
    return Tensors(
        layout,
        torch.randn(p, generator=rng),
        torch.rand(b, generator=rng),
        torch.randint(0, 99, (i,), generator=rng),
    )


def everything(seed: int = 0, samples: int = 2, many: bool = False) -> Everything:
    x = torch.full((samples, 1, 2), seed % 200, dtype=torch.uint8)
    y = torch.arange(samples)
    s = Samples({"a": x, "b": x.float()}, y) if many else Samples(x, y)
    return Everything(
        x=tensors(seed),
        dy=tensors(seed + 1),
        dc=tensors(seed + 2).params,
        run=LocalRun(10, 3, 0.5),
        loss=1.25,
        s=s,
        sketch=torch.arange(6.0).view(2, 3),
        count=-7,
    )


def chained(items) -> dict:
    return {k: parse(items) for k in ("state", "delta", "control")} if items else {}


def same(a, b) -> bool:
    if isinstance(a, Tensors):
        return a.layout == b.layout and all(
            torch.equal(getattr(a, f), getattr(b, f)) for f in ("vector", "buffers", "counters")
        )
    if isinstance(a, Samples):
        xs = zip(a.x.items(), b.x.items()) if isinstance(a.x, dict) else [(("x", a.x), ("x", b.x))]
        return same(a.y, b.y) and all(n == k and same(v, w) for (n, v), (k, w) in xs)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


@pytest.mark.parametrize("items", CHAINS, ids=str)
@pytest.mark.parametrize("buffers", [True, False])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000), samples=st.integers(0, 3), many=st.booleans(), diff=st.booleans()
)
def test_receiver_sees_what_the_sender_says_it_sees(items, buffers, seed, samples, many, diff):
    codec = Codec(LAYOUT, chained(items), buffers)
    payload = everything(seed, samples, many)
    reference = tensors(99) if diff else None
    how = Compression(lambda name: np.random.default_rng(seed), Memory({}, {}), reference=reference)
    encoded = codec.encode(payload, how)
    codec.check(Everything, encoded.form, BOUNDS)
    for f in encoded.form[:5] if "zstd" not in items else ():
        declared = Everything.fields[f.name]
        assert codec.size_of(declared.kind, declared.form, None) == (f.size, f.size)
    decoded = codec.decode(
        Everything,
        encoded.form,
        Body([bytearray(encoded.body.to_bytes())]),
        reference,
        fill=tensors(seed),
    )
    for name, field in Everything.fields.items():
        seen = getattr(encoded.seen, name)
        got = getattr(decoded, name)
        if field.form == "tensors" and not buffers and name == "dy":
            # Its own buffers stay at home: they are filled in.
            assert torch.equal(seen.vector, got.vector)
            assert torch.equal(got.buffers, payload.x.buffers)
        else:
            assert same(seen, got), name
    if not items:
        assert same(decoded.x, payload.x)
        assert same(decoded.dc, payload.dc)


@pytest.mark.parametrize("buffers", [True, False])
def test_payloads_that_are_decoded_together_are_those_decoded_one_by_one(buffers):
    codec = Codec(LAYOUT, {}, buffers)
    fill = tensors(9)
    sent = [codec.encode(everything(seed)) for seed in range(3)]
    form = sent[0].form
    bodies = [Body([bytearray(one.body.to_bytes())]) for one in sent]
    together = codec.decode_all(Everything, form, bodies, fill=fill)
    for body, payload in zip(bodies, together):
        alone = codec.decode(Everything, form, body, fill=fill)
        assert all(same(getattr(alone, name), getattr(payload, name)) for name in Everything.fields)
        assert alone.x.rough_norm == payload.x.rough_norm


def test_of_payloads_decoded_together_each_may_be_written_to():
    codec = Codec(LAYOUT, {})
    sent = [codec.encode(everything(seed)) for seed in range(2)]
    bodies = [Body([bytes(one.body)]) for one in sent]
    first, second = codec.decode_all(Everything, sent[0].form, bodies)
    first.x.vector.zero_()
    assert same(second.x, everything(1).x)
    assert same(codec.decode(Everything, sent[0].form, bodies[0]).x, everything(0).x)


def test_size_by_hand():
    # 17 parameters, 3 buffer floats, 1 counter: 68 + 12 + 8. Without buffers, 68. run 24, float and
    # int 8.
    sizes = [f.size for f in Codec(LAYOUT, {}).encode(everything()).form]
    assert sizes == [88, 88, 68, 24, 8, 2 * 2 + 2 * 8, 24, 8]
    sizes = [f.size for f in Codec(LAYOUT, {}, buffers=False).encode(everything()).form]
    assert sizes[:3] == [68, 68, 68]
    fp16 = Codec(LAYOUT, {"delta": parse(["fp16"])}).encode(everything()).form
    assert [(f.size, f.raw) for f in fp16[:2]] == [(88, 88), (34 + 20, 88)]


class Down(Payload):
    x: Weights


def test_cache_does_not_take_another_clients_tensors_for_these():
    codec = Codec(LAYOUT, {"state": parse(["fp16"])})
    cache: dict = {}
    for seed in range(50):  # each value is gone when the next one is made, and its address is free
        encoded = codec.encode(Down(x=tensors(seed)), Compression(cache=cache))
        assert torch.equal(encoded.seen.x.vector, tensors(seed).vector.half().float())


def test_broadcast_is_compressed_once():
    codec = Codec(LAYOUT, {"state": parse(["qsgd(4)"])})
    cache = {}
    down = Down(x=tensors(1))
    rng = np.random.default_rng(0)
    one, two = (codec.encode(down, Compression(lambda name: rng, cache=cache)) for _ in range(2))
    assert bytes(one.body) == bytes(two.body)
    assert torch.equal(one.seen.x.vector, two.seen.x.vector)
    # and remembered for each client, where both ends remember
    codec = Codec(LAYOUT, {"state": parse(["delta", "topk(0.5)"])})
    cache = {}
    clients = [Memory({}, {}), Memory({}, {})]
    for memory in clients:
        codec.encode(down, Compression(cache=cache, past=memory))
    assert len(cache) == 1
    assert torch.equal(clients[1].next["x/h"], clients[0].next["x/h"])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_body_is_read_in_ranges_as_if_it_were_one(segments, a, b):
    body = Body(segments)
    whole = b"".join(segments)
    start = min(a, b, len(whole))
    end = min(max(a, b), len(whole))
    assert bytes(body.slice(start, end)) == whole[start:end]
    assert bytes(body) == whole


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_a_payloads_check_is_that_of_its_bytes_however_they_are_cut(segments):
    assert Body(segments).digest() == Body([b"".join(segments)]).digest()


# -- what is not what it should be -----------------------------------------------------------------
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["vector", "buffers"])
@pytest.mark.parametrize("items", [[], ["fp16"], ["topk(0.3)"], ["zstd"]], ids=str)
def test_values_that_are_not_finite_are_refused(value, where, items):
    codec = Codec(LAYOUT, chained(items))
    bad = tensors(0)
    getattr(bad, where)[1] = value
    encoded = codec.encode(Up(dy=bad))
    with pytest.raises(RemoteProtocolError):
        codec.decode(Up, encoded.form, Body([bytearray(encoded.body.to_bytes())]))


class Up(Payload):
    dy: Delta


def test_tensors_of_another_layout_are_not_sent():
    with pytest.raises(LocalProtocolError, match="must have the layout"):
        Codec(LAYOUT, {}).encode(Up(dy=tensors(0, LAYOUT.without(["b"]))))


def test_sum_that_overflows_is_no_reason_to_refuse():
    codec = Codec(LAYOUT, {})
    big = tensors(0)
    big.vector.fill_(3e38)
    encoded = codec.encode(Up(dy=big))
    assert same(codec.decode(Up, encoded.form, Body([bytearray(encoded.body.to_bytes())])).dy, big)


def test_buffer_that_was_not_finite_in_the_initial_model_is_exempt_and_only_that():
    layout = Layout((*LAYOUT.slots, Slot("mask", (2,), "buffer")))
    initial = tensors(0, layout)
    initial["mask"].fill_(-math.inf)
    assert not_finite(initial) == {"mask"}
    codec = Codec(layout, {}, exempt=not_finite(initial))

    encoded = codec.encode(Down(x=initial))
    assert same(
        codec.decode(Down, encoded.form, Body([bytearray(encoded.body.to_bytes())])).x, initial
    )
    initial["mean"][0] = math.nan
    encoded = codec.encode(Down(x=initial))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        codec.decode(Down, encoded.form, Body([bytearray(encoded.body.to_bytes())]))


FORM = Codec(LAYOUT, {}).encode(everything()).form


def changed(which: int, **fields) -> list[m.Field]:

    return [msgspec.structs.replace(f, **fields) if i == which else f for i, f in enumerate(FORM)]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (FORM[:-1], "fields"),
        ([*FORM, FORM[-1]], "fields"),
        (changed(0, name="y"), "fields"),
        (changed(1, kind="state"), "kind 'state', expected 'delta'"),
        (changed(0, size=1 << 40), "1099511627776 bytes, expected 88"),
        (changed(0, size=84), "84 bytes, expected 88"),
        (changed(3, size=25), "25 bytes, expected 24"),
        (changed(3, size=20), "20 bytes, expected 24"),
        (changed(5, size=4001), "4001 bytes, expected 0 to 4000"),
        (changed(0, raw=1 << 40), "before compression"),
        (changed(6, raw=5), "before compression"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_form_that_was_not_declared_is_refused_before_its_body_is_asked_for(form, reason):
    with pytest.raises(RemoteProtocolError, match=reason):
        Codec(LAYOUT, {}).check(Everything, form, BOUNDS)


class Given(Payload):
    s: Images


class Array(Payload):
    a: Sketch


def samples_form(size: int, *parts) -> list[m.Field]:
    return [m.Field("s", "condensed", size, size, list(parts))]


@pytest.mark.parametrize(
    "form",
    [
        samples_form(8, ("x", "float32", [1, 0]), ("y", "int64", [1, 1, 1, 1, 1, 1, 1, 2])),
        samples_form(8, ("y", "int64", [1])),
        samples_form(16, ("x", "float32", [2]), ("y", "int64", [1])),
        samples_form(16, ("y", "int64", [1]), ("y", "int64", [1])),
        samples_form(16, ("x", "int64", []), ("y", "int64", [])),
        samples_form(9, ("x", "bool", [1]), ("y", "int64", [1])),
        samples_form(12, ("x", "float32", [1]), ("z", "float32", [1]), ("y", "float32", [1])),
        samples_form(12, ("x", "object", [1]), ("y", "int64", [1])),
        samples_form(8, ("x", "float32", [1, 0] + [1 << 30] * 6), ("y", "int64", [1])),
        samples_form(0, ("x", "float32", [0] + [1 << 40] * 7), ("y", "int64", [0])),
        samples_form(12, ("x", "float32", [1] * 9), ("y", "int64", [1])),
        samples_form(1 << 20, ("x", "float32", [1 << 40, 1 << 40]), ("y", "int64", [1])),
    ],
    ids=lambda f: str([p[1:] for p in f[0].parts]),
)
def test_arrays_that_are_no_samples_are_refused(form):
    with pytest.raises(RemoteProtocolError):
        Codec(LAYOUT, {}).decode(Given, form, Body([bytearray(form[0].size)]))


def test_truth_value_of_another_byte_is_refused():
    form = [m.Field("a", "sketch", 2, 2, [("", "bool", [2])])]
    with pytest.raises(RemoteProtocolError, match="truth"):
        Codec(LAYOUT, {}).decode(Array, form, Body([bytearray(b"\x01\x02")]))


@pytest.mark.parametrize("items", CHAINS, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_spoilt_body_or_form_is_refused_or_a_payload_and_nothing_else(items, data):
    codec = Codec(LAYOUT, chained(items))
    how = Compression(lambda name: np.random.default_rng(0), Memory({}, {}))
    encoded = codec.encode(everything(data.draw(st.integers(0, 5))), how)
    body = bytearray(encoded.body.to_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    form = list(encoded.form)
    if data.draw(st.booleans()):
        import msgspec

        i = data.draw(st.integers(0, len(form) - 1))
        number = st.one_of(st.integers(0, 200), st.just(1 << 40))
        parts = st.lists(
            st.tuples(
                st.sampled_from(["", "x", "y", "x.a", "z"]),
                st.sampled_from(["uint8", "float32", "int64", "bool", "bfloat16", "q"]),
                st.lists(number, max_size=9),
            ),
            max_size=3,
        )
        form[i] = msgspec.structs.replace(
            form[i],
            size=data.draw(st.one_of(st.just(form[i].size), number)),
            parts=data.draw(parts),
        )
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(Everything, form, Body([body]), fill=tensors(0))


class Bounded(Payload):
    a: kind("sketch", "array", dtype="float32", rank=2, low=-1, high=1)  # type: ignore[valid-type]
    share: kind("share", "float", low=0, high=1)  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("a", "share", "reason"),
    [
        (torch.ones(2, 3), 0.5, ""),
        (torch.ones(0, 3), 1.0, ""),
        (torch.ones(2, 3, dtype=torch.float64), 0.5, "float64, declared is float32"),
        (torch.ones(6), 0.5, "1 axes, declared are 2"),
        (torch.full((2, 3), 1.5), 0.5, "values from 1.5 to 1.5, declared are -1 to 1"),
        (torch.ones(2, 3), 1.5, "values from 1.5 to 1.5, declared are 0 to 1"),
    ],
)
def test_what_is_outside_its_declaration_is_refused(a, share, reason):
    codec = Codec(LAYOUT, {})
    sent = codec.encode(Bounded(a=a, share=share))
    if not reason:
        assert torch.equal(codec.decode(Bounded, sent.form, sent.body).a, a)
        return
    with pytest.raises(RemoteProtocolError, match=reason):
        codec.decode(Bounded, sent.form, sent.body)


def first(*values: float) -> Tensors:
    """Parameters that begin with these; the others are 0."""
    x = Tensors.zeros(LAYOUT)
    x.vector[: len(values)] = torch.tensor(values)
    return x


def test_a_compressed_state_is_sent_as_the_difference_to_what_both_have():
    codec = Codec(LAYOUT, {"state": parse(["topk(0.05)"])})
    reference = first(1, 2, 4, 4)
    how = Compression(errors=Memory({}, {}), reference=reference)
    encoded = codec.encode(Down(x=first(1, 2, 3, 9)), how)
    # Of the differences 0, 0, -1 and 5 the largest.
    assert encoded.seen.x.vector.tolist()[:4] == [1, 2, 4, 9]


def test_a_state_of_a_lossless_chain_keeps_every_bit_though_both_ends_have_another_one():
    """0.1 - 3e7 + 3e7 is 0 in float32."""
    codec = Codec(LAYOUT, {"state": parse(["zstd"])})
    reference = first(3e7, -0.0)
    x = first(0.1, 0.0, 1e-40)
    how = Compression(errors=Memory({}, {}), reference=reference)
    encoded = codec.encode(Down(x=x), how)
    found = codec.decode(Down, encoded.form, encoded.body, reference)
    assert same(found.x, x)
    assert same(encoded.seen.x, x)


def test_residuals_of_exchanges_keep_apart_and_of_a_broadcast_the_shared_value_alone_has_one():
    codec = Codec(LAYOUT, {"state": parse(["topk(0.05)"])})
    shared = first(3, 4)

    def sent(x, residuals, slot="", cache=None):
        errors = Memory(residuals, residuals, slot)
        found = codec.encode(Down(x=x), Compression(errors=errors, cache=cache))
        return found.seen.x.vector.tolist()[:2]

    residuals: dict[str, torch.Tensor] = {}
    seen = [sent(shared, residuals, slot=slot) for slot in ("0/", "0/", "1/")]
    assert seen == [[0, 4], [6, 0], [0, 4]]
    cache = {}
    residuals = {}
    assert [sent(x, residuals, cache=cache) for x in (shared, first(5, 8), shared)][2] == [0, 4]
    assert residuals["x"].tolist()[:2] == [3, 0]


def test_a_payload_is_decoded_alike_for_all_only_where_everything_in_it_crosses():
    class Model(Payload):
        x: Weights

    class Update(Payload):
        dc: Control
        run: Statistics

    chain = {"control": parse(["fp16"])}
    for codec, model, update in (
        (Codec(LAYOUT, {}), True, True),
        (Codec(LAYOUT, {}, buffers=False), False, True),  # its receiver fills in the buffers
        (Codec(LAYOUT, chain), True, False),
    ):
        assert (codec.self_contained(Model), codec.self_contained(Update)) == (model, update)
