"""What a reply must be before it may be folded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fednet.algorithms.base import Payload, Weights
from fednet.errors import RemoteProtocolError
from fednet.journal.events import Accepted
from fednet.journal.journal import Journal
from fednet.loading import WrongPart
from fednet.server.inbox import HeldMemory, ReceivedReply, SentModels, decoder
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.codec import Codec
from fednet.wire.compress import Chain
from fednet.wire.compressors.values import Half
from fednet.wire.messages import Key

LAYOUT = Layout(
    (Slot("w", (3,), "parameter"), Slot("mask", (2,), "buffer"), Slot("n", (), "counter"))
)
INF = float("inf")
NAN = float("nan")


class Whole(Payload):
    x: Weights


def admit(w, mask, exempt=frozenset(), chains=None):
    """Asks for a reply of these values."""
    codec = Codec(LAYOUT, chains or {}, exempt=exempt)
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
    decoder(exp, SentModels(), lambda client: None, lambda client: (0, 0))(
        [ReceivedReply(Accepted(message, b"", b""), message, HeldMemory(0), Journal(print))],
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


def test_a_reply_at_which_a_compressor_of_the_users_own_fails_is_refused():
    class Mine(Half):
        def encode(self, x, rng):
            return b"\xff" * self.nbytes(x.size)

        def decode(self, data, n):
            self.decode = lambda data, n: int(bytes(data))  # the sender has read it
            return np.zeros(n, dtype=np.float32)

    with pytest.raises(WrongPart, match=r"^ValueError: invalid literal .*test_admission.py, line"):
        admit(ZERO, (0.0, 0.0), chains={"state": Chain(values=Mine())})
