from __future__ import annotations

import pytest

from fednet import config, papers
from fednet.papers.mini import COHORT, LONG, RATE, mini


@pytest.mark.parametrize("table", papers.with_results())
def test_every_cell_has_a_mini_of_its_own_that_is_a_valid_and_smaller_configuration(table):
    for cell in papers.cells(table):
        small = mini(cell)
        made = config.from_mapping(small.config, small.config["name"])
        assert made.name.endswith("-mini")
        assert made.rounds <= LONG
        assert made.cohort_size <= COHORT
        assert made.train.steps is not None
        assert RATE[0] - 1e-6 <= made.train.lr / (1 - made.train.momentum) <= RATE[1] + 1e-6
        assert (made.algorithm.name, made.data.dataset) == (
            cell.config["algorithm"]["name"],
            cell.config["data"]["dataset"],
        )
        assert small.figures == cell.figures


def test_condensation_as_long_as_the_papers_stays_so_at_mini_scale():
    small = [mini(c) for c in papers.cells("feddc/text_K500")]
    assert {c.config["algorithm"].get("iterations") for c in small} == {None, 500}
    assert {c.config["model"]["width"] for c in small} == {32}
    others = {mini(c).config["name"] for c in papers.cells("feddc/table1")}
    assert not others & {c.config["name"] for c in small}
