"""What is changed in samples as they are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fednet.data.augment import augment_with_targets, check, crop_flip, crop_reflect_flip, flip, get
from fednet.data.base import Data
from fednet.errors import ConfigError
from fednet.seeds import torch_rng

X = torch.arange(6 * 2 * 6 * 5, dtype=torch.float32).view(6, 2, 6, 5) + 1


@pytest.mark.parametrize(
    ("function", "pad", "mode"),
    [(flip, 0, "constant"), (crop_flip, 4, "constant"), (crop_reflect_flip, 4, "reflect")],
)
def test_an_image_becomes_a_window_of_its_padded_form_or_the_mirror_of_one(function, pad, mode):
    out = function(X, torch_rng(0, "augment"))
    assert torch.equal(out, function(X, torch_rng(0, "augment")))
    kept = turned = moved = False
    for image, x in zip(out, X):
        padded = torch.nn.functional.pad(x, (pad,) * 4, mode=mode)
        places = [(i, j) for i in range(2 * pad + 1) for j in range(2 * pad + 1)]
        windows = [padded[:, i : i + 6, j : j + 5] for i, j in places]
        plain = any(torch.equal(image, w) for w in windows)
        mirrored = any(torch.equal(image, w.flip(-1)) for w in windows)
        assert plain or mirrored
        kept |= plain
        turned |= mirrored
        moved |= not (torch.equal(image, x) or torch.equal(image, x.flip(-1)))
    assert kept
    assert turned
    assert moved == (pad > 0)
    assert function(X.to(torch.uint8), torch_rng(0, "augment")).dtype == torch.uint8


@pytest.mark.parametrize("change", [flip, crop_flip, crop_reflect_flip])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_a_mask_is_moved_with_its_image_and_has_no_label_where_that_is_padded(change, kind):
    y = X[:, 0].to(kind)  # each pixel's target is its own value
    images, masks = augment_with_targets(change, X, y, torch_rng(0, "augment"))
    assert torch.equal(images, change(X, torch_rng(0, "augment")))
    assert (masks.shape, masks.dtype) == (y.shape, kind)
    expected = images[:, 0].to(kind)
    if kind == torch.int64:
        expected[expected == 0] = -100
    assert torch.equal(masks, expected)
    wide = augment_with_targets(change, X, X.clone(), torch_rng(0, "augment"))[1]
    assert torch.equal(wide, images)


def test_the_targets_of_whole_images_stay_as_they_are():
    y = torch.arange(6)
    images, same = augment_with_targets(flip, X, y, torch_rng(0, "augment"))
    assert torch.equal(images, flip(X, torch_rng(0, "augment")))
    assert same is y


@pytest.mark.parametrize(
    ("name", "y", "classes", "says"),
    [
        ("flip", np.zeros((6, 3, 5), int), 2, r"targets of shape \[3, 5\] cannot be moved"),
        ("crop_flip", np.zeros((6, 6, 5)), None, "no mark for a pixel without a target"),
    ],
)
def test_targets_that_cannot_be_moved_with_their_images_are_refused(name, y, classes, says):
    with pytest.raises(ConfigError, match=says):
        check(name, Data(train=(X, y), classes=classes))


def test_unknown_augmentations_and_samples_that_are_no_images_are_refused():
    assert get("none") is None
    with pytest.raises(ConfigError, match="Did you mean 'crop_flip'"):
        get("cropflip")
    flat = Data(train=(np.zeros((2, 3)), np.zeros(2)))
    check("none", flat)
    with pytest.raises(ConfigError, match=r"a sample here is of shape \[3\]"):
        check("flip", flat)


def test_images_without_the_pixels_that_are_mirrored_are_refused():
    five, four = (Data(train=(np.zeros((2, 1, 9, n)), np.zeros(2))) for n in (5, 4))
    check("crop_reflect_flip", five)
    check("crop_flip", four)
    with pytest.raises(ConfigError, match=r"images of shape \[1, 9, 4\] have too few"):
        check("crop_reflect_flip", four)
