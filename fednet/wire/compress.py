"""Chains of compressors: `[topk(0.01), qsgd(8), zstd]`, either way, for the kinds that a
configuration names.

A chain takes a vector of float32, and nothing else: integer counters and labels never pass through
one. Its parts come in this order, each at most once: one that selects values (topk), one that
writes them (fp16, bf16, qsgd, sign), one that shortens bytes (zstd). The number of values is known
to both ends, so a chain adds no header, and the length of what it makes follows from that number
(with zstd: a bound on it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fednet import registry
from fednet.errors import ConfigError, RemoteProtocolError
from fednet.options import instance
from fednet.wire.compressors.base import Floats, Lossless, Part, Select, Values


@dataclass(frozen=True, slots=True)
class Chain:
    """Compressors in order; the empty chain writes float32. `text` is its configuration."""

    select: Select | None = None
    values: Values | None = None
    lossless: Lossless | None = None
    text: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(p for p in (self.select, self.values, self.lossless) if p is not None)

    @property
    def lossy(self) -> bool:
        return any(p.lossy for p in self.parts)

    @property
    def needs_feedback(self) -> bool:
        """True if what is lost must be sent later (topk, sign); what qsgd loses has no bias, and
        rounding is small.
        """
        return any(p.biased for p in self.parts)

    def __str__(self) -> str:
        return "[" + ", ".join(self.text) + "]"

    def nbytes(self, numel: int) -> tuple[int, bool]:
        """Length of numel encoded values, and whether that is exact; without, it is an upper
        bound.
        """
        raw = self._raw(numel)
        return (raw, True) if self.lossless is None else (self.lossless.bound(raw), False)

    def encode(self, vector: torch.Tensor, rng: np.random.Generator) -> bytes:
        """vector: (n,) float32 on the CPU. Draws from `rng` only where the chain is stochastic.

        Values that are not finite are not hidden: `decode` gives them back so, or refuses.
        """
        if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != "cpu":
            found = f"{tuple(vector.shape)} {vector.dtype} {vector.device}"
            raise TypeError(f"expected a (n,) float32 tensor on the CPU, got {found}")
        x: Floats = vector.detach().numpy()
        pieces = []
        if self.select is not None:
            kept = self.select.select(x)
            x = x[kept]
            pieces.append(kept.astype("<u4", copy=False).tobytes())
        pieces.append(
            x.astype("<f4", copy=False).tobytes()
            if self.values is None
            else self.values.encode(x, rng)
        )
        raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return raw if self.lossless is None else self.lossless.encode(raw)

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> torch.Tensor:
        """(numel,) float32. Raises RemoteProtocolError for what `encode` cannot have made of numel
        values.
        """
        expected, view = self._raw(numel), memoryview(data).cast("B")
        if self.lossless is not None:
            most = self.lossless.bound(expected)
            if len(view) > most:
                raise RemoteProtocolError(
                    f"{self}: {len(view)} bytes for {numel} values, expected at most {most}."
                )
            view = memoryview(self.lossless.decode(view, expected))
        elif len(view) != expected:
            raise RemoteProtocolError(
                f"{self}: {len(view)} bytes for {numel} values, expected {expected}."
            )
        if self.select is None:
            return torch.from_numpy(self._written(view, numel))
        k = self.select.count(numel)
        indices = np.frombuffer(view[: 4 * k], dtype="<u4").astype(np.int64)
        if k and (int(indices[-1]) >= numel or bool((indices[1:] <= indices[:-1]).any())):
            raise RemoteProtocolError(
                f"{self}: the indices do not ascend, or reach beyond {numel} values."
            )
        out = np.zeros(numel, dtype=np.float32)
        out[indices] = self._written(view[4 * k :], k)
        return torch.from_numpy(out)

    def _raw(self, numel: int) -> int:
        k = numel if self.select is None else self.select.count(numel)
        indices = 0 if self.select is None else 4 * k
        return indices + (4 * k if self.values is None else self.values.nbytes(k))

    def _written(self, view: memoryview, n: int) -> Floats:
        if self.values is None:
            return np.frombuffer(view, dtype="<f4").astype(np.float32)
        return self.values.decode(view, n)


def parse(items: Sequence[str]) -> Chain:
    """The chain of a configuration's list, such as ["topk(0.01)", "qsgd(8)"]. Raises
    ConfigError.
    """
    chain = Chain()
    for item in items:
        part, text = _part(item), (*chain.text, str(item).replace(" ", ""))
        if isinstance(part, Select) and not chain.parts:
            chain = Chain(select=part, text=text)
        elif isinstance(part, Values) and chain.values is None and chain.lossless is None:
            chain = Chain(chain.select, part, None, text)
        elif isinstance(part, Lossless) and chain.lossless is None:
            chain = Chain(chain.select, chain.values, part, text)
        else:
            raise ConfigError(
                f"{chain}: {item!r} cannot follow; the order is topk, one of fp16, bf16, qsgd, "
                f"sign, "
                "zstd, each at most once."
            )
    return chain


def chains(section: Mapping[str, Sequence[str]], where: str = "wire.up") -> dict[str, Chain]:
    """The chains of `wire.up` or `wire.down`, by kind; kinds with an empty list are left out.
    Errors name the key.
    """
    found = {}
    for kind, items in section.items():
        try:
            chain = parse(items)
        except ConfigError as e:
            raise ConfigError(f"{where}.{kind}: {e}") from e
        if chain.parts:
            found[kind] = chain
    return found


def _part(item: str) -> Part:
    part = instance(registry.compressor, item)
    if not isinstance(part, (Select, Values, Lossless)):
        raise ConfigError(f"compressor {item!r} derives from none of Select, Values and Lossless.")
    return part
