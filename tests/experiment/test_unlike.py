"""Unlike models at clients, for methods whose messages do not depend on the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fednet
from fednet import config
from fednet.errors import ConfigError
from tests.processes import Federation, settings
from tests.rooms import run, small

TWO = [
    {"name": "mlp", "hidden": [16, 8], "clients": "0,3"},
    {"name": "mlp", "hidden": [8], "clients": "1-2"},
]
ASKED = {"clients": 4, "algorithm": {"name": "fedproto"}, "evaluate": {"clients": "auto"}}


def personal(out: Path, name: str, **changes: Any) -> list[dict[str, torch.Tensor]]:
    directory = run(out, name=name, **{**ASKED, **changes})
    return [load_file(directory / "personal" / f"client-{c}.safetensors") for c in range(4)]


@pytest.mark.long
def test_each_client_trains_its_own_model_as_where_all_have_it(tmp_path: Path) -> None:
    """In round 1 there are no prototypes yet, so nobody hears of the others."""
    mixed = personal(tmp_path, "mixed", model=TWO, rounds=1)
    deep, flat = (
        personal(tmp_path, f"all-{k}", model={"name": "mlp", "hidden": one["hidden"]}, rounds=1)
        for k, one in enumerate(TWO)
    )
    for client, alone in enumerate((deep, flat, flat, deep)):
        weights = {n for n in mixed[client] if n.endswith(("weight", "bias"))}
        assert weights == {n for n in alone[client] if n.endswith(("weight", "bias"))}
        assert all(torch.equal(mixed[client][n], alone[client][n]) for n in weights)
    assert mixed[0].keys() != mixed[1].keys()


@pytest.mark.long
def test_scores_cross_between_models_whose_features_differ(tmp_path: Path) -> None:
    other = [TWO[0], {**TWO[1], "hidden": [12]}]
    public = {"public": {"samples": 20}}
    made = personal(tmp_path, "md", model=other, algorithm={"name": "fedmd"}, data=public)
    assert [len(m["head.weight"][0]) for m in made] == [8, 12, 12, 8]


def test_a_list_of_models_is_written_and_read_again() -> None:
    made = small(**ASKED, model=[{**TWO[0], "clients": None}, {**TWO[1], "clients": 1}])
    again = config.to_mapping(made)
    assert again["model"]["hidden"] == [16, 8]
    (other,) = again["model"]["others"]
    assert (other["name"], other["clients"], other["hidden"]) == ("mlp", "1", [8])
    assert config.to_mapping(config.from_mapping(again)) == again


def test_models_whose_heads_get_other_widths_are_refused_where_features_cross(
    tmp_path: Path,
) -> None:
    other = [TWO[0], {**TWO[1], "hidden": [12]}]
    with pytest.raises(ConfigError, match=r"get 8 and 12 features, and fedproto sends features"):
        run(tmp_path, **ASKED, model=other)


@pytest.mark.long
def test_processes_and_a_killed_server_give_the_bits_of_one_process(tmp_path: Path) -> None:
    changes = {"model": TWO, "algorithm": "fedproto", "rounds": 4, "participation": 0.75}
    one = Federation(tmp_path / "one", **changes)
    fednet.run(settings(**changes), out=one.out, in_process=True)
    crash = [{"round": 3, "kind": "server_crash", "at": "aggregating"}]
    with Federation(tmp_path / "two", **changes, faults={"schedule": crash}) as fed:
        for ids in ("0,1", "2-3"):
            fed.client(ids)
        fed.server()
        fed.finish()
        assert fed.hashes() == one.hashes()
        assert sum(e["incarnation"] > 1 for e in fed.events("started")) == 1
