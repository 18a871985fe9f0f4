from __future__ import annotations

from collections import Counter

import pytest

from fednet import papers
from fednet.errors import ConfigError
from fednet.papers.tables import DATASETS, lay

TABLES = papers.with_results()
CELLS = [c for t in TABLES for c in papers.cells(t)]


def only(table: str, **wanted: str) -> papers.Cell:
    (found,) = [
        c for c in papers.cells(table) if all(getattr(c, k) == v for k, v in wanted.items())
    ]
    return found


def settings(paper: str) -> dict:
    return papers.paper(paper)["settings"]


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


KEYS = {"title", "settings", "anomalies", "base", "changes", "mini"}
TABLE_KEYS = {"caption", "base", "changes", "mini", "at", "by", "columns", "measures"}


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
    for key in ("changes", "mini"):
        assert unread(described.get(key, {}), every) == [], key


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


@pytest.mark.parametrize("paper", [p for p in papers.NAMES if p not in papers.FIELD])
def test_sizes_of_the_federation_and_local_training_are_the_papers(paper):
    said = settings(paper)
    optimizer = said["optimizer"]
    for cell in (c for c in CELLS if c.paper == paper and c.method != "SOLO"):
        config = cell.config
        assert config["clients"] == said["clients"]
        if said.get("participation") is not None:
            assert config["participation"] == said["participation"]
        for key, value in (
            ("lr", optimizer.get("lr")),
            ("momentum", optimizer.get("momentum")),
            ("weight_decay", optimizer.get("weight_decay")),
            ("batch_size", optimizer.get("batch_size") or said.get("batch_size")),
        ):
            if value is not None:
                assert config["train"][key] == value
        if isinstance(said.get("local_epochs"), int):
            assert config["train"]["epochs"] == said["local_epochs"]
        if paper != "fedrds":
            assert (
                float(cell.heterogeneity.partition("=")[2]) == config["data"]["partition"]["alpha"]
            )
        assert config["data"]["dataset"] == DATASETS[cell.dataset]


@pytest.mark.parametrize("paper", papers.FIELD)
def test_sizes_of_the_fields_tables_are_the_printed_ones(paper):
    said = settings(paper)

    def stated(key: str, cell: papers.Cell) -> object:
        """Of all cells, or by what tells them apart."""
        value = said.get(key)
        if not isinstance(value, dict):
            return value
        return next(v for k, v in value.items() if k in (cell.variant, cell.dataset))

    for cell in (c for c in CELLS if c.paper == paper):
        config, train = cell.config, cell.config["train"]
        if paper == "niidbench":
            assert f"{config['clients']} parties" == cell.variant
        else:
            assert config["clients"] == said["clients"]
        if stated("participation", cell) is not None:
            assert config["participation"] == stated("participation", cell)
        if "clients_per_round" in said:
            assert config["participation"] * said["clients"] == said["clients_per_round"]
        for key, own in (("local_epochs", "epochs"), ("local_steps", "steps")):
            assert said.get(key) is None or train[own] == said[key]
        for key, value in {**said, **said.get("optimizer", {})}.items():
            if key in ("lr", "batch_size", "momentum", "weight_decay"):
                assert isinstance(value, str) or train[key] == value
        if paper != "mcmahan" and stated("rounds", cell) is not None:
            assert config["rounds"] == stated("rounds", cell)
        mu = said.get("FedProx_mu", {}).get(cell.variant, {}).get(cell.heterogeneity)
        if cell.method == "FedProx" and mu is not None and cell.table == "cifar10":
            assert config["algorithm"]["mu"] == mu
        assert config["data"]["dataset"] == DATASETS[cell.dataset]


def test_rounds_and_values_that_differ_between_datasets_are_the_papers():
    for cell in CELLS:
        said = settings(cell.paper).get("datasets", {}).get(cell.dataset, {})
        if cell.table == "figure2":  # ends where the figure looks
            assert f"round={cell.config['rounds']}" == cell.variant
        elif isinstance(said.get("rounds"), int) and cell.method != "SOLO":
            assert cell.config["rounds"] == said["rounds"]
        if cell.paper == "fedabc":
            assert cell.config["train"]["lr"] == said["lr"]
            if cell.method == "FedABC":
                algorithm = cell.config["algorithm"]
                assert [algorithm[k] for k in ("m_p", "m_n", "m_nn", "focal_gamma")] == [
                    said[k] for k in ("m_p", "m_n", "m_nn", "focal_exponent")
                ]
        if cell.paper == "fedrds":
            row = settings("fedrds")["table2"][cell.dataset]
            assert cell.config["train"]["lr"] == row["lr"]
            assert cell.config["train"]["batch_size"] == row["batch_size"]
            assert cell.table == "figure5" or cell.config["train"]["epochs"] == row["local_epochs"]
            assert cell.config["participation"] == row["fraction_clients"]
            assert (
                cell.table in ("figureA1", "figure6")
                or cell.config["data"]["public"]["fraction"] == row["beta_shared"]
            )
            if cell.method == "FedRDS" and cell.table != "figureA1":
                assert cell.config["algorithm"]["alpha"] == row["alpha_shared_per_client"]


def test_laying_another_part_on_a_mapping_drops_the_options_of_the_one_below():
    partition = {"scheme": "iid", "y": 1}
    below = {
        "model": {"name": "a", "x": 1},
        "data": {"dataset": "d", "partition": partition},
        "rounds": 1,
    }
    assert lay(below, {"model": {"name": "b"}, "data": {"dataset": "e"}}) == {
        "model": {"name": "b"},
        "data": {"dataset": "e", "partition": partition},
        "rounds": 1,
    }
    assert lay(below, {"model": {"z": 2}})["model"] == {"name": "a", "x": 1, "z": 2}


# -- names -----------------------------------------------------------------------------------------
def test_names_of_tables_are_forgiving_in_case_and_helpful_otherwise():
    assert papers.cells("FedDPC/Table2") == papers.cells("feddpc/table2")
    with pytest.raises(
        ConfigError, match=r"unknown table 'fedpdc/table9'.*Did you mean 'fedpdc/table"
    ):
        papers.cells("fedpdc/table9")
    with pytest.raises(ConfigError, match=r"feddpc/table1 has no runs behind it.*O notation"):
        papers.cells("feddpc/table1")
