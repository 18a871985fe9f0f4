"""What a reply must be before it may be aggregated."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fednet.algorithms.base import Delta, LocalRun, Payload, Scalar, Statistics, Weights
from fednet.errors import RemoteProtocolError
from fednet.journal.events import Accepted
from fednet.journal.journal import Journal
from fednet.loading import WrongPart
from fednet.server.decoding import ReplyDecoder, SentModels
from fednet.server.inbox import HeldMemory, Inbox, ReceivedReply
from fednet.tensors import Layout, Slot, Tensors
from fednet.tensors.values import BLOCK
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.codec import Codec
from fednet.wire.compress import Chain
from fednet.wire.compressors.values import Half
from fednet.wire.messages import Key
from tests.books import journal_in

LAYOUT = Layout(
    (Slot("w", (3,), "parameter"), Slot("mask", (2,), "buffer"), Slot("n", (), "counter"))
)
INF = float("inf")
NAN = float("nan")


class Whole(Payload):
    x: Weights


class Behind(Payload):
    number: Scalar
    x: Weights


class Moved(Payload):
    d: Delta


class Trained(Payload):
    x: Weights
    run: Statistics


def decoder_of(codec, kind, samples=None, max_norm=None):
    exp = SimpleNamespace(
        up=codec,
        shared=codec.layout,
        federation=None,
        algorithm=SimpleNamespace(exchanges=[SimpleNamespace(up=kind)]),
        setting=SimpleNamespace(initial=Tensors.zeros(codec.layout), classes=2),
        config=SimpleNamespace(
            security=SimpleNamespace(max_norm=max_norm),
            train_of=lambda client: SimpleNamespace(steps=None, epochs=1),
        ),
    )
    return ReplyDecoder(exp, SentModels(), lambda client: samples, lambda client: (0, 0)).decode


def admit(w, mask, exempt=frozenset(), chains=None):
    """Asks for a reply of these values."""
    codec = Codec(LAYOUT, chains or {}, exempt=exempt)
    sent = codec.encode(
        Whole(x=Tensors(LAYOUT, torch.tensor(w), torch.tensor(mask), torch.tensor([1])))
    )
    form = list(sent.form)
    message = m.Reply(key=Key(1, 0, 0, 0), form=form, size=sum(f.size for f in form))
    decoder_of(codec, Whole)(
        [ReceivedReply(Accepted(message, b"", b""), HeldMemory(0), Journal(print))],
        [Body([bytes(sent.body)])],
    )


ZERO = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("w", "mask", "exempt", "says"),
    [
        (ZERO, (0.0, 0.0), False, ""),
        ((1e19, 0.0, 0.0), (0.0, 0.0), False, ""),  # a norm that float32 holds
        ((-1e19, 1e19, 0.0), (0.0, 0.0), False, ""),
        ((NAN, 0.5, 0.5), (0.0, 0.0), False, "a value is not finite"),
        ((0.5, 0.5, -INF), (0.0, 0.0), False, "a value is not finite"),
        (ZERO, (0.0, NAN), False, "a value is not finite"),
        (ZERO, (0.0, INF), False, "a value is not finite"),
        ((1e25, 0.0, 0.0), (0.0, 0.0), False, "a norm above"),
        ((3e38, -3e38, 0.0), (0.0, 0.0), False, "a norm above"),  # finite, but not their squares
        (ZERO, (0.0, INF), True, ""),  # a buffer that the model began with may be infinite
        ((0.0, NAN, 0.0), (0.0, INF), True, "a value is not finite"),
    ],
)
def test_values_that_are_not_finite_or_too_large_are_refused(w, mask, exempt, says):
    refused = pytest.raises(RemoteProtocolError, match=f"field x: {says}")
    with refused if says else contextlib.nullcontext():
        admit(w, mask, frozenset({"mask"} if exempt else ()))


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize(
    ("value", "mask", "n", "steps", "says"),
    [
        (NAN, 0.0, 8, 1, "field x: a value is not finite"),
        (1.0, INF, 8, 1, "field x: a value is not finite"),
        (1e25, 0.0, 8, 1, "field x: a norm above"),
        (1.0, 0.0, 9, 1, "it reports 9 samples, but has 8"),
        (1.0, 0.0, 8, 801, "it says it took 801 steps; 800 would be"),
    ],
)
def test_of_replies_that_are_read_together_each_is_checked(
    tmp_path, bad, value, mask, n, steps, says
):
    layout = Layout((Slot("w", (1,), "parameter"), Slot("mask", (1,), "buffer")))
    codec = Codec(layout, {})
    arrived = []
    for client in range(3):
        w, b, run = client + 1.0, 0.0, LocalRun(8, 800, 0.0)
        if client == bad:
            w, b, run = value, mask, LocalRun(n, steps, 0.0)
        x = Tensors(layout, torch.tensor([w]), torch.tensor([b]), torch.zeros(0, dtype=torch.int64))
        sent = codec.encode(Trained(x=x, run=run))
        key = Key(1, 0, 0, client)
        form = list(sent.form)
        message = m.Reply(key=key, form=form, size=sent.body.size, check=sent.body.digest())
        arrived.append((Accepted(message, b"", b""), Body([bytes(sent.body)])))
    found = Inbox(tmp_path, journal_in(tmp_path), decoder_of(codec, Trained, 8)).accept(arrived)
    assert str(found[bad]).startswith(says)
    assert {c: found[c].norms for c in range(3) if c != bad} == {
        c: {"x": c + 1.0} for c in range(3) if c != bad
    }


@pytest.mark.parametrize("bad", range(3))
def test_of_replies_that_are_read_together_each_is_held_to_the_largest_norm(tmp_path, bad):
    layout = Layout((Slot("w", (2,), "parameter"),))
    codec = Codec(layout, {})
    arrived = []
    for client in range(3):
        w = [3.0, 4.1] if client == bad else [3.0, 4.0]
        nothing = torch.zeros(0, dtype=torch.int64)
        sent = codec.encode(Moved(d=Tensors(layout, torch.tensor(w), torch.zeros(0), nothing)))
        key = Key(1, 0, 0, client)
        form = list(sent.form)
        message = m.Reply(key=key, form=form, size=sent.body.size, check=sent.body.digest())
        arrived.append((Accepted(message, b"", b""), Body([bytes(sent.body)])))
    decode = decoder_of(codec, Moved, max_norm=5.0)
    found = Inbox(tmp_path, journal_in(tmp_path), decode).accept(arrived)
    assert str(found[bad]).startswith("d is an update of norm 5.08")
    assert [c for c in range(3) if isinstance(found[c], RemoteProtocolError)] == [bad]


SIZE = 2 * BLOCK + 5  # two parts and a piece of one


@pytest.mark.parametrize("kind", [Whole, Behind])
@pytest.mark.parametrize("at", [None, 0, BLOCK, SIZE - 1])
@pytest.mark.parametrize("value", [NAN, 2e19])
def test_a_bad_value_is_seen_in_whichever_part_of_a_large_reply_it_comes(tmp_path, kind, at, value):
    layout = Layout((Slot("w", (SIZE,), "parameter"),))
    vector = torch.ones(SIZE)
    if at is not None:
        vector[at] = value
    values = {"x": Tensors(layout, vector, torch.empty(0), torch.empty(0, dtype=torch.int64))}
    if kind is Behind:
        values["number"] = 1.0
    codec = Codec(layout, {})
    sent = codec.encode(kind(**values))
    message = m.Reply(
        key=Key(1, 0, 0, 0), form=list(sent.form), size=sent.body.size, check=sent.body.digest()
    )
    inbox = Inbox(tmp_path, journal_in(tmp_path), decoder_of(codec, kind))
    data = memoryview(bytearray(sent.body.to_bytes()))
    for start in range(0, len(data), m.PART):
        inbox.store(message.key, start, Body([data[start : start + m.PART]]))
    (found,) = inbox.accept([(Accepted(message, b"", b""), None)])
    if at is None:
        assert found.norms["x"] == pytest.approx(SIZE**0.5)
        return
    assert "a value is not finite" in str(found) or "a norm above" in str(found)


def test_a_reply_at_which_a_compressor_of_the_users_own_fails_is_refused():
    class Mine(Half):
        def encode(self, x, rng):
            return b"\xff" * self.nbytes(x.size)

        def decode(self, data, n):
            self.decode = lambda data, n: int(bytes(data))  # the sender has read it
            return np.zeros(n, dtype=np.float32)

    with pytest.raises(WrongPart, match=r"^ValueError: invalid literal .*test_decoding.py, line"):
        admit(ZERO, (0.0, 0.0), chains={"state": Chain(values=Mine())})
