"""The division of a dataset between clients, and the samples of one client."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fednet.data.base import Data, Split
from fednet.plain import JsonDict
from fednet.seeds import rng, torch_rng
from fednet.tensors import Inputs, by_name, map_inputs, to_device

ON_GPU = 1 << 30  # bytes of raw samples up to which all lie on a GPU


@dataclass(frozen=True, eq=False)
class Site:
    """The samples of one client: its part of `data`, made into model inputs when they are used.

    noise: the standard deviation of the Gaussian noise that is added to the inputs (feature skew),
    in units of 0..1 for uint8 images (before mean and std), else of the inputs themselves; seed,
    client: of its draws. Whole numbers are not changed.
    """

    data: Data
    part: np.ndarray  # indices into data.train
    own_test: np.ndarray  # indices into data.test
    device: torch.device
    noise: float = 0.0
    seed: int = 0
    client: int = 0

    @cached_property
    def train(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the training split as model inputs on `device`."""
        return self._inputs(self.data.take(self.part), "train")

    @cached_property
    def test(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the client's own test split; may be empty."""
        return self._inputs(self.data.take(self.own_test, "test"), "test")

    @property
    def nbytes(self) -> int:
        """Bytes of the training inputs."""
        return self.n * self.data.input_nbytes

    @property
    def together(self) -> bool:
        """Whether the training samples are rows of `data` as it is, which has room on `device`."""
        if self.noise:
            return False
        return self.device.type == "cpu" or self.data.n_train * self.data.sample_nbytes <= ON_GPU

    def rows(self, index: np.ndarray) -> tuple[Inputs, torch.Tensor]:
        """(x, y): these rows of all training samples of `data` as model inputs on `device`, one
        behind the other; for a site that is `together`.
        """
        x, y = self.data.raw_samples(self.device)
        at = to_device(torch.from_numpy(index), self.device)
        taken = map_inputs(x, lambda part: part.index_select(0, at))
        return self.data.inputs(taken, self.device), y.index_select(0, at)

    @property
    def n(self) -> int:
        """Training samples, n_i."""
        return len(self.part)

    @property
    def n_test(self) -> int:
        return len(self.own_test)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """(C,) int64 training samples by class; (1,) if y holds values."""
        return np.bincount(self.data.labels()[self.part], minlength=self.data.table_classes)

    def _inputs(self, raw: Split, which: str) -> tuple[Inputs, torch.Tensor]:
        x = self.data.inputs(raw[0], self.device)
        y = to_device(raw[1], self.device)
        if not self.noise:
            return x, y
        if isinstance(x, dict):
            return {name: self._noisy(part, f"{which}/{name}") for name, part in x.items()}, y
        return self._noisy(x, f"{which}/"), y

    def _noisy(self, x: torch.Tensor, which: str) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        draws = torch_rng(self.seed, f"feature_noise/{which}", client=self.client)
        added = torch.randn(x.shape, generator=draws).mul_(self.noise)
        std = self.data.std
        if std is not None and x.ndim > 1 and x.shape[1] == len(std):
            added.div_(torch.tensor(std).view(1, -1, *([1] * (x.ndim - 2))))
        return x + added.to(x.device)


def noisy(data: Data) -> bool:
    """Whether `data.feature_noise` changes any of the inputs: none of whole numbers."""
    return any(part.dtype != torch.int64 for part in by_name(data.train[0]).values())


@dataclass(frozen=True, eq=False)
class Federation:
    """The data and their division. All index arrays are sorted int64; parts, validation and public
    are disjoint.
    """

    data: Data
    """May be divided into train and test otherwise than the loaded data (merge_split)."""
    parts: list[np.ndarray]
    """Indices into data.train, one array a client."""
    tests: list[np.ndarray]
    """Indices into data.test, one array a client; empty for `client_test: none`."""
    validation: np.ndarray
    """Indices into data.train."""
    public: np.ndarray
    """Indices into data.train."""
    scheme: str = ""
    feature_noise: float = 0.0
    """The noise of the last client, see `site`."""
    seed: int = 0
    """Of the noise's draws."""

    @property
    def clients(self) -> int:
        return len(self.parts)

    def table(self) -> np.ndarray:
        """Returns (N, C) int64 training samples by client and class."""
        return class_table(self.data.labels(), self.parts, self.data.table_classes)

    def test_table(self) -> np.ndarray:
        """Returns (N, C) int64 own test samples by client and class."""
        return class_table(self.data.labels("test"), self.tests, self.data.table_classes)

    def sha256(self, client: int) -> str:
        """Returns the SHA-256 of one client's training indices as little-endian int64 bytes."""
        return hashlib.sha256(self.parts[client].astype("<i8").tobytes()).hexdigest()

    def site(self, client: int, device: torch.device | str = "cpu") -> Site:
        """Returns one client's samples, with noise of feature_noise * client / (clients - 1). The
        levels are those of the code of Li et al., ICDE 2022 (arXiv:2102.02079: `--noise`), whose
        section IV calls sigma i / N a variance.

        Departs from that code: the noise is drawn once for each sample, before any augmentation,
        and the server's test set has none. The code draws it each time that a sample is loaded,
        after the augmentation, and evaluates on one copy of the test set for each client, with its
        noise.
        """
        noise = self.feature_noise * client / max(1, len(self.parts) - 1)
        part = self.parts[client]
        test = self.tests[client]
        return Site(self.data, part, test, torch.device(device), noise, self.seed, client)

    def only(self, indices: np.ndarray) -> Data | None:
        """Returns these training samples, such as the public ones, as `train` of a Data of their
        own; None without any.
        """
        if not len(indices):
            return None
        chosen = self.data.take(indices)
        return self.data.replace(train=chosen, test=None, groups=None, test_groups=None)

    def to_json(self) -> JsonDict:
        """Returns the contents of `partition.json`."""
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
        """Returns the index lists in the form that `data.partition: {scheme: file}` reads."""
        return {
            "train": [part.tolist() for part in self.parts],
            "test": [test.tolist() for test in self.tests],
            "sha256": [self.sha256(i) for i in range(self.clients)],
        }


def class_table(y: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    """Returns (N, C) int64 samples by client and class. parts: indices into y."""
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


def balanced_test(data: Data, seed: int) -> np.ndarray:
    """Returns sorted indices of a test set with as many samples of each class as the rarest class
    has (FedABC, Eq. 8).
    """
    y = data.labels("test")
    counts = np.bincount(y, minlength=data.table_classes)
    draw = rng(seed, "balanced_test")
    chosen = [draw.permutation(np.flatnonzero(y == c))[: counts.min()] for c in range(len(counts))]
    return np.sort(np.concatenate(chosen))
