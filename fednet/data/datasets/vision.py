"""The usual image benchmarks, read (and, if asked, fetched) by torchvision, which is imported only
here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from fednet.data.base import Data
from fednet.data.datasets.arrays import images
from fednet.errors import DataError
from fednet.files import alone
from fednet.registry import dataset


@dataset("mnist")
def mnist(root: Path, download: bool, with_test: bool = True) -> Data:
    """MNIST: 60,000 + 10,000 handwritten digits, 1x28x28, 10 classes."""
    return _read("MNIST", root, download, with_test, (0.1307,), (0.3081,))


@dataset("fashion-mnist")
def fashion_mnist(root: Path, download: bool, with_test: bool = True) -> Data:
    """Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 1x28x28, 10 classes."""
    return _read("FashionMNIST", root, download, with_test, (0.2860,), (0.3530,))


@dataset("svhn")
def svhn(root: Path, download: bool, with_test: bool = True) -> Data:
    """SVHN: 73,257 + 26,032 house numbers, 3x32x32, 10 classes (without the extra set)."""
    return _read(
        "SVHN", root, download, with_test, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
    )


@dataset("cifar10")
def cifar10(root: Path, download: bool, with_test: bool = True) -> Data:
    """CIFAR-10: 50,000 + 10,000 photographs, 3x32x32, 10 classes."""
    return _read(
        "CIFAR10", root, download, with_test, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    )


@dataset("cifar100")
def cifar100(root: Path, download: bool, with_test: bool = True) -> Data:
    """CIFAR-100: 50,000 + 10,000 photographs, 3x32x32, 100 classes."""
    return _read(
        "CIFAR100", root, download, with_test, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    )


def _read(
    name: str,
    root: Path,
    download: bool,
    with_test: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Data:
    """Reads one of torchvision's datasets; with_test: both of its splits."""
    from torchvision import datasets

    def read(which: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        if name == "SVHN":
            found = datasets.SVHN(str(root), which, download=download)
            return found.data, found.labels, tuple("0123456789")
        found = getattr(datasets, name)(str(root), which == "train", download=download)
        return images(np.asarray(found.data)), np.asarray(found.targets), tuple(found.classes)

    try:
        with contextlib.ExitStack() as alone_with_it:
            if download:  # no other process of this machine fetches into the folder meanwhile
                root.mkdir(parents=True, exist_ok=True)
                lock = alone_with_it.enter_context(open(root / ".fednet.lock", "w"))
                alone_with_it.enter_context(alone(lock.fileno(), lock.name))
            x, y, names = read("train")
            test = read("test")[:2] if with_test else None
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
    return Data(
        train=(x, y),
        test=test,  # type: ignore[arg-type]  # None: there are none
        classes=len(names),
        mean=mean,
        std=std,
        names=names,
    )
