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


def test_a_mini_of_fedsmu_is_without_what_its_thousands_of_rounds_have_against_overfitting():
    cell = next(c for c in papers.cells("fedsmu/table2") if c.method == "FedSMU")
    full, small = (config.from_mapping(c.config, "one") for c in (cell, mini(cell)))
    assert (full.data.augment, full.train.weight_decay, full.train.clip_norm) == (
        "crop_flip",
        0.001,
        10,
    )
    assert (small.data.augment, small.train.weight_decay, small.train.clip_norm) == (
        "none",
        0.0,
        None,
    )
    assert small.algorithm == full.algorithm


def test_a_mini_keeps_the_ratio_of_local_work_and_of_who_takes_part():
    def small(table, **wanted):
        return config.from_mapping(
            mini(
                next(
                    c
                    for c in papers.cells(table)
                    if all(getattr(c, k) == v for k, v in wanted.items())
                )
            ).config,
            "mini",
        )

    ten, one = (small("feddc/table1", variant=e) for e in ("E10", "E1"))
    assert (ten.train.steps, one.train.steps) == (20, 10)
    assert [small("fedrds/figure5", variant=f"E={e}").train.steps for e in (10, 20, 40, 80)] == [
        20,
        40,
        80,
        160,
    ]
    everyone, half = (
        small("fedpdc/table2", method="FedPDC"),
        small("fedabc/table1", method="FedABC"),
    )
    assert (everyone.clients, everyone.cohort_size) == (5, 5)
    assert (half.clients, half.cohort_size) == (10, 5)


def test_condensation_as_long_as_the_papers_stays_so_at_mini_scale():
    small = [mini(c) for c in papers.cells("feddc/text_K500")]
    assert {c.config["algorithm"].get("iterations") for c in small} == {None, 500}
    assert {c.config["model"]["width"] for c in small} == {32}
    others = {mini(c).config["name"] for c in papers.cells("feddc/table1")}
    assert not others & {c.config["name"] for c in small}
