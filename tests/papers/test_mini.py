from __future__ import annotations

import pytest

from fednet import config, papers
from fednet.papers.mini import COHORT, ROUNDS, mini


@pytest.mark.parametrize("table", papers.results())
def test_every_cell_has_a_mini_of_its_own_that_is_a_valid_and_smaller_configuration(table):
    for cell in papers.cells(table):
        small = mini(cell)
        made = config.from_mapping(small.config, small.config["name"])
        assert made.name.endswith("-mini")
        assert made.rounds <= ROUNDS
        assert made.cohort_size <= COHORT
        assert made.train.steps is not None
        assert (made.algorithm.name, made.data.dataset) == (cell.config["algorithm"]["name"], cell.config["data"]["dataset"])
        assert small.figures == cell.figures
