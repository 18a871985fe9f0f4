"""FedABC's tables. The paper leaves the baselines' own hyper-parameters open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednet.papers.cell import DATASETS, Cell, Rest, make
from fednet.plain import JsonDict, JsonMapping

COLUMNS: dict[str, JsonDict] = {
    "MNIST": {"rounds": 100, "model": {"name": "abc_mlp"}, "train": {"lr": 0.01}},
    "CIFAR-10": {"rounds": 200, "model": {"name": "abc_conv"}, "train": {"lr": 0.1}},
}
MARGINS = {
    "MNIST": {"m_p": 0.75, "m_n": 0.25, "m_nn": 0.3},
    "CIFAR-10": {"m_p": 0.85, "m_n": 0.2, "m_nn": 0.3},
}


def method(name: str, dataset: str) -> JsonDict:
    methods: dict[str, JsonDict] = {
        "Local only": {"name": "local"},
        "FedAvg": {"name": "fedavg"},
        "FedProx": {"name": "fedprox", "mu": 0.01},
        "Scaffold": {"name": "scaffold", "option": "II"},
        "LG_FedAvg": {"name": "lgfedavg", "global_layers": 2},
        "FedPer": {"name": "fedper"},
        "FedRep": {"name": "fedrep", "head_epochs": 4, "body_epochs": 1},
        "FedRod": {"name": "fedrod"},  # linear mode
        "FedABC": {"name": "fedabc", **MARGINS[dataset], "focal_gamma": 2},
        # Without under-sampling and hard-sample mining: every class's binary loss, plain.
        "FedABC_wi": {"name": "fedabc", "m_p": 1, "m_n": 0, "m_nn": 0, "focal_gamma": 0},
    }
    return methods[name]


def cell(
    table: str,
    base: JsonMapping,
    name: str,
    dataset: str,
    alpha: str,
    figures: JsonDict,
    **rest: Rest,
) -> Cell:
    over = [
        COLUMNS[dataset],
        {"data": {"dataset": DATASETS[dataset], "partition": {"alpha": float(alpha)}}},
        {"algorithm": method(name, dataset)},
        rest.pop("over", {}),
    ]
    return make(
        "fedabc",
        table,
        base,
        over,
        method=name,
        dataset=dataset,
        heterogeneity=f"alpha={alpha}",
        figures=figures,
        **rest,
    )


def accuracy(table: str, measure: str) -> Callable[..., Iterator[Cell]]:
    def cells(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
        for dataset, rows in printed["rows"].items():
            for alpha, row in rows.items():
                for name, figure in zip(printed["columns"], row, strict=True):
                    yield cell(table, base, name, dataset, alpha, {measure: figure})

    return cells


def figure5(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for heading, gain in zip(printed["columns"], printed["rows"]["gain"], strict=True):
        alpha = heading.removeprefix("alpha=")
        yield cell(
            "figure5_text",
            base,
            "FedABC",
            "CIFAR-10",
            alpha,
            {"points_gained": gain, "pfl_accuracy": None},
            versus="FedABC_wi",
        )
        yield cell("figure5_text", base, "FedABC_wi", "CIFAR-10", alpha, {"pfl_accuracy": None})


# -- a figure whose numbers the paper does not print -----------------------------------------------
def figure2(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    """Runs that end where the figure looks: their last local models are those of that round."""
    for t in (10, 50):
        for name in ("FedAvg", "FedABC"):
            yield cell(
                "figure2",
                base,
                name,
                "CIFAR-10",
                "0.1",
                {"drift_accuracy": None, "pfl_accuracy": None},
                variant=f"round={t}",
                over={"rounds": t},
            )


FIGURES = {"figure2": figure2}
CAPTIONS = {
    "figure2": "accuracy by class of the clients' local models after rounds 10 and 50, CIFAR-10 "
    "(alpha 0.1 is a choice of ours)"
}
TABLES = {
    "table1": accuracy("table1", "pfl_accuracy"),
    "table2": accuracy("table2", "drift_accuracy"),
    "figure5_text": figure5,
}
