"""Datasets by name: built in, one's own, from files, and at a site."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from fednet.config.schema import DataSection, PartitionSection, PublicSection
from fednet.data.base import Data
from fednet.data.datasets.site import alone, load_site
from fednet.data.division import split
from fednet.data.loading import load
from fednet.errors import ConfigError, DataError
from fednet.registry import dataset


def section(name, **options):
    return DataSection(dataset=name, options=options)


def toy(n=6, classes=2):
    x = np.zeros((n, 3))
    y = np.arange(n) % classes
    return Data(train=(x, y), test=(x[:2], y[:2]), classes=classes)


# -- built in --------------------------------------------------------------------------------------
def test_digits_are_all_there_with_one_in_five_of_each_class_for_testing():
    d = load(section("digits"))
    train = np.bincount(d.labels())
    test = np.bincount(d.labels("test"))
    assert (train + test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test.tolist() == [n // 5 for n in (train + test).tolist()]
    assert d.train[0].dtype == torch.uint8
    assert d.input_shape == (1, 28, 28)
    # a stored fact: every machine must make the same bytes, whatever the run's seed
    assert load(section("digits"), seed=3).sha256() == d.sha256()
    assert d.sha256()[:16] == "ac2b329e46a91f99"


def test_synthetic_samples_follow_the_seed():
    one, same, other = (
        load(section("synthetic", samples=20, shape=[5]), seed=s) for s in (1, 1, 2)
    )
    assert one.sha256() == same.sha256()
    for which in ("train", "test"):  # the labels are drawn as the noise is
        assert not torch.equal(getattr(one, which)[1], getattr(other, which)[1])


@pytest.mark.parametrize("shape", [[20], [3, 8, 8]])
def test_training_samples_are_the_same_without_test_samples(shape):
    alone, whole = (
        load(section("synthetic", samples=33, shape=shape), seed=1, with_test=both)
        for both in (False, True)
    )
    assert alone.n_test == 0
    assert alone.sha256() == whole.replace(test=None).sha256()


def test_a_dataset_is_told_that_nothing_is_evaluated_and_may_make_its_test_samples_anyway():
    told = []

    @dataset("told")
    def made(with_test):
        told.append(with_test)
        return toy()

    assert load(section("told"), with_test=False).n_test == 0
    assert load(section("told")).n_test == 2
    assert told == [False, True]


@pytest.mark.parametrize("shape", [[20], [3, 8, 8]])
def test_synthetic_classes_can_be_told_apart(shape):
    d = load(section("synthetic", samples=200, shape=shape, classes=4), seed=0)
    x = d.inputs(d.train[0]).flatten(1)
    tx = d.inputs(d.test[0]).flatten(1)
    centres = torch.stack([x[d.train[1] == c].mean(0) for c in range(4)])
    assert (torch.cdist(tx, centres).argmin(1) == d.test[1]).float().mean() > 0.9


def test_a_missing_download_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"MNIST could not be read under .*data.download: true"):
        load(section("mnist"), tmp_path)
    with pytest.raises(DataError, match="tiny-imagenet was not found"):
        load(section("tiny-imagenet"), tmp_path)


@pytest.mark.parametrize(
    ("name", "made", "kind"),
    [
        ("mnist", "MNIST", "tensor"),
        ("fashion-mnist", "FashionMNIST", "tensor"),
        ("cifar10", "CIFAR10", "channels last"),
        ("cifar100", "CIFAR100", "channels last"),
        ("svhn", "SVHN", "channels first"),
    ],
)
def test_each_benchmark_of_torchvision_has_channels_first_and_its_classes(
    monkeypatch, tmp_path, name, made, kind
):
    grey = kind == "tensor"
    channels = 1 if kind == "tensor" else 3
    pixels = np.arange(4 * channels * 32 * 32).astype(np.uint8).reshape(4, channels, 32, 32)
    labels = [3, 0, 9, 3]

    def fake(root, split, download):
        """Both splits have the same samples, but for the last one, which only `train` has."""
        part = slice(None) if split in (True, "train") else slice(3)
        assert (root, download) == (str(tmp_path), False)
        if kind == "channels first":
            return SimpleNamespace(data=pixels[part], labels=np.array(labels[part]))
        data = torch.tensor(pixels[part, 0]) if grey else pixels[part].transpose(0, 2, 3, 1)
        targets = torch.tensor(labels[part]) if grey else labels[part]
        return SimpleNamespace(data=data, targets=targets, classes=list("abcdefghij"))

    monkeypatch.setattr(f"torchvision.datasets.{made}", fake)
    d = load(section(name), tmp_path)
    assert torch.equal(d.train[0], torch.from_numpy(pixels))
    assert torch.equal(d.test[0], torch.from_numpy(pixels[:3]))
    assert (d.train[1].tolist(), d.test[1].tolist()) == (labels, labels[:3])
    assert d.names == tuple("0123456789" if kind == "channels first" else "abcdefghij")
    assert len(d.mean) == len(d.std) == channels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("mnist", (60000, 10000), (1, 28, 28)),
        ("fashion-mnist", (60000, 10000), (1, 28, 28)),
        ("cifar10", (50000, 10000), (3, 32, 32)),
    ],
)
def test_real_benchmarks_have_their_sizes_and_normalise_to_zero_mean_and_unit_deviation(
    name, sizes, shape
):
    if "FEDNET_DATA" not in os.environ:
        pytest.skip("FEDNET_DATA is not set")
    d = load(section(name))
    assert ((d.n_train, d.n_test), d.input_shape) == (sizes, shape)
    x = d.inputs(d.train[0])
    assert x.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.0] * shape[0], abs=0.01)
    assert x.std(dim=(0, 2, 3)).tolist() == pytest.approx([1.0] * shape[0], abs=0.01)


# -- one's own -------------------------------------------------------------------------------------
def test_an_own_dataset_gets_its_root_and_its_options(tmp_path):
    seen = {}

    @dataset("sensors")
    def sensors(root, **options):
        seen.update(options, root=root)
        return toy()

    load(section("sensors", window=128), tmp_path)
    assert seen == {"root": tmp_path, "window": 128}


def test_named_options_are_checked_by_name_and_type(tmp_path):
    @dataset("sensors")
    def sensors(root, *, window: int = 64, axes: list[str] = ()):
        return toy()

    load(section("sensors", window=1, axes=["x"]), tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"unknown key data\.windw\. Did you mean data\.window",
    ):
        load(section("sensors", windw=1), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.window: expected a whole number, got 'wide'"):
        load(section("sensors", window="wide"), tmp_path)


def test_an_own_dataset_must_return_data_with_test_samples(tmp_path):
    dataset("pair")(lambda root: (1, 2))
    with pytest.raises(DataError, match=r"returned tuple, expected fednet\.Data"):
        load(section("pair"), tmp_path)
    dataset("trainonly")(lambda root: Data(train=(np.zeros((4, 1)), np.zeros(4))))
    with pytest.raises(DataError, match="has no test samples"):
        load(section("trainonly"), tmp_path)


# -- files -----------------------------------------------------------------------------------------
def test_arrays_are_read_with_classes_groups_and_statistics(tmp_path):
    x = np.zeros((4, 5, 6, 3), dtype=np.uint8)  # with channels last
    x[2:] = 255
    x[0, 0, 1, 2] = 7
    np.savez(
        tmp_path / "a.npz",
        x_train=x,
        y_train=np.array([[0], [1], [2], [0]], dtype=np.uint8),
        x_test=x[:2],
        y_test=np.array([[1], [1]]),
        groups=np.array([5, 5, 6, 6]),
    )
    d = load(section("arrays", path="a.npz"), tmp_path)
    assert torch.equal(d.train[0], torch.from_numpy(x).permute(0, 3, 1, 2))
    assert (d.input_shape, d.classes) == ((3, 5, 6), 3)
    assert d.mean == pytest.approx([0.5] * 3, abs=1e-3)
    assert d.std == pytest.approx([0.5] * 3, abs=1e-3)
    assert (d.train[1].tolist(), d.groups.tolist()) == ([0, 1, 2, 0], [5, 5, 6, 6])


def test_a_file_without_the_arrays_of_a_dataset_is_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"one\.npy: not a readable \.npz"):
        load(section("arrays", path="one.npy"), tmp_path)
    np.savez(tmp_path / "b.npz", X=np.zeros(3))
    with pytest.raises(DataError, match="no array 'x_train'; found X"):
        load(section("arrays", path="b.npz"), tmp_path)


def picture(path, shade, size=(4, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 0, 255)).save(path)


def test_a_folder_of_images_has_its_classes_by_name(tmp_path):
    for c, name in enumerate(("ant", "bee")):
        for k in range(3):
            picture(tmp_path / "train" / name / f"{k}.png", 10 * c + k)
        picture(tmp_path / "val" / name / "0.png", 100 + c)
    d = load(section("folder"), tmp_path)
    assert (d.names, d.input_shape, d.n_train, d.n_test) == (("ant", "bee"), (3, 4, 4), 6, 2)
    assert d.train[0][:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert d.test[0][:, 0, 0, 0].tolist() == [100, 101]
    assert (d.train[1].tolist(), d.test[1].tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])


def test_a_folder_of_classes_alone_is_read_and_one_of_their_folders_is_not_taken_for_it(tmp_path):
    for name in ("ant", "bee"):
        for k in range(5):
            picture(tmp_path / "insects" / name / f"{k}.png", k)
            picture(tmp_path / "kept" / "TRAINING" / name / f"{k}.png", k)
    d = load(section("folder", path="insects"), tmp_path)
    assert (d.names, d.n_train, d.n_test) == (("ant", "bee"), 8, 2)
    with pytest.raises(DataError, match="kept: no folder train/"):
        load(section("folder", path="kept"), tmp_path)
    with pytest.raises(DataError, match="there is no folder gone"):
        load(section("folder", path="gone"), tmp_path)


def test_images_of_different_sizes_want_a_size(tmp_path):
    for k, size in enumerate(((4, 4), (6, 4), (4, 4))):
        picture(tmp_path / "train" / "ant" / f"{k}.png", 9, size)
    with pytest.raises(DataError, match=r"4x6 pixels where others have 4x4; say data.size"):
        load(section("folder", test_share=0.0), tmp_path)
    d = load(section("folder", test_share=0.34, size=[8, 2], grey=True), tmp_path)
    assert d.input_shape == (1, 8, 2)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda file: file.write_text("no image"), "not a readable image"),
        (lambda file: Image.new("I;16", (4, 4)).save(file), "more than 8 bits a channel"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(write, says, tmp_path):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    write(tmp_path / "train" / "ant" / "0.png")
    with pytest.raises(DataError, match=f"0.png: {says}"):
        load(section("folder"), tmp_path)


def test_tiny_imagenet_is_read_in_its_own_layout(tmp_path):
    top = tmp_path / "tiny-imagenet-200"
    for c, name in enumerate(("n01", "n02")):
        picture(top / "train" / name / "images" / f"{name}_0.png", c)
    picture(top / "val" / "images" / "val_0.png", 50)
    picture(top / "val" / "images" / "val_1.png", 60)
    picture(top / "test" / "images" / "test_0.png", 70)  # without labels: not used
    (top / "val" / "val_annotations.txt").write_text(
        "val_0.png\tn02\t0\t0\t1\t1\nval_1.png\tn01\t0\t0\t1\t1\n"
    )
    d = load(section("tiny-imagenet"), tmp_path)
    assert (d.test[0][:, 0, 0, 0].tolist(), d.test[1].tolist()) == ([50, 60], [1, 0])
    assert d.mean == (0.4802, 0.4481, 0.3975)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            ["train/a/0.png", "train/b/0.gif"],
            r"train/b: no images in this folder of a class \(found \.gif\); expected files that",
        ),
        (
            ["train/a/0.png", "train/b/0.png", "test/a/0.png", "test/B/0.png"],
            r"test: unknown class 'B'\. Did you mean 'b'\? Known: a, b",
        ),
    ],
)
def test_a_folder_whose_images_would_be_left_out_is_an_error(tmp_path, files, says):
    for name in files:
        picture(tmp_path / name, 9)
    with pytest.raises(DataError, match=says):
        load(section("folder"), tmp_path)


def linked(tmp_path, link: str, to: str) -> DataSection:
    """A folder of two classes with two images each, with a link."""
    for name in (
        "train/a/0.png",
        "train/a/1.png",
        "train/b/0.png",
        "train/b/1.png",
        "more/x/2.png",
    ):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(place)
    (tmp_path / link).symlink_to(tmp_path / to)
    return section("folder", test_share=0.5)


@pytest.mark.parametrize("link", ["train/a/site", "train/c"])
def test_links_to_folders_of_images_are_followed_at_any_depth(tmp_path, link):
    data = load(linked(tmp_path, link, "more/x"), tmp_path)
    assert data.n_train + data.n_test == 5


@pytest.mark.parametrize(
    ("link", "to", "says"),
    [
        ("train/a/gone.png", "nothing.png", r"train/a/gone\.png: a link to .*nothing\.png"),
        ("train/c", "nothing", "train/c: a link to .*nothing, which is not there"),
        ("train/a/self", "train", "train/a/self/a: a link to a folder that contains it"),
    ],
)
def test_a_link_that_leads_nowhere_or_in_a_circle_is_named(tmp_path, link, to, says):
    with pytest.raises(DataError, match=says):
        load(linked(tmp_path, link, to), tmp_path)


def test_without_test_images_a_share_of_each_class_is_kept_and_folders_not_read_are_named(tmp_path):
    for k in range(5):
        for place in ("train/ant", "train/bee", "Testing/ant"):
            picture(tmp_path / place / f"{k}.png", 9)
    d = load(section("folder", test_share=0.4), tmp_path)
    assert np.bincount(d.labels("test")).tolist() == [2, 2]
    assert np.bincount(d.labels()).tolist() == [3, 3]
    (note,) = d.notes
    assert "no test images in test/ or val/, so 0.4 of each class is kept" in note
    assert note.endswith("not read: Testing.")


# -- at a site -------------------------------------------------------------------------------------
def test_a_site_brings_its_own_folder_and_lacks_some_classes(tmp_path):
    for k in range(4):
        picture(tmp_path / "train" / "bee" / f"{k}.png", k)
    d = load_site(
        section("site", shape=[3, 4, 4], classes=["ant", "bee", "cat"], test_share=0.25), tmp_path
    )
    assert (d.classes, d.labels().tolist(), d.labels("test").tolist()) == (3, [1, 1, 1], [1])
    assert d.mean == (0.5, 0.5, 0.5)  # never the site's own statistics
    site = alone(d).site(0)
    assert (site.n, site.n_test, site.class_counts.tolist()) == (3, 1, [0, 3, 0])


def test_a_site_brings_one_npz_file(tmp_path):
    np.savez(
        tmp_path / "mine.npz",
        x_train=np.zeros((3, 7), dtype=np.float32),
        y_train=np.array([0, 0, 1]),
    )
    d = load_site(section("site", shape=[7], classes=2), tmp_path)
    assert (d.n_train, d.n_test) == (3, 0)
    with pytest.raises(
        DataError, match=r"holds samples of shape \[7\] in 2 classes; .* say \[8\] and 2"
    ):
        load_site(section("site", shape=[8], classes=2), tmp_path)


def test_a_site_brings_a_registered_dataset(tmp_path):
    dataset("sensors")(lambda root, *, window=1: toy())
    assert (
        load_site(
            section("site", shape=[3], classes=2, format="sensors", window=2), tmp_path
        ).n_train
        == 6
    )


@pytest.mark.parametrize(
    ("options", "place", "says"),
    [
        ({"shape": [3], "classes": 2}, "empty", r"found neither train/<class>/ nor one .npz file"),
        ({"classes": 2}, "empty", "say the shape of a sample"),
        ({"shape": [3], "classes": 2}, "nowhere", "there is no such folder or file"),
        ({"shape": [3], "classes": 2}, None, "--data DIR"),
        ({"shape": [3], "classes": 2, "format": "site"}, "empty", "unknown format 'site'"),
    ],
)
def test_a_site_that_cannot_be_read_says_why(tmp_path, options, place, says):
    (tmp_path / "empty").mkdir()
    with pytest.raises((ConfigError, DataError), match=says):
        load_site(section("site", **options), place and tmp_path / place)


# -- export and back -------------------------------------------------------------------------------
def test_an_exported_partition_is_read_back_as_it_was(tmp_path):
    d = load(section("digits"))

    def divided(scheme, **options):
        partition = PartitionSection(scheme=scheme, options=options)
        public = PublicSection(samples=20)
        return split(d, DataSection(partition=partition, public=public), 4, 0)

    first = divided("dirichlet", alpha=0.5)
    (tmp_path / "parts.json").write_text(json.dumps(first.export()))
    again = divided("file", path=str(tmp_path / "parts.json"))
    assert [again.sha256(i) for i in range(4)] == [first.sha256(i) for i in range(4)]
    assert all((a == b).all() for a, b in zip(again.tests, first.tests))


def test_classes_that_only_the_test_set_has_are_told_with_their_names(tmp_path):
    x = np.zeros((4, 3), np.float32)
    y = np.array(["a", "b", "c", "a"])
    y_test = np.array(["a", "b ", "c", "b "])
    np.savez(tmp_path / "spaces.npz", x_train=x, y_train=y, x_test=x, y_test=y_test)
    chosen = section("arrays", path="spaces.npz")
    assert "y: 2 test samples are of classes without a training sample: 'b '." in (
        load(chosen, tmp_path).notes
    )
    merged = msgspec.structs.replace(chosen, client_test="merge_split")  # trains on them too
    np.savez(tmp_path / "spaces.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for one in (chosen, merged):
        assert not any("without a training sample" in n for n in load(one, tmp_path).notes)
    x = np.zeros((4, 3), np.float32)
    y = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "numbers.npz", x_train=x, y_train=y, x_test=x, y_test=y + 1)
    assert load(section("arrays", path="numbers.npz"), tmp_path).notes == (
        "y: 2 test samples are of classes without a training sample: 2.",
    )
