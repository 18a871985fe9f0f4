from __future__ import annotations

import numpy as np
import torch
from matplotlib.image import imread
from safetensors.torch import save_file

from fednet.report.condensed import GAP, draw, mosaic, shown

RAMP = torch.linspace(0, 1, 16).view(1, 4, 4)


def test_a_row_for_each_class_with_the_mean_first_and_clients_in_order_of_id():
    means = torch.stack([RAMP, RAMP.flip(1), RAMP])
    by_client = {
        7: (torch.stack([RAMP]), torch.tensor([2])),
        3: (torch.stack([-RAMP, RAMP]), torch.tensor([0, 1])),
    }
    picture = mosaic(by_client, means)
    side = 4 + GAP
    assert picture.shape == (3 * side - GAP, 3 * side - GAP, 4)

    def tile(row, column):
        return picture[row * side : row * side + 4, column * side : column * side + 4, :3]

    assert np.array_equal(tile(1, 0), shown(means[1]))
    assert np.array_equal(tile(0, 1), shown(-RAMP))  # client 3, class 0
    assert np.array_equal(tile(2, 2), shown(RAMP))  # client 7, class 2
    assert (picture[2 * side :, side : side + 4, 3] == 0).all()  # client 3 has no class 2
    assert (picture[:, 4 : 4 + GAP, 3] == 0).all()


def test_pixels_are_stretched_to_what_can_be_seen():
    assert shown(RAMP).shape == (4, 4, 3)
    assert shown(100 * RAMP - 7).min() == 0
    assert shown(100 * RAMP - 7).max() == 1
    assert np.allclose(shown(RAMP), shown(5 * RAMP + 2))
    assert (shown(torch.ones(3, 4, 4)) == 0.5).all()
    colours = torch.stack([RAMP[0], RAMP[0] * 0, RAMP[0] * 0])
    assert shown(colours)[-1, -1].tolist() == [1, 0, 0]


def test_the_picture_of_a_run_has_a_column_for_each_client(tmp_path):
    assert draw(tmp_path, tmp_path / "none.png") is None
    folder = tmp_path / "condensed"
    folder.mkdir()
    names = {"names": '["cat", "dog"]'}
    save_file({"means": torch.stack([RAMP, RAMP])}, folder / "means.safetensors", metadata=names)
    widths = []
    for client in range(2):
        images = {"x": torch.stack([RAMP, -RAMP]), "y": torch.tensor([0, 1])}
        save_file(images, folder / f"client-{client}.safetensors")
        picture = imread(draw(tmp_path, tmp_path / "one.png"))
        widths.append(picture.shape[1])
    assert widths[1] > widths[0]
    assert (picture[..., :3] < 0.5).any()
