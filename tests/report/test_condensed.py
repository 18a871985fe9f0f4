from __future__ import annotations

import numpy as np
import torch
from matplotlib.image import imread

from fednet.report.condensed import GAP, class_means, grid, mosaic, shown

RAMP = torch.linspace(0, 1, 16).view(1, 4, 4)


def test_the_mean_of_each_class_and_none_for_an_absent_one():
    x, y = torch.stack([RAMP, 3 * RAMP, 5 * RAMP]), torch.tensor([0, 0, 2])
    means = class_means(x, y, 3)
    assert torch.equal(means[0], 2 * RAMP)
    assert means[1].isnan().all()
    assert torch.equal(means[2], 5 * RAMP)


def test_a_row_for_each_class_with_the_mean_first_and_clients_in_order_of_id():
    means = torch.stack([RAMP, RAMP.flip(1), RAMP])
    by_client = {
        7: (torch.stack([RAMP]), torch.tensor([2])),
        3: (torch.stack([-RAMP, RAMP]), torch.tensor([0, 1])),
    }
    picture = mosaic(by_client, means)
    side = 4 + GAP
    assert picture.shape == (3 * side - GAP, 3 * side - GAP, 3)

    def tile(row, column):
        return picture[row * side : row * side + 4, column * side : column * side + 4]

    assert np.array_equal(tile(1, 0), shown(means[1]))
    assert np.array_equal(tile(0, 1), shown(-RAMP))  # client 3, class 0
    assert np.array_equal(tile(2, 2), shown(RAMP))  # client 7, class 2
    assert (tile(2, 1) == 1).all()  # client 3 has no class 2
    assert (picture[:, 4 : 4 + GAP] == 1).all()


def test_pixels_are_stretched_to_what_can_be_seen():
    assert shown(RAMP).shape == (4, 4, 3)
    assert shown(100 * RAMP - 7).min() == 0
    assert shown(100 * RAMP - 7).max() == 1
    assert np.allclose(shown(RAMP), shown(5 * RAMP + 2))
    assert (shown(torch.ones(3, 4, 4)) == 0.5).all()
    colours = torch.stack([RAMP[0], RAMP[0] * 0, RAMP[0] * 0])
    assert shown(colours)[-1, -1].tolist() == [1, 0, 0]


def test_one_method_or_two_side_by_side_are_written(tmp_path):
    images = {i: (torch.stack([RAMP, -RAMP]), torch.tensor([0, 1])) for i in range(3)}
    means = torch.stack([RAMP, RAMP])
    one = imread(grid(images, means, ["cat", "dog"], tmp_path / "one.png"))
    two = imread(grid(images, means, ["cat", "dog"], tmp_path / "two.png", beside=images))
    assert two.shape[1] > 1.5 * one.shape[1]
    assert (one[..., :3] < 0.5).any()


def test_two_runs_with_condensed_images_stand_side_by_side_on_one_page(tmp_path):
    from safetensors.torch import save_file

    from fednet.report import open_run, page
    from tests.report import fake_run

    runs = []
    for name in ("feddc", "feddcplus"):
        folder = fake_run.write(tmp_path / name, algorithm={"name": name})
        (folder / "condensed").mkdir()
        save_file(
            {"x": torch.zeros(1, 3, 4, 4), "y": torch.tensor([1])},
            folder / "condensed" / "client-0.safetensors",
        )
        save_file(
            {"means": torch.ones(2, 3, 4, 4)},
            folder / "condensed" / "means.safetensors",
            metadata={"names": '["cat", "dog"]'},
        )
        runs.append(open_run(folder))
    assert "Condensed images of two methods" in page.render(runs)
    assert "side by side" not in page.render(runs[:1])
