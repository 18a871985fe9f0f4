"""Every random draw of a run, from one seed.

`rng(seed, purpose, round, client)` gives an independent stream for each purpose, round and client
(see "Bits" in docs/architecture.md). No method consumes another's numbers, so two methods with one
seed see the same clients and the same batches. Nothing is seeded globally.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def key(seed: int, purpose: str, round: int = 0, client: int = -1) -> int:
    """Returns a 64-bit number for (seed, purpose, round, client): the first 8 bytes of their
    SHA-256, less the top bit.
    """
    text = f"fednet/{seed}/{purpose}/{round}/{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def rng(seed: int, purpose: str, round: int = 0, client: int = -1) -> np.random.Generator:
    """Returns a NumPy generator of its own for (seed, purpose, round, client)."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, round, client)))


def torch_rng(seed: int, purpose: str, round: int = 0, client: int = -1) -> torch.Generator:
    """Returns a CPU torch generator of its own for (seed, purpose, round, client)."""
    import torch

    return torch.Generator().manual_seed(key(seed, purpose, round, client))


_drawing = threading.RLock()


@contextlib.contextmanager
def scope(
    seed: int, purpose: str, round: int = 0, client: int = -1, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Inside, torch's default generator of `device`, NumPy's and Python's draw from this stream;
    afterwards they have their former state.

    For code without a `generator` argument: `nn.Module` initialisation, dropout, a user's own
    dataset. Lets in one thread at a time, since threads share these generators.
    """
    import torch

    kind = torch.device(device)
    devices = [kind] if kind.type == "cuda" else []
    with _drawing, torch.random.fork_rng(devices=devices):
        start = key(seed, purpose, round, client)
        torch.default_generator.manual_seed(start)
        if devices:
            torch.cuda.manual_seed(start)
        numpys = np.random.get_state()
        pythons = random.getstate()
        np.random.seed(start % 2**32)
        random.seed(start)
        try:
            yield
        finally:
            np.random.set_state(numpys)
            random.setstate(pythons)
