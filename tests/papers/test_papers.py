from __future__ import annotations

import functools
from collections import Counter

import pytest

from fednet import papers
from fednet.errors import ConfigError

TABLES = papers.with_results()
CELLS = [c for t in TABLES for c in papers.cells(t)]


def only(table: str, **wanted: str) -> papers.Cell:
    (found,) = [
        c for c in papers.cells(table) if all(getattr(c, k) == v for k, v in wanted.items())
    ]
    return found


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [float(value)] if isinstance(value, (int, float)) else []


# -- figures ---------------------------------------------------------------------------------------
def test_every_table_has_a_caption_and_what_is_not_printed_has_no_figures():
    assert all(papers.caption(t) for t in TABLES)
    unprinted = {t for t in TABLES if "cells" not in papers.table(t)}
    assert unprinted == {
        *(f"feddpc/figure{k}" for k in (3, 4, 5, 6, 7)),
        *(f"fedrds/figure{k}" for k in (4, 5, 6, 7, "A1")),
        "feddc/text_E5",
        "feddc/text_K500",
        "fedabc/figure2",
    }
    assert all(v is None for t in unprinted for c in papers.cells(t) for v in c.figures.values())
    assert set(papers.no_runs()) == {"feddpc/table1", "feddc/figure7_text"}


@pytest.mark.parametrize("table", TABLES)
def test_every_number_of_a_table_is_the_figure_of_a_cell(table):
    found = Counter(v for c in papers.cells(table) for v in c.figures.values() if v is not None)
    assert found == Counter(numbers(papers.table(table).get("cells")))


KEYS = {"title", "settings", "anomalies", "base", "changes", "grids", "mini"}
TABLE_KEYS = {"caption", "shown_by", "base", "changes", "mini", "at", "by", "columns", "measures"}


@pytest.mark.parametrize("paper", papers.NAMES)
def test_every_line_of_a_description_is_read(paper):
    """A key that nothing reads, or words that no cell has, would change nothing and say nothing."""
    described = papers.paper(paper)
    assert set(described) <= KEYS | {"tables"}
    every = [c for c in CELLS if c.paper == paper]
    for name, table in described["tables"].items():
        if "no_runs" in table:
            continue
        own = [c for c in every if c.table == name]
        by_words = {"measures", "versus", "target_round", "no_run"}
        assert set(table) <= TABLE_KEYS | by_words | {"cells"}
        for key in {"changes", "mini"} | by_words:
            if isinstance(table.get(key), dict):
                assert unread(table[key], own) == [], (name, key)
    for key in ("changes", "grids", "mini"):
        assert unread(described.get(key, {}), every) == [], key


def test_a_figure_of_another_tables_runs_has_cells_of_that_table_alone():
    shown = {t: papers.table(t)["shown_by"] for t in TABLES if "shown_by" in papers.table(t)}
    assert set(shown) == {"feddpc/figure3", "feddpc/figure4", "feddpc/figure5", "fedrds/figure4"}
    for figure, other in shown.items():
        runs = {c.name for c in papers.cells(f"{figure.partition('/')[0]}/{other}")}
        assert {c.name for c in papers.cells(figure)} <= runs


def unread(lines: dict, cells: list[papers.Cell]) -> list[str]:
    """The keys whose words no cell has."""
    have = [{"all", c.method, c.dataset, c.heterogeneity, c.variant} for c in cells]
    return [key for key in lines if not any(h >= set(key.split(" & ")) for h in have)]


def test_a_method_that_never_reaches_the_target_has_no_figure():
    cell = only("fedpdc/table5", method="FedProx", dataset="Tiny-ImageNet")
    assert cell.figures == {"rounds_to_target": None, "speedup": None}
    assert (cell.versus, cell.target_round) == ("FedAvg", 20)


def test_what_is_measured_against_another_method_has_that_method_in_its_table():
    for cell in CELLS:
        if cell.versus is not None:
            only(
                f"{cell.paper}/{cell.table}",
                method=cell.versus,
                dataset=cell.dataset,
                variant=cell.variant,
                heterogeneity=cell.heterogeneity,
            )


# -- configurations --------------------------------------------------------------------------------
def test_cells_of_one_name_are_one_run():
    seen: dict[str, dict] = {}
    for cell in CELLS:
        assert cell.config["name"] == cell.name
        assert seen.setdefault(cell.name, cell.config) == cell.config
    assert only(
        "fedabc/table1", method="FedPer", dataset="MNIST", heterogeneity="alpha=0.3"
    ).name in {c.name for c in papers.cells("fedabc/table2")}


STATED = {
    "clients": ("clients",),
    "participation": ("participation",),
    "local_epochs": ("train", "epochs"),
    "local_steps": ("train", "steps"),
    "batch_size": ("train", "batch_size"),
    "lr": ("train", "lr"),
    "momentum": ("train", "momentum"),
    "weight_decay": ("train", "weight_decay"),
}


@pytest.mark.parametrize("paper", papers.NAMES)
def test_runs_have_the_numbers_that_the_paper_states(paper):
    settings = papers.paper(paper)["settings"]
    stated = {**settings, **settings.get("optimizer", {})}
    for cell in (c for c in CELLS if c.paper == paper and c.method != "SOLO"):
        for key, path in STATED.items():
            if isinstance(stated.get(key), (int, float)):
                value = functools.reduce(lambda at, k: at.get(k, {}), path, cell.config)
                assert value == stated[key], (cell.name, key)


# -- names -----------------------------------------------------------------------------------------
def test_names_of_tables_are_forgiving_in_case_and_helpful_otherwise():
    assert papers.cells("FedDPC/Table2") == papers.cells("feddpc/table2")
    with pytest.raises(
        ConfigError, match=r"unknown table 'fedpdc/table9'.*Did you mean 'fedpdc/table"
    ):
        papers.cells("fedpdc/table9")
    with pytest.raises(ConfigError, match=r"feddpc/table1 has no runs behind it.*O notation"):
        papers.cells("feddpc/table1")
