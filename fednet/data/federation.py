"""The division of a dataset between clients, and the samples of one client."""

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
    """The samples of one client: its part of `data`, made into model inputs when they are used."""

    data: Data
    part: np.ndarray  # indices into data.train
    own_test: np.ndarray  # indices into data.test
    device: torch.device
    change: Callable[[Inputs, str], Inputs] | None = None  # adds feature skew, see `noise`

    @cached_property
    def train(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the training split as model inputs on `device`."""
        return self._inputs(self.data.take(self.part), "train")

    @property
    def nbytes(self) -> int:
        """Bytes of the training inputs."""
        x = self.train[0]
        return sum(part.nbytes for part in (x.values() if isinstance(x, dict) else (x,)))

    @cached_property
    def test(self) -> tuple[Inputs, torch.Tensor]:
        """(x, y): the client's own test split; may be empty."""
        return self._inputs(self.data.take(self.own_test, "test"), "test")

    @property
    def n(self) -> int:
        """Training samples, n_i."""
        return len(self.part)

    @property
    def n_test(self) -> int:
        return len(self.own_test)

    @property
    def n_targets(self) -> int:
        """Labels or values in the test split; a sample may have several."""
        return self.n_test * self.data.targets_each

    @property
    def classes(self) -> int | None:
        return self.data.classes

    @cached_property
    def class_counts(self) -> np.ndarray:
        """(C,) int64 training samples by class; (1,) if y holds values."""
        return np.bincount(self.data.labels()[self.part], minlength=self.data.table_classes)

    def _inputs(self, raw: Split, which: str) -> tuple[Inputs, torch.Tensor]:
        x = self.data.inputs(raw[0], self.device)
        return x if self.change is None else self.change(x, which), to_device(raw[1], self.device)


@dataclass(frozen=True, eq=False)
class Federation:
    """The data and their division. All index arrays are sorted int64; parts, validation and public
    are disjoint.

    data: may be divided into train and test otherwise than the loaded data (merge_split). parts:
    indices into data.train, one array a client. tests: into data.test (empty arrays for
    `client_test: none`). validation, public: into data.train. feature_noise: the sigma of `noise`;
    seed: of its draws.
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
        """Returns (N, C) int64 training samples by client and class."""
        return class_table(self.data.labels(), self.parts, self.data.table_classes)

    def test_targets(self, client: int) -> int:
        """Returns the number of labels or values in one client's own test samples."""
        return len(self.tests[client]) * self.data.targets_each

    def test_table(self) -> np.ndarray:
        """Returns (N, C) int64 own test samples by client and class."""
        return class_table(self.data.labels("test"), self.tests, self.data.table_classes)

    def sha256(self, client: int) -> str:
        """Returns the SHA-256 of one client's training indices as little-endian int64 bytes."""
        return hashlib.sha256(self.parts[client].astype("<i8").tobytes()).hexdigest()

    def site(self, client: int, device: torch.device | str = "cpu") -> Site:
        change = noise(self.data, self.feature_noise, self.seed, client, self.clients)
        return Site(self.data, self.parts[client], self.tests[client], torch.device(device), change)

    def public_data(self) -> Data | None:
        """Returns the server's public samples as `train` of a Data of their own; None without
        any.
        """
        return self._only(self.public)

    def validation_data(self) -> Data | None:
        """Returns the validation samples as `train` of a Data of their own; None without any."""
        return self._only(self.validation)

    def facts(self, client: int) -> JsonDict:
        """Returns the fields of `ClientFacts`, by which the sizes of messages are predicted."""
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
        return {"train": [p.tolist() for p in self.parts], "test": [t.tolist() for t in self.tests]}

    def _only(self, indices: np.ndarray) -> Data | None:
        if not len(indices):
            return None
        return self.data.replace(train=self.data.take(indices), test=None, groups=None)


def class_table(y: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    """Returns (N, C) int64 samples by client and class. parts: indices into y."""
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


def noise(
    data: Data, sigma: float, seed: int, client: int, clients: int
) -> Callable[[Inputs, str], Inputs] | None:
    """Returns a function that adds Gaussian noise of standard deviation sigma * client / (clients -
    1) to a client's inputs (feature skew); None for no noise. It takes (inputs, `train` or `test`).

    sigma: in units of 0..1 for uint8 images (before mean and std), else of the inputs themselves.
    Whole numbers are not changed. The levels are those of the code of Li et al., ICDE 2022
    (arXiv:2102.02079: `--noise`), whose section IV calls sigma i / N a variance.

    Departs from that code: the noise is drawn once for each sample, before any augmentation, and
    the server's test set has none. The code draws it each time that a sample is loaded, after the
    augmentation, and evaluates on one copy of the test set for each client, with its noise.
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
    """Returns sorted indices of a test set with as many samples of each class as the rarest class
    has (FedABC, Eq. 8).
    """
    y = data.labels("test")
    counts = np.bincount(y, minlength=data.table_classes)
    draw = rng(seed, "balanced_test")
    chosen = [draw.permutation(np.flatnonzero(y == c))[: counts.min()] for c in range(len(counts))]
    return np.sort(np.concatenate(chosen))
