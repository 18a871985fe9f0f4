"""`Data` takes any tensors, and says what is wrong with those it cannot take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fednet.data.base import Data
from fednet.data.federation import balanced_test
from fednet.data.raw import channel_statistics
from fednet.errors import ConfigError, DataError

X = np.zeros((4, 2), dtype=np.float32)
Y = np.array([0, 1, 2, 0])


def test_numpy_arrays_of_any_width_become_the_kept_forms():
    d = Data(
        train=(X.astype(np.float64), Y.astype(np.uint16)),
        test=(np.arange(8, dtype=">f8").reshape(4, 2), Y.astype(np.int8)),
        classes=3,
        groups=np.array([1, 1, 2, 2], dtype=np.int32),
    )
    assert (d.train[0].dtype, d.train[1].dtype, d.groups.dtype) == (
        torch.float32,
        torch.int64,
        torch.int64,
    )
    assert (d.n_train, d.n_test, d.input_shape, d.sample_nbytes) == (4, 4, (2,), 8)
    assert torch.equal(d.test[0], torch.arange(8, dtype=torch.float32).view(4, 2))
    assert d.train[1].tolist() == d.test[1].tolist() == Y.tolist()


def test_a_dict_of_tensors_is_indexed_and_normalised_by_name():
    x = {
        "image": torch.full((4, 3, 2, 2), 255, dtype=torch.uint8),
        "tokens": torch.arange(8).view(4, 2),
    }
    d = Data(train=(x, Y), classes=3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 1.0))
    assert d.sample_nbytes == 12 + 16
    taken = d.take(np.array([2, 0]))
    assert taken[0]["tokens"].tolist() == [[4, 5], [0, 1]]
    inputs = d.inputs(taken[0])
    assert inputs["image"][0, :, 0, 0].tolist() == [1.0, 2.0, 0.5]
    assert inputs["tokens"].dtype == torch.int64


def test_values_and_sequences_have_one_row_of_classes():
    values = Data(train=(X, np.array([0.5, 1.5, 2.5, 3.5])))
    sequences = Data(train=(X, np.array([[0, 1]] * 4)), classes=2)
    assert values.train[1].dtype == torch.float32
    assert values.table_classes == sequences.table_classes == 1
    assert sequences.labels().tolist() == [0, 0, 0, 0]


def test_the_hash_covers_every_sample():
    one = Data(train=(X, Y), classes=3)
    two = Data(train=(X, Y), classes=3)
    assert one.sha256() == two.sha256()
    assert one.sha256() != Data(train=(X, Y[::-1].copy()), classes=3).sha256()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": (X, Y[:3])}, "train: 4 samples in x but 3 in y"),
        ({"train": ({"a": X, "b": X[:2]}, Y)}, r"2 samples in x\['b'\] but 4 in y"),
        ({"classes": 2}, r"labels are in 0\.\.2, expected 0\.\.1 for classes=2"),
        ({"train": (X, Y - 1)}, r"labels are in -1\.\.1"),
        ({"classes": None}, "say classes=C"),
        ({"mean": (0.5,)}, "give both or neither"),
        ({"test": ({"a": X}, Y)}, "train has the inputs one tensor, test has 'a'"),
        ({"train": (X, Y.astype(float))}, "y holds floats but classes=3"),
        (
            {"test": (X[:, :1], Y)},
            r"a training sample is torch.float32 \(2,\), a test sample is torch.float32 \(1,\)",
        ),
        ({"groups": Y[:2]}, "groups: expected one whole number for each of the 4 training samples"),
        ({"test_groups": Y}, "test_groups: given without groups"),
        ({"groups": Y, "test_groups": list("abab")}, "one of them is text, and the other is not"),
        ({"groups": Y, "test_groups": Y[:2]}, "test_groups: expected one whole number for each"),
        ({"train": X}, r"expected a pair \(x, y\)"),
        ({"train": ([[1], [2, 3]], Y)}, "train x: a list of entries of unlike shapes"),
        ({"train": (np.array(["a"] * 4), Y)}, "holds no numbers"),
        ({"train": (X[:0], Y[:0])}, "train: no samples"),
        (
            {"train": (np.zeros((4, 3, 2, 2), dtype=np.uint8), Y), "mean": (0.5,), "std": (0.5,)},
            "mean and std are for 1 channels",
        ),
        ({"names": ("a", "b")}, "2 class names for 3 classes"),
        ({"train": (X, Y - 100)}, "sample 0 has the label -100, .* leave such samples out"),
        (
            {"train": (X, np.stack([Y, [255] * 4], 1))},
            r"labels are in 0..255, expected 0..2 .* say ignore_index",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(fields, says):
    with pytest.raises(DataError, match=says):
        Data(**{"train": (X, Y), "classes": 3, **fields})


def padded(samples):
    """As a collate function of a DataLoader."""
    width = max(len(s["words"]) for s in samples)
    words = torch.tensor([s["words"] + [0] * (width - len(s["words"])) for s in samples])
    return {"words": words, "labels": torch.tensor([s["y"] for s in samples])}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, i):
        return TEXTS[i]


TEXTS = [{"words": [1], "y": 0}, {"words": [2, 3], "y": 1}, {"words": [4, 5, 6], "y": 1}]


def test_samples_of_unlike_lengths_are_padded_to_the_longest_of_train_and_test():
    data = Data(train=TEXTS[:2], test=TEXTS[2:], classes=2, collate=padded)
    assert data.train[0]["words"].tolist() == [[1, 0, 0], [2, 3, 0]]
    assert data.train[1].tolist() == [0, 1]
    assert data.test[0]["words"].tolist() == [[4, 5, 6]]
    assert data.notes == ()
    pairs = Data(train=TEXTS, classes=2, collate=lambda s: (padded(s)["words"], [0, 1, 1]))
    assert pairs.train[0].tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]


def test_a_collate_function_that_draws_is_said_to_be_read_once():
    def masked(samples):
        made = padded(samples)
        return {**made, "mask": torch.rand(len(samples), 50)}

    (note,) = Data(train=TEXTS, classes=2, collate=masked).notes
    assert "train: samples are drawn at random as they are read" in note


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": Rows()}, r"sample 0 of the dataset is a dict; .* a collate function in Data"),
        ({"train": (X, Y), "collate": padded}, "collate takes a list of samples .* got tuple"),
        (
            {"train": TEXTS, "collate": lambda s: (X[:2], Y[:2])},
            "collate returned 2 targets for 3 samples",
        ),
    ],
)
def test_what_cannot_be_collated_is_refused_with_the_reason(fields, says):
    with pytest.raises(DataError, match=says):
        Data(**{"classes": 2, **fields})


def test_targets_that_stand_for_no_label_are_kept_as_torchs():
    void = np.array([[0, 255], [255, 2]], dtype=np.uint8)
    data = Data(train=(X[:2], void), test=(X[:2], void), classes=3, ignore_index=255)
    assert data.replace(notes=("x",)).train[1].tolist() == [[0, -100], [-100, 2]]
    assert data.test[1].tolist() == [[0, -100], [-100, 2]]
    assert (
        Data(train=(X[:2], data.train[1]), classes=3).sha256() == data.replace(test=None).sha256()
    )


def test_labels_that_are_text_are_numbered_in_sorted_order_over_train_and_test():
    y = np.array(["dog", "ant", "cat", "dog"])
    ty = ["cat", "bee"]
    data = Data(train=(X, y), test=(X[:2], ty))
    assert data.names == ("ant", "bee", "cat", "dog")
    assert data.classes == 4
    assert (data.train[1].tolist(), data.test[1].tolist()) == ([3, 0, 2, 3], [2, 1])
    said = "y: labels are text, numbered in sorted order: 0 'ant', 1 'bee', 2 'cat', 3 'dog'."
    assert data.notes == (said,)
    assert data.replace(test=None).notes == (said,)
    named = Data(train=(X, y.astype(object)), names=["dog", "cat", "ant"])
    assert (named.classes, named.notes) == (3, ())
    assert named.train[1].tolist() == [0, 2, 1, 0]
    assert Data(train=Pairs(4, lambda i: (X[i], str(y[i])))).train[1].tolist() == [2, 0, 1, 2]
    groups = Data(train=(X, y), groups=np.array(["b", "a", "b", "c"])).groups
    assert groups.tolist() == [1, 0, 1, 2]


def test_labels_that_differ_by_a_space_can_be_told_apart_where_they_are_listed():
    (note,) = Data(train=(X, ["a", "b", "b ", "c"])).notes
    assert note.endswith("order: 0 'a', 1 'b', 2 'b ', 3 'c'.")
    with pytest.raises(DataError, match=r"unknown label 'b'\. .*Known: 'b ', c\."):
        Data(train=(X, ["c", "b", "b ", "c"]), names=("b ", "c"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"classes": 3}, "2 class names for 3 classes"),
        ({"names": ("yes", "non")}, "unknown label 'no'. Did you mean 'non'"),
        ({"test": (X[:1], [0])}, "text in one of train and test, and not in the other"),
        ({"train": (X, np.array(["no", None, "no", "no"]))}, "train y: .* without missing values"),
    ],
)
def test_text_that_cannot_be_numbered_is_refused_with_the_remedy(fields, says):
    with pytest.raises(DataError, match=says):
        Data(**{"train": (X, ["yes", "no", "no", "yes"]), **fields})


def test_a_table_of_pandas_is_refused_with_the_remedy():
    class Frame:
        """What pandas' tables have."""

        shape = (4, 2)

        def __len__(self):
            return 4

        def __getitem__(self, column):
            return self

        def to_numpy(self):
            return X

    with pytest.raises(DataError, match=r"train x: a Frame; give its values, \.to_numpy\(\)"):
        Data(train=(Frame(), ["yes", "no", "no", "yes"]))
    with pytest.raises(DataError, match=r"expected a pair of arrays .* got Frame"):
        Data(train=Frame())


def test_a_dataset_that_draws_at_random_is_found_by_reading_samples_twice():
    noise = Pairs(20, lambda i: (torch.randn(2), i % 3))
    nan = Pairs(20, lambda i: (torch.tensor([float("nan"), 1.0]), i % 3))
    data = Data(train=noise, test=Pairs(20, lambda i: (X[0], i % 3)), classes=3)
    (said,) = data.notes
    assert said.startswith("train: samples are drawn at random as they are read")
    assert Data(train=nan, classes=3).notes == ()


def test_a_truth_value_is_a_class():
    for y in (Y > 0, torch.from_numpy(Y > 0)):
        assert Data(train=(X, y), classes=2).train[1].tolist() == (Y > 0).astype(int).tolist()


def test_channel_statistics_are_those_of_the_pixels():
    x = torch.tensor([[0, 255], [51, 51]], dtype=torch.uint8).view(1, 2, 1, 2).repeat(1500, 1, 1, 1)
    mean, std = channel_statistics(x.numpy())
    assert mean == pytest.approx((0.5, 0.2))
    assert std == pytest.approx((0.5, 1.0))  # a constant channel is left unscaled


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.zeros((4, 3), np.uint8), "x: its bytes (uint8) are no more than 0 and 1, and are"),
        (np.full((4, 3), 9, np.uint8), "x: its bytes (uint8) are no images, and are divided"),
        (np.ones((4, 1, 2, 2), np.uint8), "x: its bytes (uint8) are no more than 0 and 1"),
        (np.full((4, 1, 2, 2), 9, np.uint8), ""),
        (np.zeros((4, 3), np.float32), ""),
        ({"a": np.zeros((4, 3), np.uint8), "b": np.zeros((4, 3), int)}, "x['a']: its bytes"),
    ],
)
def test_bytes_that_may_be_no_pixels_are_remarked_on(x, said):
    data = Data(train=(x, np.zeros(4, int)), classes=1)
    assert [note[: len(said)] for note in data.notes] == ([said] if said else [])
    assert data.replace(groups=np.zeros(4, int)).notes == data.notes


def test_a_balanced_test_set_has_of_each_class_what_the_rarest_has():
    ty = np.array([0] * 9 + [1] * 4 + [2] * 6)
    d = Data(train=(X, Y), test=(np.zeros((19, 2), dtype=np.float32), ty), classes=3)
    chosen = balanced_test(d, 0)
    assert np.bincount(ty[chosen]).tolist() == [4, 4, 4]
    assert len(set(chosen.tolist())) == 12
    assert chosen.tolist() == balanced_test(d, 0).tolist()


class Pairs(torch.utils.data.Dataset):
    """As torch has them: a sample at a time."""

    def __init__(self, n, make=lambda i: (torch.full((2, 3), float(i)), i % 3)):
        self.n = n
        self.make = make

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(i)


def test_a_dataset_of_torchs_is_taken_as_it_is():
    data = Data(train=Pairs(9), test=Pairs(3), classes=3)
    assert data.train[0].shape == (9, 2, 3)
    assert data.train[0].dtype == torch.float32
    assert data.train[0][4, 1, 2] == 4.0
    assert data.train[1].tolist() == [0, 1, 2] * 3
    assert data.n_test == 3


def test_a_dataset_that_memory_does_not_hold_is_refused():
    class Endless(Pairs):
        def __len__(self):
            return 2**40

    with pytest.raises(ConfigError, match=r"a dataset of the shape .* of memory; .* are free here"):
        Data(train=Endless(3), classes=3)


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_an_array_that_is_mapped_and_may_be_written_to_stays_in_its_file(tmp_path, mode):
    n = 2**20
    whole = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (n, 8))
    whole[5:, 3] = 2.0
    whole.flush()
    before = resident()
    x = np.load(tmp_path / "x.npy", mmap_mode=mode)[1:]
    data = Data(train=(x, np.zeros(n - 1, np.int64)), classes=1)
    assert data.train[0][4:6, 3].tolist() == [2.0, 2.0]
    assert data.train[0][3].tolist() == [0.0] * 8
    assert resident() - before < 2**24 + data.train[1].nbytes
    if mode == "c":  # a model that works in place spoils no file
        data.train[0][7] = 9.0
        assert whole[8].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("mode", "shape"), [("L", (1, 4, 5)), ("RGB", (3, 4, 5))])
def test_images_of_pillow_come_with_their_channels_first(mode, shape):
    Image = pytest.importorskip("PIL.Image")
    data = Data(train=Pairs(3, lambda i: (Image.new(mode, (5, 4)), i)), classes=3)
    assert data.train[0].dtype == torch.uint8
    assert data.input_shape == shape


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda i: {"x": i}, "sample 0 of the dataset is a dict; expected a pair"),
        (lambda i: (np.zeros(2 + i), 0), r"sample 1 is float64 of shape \(3,\)"),
        (lambda i: ("text", 0), "sample 0 of the dataset holds"),
        (lambda i: (np.zeros(2) if i else np.zeros(2, int), 0), "sample 1 is float64"),
        (lambda i: (np.zeros(2), np.zeros(i)), "targets of unlike shapes"),
    ],
)
def test_a_dataset_that_is_none_of_pairs_of_numbers_is_refused_with_its_sample(made, says):
    with pytest.raises(DataError, match=f"train: {says}"):
        Data(train=Pairs(3, made), classes=3)
