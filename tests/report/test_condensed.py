from __future__ import annotations

import matplotlib.figure
import numpy as np
import torch
from safetensors.torch import save_file

from fednet.report import figures
from fednet.report.condensed import GAP, displayed_image, images
from tests.report.fake_run import opened

RAMP = torch.linspace(0, 1, 16).view(1, 4, 4)


def save(run, means, **by_client):
    folder = run / "condensed"
    folder.mkdir(exist_ok=True)
    names = {"names": '["cat", "dog", "eel"]'}
    save_file({"means": torch.stack(means)}, folder / "means.safetensors", metadata=names)
    for client, (x, y) in by_client.items():
        sent = {"x": torch.stack(x), "y": torch.tensor(y)}
        save_file(sent, folder / f"client-{client[1:]}.safetensors")


def test_a_row_for_each_class_with_the_mean_first_and_clients_in_order_of_id(tmp_path):
    assert list(images(tmp_path)) == []
    means = [RAMP, RAMP.flip(1), torch.full_like(RAMP, torch.nan)]
    save(tmp_path, means, c7=([RAMP], [2]), c13=([-RAMP, RAMP], [0, 1]))
    (figure,) = images(tmp_path)
    drawn = matplotlib.figure.Figure()
    figure.draw(drawn)
    (ax,) = drawn.axes
    assert [t.get_text() for t in ax.get_xticklabels()] == ["mean", "7", "13"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cat", "dog", "eel"]
    picture = np.asarray(ax.images[0].get_array())
    side = 4 + GAP
    assert picture.shape == (3 * side - GAP, 3 * side - GAP, 4)
    tiles = [
        [picture[r * side : r * side + 4, c * side : c * side + 4] for c in range(3)]
        for r in range(3)
    ]
    assert np.array_equal(tiles[1][0][..., :3], displayed_image(means[1]))
    assert np.array_equal(tiles[2][1][..., :3], displayed_image(RAMP))  # client 7, class 2
    assert np.array_equal(tiles[0][2][..., :3], displayed_image(-RAMP))  # client 13, class 0
    seen = [[bool(tile[..., 3].any()) for tile in row] for row in tiles]
    assert seen == [[True, False, True], [True, False, True], [False, True, False]]
    assert (picture[:, 4 : 4 + GAP, 3] == 0).all()
    assert "of the first" not in figure.note
    (figure,) = images(tmp_path, most=1)
    assert figure.note.endswith("(of the first 1 clients).")


def test_they_are_among_the_figures_of_a_run(tmp_path):
    run = opened(tmp_path / "a", rounds=1)
    save(run.dir, [RAMP] * 3, c5=([RAMP], [0]))
    assert [f.name for f in figures.details(run)][-1] == "condensed"


def test_pixels_are_stretched_to_what_can_be_seen():
    assert displayed_image(RAMP).shape == (4, 4, 3)
    assert displayed_image(100 * RAMP - 7).min() == 0
    assert displayed_image(100 * RAMP - 7).max() == 1
    assert np.allclose(displayed_image(RAMP), displayed_image(5 * RAMP + 2))
    assert (displayed_image(torch.ones(3, 4, 4)) == 0.5).all()
    colours = torch.stack([RAMP[0], RAMP[0] * 0, RAMP[0] * 0])
    assert displayed_image(colours)[-1, -1].tolist() == [1, 0, 0]
