"""The usual image benchmarks, read (and, if asked, fetched) by torchvision, which is imported only
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednet.data.base import Data
from fednet.errors import DataError
from fednet.files import alone
from fednet.registry import dataset


@dataset("mnist")
def mnist(root: Path, download: bool) -> Data:
    """MNIST: 60,000 + 10,000 handwritten digits, 1x28x28, 10 classes."""
    return _grey("MNIST", root, download, (0.1307,), (0.3081,))


@dataset("fashion-mnist")
def fashion_mnist(root: Path, download: bool) -> Data:
    """Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 1x28x28, 10 classes."""
    return _grey("FashionMNIST", root, download, (0.2860,), (0.3530,))


@dataset("svhn")
def svhn(root: Path, download: bool) -> Data:
    """SVHN: 73,257 + 26,032 house numbers, 3x32x32, 10 classes (without the extra set)."""
    train, test = (_read("SVHN", root, download, split=which) for which in ("train", "test"))
    return Data(
        train=(train.data, train.labels),
        test=(test.data, test.labels),
        classes=10,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        names=tuple("0123456789"),
    )


@dataset("cifar10")
def cifar10(root: Path, download: bool) -> Data:
    """CIFAR-10: 50,000 + 10,000 photographs, 3x32x32, 10 classes."""
    return _cifar("CIFAR10", root, download, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataset("cifar100")
def cifar100(root: Path, download: bool) -> Data:
    """CIFAR-100: 50,000 + 10,000 photographs, 3x32x32, 100 classes."""
    return _cifar("CIFAR100", root, download, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _grey(name: str, root: Path, download: bool, mean: tuple[float], std: tuple[float]) -> Data:
    train, test = (_read(name, root, download, train=which) for which in (True, False))
    return Data(
        train=(train.data.unsqueeze(1), train.targets),
        test=(test.data.unsqueeze(1), test.targets),
        classes=10,
        mean=mean,
        std=std,
        names=tuple(train.classes),
    )


def _cifar(
    name: str, root: Path, download: bool, mean: tuple[float, ...], std: tuple[float, ...]
) -> Data:
    train, test = (_read(name, root, download, train=which) for which in (True, False))
    pairs = [
        (torch.from_numpy(d.data).permute(0, 3, 1, 2), np.array(d.targets)) for d in (train, test)
    ]
    names = tuple(train.classes)
    return Data(train=pairs[0], test=pairs[1], classes=len(names), mean=mean, std=std, names=names)


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Waits until no other process of this machine fetches data into the folder."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".fednet.lock", "w") as lock, alone(lock.fileno()):
        yield


def _read(name: str, root: Path, download: bool, **which: object) -> Any:
    """Returns one of torchvision's datasets, each of which has attributes of its own."""
    from torchvision import datasets

    try:
        with _one_at_a_time(root) if download else contextlib.nullcontext():
            return getattr(datasets, name)(str(root), download=download, **which)
    except (RuntimeError, OSError, ValueError) as wrong:  # absent or damaged files; no network
        first = (str(wrong).splitlines() or [type(wrong).__name__])[0]
        reason = first.partition(" You can use")[0].rstrip(".")
        hint = ""
        if not download:
            hint = (
                " Set data.root or FEDNET_DATA to the folder that holds it, or data.download: true "
                "to fetch (or unpack) it."
            )
        raise DataError(
            f"data.dataset: {name} could not be read under {root}: {reason}.{hint}"
        ) from wrong
