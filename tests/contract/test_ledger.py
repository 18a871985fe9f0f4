"""What every registered method costs: the formula from its declarations is what crosses, to the
byte.
"""

from __future__ import annotations

import msgspec
import pytest

from fednet import registry
from tests.rooms import lines, run, summary

NAMES = registry.algorithm.names()
# Three sides: condensation needs images. The public set: FedPDC and FedRDS need one.
IMAGES = {
    "dataset": "synthetic",
    "samples": 60,
    "shape": [1, 8, 8],
    "classes": 3,
    "partition": {"scheme": "iid"},
    "public": {"samples": 12},
}
FAST = {"iterations": 1, "ft_epochs": 1, "ipc": 1}
CHAINS = {"state": ["qsgd(8)"], "delta": ["ef", "topk(0.2)", "fp16"], "control": ["bf16"]}


def method(name):
    known = {f.encode_name for f in msgspec.structs.fields(registry.algorithm.get(name).Config)}
    return {"name": name, **{k: v for k, v in FAST.items() if k in known}}


def added(records, what):
    total = {"up": {}, "down": {}}
    for record in records:
        for way, kinds in record[what].items():
            for kind, n in kinds.items():
                total[way][kind] = total[way].get(kind, 0) + n
    return total


def measured(rows):
    """Useful payload bytes of the method's own messages, from the book itself."""
    total = {"up": {}, "down": {}}
    for row in rows:
        if row["useful"] and row["purpose"] == "train":
            for kind, n in row["kinds"].items():
                total[row["direction"]][kind] = total[row["direction"]].get(kind, 0) + n
    return total


@pytest.mark.parametrize("wire", [{}, {"up": CHAINS, "down": CHAINS}], ids=["plain", "compressed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_is_what_crosses(tmp_path, name, wire):
    directory = run(
        tmp_path,
        algorithm=method(name),
        data=IMAGES,
        model={"name": "mlp", "hidden": [8]},
        wire=wire,
        participation=0.67,
        evaluate={"clients": "auto"},
    )
    records, book, done = (
        lines(directory / "rounds.jsonl"),
        lines(directory / "wire.jsonl"),
        summary(directory),
    )
    assert len(records) == 2
    for record in records:
        assert record["predicted"] == record["useful"]
        if registry.algorithm.get(name).own_schedule:
            continue  # a reply counts in a later update than that in which its task was sent
        assert record["predicted"] == measured([r for r in book if r["round"] == record["round"]])
    assert done["predicted"] == done["useful"] == added(records, "predicted") == measured(book)
    assert done["predicted_is"] == "exact"


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_runs_bytes_are_all_rows_of_the_book(tmp_path, name):
    """The summary is written when all but the farewells have crossed."""
    directory = run(tmp_path, algorithm=method(name), data=IMAGES, rounds=1)
    book, spent = lines(directory / "wire.jsonl"), summary(directory)["bytes"]
    farewell = {"up": 0, "down": 0}
    for row in book:
        if row["type"] in ("end", "beat", "connection", "cancel", "leave"):
            farewell[row["direction"]] += row["bytes"]
    for way in ("up", "down"):
        total = sum(r["bytes"] for r in book if r["direction"] == way)
        assert total - farewell[way] <= spent[way] <= total
    assert all(r["bytes"] == sum(r["kinds"].values()) + r["envelope"] for r in book)


def test_with_zstd_the_prediction_is_a_bound(tmp_path):
    directory = run(tmp_path, wire={"up": {"state": ["zstd"]}, "down": {"state": ["zstd"]}})
    done = summary(directory)
    assert done["predicted_is"] == "a bound"
    for way in ("up", "down"):
        assert done["useful"][way]["state"] <= done["predicted"][way]["state"]
    assert done["useful"]["up"]["statistics"] == done["predicted"]["up"]["statistics"]
