"""What is compressed is the difference to what both ends remember."""

from __future__ import annotations

import copy
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch

from fednet.errors import ConfigError, Forgotten
from fednet.files import digest
from fednet.registry import compressor
from fednet.wire.compressors.base import Feedback, Memory, Reduce, Values
from fednet.wire.compressors.ef import expansive

MARK = 8  # bytes
ANEW = bytes(MARK)


class Shift(Feedback):
    """Both ends remember a vector h, 0 at first: C(x - h) is sent, h + C(x - h) stands for x, and h
    becomes h + step C(x - h).

    On the wire: 8 bytes that tell which h is meant (0: none, so that who lost it begins anew), then
    the rest of the chain. What else is meant than is here is refused, never mistaken.
    """

    shared = True
    head = MARK
    step = 1.0

    def wanted(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        h = memory.get("h")
        return x if h is None else x - h

    def said(self, memory: Memory) -> bytes:
        h = memory.get("h")
        if h is None:
            return ANEW
        found = digest([h.numpy().tobytes()])[:MARK]
        return found if found != ANEW else b"\1" * MARK

    def kept(self, wanted: torch.Tensor, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        return self.received(decoded, memory)

    def again(self, arrived: torch.Tensor, memory: Memory) -> None:
        memory.set(arrived, "h")

    def heard(self, said: bytes, memory: Memory) -> Memory:
        if said == ANEW:
            return Memory({}, memory.next, memory.field)
        if said != self.said(memory):
            raise Forgotten
        return memory

    def received(self, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
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

    def refused(self, select: Reduce | None, values: Values | None) -> str:
        if select is None and values is None:
            return "needs a compressor after it, such as topk"
        return expansive(select, values)

    def misplaced(self, way: str, kind: str) -> str:
        return "is for uploads; delta is the same for what comes down" if way == "down" else ""


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

    def __init__(
        self,
        alpha: Annotated[
            float, "Step with which the shift is learned, above 0 and at most 1/(1 + omega)."
        ],
    ) -> None:
        if not 0 < alpha <= 1:
            raise ConfigError(f"diana({alpha}): expected a step above 0 and at most 1.")
        self.step = float(alpha)

    def refused(self, select: Reduce | None, values: Values | None) -> str:
        found = [p.omega for p in (select, values) if p is not None]
        if not found or None in found:
            return "needs a compressor without bias, randk or qsgd; ef21 is for the others"
        most = 1.0
        for omega in found:
            most /= 1 + (omega or 0.0)
        if self.step > most * 1.001:
            return f"needs an alpha of at most 1/(1 + omega), here {most:.3g}"
        return ""

    def misplaced(self, way: str, kind: str) -> str:
        return "is for uploads; delta is for what comes down" if way == "down" else ""


@compressor("delta")
class Delta(Shift):
    """What comes down is the difference to what that client had last, where it still has it; the
    server keeps that for each client, and the client its own.

    w_i^{t+1} = w_i^t + C(x^{t+1} - w_i^t) (EF21-P), w_i^0 the initial model that all
    have. Where the rest of the chain loses nothing, as with zstd, it is the exclusive or of both
    bit patterns, and byte k of all values before byte k + 1: every bit is given back.
    """

    paper = "Gruntkowska, Tyurin and Richtarik 2022, EF21-P and Friends, arXiv:2209.15218"
    _exact = False

    def over(self, lossy: bool) -> Feedback:
        other = copy.copy(self)
        other._exact = not lossy
        return other

    def misplaced(self, way: str, kind: str) -> str:
        return "is for what comes down; ef21 is the same for uploads" if way == "up" else ""

    def refused(self, select: Reduce | None, values: Values | None) -> str:
        return expansive(select, values)

    def wanted(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        if not self._exact:
            return super().wanted(x, memory)
        bits = _mixed(x, memory.get("h"))
        return torch.from_numpy(bits.view(np.uint8).reshape(-1, 4).T.reshape(-1).view(np.float32))

    def received(self, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        if not self._exact:
            return super().received(decoded, memory)
        planes = decoded.numpy().view(np.uint8).reshape(4, -1)
        bits = torch.from_numpy(planes.T.reshape(-1).view(np.float32))
        arrived = torch.from_numpy(_mixed(bits, memory.get("h")).view(np.float32))
        memory.set(arrived, "h")
        return arrived


def _mixed(x: torch.Tensor, h: torch.Tensor | None) -> npt.NDArray[np.uint32]:
    """The bits of x, exclusive or those of h."""
    bits: npt.NDArray[np.uint32] = x.contiguous().numpy().view(np.uint32)
    return bits.copy() if h is None else bits ^ h.numpy().view(np.uint32)
