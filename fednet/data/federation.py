"""Which client has which samples, and what one client trains and is evaluated on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fednet.data.base import Data, Split
from fednet.plain import JsonDict
from fednet.seeds import rng, torch_rng
from fednet.tensors import Inputs, to_device


@dataclass(frozen=True, eq=False)
class Site:
    """What one client has at home: its slice of `data`, made into model inputs when asked for.

    Only the slice becomes float32, never the whole dataset. On the CPU bytes are kept as bytes:
    four times as many clients stay in memory, and to make float32 of them takes a seventh of
    gathering them anew (1.3 ms against 8.8 ms for 500 images of 3 kB where this was measured).
    """

    data: Data
    part: np.ndarray  # indices into data.train
    own_test: np.ndarray  # indices into data.test
    device: torch.device
    change: Callable[[Inputs, str], Inputs] | None = None  # of this client's inputs: see `noise`

    @property
    def train(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the training split as model inputs, one tensor (or a dict of them), on
        `device`.
        """
        return self._inputs(self._kept, "train") if self._as_bytes else self._kept

    @cached_property
    def _kept(self) -> tuple[Inputs, torch.Tensor]:
        raw = self.raw()
        return raw if self._as_bytes else self._inputs(raw, "train")

    @cached_property
    def _as_bytes(self) -> bool:
        x = self.data.train[0]
        small = isinstance(x, torch.Tensor) and x.dtype == torch.uint8
        return small and self.change is None and self.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the training split's x, as it is kept from the first time it is asked for."""
        x = self._kept[0]
        return sum(part.nbytes for part in (x.values() if isinstance(x, dict) else (x,)))

    @cached_property
    def test(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the client's own test split, likewise; may be empty."""
        return self._inputs(self.data.take(self.own_test, "test"), "test")

    def raw(self, chosen: np.ndarray | None = None) -> Split:
        """Training samples as stored (uint8 where images are), on the CPU; `chosen`: positions
        0..n-1, default all.
        """
        return self.data.take(self.part if chosen is None else self.part[chosen])

    @property
    def n(self) -> int:
        """Training samples, n_i."""
        return len(self.part)

    @property
    def n_test(self) -> int:
        return len(self.own_test)

    @property
    def n_targets(self) -> int:
        """Labels or values in the test split: more than its samples where each has several."""
        return self.n_test * self.data.targets_each

    @property
    def classes(self) -> int | None:
        return self.data.classes

    @cached_property
    def class_counts(self) -> np.ndarray:
        """(C,) int64 training samples by class; (1,) where y holds values."""
        return np.bincount(self.data.labels()[self.part], minlength=self.data.table_classes)

    def _inputs(self, raw: Split, which: str) -> tuple[Inputs, torch.Tensor]:
        x = self.data.inputs(raw[0], self.device)
        return x if self.change is None else self.change(x, which), to_device(raw[1], self.device)


@dataclass(frozen=True, eq=False)
class Federation:
    """The data and their division. All index arrays are sorted int64; parts, validation and public
    are disjoint.

    data: may be laid out differently from what was loaded (merge_split): indices are into this one.
    parts: into data.train, one array a client. tests: into data.test, likewise (empty arrays for
    `client_test: none`). validation, public: into data.train. feature_noise: of the last client, as
    `noise` has it; seed: of its draws.
    """

    data: Data
    parts: list[np.ndarray]
    tests: list[np.ndarray]
    validation: np.ndarray
    public: np.ndarray
    scheme: str = ""
    feature_noise: float = 0.0
    seed: int = 0

    @property
    def clients(self) -> int:
        return len(self.parts)

    def table(self) -> np.ndarray:
        """(N, C) int64 training samples by client and class."""
        y = self.data.labels()
        return np.stack([np.bincount(y[p], minlength=self.data.table_classes) for p in self.parts])

    def test_targets(self, client: int) -> int:
        """Labels or values in one client's own test samples."""
        return len(self.tests[client]) * self.data.targets_each

    def test_table(self) -> np.ndarray:
        """(N, C) int64 own test samples by client and class."""
        y = self.data.labels("test")
        return np.stack([np.bincount(y[t], minlength=self.data.table_classes) for t in self.tests])

    def sha256(self, client: int) -> str:
        """SHA-256 of one client's training indices as little-endian int64 bytes."""
        return hashlib.sha256(self.parts[client].astype("<i8").tobytes()).hexdigest()

    def site(self, client: int, device: torch.device | str = "cpu") -> Site:
        change = noise(self.data, self.feature_noise, self.seed, client, self.clients)
        return Site(self.data, self.parts[client], self.tests[client], torch.device(device), change)

    def public_data(self) -> Data | None:
        """The server's public samples as `train` of a Data of their own, or None where there are
        none.
        """
        return self._only(self.public)

    def validation_data(self) -> Data | None:
        """The validation samples as `train` of a Data of their own, or None where there are
        none.
        """
        return self._only(self.validation)

    def facts(self, client: int) -> JsonDict:
        """What predicts a client's message sizes: the fields of
        `fednet.algorithms.base.ClientFacts`.
        """
        counts = np.bincount(
            self.data.labels()[self.parts[client]], minlength=self.data.table_classes
        )
        return {
            "n": len(self.parts[client]),
            "class_counts": tuple(int(n) for n in counts),
            "sample_nbytes": self.data.sample_nbytes,
            "input_shape": self.data.input_shape,
            "public_n": len(self.public),
        }

    def to_json(self) -> JsonDict:
        """What `partition.json` holds."""
        return {
            "scheme": self.scheme,
            **({"feature_noise": self.feature_noise} if self.feature_noise else {}),
            "clients": self.clients,
            "classes": self.data.classes,
            "outputs": self.data.outputs,
            "input_shape": list(self.data.input_shape),
            "samples": [len(p) for p in self.parts],
            "test_samples": [len(t) for t in self.tests],
            "samples_by_class": self.table().tolist(),
            "test_samples_by_class": self.test_table().tolist(),
            "unused": self.data.n_train
            - sum(map(len, self.parts))
            - len(self.public)
            - len(self.validation),
            "public": len(self.public),
            "validation": len(self.validation),
            "sha256": [self.sha256(i) for i in range(self.clients)],
        }

    def export(self) -> JsonDict:
        """The index lists, as `data.partition: {scheme: file}` reads them back."""
        return {"train": [p.tolist() for p in self.parts], "test": [t.tolist() for t in self.tests]}

    def _only(self, indices: np.ndarray) -> Data | None:
        return (
            self.data.replace(train=self.data.take(indices), test=None, groups=None)
            if len(indices)
            else None
        )


def noise(
    data: Data, sigma: float, seed: int, client: int, clients: int
) -> Callable[[Inputs, str], Inputs] | None:
    """Feature skew: what adds Gaussian noise of standard deviation sigma * client / (clients - 1)
    to a client's inputs, so that the first has none and the last sigma; None where there is none.

    The levels are those of the code of Li et al., ICDE 2022 (arXiv:2102.02079: `--noise`), whose
    section IV calls sigma i / N a variance. sigma: in units of 0..1 for uint8 images (before mean
    and std), else of the inputs themselves; whole numbers are left alone. Drawn once for each
    sample, before any augmentation: it is a property of the client's data, its own test split
    included. That code draws it anew each time that a sample is loaded, after the augmentation, and
    judges the global model on as many copies of the test set, with the noise of each client; here
    the server's test set has none.
    What is called takes (inputs, `train` or `test`).
    """
    level = sigma * client / max(1, clients - 1)
    if level == 0:
        return None

    def one(x: torch.Tensor, which: str, name: str = "") -> torch.Tensor:
        if not x.is_floating_point():
            return x
        draws = torch_rng(seed, f"feature_noise/{which}/{name}", client=client)
        added = torch.randn(x.shape, generator=draws).mul_(level)
        if data.std is not None and x.ndim > 1 and x.shape[1] == len(data.std):
            added.div_(torch.tensor(data.std).view(1, -1, *([1] * (x.ndim - 2))))
        return x + added.to(x.device)

    def changed(x: Inputs, which: str) -> Inputs:
        if isinstance(x, dict):
            return {name: one(part, which, name) for name, part in x.items()}
        return one(x, which)

    return changed


def balanced_test(data: Data, seed: int) -> np.ndarray:
    """Sorted indices of a class-balanced test set: of each class as many as the rarest one has
    (FedABC, Eq. 8).
    """
    y = data.labels("test")
    counts = np.bincount(y, minlength=data.table_classes)
    draw = rng(seed, "balanced_test")
    chosen = [draw.permutation(np.flatnonzero(y == c))[: counts.min()] for c in range(len(counts))]
    return np.sort(np.concatenate(chosen))
