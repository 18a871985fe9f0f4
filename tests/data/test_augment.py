from __future__ import annotations

import numpy as np
import pytest
import torch

from fednet.data import Data
from fednet.data.augment import check, crop, crop_flip, flip, get
from fednet.errors import ConfigError
from fednet.seeds import torch_rng

X = torch.arange(6 * 2 * 5 * 4, dtype=torch.float32).view(6, 2, 5, 4) + 1


def test_flip_mirrors_whole_images_or_leaves_them():
    out = flip(X, torch_rng(0, "augment"))
    mirrored = [torch.equal(o, x.flip(-1)) for o, x in zip(out, X)]
    kept = [torch.equal(o, x) for o, x in zip(out, X)]
    assert all(a != b for a, b in zip(mirrored, kept))
    assert any(mirrored)
    assert any(kept)


def test_crop_is_a_window_of_the_padded_image():
    out = crop(X, torch_rng(1, "augment"))
    assert out.shape == X.shape
    for o, x in zip(out, X):
        padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
        windows = [padded[:, i : i + 5, j : j + 4] for i in range(9) for j in range(9)]
        assert sum(torch.equal(o, w) for w in windows) >= 1
    assert not torch.equal(out, X)


@pytest.mark.parametrize("function", [flip, crop, crop_flip])
def test_the_same_stream_gives_the_same_batch(function):
    one, two = (function(X, torch_rng(5, "augment")) for _ in range(2))
    assert torch.equal(one, two)
    raw = function(X.to(torch.uint8), torch_rng(5, "augment"))
    assert raw.dtype == torch.uint8


def test_unknown_augmentations_and_samples_that_are_no_images_are_refused():
    assert get("none") is None
    with pytest.raises(ConfigError, match="Did you mean 'crop_flip'"):
        get("cropflip")
    flat = Data(train=(np.zeros((2, 3)), np.zeros(2)))
    check("none", flat)
    with pytest.raises(ConfigError, match=r"a sample here is of shape \[3\]"):
        check("flip", flat)
