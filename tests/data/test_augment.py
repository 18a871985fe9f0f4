"""What is changed in samples as they are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fednet.data import Data
from fednet.data.augment import check, crop_flip, crop_reflect_flip, flip, get
from fednet.data.federation import Federation
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


def test_a_crop_is_a_window_of_the_padded_image_or_its_mirror():
    out = crop_flip(X, torch_rng(1, "augment"))
    assert out.shape == X.shape
    for o, x in zip(out, X):
        padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
        windows = [padded[:, i : i + 5, j : j + 4] for i in range(9) for j in range(9)]
        assert any(torch.equal(o, w) or torch.equal(o, w.flip(-1)) for w in windows)
    assert not torch.equal(out, X)


@pytest.mark.parametrize("function", [flip, crop_flip])
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


# -- features --------------------------------------------------------------------------------------
def federation(noise):
    x = torch.full((400, 1, 8, 8), 128, dtype=torch.uint8)
    y = torch.arange(400) % 2
    data = Data(train=(x, y), test=(x[:40], y[:40]), classes=2, mean=(0.5,), std=(0.25,))
    parts = [np.arange(100 * i, 100 * (i + 1)) for i in range(4)]
    return Federation(
        data, parts, [np.arange(10)] * 4, np.arange(0), np.arange(0), "iid", noise, seed=7
    )


def test_noise_grows_from_none_at_the_first_client_to_sigma_at_the_last():
    quiet, noisy = federation(0.0), federation(0.3)
    for client in range(4):
        added = noisy.site(client).train[0] - quiet.site(client).train[0]
        # 0.3 * client / 3 in units of 0..1, so 0.1, 0.2, 0.3 over std 0.25 as the model sees it
        assert added.std().item() == pytest.approx(0.4 * client, rel=0.03, abs=1e-9)
        assert torch.equal(noisy.site(client).train[0], noisy.site(client).train[0])
    train, test = noisy.site(3).train[0], noisy.site(3).test[0]
    assert not torch.equal(train[:10], test)
    assert test.std().item() == pytest.approx(1.2, rel=0.1)


def test_a_reflected_border_is_the_image_mirrored():
    x = torch.arange(64.0).view(1, 1, 8, 8)

    def first(seed):  # what a generator draws: the offset, and whether to mirror
        draw = torch.Generator().manual_seed(seed)
        offset = torch.randint(0, 9, (2, 1), generator=draw).view(-1).tolist()
        return offset, bool(torch.rand(1, generator=draw) < 0.5)

    seed = next(s for s in range(10_000) if first(s) == ([0, 0], False))
    made = crop_reflect_flip(x, torch.Generator().manual_seed(seed))
    # Cut at the upper left of the padded image: rows and columns 4, 3, 2, 1, 0, 1, 2, 3.
    at = [4, 3, 2, 1, 0, 1, 2, 3]
    assert made[0, 0].tolist() == [[8.0 * r + c for c in at] for r in at]
