"""What a reply must be before it may be folded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fednet.algorithms.base import Payload, Weights
from fednet.errors import RemoteProtocolError
from fednet.server.inbox import HeldMemory, Reply, ReplyRecord, Sent, decoder
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire import messages as m
from fednet.wire.codec import Codec
from fednet.wire.messages import Key

LAYOUT = Layout(
    (Slot("w", (3,), "parameter"), Slot("mask", (2,), "buffer"), Slot("n", (), "counter"))
)
INF, NAN = float("inf"), float("nan")


class Whole(Payload):
    x: Weights


def admit(w, mask=(0.0, 0.0), exempt=frozenset()):
    """Asks for a reply of these values."""
    codec = Codec(LAYOUT, {}, exempt=exempt)
    exp = SimpleNamespace(
        up=codec,
        shared=LAYOUT,
        federation=None,
        algorithm=SimpleNamespace(exchanges=[SimpleNamespace(up=Whole)]),
        setting=SimpleNamespace(initial=Tensors.zeros(LAYOUT), classes=2),
        config=SimpleNamespace(security=SimpleNamespace(max_norm=None), train=None),
    )
    sent = codec.encode(
        Whole(x=Tensors(LAYOUT, torch.tensor(w), torch.tensor(mask), torch.tensor([1])))
    )
    form = list(sent.form)
    message = m.Reply(key=Key(1, 0, 0, 0), form=form, size=sum(f.size for f in form))
    decoder(exp, Sent(), lambda client: None, lambda client: (0, 0))(
        Reply(ReplyRecord(message=message), message, HeldMemory(0), ""),
        memoryview(bytes(sent.body.whole())),
    )


@pytest.mark.parametrize("w", [(0.0, 0.0, 0.0), (1e19, 0.0, 0.0), (-1e19, 1e19, 0.0)])
def test_finite_values_of_a_norm_that_float32_holds_are_let_in(w):
    admit(w)


@pytest.mark.parametrize(
    ("w", "mask", "says"),
    [
        ((NAN, 0.5, 0.5), (0.0, 0.0), "a value is not finite"),
        ((0.5, 0.5, -INF), (0.0, 0.0), "a value is not finite"),
        ((0.0, 0.0, 0.0), (0.0, NAN), "a value is not finite"),
        ((0.0, 0.0, 0.0), (0.0, INF), "a value is not finite"),
        ((1e25, 0.0, 0.0), (0.0, 0.0), "a norm above"),
        ((3e38, -3e38, 0.0), (0.0, 0.0), "a norm above"),  # finite values, whose squares are not
    ],
)
def test_values_that_are_not_finite_or_too_large_are_refused(w, mask, says):
    with pytest.raises(RemoteProtocolError, match=f"field x: {says}"):
        admit(w, mask)


def test_a_buffer_that_the_model_began_with_may_be_infinite():
    exempt = frozenset({"mask"})
    admit((0.0, 0.0, 0.0), (0.0, INF), exempt)
    with pytest.raises(RemoteProtocolError, match="a value is not finite"):
        admit((0.0, NAN, 0.0), (0.0, INF), exempt)
