"""A server's text for parts of a site's own, which might read the file that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fednet import config as configuration
from fednet import registry
from fednet.client.policy import Policy, policy
from fednet.data.base import Data
from fednet.errors import ConfigError
from tests.rooms import SMALL


def table(
    root: Path,
    *,
    label: str = "age",
    split: Literal["old", "new"] = "old",
    columns: list[str] | None = None,
    width: int = 3,
) -> Data:
    x, y = np.zeros((60, width), np.float32), np.arange(60) % 2
    return Data(train=(x, y), test=(x, y), classes=2)


def anything(root: Path, **options: Any) -> Data:
    return table(root)


def lot(y: Any, clients: int, *, order: str = "") -> list[np.ndarray]:
    return np.array_split(np.arange(len(y)), clients)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.dataset._parts, "texts-table", table)
    monkeypatch.setitem(registry.dataset._parts, "texts-anything", anything)
    monkeypatch.setitem(registry.partitioner._parts, "texts-lot", lot)


def said(**data: Any) -> str:
    """As it comes from a server."""
    divided = {} if data["dataset"] == "site" else {"partition": {"scheme": "iid"}}
    made = {**SMALL, "data": {**divided, **data}}
    return configuration.to_yaml(configuration.from_mapping(made, where="here"))


TABLE: dict[str, Any] = {"dataset": "texts-table"}


@pytest.mark.parametrize(
    "data",
    [
        TABLE,  # the part's own defaults
        {**TABLE, "label": "age", "split": "new", "width": 5},
        {"dataset": "texts-anything", "width": 5},
        {**TABLE, "partition": {"scheme": "texts-lot"}},
        {"dataset": "site", "shape": [3], "classes": ["a", "b"], "format": "texts-table"},
        {"dataset": "synthetic", "shape": [3], "classes": 2, "samples": 60},
    ],
)
def test_what_the_sites_own_file_gives_may_be_said(data: dict[str, Any]) -> None:
    Policy().read(said(**data))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({**TABLE, "label": "/etc/passwd"}, "data.label"),
        ({**TABLE, "label": "secret"}, "data.label"),
        ({**TABLE, "columns": ["age", "secret.csv"]}, "data.columns"),
        ({"dataset": "texts-anything", "where": {"deep": ["secret"]}}, "data.where"),
        ({"dataset": "texts-anything", "where": {"secret": 1}}, "data.where"),
        (
            {**TABLE, "partition": {"scheme": "texts-lot", "order": "secret"}},
            "data.partition.order",
        ),
        (
            {
                "dataset": "site",
                "shape": [3],
                "classes": 2,
                "format": "texts-table",
                "label": "secret",
            },
            "data.label",
        ),
    ],
)
def test_other_text_is_refused_but_where_the_policy_lets_the_server_choose(
    tmp_path: Path, data: dict[str, Any], key: str
) -> None:
    config = said(**data)
    with pytest.raises(ConfigError, match=f"{key}: the server gives .* of this site's own"):
        Policy().read(config)
    file = tmp_path / "site.yaml"
    file.write_text(f"text: [{key}]\n")
    policy(file, None, None).read(config)
    Policy.of_run(None).read(config)  # under `fednet run` the server's words are the user's own


def test_a_path_of_a_dataset_of_ones_own_lies_below_the_sites_data(tmp_path: Path) -> None:
    config = Policy().read(said(dataset="texts-anything", path="x.csv"))
    with pytest.raises(ConfigError, match="without --data"):
        Policy().applied_to(config)
    settled = policy(None, tmp_path, None).applied_to(config)
    assert settled.data.options["path"] == str(tmp_path / "x.csv")


def test_a_method_of_ones_own_is_not_made_with_such_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fednet.algorithms.fedavg import FedAvg

    class Reader(FedAvg):
        class Config(FedAvg.Config):
            prior: str = ""

        def __init__(self, config: Any, clients: int) -> None:
            super().__init__(config, clients)
            opened.append(config.prior)

    opened: list[str] = []
    monkeypatch.setitem(registry.algorithm._parts, "texts-reader", Reader)
    section = {"algorithm": {"name": "texts-reader", "prior": "/etc/passwd"}}
    made = {**SMALL, "data": {"partition": {"scheme": "iid"}}, **section}
    text = configuration.to_yaml(configuration.from_mapping(made, where="here"))
    opened.clear()  # by the user who wrote it
    with pytest.raises(ConfigError, match=r"algorithm\.prior: the server gives '/etc/passwd'"):
        Policy().read(text)
    assert opened == []
    Policy.of_run(None).read(text)
    assert opened == ["/etc/passwd"]
