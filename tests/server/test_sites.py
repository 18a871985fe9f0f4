"""Sites that bring their own data: what one declared when it first joined is what it weighs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from fednet import config as configuration
from fednet.algorithms.fedavg import FedAvg
from fednet.errors import ConfigError, FednetError, Stopped
from fednet.launch import start
from fednet.server.watch import Hosting
from tests.rooms import SMALL, lines

SITE = {"dataset": "site", "shape": [4], "classes": 2}


def data(folder: Path, client: int, n: int) -> None:
    place = folder / f"client-{client}"
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(client)
    x, y = rng.random((n, 4), dtype=np.float32), np.arange(n) % 2
    np.savez(place / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)


@pytest.mark.parametrize(
    ("names", "classes", "refused"),
    [
        ([("cat", "dog"), ("cat", "dog"), ("cat", "dog")], 2, ""),
        ([("cat", "dog"), ("cat", "Dog"), ("cat", "dog")], 2, "client 1 have other .* client 0"),
        ([("cat", "dog"), ("cat", "dog"), ("dog", "horse")], 2, "client 2 have other .* client 0"),
        ([("cat", "dog")] * 2 + [("dog", "cat")], ["dog", "cat"], ""),  # numbered as listed
    ],
)
def test_sites_whose_classes_have_other_names_do_not_train_together(
    tmp_path: Path, names: list[tuple[str, str]], classes: object, refused: str
) -> None:
    for client, pair in enumerate(names):
        place = tmp_path / "data" / f"client-{client}"
        place.mkdir(parents=True)
        x, y = np.random.default_rng(0).random((8, 4), dtype=np.float32), np.array(pair * 4)
        np.savez(place / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    said = pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext()
    with said:
        go(tmp_path, tmp_path / "data", data={**SITE, "classes": classes})


def go(out: Path, folder: Path, resume: bool = False, callback=None, data=SITE) -> Path:
    config = configuration.from_mapping({**SMALL, "rounds": 3, "data": data}, where="the test")
    with start.open_directory(config, out, resume) as (settings, directory, _):
        start.run_in_process(
            settings,
            directory,
            Hosting(start.Silent(), ["test"], "cpu", folder, callback=callback),
        )
    return directory


def test_a_site_whose_data_changed_goes_on_and_weighs_no_more_than_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[tuple[int, int]] = []
    fold = FedAvg.accumulate

    def watched(self, before, server, client_id, up, host):
        weighed.append((client_id, up.run.n))
        return fold(self, before, server, client_id, up, host)

    def stop(record) -> None:
        raise Stopped("enough")

    monkeypatch.setattr(FedAvg, "accumulate", watched)
    for client in range(3):
        data(tmp_path / "data", client, 20)
    with pytest.raises(Stopped):
        go(tmp_path, tmp_path / "data", callback=stop)
    data(tmp_path / "data", 1, 30)  # grew
    data(tmp_path / "data", 2, 10)  # shrank
    weighed.clear()
    directory = go(tmp_path, tmp_path / "data", resume=True)
    assert set(weighed) == {(0, 20), (1, 20), (2, 10)}
    assert [r["dropped"] for r in lines(directory / "rounds.jsonl")] == [{}] * 3
    events = lines(directory / "events.jsonl")
    (first,) = [e for e in events if e["type"] == "declared"]
    assert first["samples"] == {"0": 20, "1": 20, "2": 20}
    (changed,) = [e for e in events if e["type"] == "data_changed"]
    assert (changed["samples"], changed["first"]) == ({"1": 30, "2": 10}, {"1": 20, "2": 20})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x_train": np.full((20, 4), np.nan, dtype=np.float32)}, "sample 0 of the training data"),
        ({"y_train": np.full(20, 7)}, "labels are in 7..7"),
        ({"x_train": np.empty((0, 4), np.float32), "y_train": np.empty(0, int)}, "no samples"),
    ],
)
def test_the_data_of_each_client_of_a_process_are_looked_through(tmp_path, changed, says):
    for client in range(3):
        data(tmp_path / "data", client, 20)
    bad = tmp_path / "data" / "client-1" / "data.npz"
    with np.load(bad) as kept:
        arrays = {**kept, **changed}
    np.savez(bad, **arrays)
    with pytest.raises(FednetError, match=f"client 1, in .*client-1: .*{says}"):
        go(tmp_path, tmp_path / "data")
