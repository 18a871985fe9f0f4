"""Error feedback, and differences to what both ends remember."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.files import digest
from fednet.registry import compressor
from fednet.wire.compressors.base import Feedback, Memory, Reduce, Values
from fednet.wire.compressors.selecting import TopK


@compressor("ef")
class ErrorFeedback(Feedback):
    """Error feedback: what was not sent is added to what is sent next. topk, threshold, sign and
    powersgd have it where nothing else is named.

    p_t = x_t + e_t, C(p_t) is sent, and e_{t+1} = p_t - C(p_t) (Algorithm 2, EF-SGD; here x_t is
    the update that a client sends, in which its learning rate is). e is the sender's.
    """

    paper = "Karimireddy et al. 2019, Error Feedback Fixes SignSGD, arXiv:1901.09847"

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        if select is None and values is None:
            return "has nothing to feed back: the rest of the chain loses nothing"
        return expansive(select, values)

    def target(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        left = memory.get()
        return x if left is None else x + left

    def remember_sent(
        self, target: torch.Tensor, decoded: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        memory.set(target - decoded)
        return decoded


@compressor("noef")
class NoErrorFeedback(Feedback):
    """No error feedback, where there would be: what was not sent is lost."""

    paper = "the baseline of Stich et al. 2018, arXiv:1809.07599"
    turned_off = True
    scaled = True

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        biased = any(p is not None and p.biased for p in (select, values))
        return "" if biased else "turns nothing off: the rest of the chain has no error feedback"


def expansive(select: Reduce | None, values: Values | None) -> str:
    """Why what feeds errors back cannot have these: an error could grow from round to round."""
    if select is None and values is not None and not values.contracts:
        return (
            "needs a compressor that contracts, which this one does not: without bias it needs "
            "none, and diana is made for it"
        )
    return ""


MARK = 8  # bytes
ANEW = bytes(MARK)


class Shift(Feedback):
    """Both ends remember a vector h, 0 at first: C(x - h) is sent, h + C(x - h) stands for x, and h
    becomes h + step C(x - h).

    On the wire: 8 bytes that identify h (0: no h, so that an end that lost it starts again from 0),
    then the rest of the chain. Bytes for another h than this end has are refused.
    """

    shared = True
    head = MARK
    step = 1.0

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        if select is None and values is None:
            return "needs a compressor after it that loses something, such as topk"
        return expansive(select, values)

    def target(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        h = memory.get("h")
        return x if h is None else x - h

    def prefix(self, memory: Memory) -> bytes:
        h = memory.get("h")
        if h is None:
            return ANEW
        found = digest([h.numpy().tobytes()])[:MARK]
        return found if found != ANEW else b"\1" * MARK

    def remember_sent(
        self, target: torch.Tensor, decoded: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        return self.remember_received(decoded, memory)

    def repeat_sent(self, arrived: torch.Tensor, memory: Memory) -> None:
        memory.set(arrived, "h")

    def read_prefix(self, prefix: bytes, memory: Memory) -> Memory:
        if prefix == ANEW:
            return dataclasses.replace(memory, known={})
        if prefix != self.prefix(memory):
            raise RemoteProtocolError(
                "compressed with another memory of earlier messages than here"
            )
        return memory

    def remember_received(self, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        h = memory.get("h")
        arrived = moved = decoded if h is None else h + decoded
        if self.step != 1:
            moved = self.step * decoded if h is None else h + self.step * decoded
        memory.set(moved, "h")
        return arrived


@compressor("ef21")
class EF21(Shift):
    """The client compresses the difference between its update and what the server last had of it;
    for compressors that contract, such as topk. Server and client both keep that vector.

    g_i^{t+1} = g_i^t + C(grad f_i(x^{t+1}) - g_i^t), with g_i^0 = 0 (Algorithm 2, EF21); the
    client's update takes the place of the gradient. A client that is not asked keeps its g_i.

    With part of the clients in a round this is not EF21-PP (Fatkhullin et al. 2021,
    arXiv:2110.03294): its server steps along the mean of all N clients' g_i, those of absent
    clients as they were. Here the method aggregates the g_i of the round's clients alone, as it
    does with whatever they send: a compressor changes how a reply is written, not whose replies
    count, and no method has a weight for a client that did not reply. With all clients in each
    round, both are the same.
    """

    paper = "Richtarik, Sokolov and Fatkhullin 2021, EF21, arXiv:2106.05203"
    way = "up"


@compressor("diana")
class Diana(Shift):
    """The client compresses the difference between its update and a shift that server and client
    both learn with the step `alpha`; for compressors without bias, randk and qsgd.

    With h_i the shift: Delta_i = g_i - h_i, and Q(Delta_i) is sent. The server uses
    h_i + Q(Delta_i) as g_i, and h_i becomes h_i + alpha Q(Delta_i) (Algorithm 1, DIANA). alpha is
    at most 1/(1 + omega), where E||Q(x) - x||^2 <= omega ||x||^2. The client's update takes the
    place of the gradient g_i.

    DIANA has all N clients in each round, and its server keeps the mean of their h_i. With part of
    the clients in a round the method here aggregates the h_i + Q(Delta_i) of these alone; variants
    for partial participation add the absent clients' h_i, as EF21-PP adds their g_i (see ef21).
    """

    paper = (
        "Mishchenko et al. 2019, Distributed Learning with Compressed Gradient Differences, "
        "arXiv:1901.09269"
    )
    scaled = True
    way = "up"

    def __init__(
        self,
        alpha: Annotated[
            float, "Step with which the shift is learned, above 0 and at most 1/(1 + omega)."
        ],
    ) -> None:
        if not 0 < alpha <= 1:
            raise ConfigError(f"diana({alpha}): expected a step above 0 and at most 1.")
        self.step = float(alpha)

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        found = [p.omega for p in (select, values) if p is not None]
        if not found or None in found:
            return "needs a compressor without bias, randk or qsgd; ef21 is for the others"
        most = 1.0
        for omega in found:
            most /= 1 + (omega or 0.0)
        if self.step > most * 1.001:
            return f"needs an alpha of at most 1/(1 + omega), here {most:.3g}"
        return ""


@compressor("delta")
class Delta(Shift):
    """What comes down is the difference to what that client had last, where it still has it; the
    server keeps that for each client, and the client its own.

    w_i^{t+1} = w_i^t + C(x^{t+1} - w_i^t) (EF21-P), w_i^0 the initial model that all
    have.
    """

    paper = "Gruntkowska, Tyurin and Richtarik 2022, EF21-P and Friends, arXiv:2209.15218"
    way = "down"


@compressor("dgc")
class DGC(Feedback):
    """Deep gradient compression: error feedback with a momentum of its own, before topk.

    u_t = m u_{t-1} + g_t, v_t = v_{t-1} + u_t, the largest of v_t are sent, and where they stood u
    and v become 0 (momentum correction, Eq. 5, and momentum factor masking, Eq. 6). g_t is the
    client's update, scaled down to the norm `clip` where it is longer (local gradient clipping; the
    paper's bound is N^{-1/2} times that of all N; 0: none). The paper's warm-up, in which topk's
    share begins at 0.25 and falls from epoch to epoch, is left out.

    A client that was not asked keeps u and v as they were.
    """

    paper = "Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887"
    way = "up"

    def __init__(
        self,
        momentum: Annotated[float, "Momentum m, from 0 and below 1."] = 0.9,
        clip: Annotated[float, "Bound of the update's norm; 0: none. [norm]"] = 0,
    ) -> None:
        said = f"dgc({momentum}, {clip})"
        if not 0 <= momentum < 1:
            raise ConfigError(f"{said}: expected a momentum from 0, below 1.")
        if clip < 0:
            raise ConfigError(f"{said}: expected a norm, 0 or above.")
        self.momentum = float(momentum)
        self.clip = float(clip)

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        if not isinstance(select, TopK):
            return "is made for topk, which must follow it"
        return expansive(select, values)

    def wrong_place(self, way: str, kind: str) -> str:
        if way == "up" and kind not in ("state", "delta"):
            return "is for updates, of kind state or delta: no other kind has a momentum"
        return super().wrong_place(way, kind)

    def target(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        norm = float(torch.linalg.vector_norm(x.double()))
        g = x * (self.clip / norm) if 0 < self.clip < norm else x
        u = memory.get("u")
        v = memory.get()
        u = g if u is None else self.momentum * u + g
        memory.set(u, "u")
        return u if v is None else v + u

    def remember_sent(
        self, target: torch.Tensor, decoded: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        sent = decoded != 0
        u = memory.next_of("u")
        memory.set(target.masked_fill(sent, 0.0))
        memory.set(u.masked_fill(sent, 0.0), "u")
        return decoded
