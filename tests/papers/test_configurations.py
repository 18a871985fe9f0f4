"""The papers' settings against the real configuration and models."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fednet import config, models, papers
from fednet.papers.mini import COHORT, LONG, RATE, mini

TAKEN = yaml.safe_load(
    (Path(__file__).parents[2] / "configs" / "papers" / "taken.yaml").read_text(encoding="utf-8")
)
CELLS = {c.name: c for table in papers.with_results() for c in papers.cells(table)}
SHAPES = {
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "svhn": ((3, 32, 32), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tiny-imagenet": ((3, 64, 64), 200),
}


@functools.cache
def written(name: str) -> dict[str, Any]:
    """The whole configuration of the cells of this name, as it is written; they are one run."""
    return config.to_mapping(config.from_mapping(CELLS[name].config, name))


@pytest.mark.parametrize("table", papers.with_results())
def test_every_cell_is_a_valid_configuration_and_keeps_what_it_says(table):
    for cell in papers.cells(table):
        checked = written(cell.name)
        for section, said in cell.config.items():
            if isinstance(said, dict):
                assert {k: checked[section][k] for k in said if not isinstance(said[k], dict)} == {
                    k: v for k, v in said.items() if not isinstance(v, dict)
                }
            else:
                assert checked[section] == said


@pytest.mark.parametrize("paper", papers.NAMES)
def test_what_is_said_to_be_taken_where_a_paper_is_silent_is_what_its_cells_have(paper):
    checked = 0
    for entry in TAKEN[paper]:
        place = entry.get("in")
        if place is None:
            continue
        cells = [
            c
            for c in papers.cells(f"{paper}/{place['table']}")
            if place.get("method") in (None, c.method) and c.method != "SOLO"
        ]
        assert cells, entry["text"]
        for cell in cells:
            for key, value in place["values"].items():
                assert (
                    functools.reduce(lambda at, k: at[k], key.split("."), written(cell.name))
                    == value
                ), (
                    cell.name,
                    key,
                )
                checked += 1
    assert checked


def test_every_cells_model_fits_its_dataset():
    pairs = {
        (c.config["data"]["dataset"], json.dumps(c.config["model"], sort_keys=True))
        for c in CELLS.values()
    }
    for dataset, section in sorted(pairs):
        shape, classes = SHAPES[dataset]
        with torch.device("meta"):
            module = models.make(json.loads(section), shape, classes)
            assert module(torch.zeros(2, *shape)).shape == (2, classes)


# -- the mini scale --------------------------------------------------------------------------------
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
