"""Samples that another process makes while this one would import torch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednet import config
from fednet.data import ahead
from fednet.data.loading import load

# A process without torch, which begins and takes. Its words: those of --set, and
# `other` to ask for another seed than it began with.
SCRIPT = """
import hashlib, os, sys
from fednet import config
from fednet.data import ahead
sets, other = sys.argv[1:-1], sys.argv[-1]
tree = config.reading.merge(config.reading.Node({}, "here"), config.reading.overrides(sets))
typed = config.reading.fit.fit(tree, config.Config)
assert "torch" not in sys.modules
ahead.begin(typed, None)
section = ahead.complete_data(typed.data)
seed = typed.seed + (other == "other")
wanted = ahead.Wanted(section.dataset, section.options, None, False, seed, True)
found = ahead.take(wanted)
assert ahead.take(wanted) is None, "it is taken once"
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("its process is still there")
if found is None:
    print("none")
else:
    x, y = found.fields["train"]
    x += 1  # it is this process's own
    x -= 1
    print(hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest())
"""
ROOT = Path(__file__).parents[2]
SETS = ("data.dataset=synthetic", "data.samples=40", "data.shape=[1, 8, 8]", "data.classes=3")


def taken(*sets: str, other: str = "") -> str:
    """The digest of the samples that a process took, "none" where it has to make them itself."""
    words = [sys.executable, "-c", SCRIPT, *sets, other]
    done = subprocess.run(words, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def of_images(folder: Path) -> tuple[str, ...]:
    """What a configuration says of 42 images of three classes, which it makes there."""
    pixels = np.random.default_rng(0).integers(0, 256, (42, 8, 8), np.uint8)
    for number, image in enumerate(pixels):
        place = folder / "train" / str(number % 3)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02}.png")
    return ("data.dataset=folder", f"data.path={folder}", "data.grey=true", "data.test_share=0.5")


@pytest.mark.parametrize("which", ["made", "read"])
def test_the_samples_are_those_that_this_process_would_have_had(tmp_path, which):
    sets = SETS if which == "made" else of_images(tmp_path)
    settings = config.load(None, sets)
    data = load(settings.data, None, settings.seed)
    x, y = (np.asarray(part) for part in data.train)
    assert x.shape == (40 if which == "made" else 21, 1, 8, 8)
    assert taken(*sets) == hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("sets", "other"),
    [
        ((*SETS, "data.classes=0"), ""),  # refused
        ((*SETS,), "other"),  # another seed than was begun with
        (("data.dataset=cifar10",), ""),  # its file imports torch
    ],
)
def test_what_cannot_be_made_beside_or_is_not_the_same_is_left_to_this_process(sets, other):
    assert taken(*sets, other=other) == "none"


def test_nothing_is_begun_where_torch_is_imported_already(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    ahead.begin(config.load(None, SETS), None)
