"""PFLlib's leaderboard: methods with one model by that model on the clients' own test samples,
personal ones by each client's.
"""

from __future__ import annotations

from collections.abc import Iterator

from fednet.papers.cell import Cell, make
from fednet.plain import JsonDict, JsonMapping

METHODS: dict[str, JsonDict] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},
    "FedPer": {"name": "fedper"},
    "FedRep": {"name": "fedrep", "head_epochs": 1, "body_epochs": 1},
    "FedRoD": {"name": "fedrod"},
    "Ditto": {"name": "ditto"},
    "FedBABU": {"name": "fedbabu"},
    "FedProto": {"name": "fedproto", "weighting": "uniform"},
}
GLOBAL = ("FedAvg", "FedProx")
PARTITIONS: dict[str, JsonDict] = {
    "2 labels": {"scheme": "labels", "per_client": 2},
    # dataset/utils/dataset_utils.py there: with Yurochkin's cap, and a whole batch of test samples.
    "alpha=0.1": {"scheme": "dirichlet", "alpha": 0.1, "cap": True, "min_samples": 40},
}


def fmnist(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for heterogeneity, row in printed["rows"].items():
        for name, figure in zip(printed["columns"], row, strict=True):
            over = {
                "algorithm": METHODS[name],
                "data": {"partition": PARTITIONS[heterogeneity]},
            }
            measure = "client_accuracy" if name in GLOBAL else "pfl_accuracy"
            yield make(
                "pflib",
                "fmnist",
                base,
                [over],
                method=name,
                dataset="Fashion-MNIST",
                heterogeneity=heterogeneity,
                figures={measure: figure},
            )


TABLES = {"fmnist": fmnist}
