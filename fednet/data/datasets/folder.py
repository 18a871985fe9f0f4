"""Folders of images."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np

from fednet import capacity
from fednet.data.raw import Raw, absent, channel_statistics
from fednet.errors import ConfigError, DataError, unknown
from fednet.places import expand_home
from fednet.plain import part_of
from fednet.registry import dataset
from fednet.seeds import rng

# What torchvision's ImageFolder reads.
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
Labelled = list[tuple[Path, int]]


@dataset("folder")
def folder(
    root: Path,
    *,
    path: Annotated[str, "The folder, as it is or below `data.root`."] = ".",
    classes: Annotated[
        int | list[str] | None,
        "Number of classes, or the names of their folders in order; null: all folders, by name.",
    ] = None,
    size: Annotated[
        int | list[int] | None,
        "Side, or height and width, to which images are resized; null: all have one size already. "
        "[pixels]",
    ] = None,
    grey: Annotated[bool, "Whether images have one channel instead of three."] = False,
    test_share: Annotated[
        float,
        "Share of each class that is kept for testing if the folder has no test images, from 0 to "
        "1. [share]",
    ] = 0.2,
    mean: Annotated[list[float] | None, "Mean of each channel, in 0..1; null: computed."] = None,
    std: Annotated[
        list[float] | None, "Standard deviation of each channel, in 0..1; null: computed."
    ] = None,
) -> Raw:
    """Any folder of images: train/<class>/**.png, and test/ or val/ likewise, or val/ as
    Tiny-ImageNet has it; or <class>/*.png alone. Images have at most 8 bits per channel.
    """
    top = expand_home(path, "data.path")
    if not top.is_absolute() and (path == "." or not top.exists()):
        top = root / top
    if not top.is_dir():
        raise absent("folder", path, top)
    inside = top / "train"
    if not inside.is_dir():
        inside = top
        own = [top / name for name in _folders(top)]
        # Each must have images directly in it; otherwise TRAINING/ and TESTING/ would be two
        # classes.
        has_images = (any(i.suffix.lower() in ENDINGS for i in p.iterdir()) for p in own)
        if not own or not all(has_images):
            raise DataError(f"{top}: no folder train/ with a folder of images for each class.")
    names = _folders(inside)
    if isinstance(classes, list):
        _check_class_folders(inside, names, classes)
        names = classes
    elif classes is not None and classes != len(names):
        raise DataError(
            f"{inside}: {len(names)} class folders, {classes} classes declared; where some have no "
            f"images here, give data.classes as the list of all names in order."
        )
    train = _of_classes(inside, names)
    test = _test(top, names) if inside != top else []
    notes = []
    if not test and test_share > 0:
        train, test = _held_out(train, len(names), test_share)
        beside = [name for name in _folders(top) if name != "train"]
        if inside != top and beside:
            notes.append(
                f"{top}: there are no test images in test/ or val/, so {test_share:g} of each "
                f"class is kept for testing; not read: {', '.join(beside[:5])}."
            )
    sides: tuple[int, ...] | None = None
    if isinstance(size, int):
        sides = (size, size)
    elif size:
        sides = tuple(size)
    if sides is not None and (len(sides) != 2 or min(sides) < 1):
        raise ConfigError(f"data.size: expected one side or [height, width], got {size!r}.")
    x, y = _pixels(train, sides, grey)
    if mean is None or std is None:
        mean, std = (list(v) for v in channel_statistics(x))
    return Raw(
        train=(x, y),
        test=_pixels(test, sides, grey) if test else None,
        classes=len(names),
        mean=tuple(mean),
        std=tuple(std),
        names=tuple(names),
        notes=tuple(notes),
    )


@dataset("tiny-imagenet")
def tiny_imagenet(root: Path) -> Raw:
    """Tiny-ImageNet: 100,000 + 10,000 photographs (its val set), 3x64x64, 200 classes; unpacked by
    hand in `data.root`.
    """
    top = root / "tiny-imagenet-200"
    if not (top / "train").is_dir():
        raise DataError(
            f"data.dataset: tiny-imagenet was not found under {root}: unpack "
            f"tiny-imagenet-200.zip there; it is not fetched by data.download."
        )
    mean = [0.4802, 0.4481, 0.3975]
    std = [0.2770, 0.2691, 0.2821]
    return folder(top.resolve(), test_share=0.0, mean=mean, std=std)


def _folders(inside: Path) -> list[str]:
    there = (p for p in inside.iterdir() if not p.name.startswith("."))
    return sorted(p.name for p in there if _is_folder(p))


def _is_folder(path: Path) -> bool:
    """Raises DataError for a link to nothing, whose images would be missing without a word."""
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"{path}: a link to {os.readlink(path)}, which is not there; put it back, or take the "
            f"link away."
        )
    return path.is_dir()


def _files(under: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yields what lies below a folder and is no folder. Links are followed, as in torchvision's
    ImageFolder. Raises DataError for a link that leads nowhere or in a circle.
    """
    here = os.path.realpath(under)
    if here in above:
        raise DataError(f"{under}: a link to a folder that contains it; take it away.")
    for path in under.iterdir():
        if _is_folder(path):
            yield from _files(path, (*above, here))
        else:
            yield path


def _check_class_folders(inside: Path, folders: list[str], classes: list[str]) -> None:
    """Raises DataError for a folder that is not one of the classes."""
    strange = sorted(set(folders) - set(classes))
    if strange:
        raise DataError(f"{inside}: {unknown('class', strange[0], classes)}")


def _images(under: Path) -> list[Path]:
    """Returns the images below the folder of a class. Raises DataError if there are none."""
    files = [p for p in _files(under) if p.is_file()]
    images = sorted(p for p in files if p.suffix.lower() in ENDINGS)
    if not images:
        other = ", ".join(sorted({p.suffix.lower() or p.name for p in files})[:5])
        raise DataError(
            f"{under}: no images in this folder of a class{f' (found {other})' if other else ''}; "
            f"expected files that end in {', '.join(sorted(ENDINGS))}. Convert them, or take the "
            f"folder away."
        )
    return images


def _of_classes(inside: Path, names: list[str]) -> Labelled:
    """Returns the images of each class that has a folder."""
    return [
        (image, c)
        for c, name in enumerate(names)
        if (inside / name).is_dir()
        for image in _images(inside / name)
    ]


def _test(top: Path, names: list[str]) -> Labelled:
    """Returns the images of test/<class>, else val/<class>, else val/images with its annotations.
    (Tiny-ImageNet's test/images has no labels.)
    """
    for which in ("test", "val"):
        found = _folders(top / which) if (top / which).is_dir() else []
        if found and (found != ["images"] or "images" in names):
            _check_class_folders(top / which, found, names)
            return _of_classes(top / which, names)
    notes = top / "val" / "val_annotations.txt"
    if not notes.is_file():
        return []
    number = {name: c for c, name in enumerate(names)}
    labelled = []
    for k, line in enumerate(notes.read_text(encoding="utf-8").splitlines(), 1):
        image, _, rest = line.partition("\t")
        name = rest.split("\t")[0].strip()
        if name not in number:
            raise DataError(f"{notes}:{k}: {name!r} is no class of train/.")
        labelled.append((notes.parent / "images" / image, number[name]))
    return sorted(labelled)


def _held_out(images: Labelled, classes: int, share: float) -> tuple[Labelled, Labelled]:
    """Returns (training, test): a share of each class is for testing, the same in every run."""
    draw = rng(0, "folder")
    labels = np.array([c for _, c in images])
    test: set[int] = set()
    for c in range(classes):
        of_class = draw.permutation(np.flatnonzero(labels == c))
        test.update(of_class[: part_of(share, len(of_class))].tolist())
    return [v for i, v in enumerate(images) if i not in test], [images[i] for i in sorted(test)]


def _pixels(
    images: Labelled, size: tuple[int, ...] | None, grey: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (n, c, h, w) uint8 and (n,) int64. size: (h, w) that images are resized to; None: all
    must have the size of the first.
    """
    height, width = size or _decode(images[0][0], None, grey).shape[1:]
    shape = (len(images), 1 if grey else 3, height, width)
    capacity.check_memory(math.prod(shape), f"the images of shape {shape}")
    x = np.empty(shape, np.uint8)

    def decode(i: int) -> None:
        path = images[i][0]
        pixels = _decode(path, size, grey)
        if pixels.shape != shape[1:]:
            raise DataError(
                f"{path}: {pixels.shape[1]}x{pixels.shape[2]} pixels where others have "
                f"{height}x{width}; say data.size to resize all."
            )
        x[i] = pixels

    with ThreadPoolExecutor(4) as pool:  # decoding releases the interpreter's lock
        list(pool.map(decode, range(len(images))))
    return x, np.array([c for _, c in images])


def _decode(path: Path, size: tuple[int, ...] | None, grey: bool) -> np.ndarray:
    """Returns an image's pixels, (c, h, w) uint8."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{path}: more than 8 bits a channel; convert the image.")
            plain = image.convert("L" if grey else "RGB")
    except (OSError, UnidentifiedImageError) as broken:
        raise DataError(f"{path}: not a readable image ({broken}).") from broken
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
