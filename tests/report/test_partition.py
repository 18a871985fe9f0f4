from __future__ import annotations

import numpy as np
import pytest

from fednet.report.figures import partition_file
from fednet.report.partition import rows

TABLE = np.array([[3, 0], [1, 4]])


def test_rows_show_samples_by_client_and_class_with_their_sums():
    assert rows(TABLE, ("ant", "bee")) == [
        ["client", "ant", "bee", "samples"],
        ["0", "3", "·", "3"],
        ["1", "1", "4", "5"],
        ["all", "4", "4", "8"],
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_bubble_chart_is_drawn(tmp_path, ending):
    partition_file(TABLE, None, tmp_path / f"p.{ending}")
    start = (tmp_path / f"p.{ending}").read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
