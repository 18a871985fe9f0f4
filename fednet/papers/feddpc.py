"""FedDPC's table. Its objective is the plain mean over clients, so baselines that could weight by
samples do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednet.papers.cell import DATASETS, Cell, make
from fednet.papers.choices import variants
from fednet.plain import JsonDict, JsonMapping

GROUPS = {"name": "resnet18_gn", "gn_groups": 2}  # groups and stem are unstated
COLUMNS: dict[str, JsonDict] = {
    "CIFAR-10": {"rounds": 400, "model": {"name": "lenet5"}},
    "CIFAR-100": {"rounds": 800, "model": {**GROUPS, "stem": "cifar"}},
    "Tiny-ImageNet": {"rounds": 800, "model": {**GROUPS, "stem": "imagenet"}},
}
METHODS: dict[str, JsonDict] = {
    "FedProx": {"name": "fedprox", "mu": 0.01, "weighting": "uniform"},
    "FedExP": {"name": "fedexp", "eps": 0.001},
    "FedGA": {"name": "fedga", "beta": 0.1},
    "FedCM": {"name": "fedcm", "alpha": 0.1},
    "FedVARP": {"name": "fedvarp"},
    "FedDPC": {"name": "feddpc", "lambda": 1},
}
SEARCHED = {"FedProx": "mu", "FedExP": "eps", "FedGA": "beta", "FedCM": "alpha"}
LR = {"train.lr": [1, 0.1, 0.01, 0.001, 0.0001]}


ALPHAS = ("0.2", "0.6")
UNPRINTED = {"best_accuracy": None, "final_train_loss": None}


def _cell(
    table: str,
    base: JsonMapping,
    name: str,
    dataset: str,
    alpha: str,
    figures: JsonMapping,
    **more: JsonDict,
) -> Cell:
    over = [
        COLUMNS[dataset],
        {"algorithm": METHODS[name]},
        {"data": {"dataset": DATASETS[dataset], "partition": {"alpha": float(alpha)}}},
    ]
    return make(
        "feddpc",
        table,
        base,
        over,
        method=name,
        dataset=dataset,
        heterogeneity=f"alpha={alpha}",
        figures=figures,
        **more,
    )


def table2(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for dataset, rows in printed["rows"].items():
        for name, row in rows.items():
            values = dict(zip(printed["columns"], row, strict=True))
            own = {f"algorithm.{SEARCHED[name]}": [1, 0.1, 0.01, 0.001]} if name in SEARCHED else {}
            for alpha in ALPHAS:
                figures = {
                    "best_accuracy": values[f"acc_alpha{alpha}"],
                    "best_round": values[f"T_alpha{alpha}"],
                    "seconds_per_round": values["time"],
                }
                yield _cell("table2", base, name, dataset, alpha, figures, grids={**LR, **own})


# -- figures whose numbers the paper does not print ------------------------------------------------
def curves(table: str, dataset: str) -> Callable[..., Iterator[Cell]]:
    """Table 2's runs on a dataset over the rounds: training loss and accuracy."""

    def cells(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
        for name in METHODS:
            for alpha in ALPHAS:
                yield _cell(table, base, name, dataset, alpha, UNPRINTED)

    return cells


def figure(table: str, parts: str) -> Callable[..., Iterator[Cell]]:
    """The method beside those of its variants whose label begins with `parts`, on CIFAR-10."""

    def cells(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
        for alpha in ALPHAS:
            whole = _cell(table, base, "FedDPC", "CIFAR-10", alpha, UNPRINTED)
            yield from (
                whole,
                *(v for v in variants(whole) if v.method.removeprefix("FedDPC ").startswith(parts)),
            )

    return cells


TABLES = {"table2": table2}
FIGURES = {
    "figure3": curves("figure3", "CIFAR-10"),
    "figure4": curves("figure4", "CIFAR-100"),
    "figure5": curves("figure5", "Tiny-ImageNet"),
    "figure6": figure("figure6", "no "),
    "figure7": figure("figure7", "lambda"),
}
CAPTIONS = {
    "figure3": "training loss and accuracy of Table 2's runs over the rounds, CIFAR-10",
    "figure4": "training loss and accuracy of Table 2's runs over the rounds, CIFAR-100",
    "figure5": "training loss and accuracy of Table 2's runs over the rounds, Tiny-ImageNet",
    "figure6": "ablation on CIFAR-10: without the projection, without the adaptive scaling, "
    "without both",
    "figure7": "lambda on CIFAR-10 (FedDPC: 1)",
}
