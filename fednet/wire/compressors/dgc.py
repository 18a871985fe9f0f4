from __future__ import annotations

from typing import Annotated

import torch

from fednet.errors import ConfigError
from fednet.registry import compressor
from fednet.wire.compressors.base import Feedback, Memory, Reduce, Values
from fednet.wire.compressors.ef import expansive
from fednet.wire.compressors.topk import TopK


@compressor("dgc")
class DGC(Feedback):
    """Deep gradient compression: error feedback with a momentum of its own, before topk.

    u_t = m u_{t-1} + g_t, v_t = v_{t-1} + u_t, the largest of v_t are sent, and where they stood u
    and v become 0 (momentum correction, Eq. 5, and momentum factor masking, Eq. 6). g_t is the
    client's update, scaled down to the norm `clip` where it is longer (local gradient clipping; the
    paper's bound is N^{-1/2} times that of all N; 0: none). In the first `warmup` rounds the share
    s of topk is larger, s**(t / (warmup + 1)) in round t: with 0.001 and 4, as there, about 0.25,
    0.063, 0.016 and 0.004.

    A client that was not asked keeps u and v as they were.
    """

    paper = "Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887"

    def __init__(
        self,
        momentum: Annotated[float, "Momentum m, from 0 and below 1."] = 0.9,
        clip: Annotated[float, "Bound of the update's norm; 0: none. [norm]"] = 0,
        warmup: Annotated[int, "Rounds in which more than topk's share is sent. [rounds]"] = 0,
    ) -> None:
        said = f"dgc({momentum}, {clip}, {warmup})"
        if not 0 <= momentum < 1:
            raise ConfigError(f"{said}: expected a momentum from 0, below 1.")
        if clip < 0 or warmup < 0 or warmup != int(warmup):
            raise ConfigError(f"{said}: expected a norm and a number of rounds, 0 or above.")
        self.momentum, self.clip, self.warmup = float(momentum), float(clip), int(warmup)

    def refused(self, select: Reduce | None, values: Values | None) -> str:
        if not isinstance(select, TopK):
            return "is made for topk, which must follow it"
        return expansive(select, values)

    def misplaced(self, way: str, kind: str) -> str:
        if way == "down":
            return "is for uploads: its momentum is a client's"
        if kind not in ("state", "delta"):
            return "is for updates, of kind state or delta: no other kind has a momentum"
        return ""

    def selecting(self, select: Reduce, round: int) -> Reduce:
        if round > self.warmup or not isinstance(select, TopK):
            return select
        return select.at(select.share ** (round / (self.warmup + 1)))

    def wanted(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        norm = float(torch.linalg.vector_norm(x.double()))
        g = x * (self.clip / norm) if 0 < self.clip < norm else x
        u, v = memory.get("u"), memory.get()
        u = g if u is None else self.momentum * u + g
        memory.set(u, "u")
        return u if v is None else v + u

    def kept(self, wanted: torch.Tensor, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        sent, u = decoded != 0, memory.next_of("u")
        memory.set(wanted.masked_fill(sent, 0.0))
        memory.set(u.masked_fill(sent, 0.0), "u")
        return decoded
