"""Sites that bring their own data: what one declared when it first joined is what it weighs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from fednet.algorithms.fedavg import FedAvg
from fednet.errors import ConfigError, FednetError, Stopped
from tests.rooms import lines, run, site_data


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
        y = np.array(pair * 4)
        data = site_data(tmp_path / "data", client, n=8, y_train=y, y_test=y)
    said = pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext()
    with said:
        run(tmp_path, data={**data, "classes": classes})


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
    data = site_data(tmp_path / "data", 0, 1, 2)
    with pytest.raises(Stopped):
        run(tmp_path, rounds=3, data=data, callback=stop)
    site_data(tmp_path / "data", 1, n=30)  # grew
    site_data(tmp_path / "data", 2, n=10)  # shrank
    weighed.clear()
    directory = run(tmp_path, rounds=3, data=data, resume=True)
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
    data = site_data(tmp_path / "data", 0, 1, 2)
    site_data(tmp_path / "data", 1, **changed)
    with pytest.raises(FednetError, match=f"client 1, in .*client-1: .*{says}"):
        run(tmp_path, data=data)


def test_a_site_with_a_huge_test_set_has_half_of_the_clients_accuracy_at_most(tmp_path):
    """Of 20, 20 and 300 samples, as the sites say, the last count as 40."""
    data = site_data(tmp_path / "data", 0, 1)
    site_data(tmp_path / "data", 2, n=300)
    directory = run(tmp_path, data=data, evaluate={"clients": "auto"}, rounds=1)
    rows = [row for row in lines(directory / "clients.jsonl") if not row.get("final")]
    right = sum(r["accuracy_personal"] * min(r["tested_personal"], 40) for r in rows)
    (record,) = lines(directory / "rounds.jsonl")
    assert record["client_accuracy"]["personal"] == pytest.approx(right / 80, rel=1e-12)
    plain = sum(r["correct_personal"] for r in rows) / 340
    assert record["client_accuracy"]["personal"] != pytest.approx(plain, rel=1e-3)
