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


def sends(name):
    """Return which fields of which kinds and forms a method sends, and whether in rounds."""
    method = registry.algorithm.get(name)
    messages = [kind for exchange in method.exchanges for kind in (exchange.down, exchange.up)]
    fields = [tuple((f.kind, f.form) for f in kind.fields.values()) for kind in messages]
    return bool(method.own_schedule), *fields


# Of the methods that send alike, one is compressed.
COMPRESSED = {sends(name): name for name in NAMES}.values()


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        *((name, {}) for name in NAMES),
        *((name, {"up": CHAINS, "down": CHAINS}) for name in COMPRESSED),
    ],
)
def test_the_prediction_is_what_is_sent_and_the_summary_has_all_rows(tmp_path, name, wire):
    directory = run(
        tmp_path,
        algorithm=method(name),
        data=IMAGES,
        model={"name": "mlp", "hidden": [8]},
        wire=wire,
        participation=0.67,
        evaluate={"clients": "auto"},
    )
    records = lines(directory / "rounds.jsonl")
    done = summary(directory)
    book = lines(directory / "wire.jsonl")
    assert len(records) == 2
    for record in records:
        assert record["predicted"] == record["useful"]
        if registry.algorithm.get(name).own_schedule:
            continue  # a reply counts in a later update than that in which its task was sent
        assert record["predicted"] == measured([r for r in book if r["round"] == record["round"]])
    assert done["predicted"] == done["useful"] == added(records, "predicted") == measured(book)
    assert done["predicted_is"] == "exact"
    # The summary is written when all but the farewells are sent.
    farewell = ("end", "beat", "connection", "cancel", "leave")
    for way in ("up", "down"):
        rows = [r for r in book if r["direction"] == way]
        total = sum(r["bytes"] for r in rows)
        after = sum(r["bytes"] for r in rows if r["type"] in farewell)
        assert total - after <= done["bytes"][way] <= total
    assert all(r["bytes"] == sum(r["kinds"].values()) + r["envelope"] for r in book)


def test_with_zstd_the_prediction_is_a_bound(tmp_path):
    directory = run(tmp_path, wire={"up": {"state": ["zstd"]}, "down": {"state": ["zstd"]}})
    done = summary(directory)
    assert done["predicted_is"] == "a bound"
    for way in ("up", "down"):
        assert done["useful"][way]["state"] <= done["predicted"][way]["state"]
    assert done["useful"]["up"]["statistics"] == done["predicted"]["up"]["statistics"]
