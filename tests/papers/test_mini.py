from __future__ import annotations

import pytest

from fednet import config, papers
from fednet.papers.choices import variants
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


@pytest.mark.parametrize("table", ["fedpdc/table2", "fedabc/table1", "feddc/table1", "feddpc/table2", "fedrds/table3"])
def test_what_a_paper_leaves_open_is_a_valid_variant_of_its_own_method_that_differs_in_one_thing(table):
    own = [c for c in papers.cells(table) if variants(c)]
    assert {c.method for c in own} == {papers.NAMES[table.partition("/")[0]]}
    names = [v.name for c in own for v in variants(c)]
    assert len(set(names)) == len(names)
    for found in variants(own[0]):
        made, plain = (config.to_mapping(config.from_mapping(c.config, c.name)) for c in (found, own[0]))
        assert len({k for k in made if made[k] != plain[k]} - {"name"}) == 1
        assert set(found.figures.values()) == {None}
