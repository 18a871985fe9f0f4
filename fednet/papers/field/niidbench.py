"""NIID-Bench's leaderboard, and Flower's reproduction of it. SCAFFOLD is the paper's, its step
count corrected for the momentum; what others' code does instead are variants of it
(`fednet.papers.choices`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednet.papers.cell import DATASETS, Cell, make
from fednet.plain import JsonDict, JsonMapping

PARTIES: dict[str, JsonDict] = {
    "10 parties": {"clients": 10, "participation": 1.0, "rounds": 50},
    "100 parties": {"clients": 100, "participation": 0.1, "rounds": 500},
}
# FedProx's, by parties and partition; Flower's is one of theirs for all.
MU = {
    ("10 parties", "beta=0.5"): 0.001,
    ("100 parties", "beta=0.5"): 0.001,
    ("100 parties", "#C=2"): 0.001,
}
METHODS: dict[str, JsonDict] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox"},
    "SCAFFOLD": {"name": "scaffold", "option": "II"},
    "FedNova": {"name": "fednova"},
}


def partition(heterogeneity: str) -> JsonDict:
    """The key `partition` of the section `data`."""
    kind, _, value = heterogeneity.partition("=")
    if kind == "beta":
        section = {"scheme": "dirichlet", "alpha": float(value), "cap": True, "min_samples": 10}
    elif kind == "#C":
        section = {"scheme": "labels", "per_client": int(value)}
    elif kind == "quantity":
        section = {"scheme": "quantity", "alpha": float(value), "min_samples": 10}
    else:
        section = {"scheme": "iid"}
    noise = {"feature_noise": float(value)} if kind == "noise" else {}
    return {"partition": section, **noise}


def accuracy(table: str, dataset: str, measure: str) -> Callable[..., Iterator[Cell]]:
    def cells(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
        for parties, rows in printed["rows"].items():
            for heterogeneity, row in rows.items():
                for name, figure in zip(printed["columns"], row, strict=True):
                    mu = MU.get((parties, heterogeneity), 0.01)
                    own = {"mu": mu} if name == "FedProx" else {}
                    over = [
                        PARTIES[parties],
                        {"algorithm": {**METHODS[name], **own}},
                        {"data": {"dataset": DATASETS[dataset], **partition(heterogeneity)}},
                    ]
                    yield make(
                        "niidbench",
                        table,
                        base,
                        over,
                        method=name,
                        dataset=dataset,
                        heterogeneity=heterogeneity,
                        variant=parties,
                        figures={measure: figure},
                    )

    return cells


TABLES = {
    "cifar10": accuracy("cifar10", "CIFAR-10", "final_accuracy"),
    "mnist": accuracy("mnist", "MNIST", "best_accuracy"),
    "fmnist": accuracy("fmnist", "Fashion-MNIST", "best_accuracy"),
}
