"""What a server may not choose at a site: text for the site's own parts, which might name a file,
and the files that a run reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fednet import config as configuration
from fednet import ids, registry
from fednet.algorithms.fedavg import FedAvg
from fednet.client.policy import Policy, make_policy
from fednet.client.preparing import accept_config, explanation
from fednet.data.base import Data
from fednet.errors import ConfigError
from fednet.experiment.build import build
from fednet.wire.messages import Welcome
from tests.chaos.mallory import Liar
from tests.chaos.test_hostile_server import refused, site, told
from tests.processes import Federation
from tests.rooms import SMALL, site_data


def table(
    root: Path,
    *,
    label: str = "age",
    split: Literal["old", "new"] = "old",
    columns: list[str] | None = None,
    width: int = 3,
) -> Data:
    x = np.zeros((60, width), np.float32)
    y = np.arange(60) % 2
    return Data(train=(x, y), test=(x, y), classes=2)


def anything(root: Path, **options: Any) -> Data:
    return table(root)


def lot(y: Any, clients: int, *, order: str = "") -> list[np.ndarray]:
    return np.array_split(np.arange(len(y)), clients)


def net(*, input_shape: tuple[int, ...], classes: int, file: str = "") -> torch.nn.Module:
    return torch.nn.Linear(*input_shape, classes)


class Reader(FedAvg):
    """A method that reads a file when it is made."""

    opened: list[str] = []

    class Config(FedAvg.Config):
        prior: str = ""

    def __init__(self, config: Any, clients: int) -> None:
        super().__init__(config, clients)
        self.opened.append(config.prior)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.dataset._parts, "texts-table", table)
    monkeypatch.setitem(registry.dataset._parts, "texts-anything", anything)
    monkeypatch.setitem(registry.partitioner._parts, "texts-lot", lot)
    monkeypatch.setitem(registry.model._parts, "texts-net", net)
    monkeypatch.setitem(registry.algorithm._parts, "texts-reader", Reader)


def sent(algorithm: Any = "fedavg", model: Any = SMALL["model"], **data: Any) -> str:
    """A configuration as it comes from a server."""
    divided = {} if data["dataset"] == "site" else {"partition": {"scheme": "iid"}}
    made = {**SMALL, "data": {**divided, **data}, "algorithm": algorithm, "model": model}
    return configuration.to_yaml(configuration.from_mapping(made, where="here"))


TABLE: dict[str, Any] = {"dataset": "texts-table"}
SYNTHETIC: dict[str, Any] = {"dataset": "synthetic", "shape": [3], "classes": 2, "samples": 60}
# The last client has another model.
SECOND = {"name": "mlp", "others": [{"name": "texts-net", "clients": "2", "file": "secret"}]}
SITE: dict[str, Any] = {"dataset": "site", "shape": [3], "format": "texts-table"}


@pytest.mark.parametrize(
    "data",
    [
        TABLE,  # the part's own defaults
        {**TABLE, "label": "age", "split": "new", "width": 5},
        {"dataset": "texts-anything", "width": 5},
        {**TABLE, "partition": {"scheme": "texts-lot"}},
        {**SITE, "classes": ["a", "b"]},
        SYNTHETIC,
    ],
)
def test_a_server_may_choose_what_the_sites_own_file_names(data: dict[str, Any]) -> None:
    Policy().read_config(sent(**data))


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
        ({**SITE, "classes": 2, "label": "secret"}, "data.label"),
        ({**SITE, "classes": 2, "format": "texts-anything", "path": "secret"}, "data.path"),
        (
            {**SYNTHETIC, "algorithm": {"name": "texts-reader", "prior": "/etc/passwd"}},
            "algorithm.prior",
        ),
        ({**SYNTHETIC, "model": {"name": "texts-net", "file": "secret"}}, "model.file"),
        ({**SYNTHETIC, "algorithm": "fedproto", "model": SECOND}, "model.file"),
    ],
)
def test_other_text_is_refused_unless_the_policy_lets_the_server_choose(
    tmp_path: Path, data: dict[str, Any], key: str
) -> None:
    config = sent(**data)
    Reader.opened.clear()  # by the user who wrote the configuration
    with pytest.raises(ConfigError, match=f"{key}: the server gives .* of this site's own"):
        Policy().read_config(config)
    assert not Reader.opened  # no part is made with the text
    file = tmp_path / "site.yaml"
    file.write_text(f"text: [{key}]\n")
    make_policy(file, None, None).read_config(config)
    Policy.of_run(None).read_config(config)  # under `fednet run` the same user wrote both
    assert Reader.opened == (["/etc/passwd"] * 2 if key == "algorithm.prior" else [])


@pytest.mark.parametrize(
    ("named", "asked", "beyond"),
    [
        ("0-2", "1-2", None),
        ("0-1", "1-3", 2),
        ("1/3", "0-1", None),  # of six clients
        ("1/3", "1-2", 2),
        ("2/3", "1/3", 0),
        ("4-9", "4-5", None),  # a policy may name more clients than the run has
    ],
)
def test_a_process_serves_only_clients_that_the_policy_names(
    tmp_path: Path, named: str, asked: str, beyond: int | None
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"ids: {named}\n")
    own = make_policy(file, None, None)
    clients = ids.parse(asked)
    welcome = Welcome(
        run="r",
        session="s",
        name="r",
        ids=list(clients.resolve(6)),
        config=configuration.to_yaml(configuration.from_mapping({"clients": 6})),
    )
    if beyond is None:
        assert accept_config(welcome, own, clients).clients == 6
    else:
        refused = f"--id {asked}: the policy names clients {named}, and {beyond} is none of them."
        with pytest.raises(ConfigError, match=re.escape(refused)):
            accept_config(welcome, own, clients)


def test_a_path_of_a_dataset_of_ones_own_is_below_the_sites_data(tmp_path: Path) -> None:
    config = Policy().read_config(sent(dataset="texts-anything", path="x.csv"))
    with pytest.raises(ConfigError, match="without --data"):
        Policy().applied_to(config)
    applied = make_policy(None, tmp_path, None).applied_to(config)
    assert applied.data.options["path"] == str(tmp_path / "x.csv")


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_data_are_fetched_where_both_the_server_and_the_site_want_it(wanted, allowed) -> None:
    data = {"dataset": "mnist", "download": wanted, "root": "/their/own"}
    applied = Policy(download=allowed).applied_to(configuration.from_mapping({"data": data}))
    assert applied.data.download is (wanted and allowed)
    assert applied.data.root is None


def test_a_trace_that_the_server_names_is_read_below_the_sites_own_folder_alone(
    tmp_path: Path,
) -> None:
    def traced(trace: object, clock: str = "real") -> configuration.Config:
        link = {"clock": clock, "trace": trace, "step_ms": 1}
        return configuration.from_mapping({"link": link})

    site = Policy(places=(tmp_path,))
    assert site.applied_to(traced("lte")).link.trace == "lte"
    inside = str((tmp_path / "up").resolve())
    assert site.applied_to(traced(["up", "lte"])).link.trace == (inside, "lte")
    with pytest.raises(ConfigError, match=r"link.trace: the server names '/etc/passwd'.*refused"):
        site.applied_to(traced("/etc/passwd"))
    with pytest.raises(ConfigError, match=r"link.trace: .* started without --data"):
        Policy().applied_to(traced("up.csv"))
    # On the virtual clock a site reads none.
    assert Policy().applied_to(traced("/etc/passwd", "virtual")).link.trace == "/etc/passwd"


def test_the_model_is_tried_on_each_form_of_data_that_a_process_hosts(tmp_path: Path) -> None:
    """Client 1's samples are whole numbers, such as tokens, which an mlp does not take."""
    section = site_data(tmp_path, 0, 2)
    site_data(tmp_path, 1, x_train=np.ones((20, 4), np.int64), x_test=np.ones((20, 4), np.int64))
    server = Liar(told(data={k: v for k, v in section.items() if k != "root"}), ids=[0, 1, 2])
    own = make_policy(None, tmp_path, None)
    text = refused(server, tmp_path / "state", ids="0-2", policy=own)
    assert text.startswith("client 1: model mlp: it fails")


# -- what a site is shown --------------------------------------------------------------------------
def test_a_site_is_shown_what_would_leave_it_and_keeps_nothing(tmp_path: Path, capsys) -> None:
    server = Liar(told())
    with site(server, tmp_path / "state", explain=True) as found:
        server.listen(found["over"])
    assert found["result"] == 0
    shown = capsys.readouterr().out
    # mlp of 16 -> 4 -> 4: (16 * 4 + 4 + 4 * 4 + 4) float32; a Run is 24 bytes
    assert "client 0, exchange 1: up state 352 bytes, statistics 24 bytes; down 352" in shown
    assert "the data of synthetic" in shown
    assert f"stored here: {tmp_path / 'state'}" in shown
    assert not (tmp_path / "state").exists()


def test_what_a_method_gives_once_is_explained():
    mapping = {
        "clients": 3,
        "model": "mlp",
        "data": {
            "dataset": "synthetic",
            "samples": 200,
            "shape": [1, 8, 8],
            "classes": 4,
            "public": {"fraction": 0.1},
            "partition": "iid",
        },
    }
    said = {
        name: explanation(build(configuration.from_mapping({**mapping, "algorithm": name})), [1])
        for name in ("fedrds", "fedavg")
    }
    # half of 20 samples of 64 bytes, with an int64 label each
    assert said["fedrds"][0] == "client 1, once, with its first task: down shared 720 bytes"
    assert not any("once" in line for line in said["fedavg"])


def test_the_server_shows_why_a_site_refuses_the_run(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("max_samples: 10\n")
    with Federation(tmp_path) as fed:
        fed.server()
        site = fed.client("3", "--policy", tmp_path / "site.yaml")
        assert fed.status(site) == 2
        fed.until(lambda: fed.events("away"))
        (away,) = fed.events("away")
        refused = "left: the data of this run have 240 samples; the policy's max_samples is 10."
        assert away["why"] == refused
