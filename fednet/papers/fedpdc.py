"""FedPDC's tables. SOLO is 300 local epochs without federation; the adaptive lambda is an option of
the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednet.papers.cell import DATASETS, Cell, Rest, make
from fednet.plain import JsonDict, JsonMapping

MODELS = {"CNN": "pdc_cnn", "ResNet50": "resnet50_bn_proj", "ResNet18": "resnet18_bn_proj"}
MU = {"CIFAR-10": 5.0}  # MOON's, unstated: what its authors advise for CIFAR-10, 1 elsewhere
GRIDS = {  # FedPDC's lambda has no effect on the literal penalty: nothing to search
    "FedProx": {"algorithm.mu": [0.001, 0.01, 0.1, 1]},
    "MOON": {"algorithm.mu": [0.1, 1, 5, 10]},
}


def method(name: str, dataset: str) -> JsonDict:
    if name == "SOLO":
        return {"algorithm": {"name": "local"}, "rounds": 1, "train": {"epochs": 300}}
    return {
        "algorithm": {
            "FedPDC": {"name": "fedpdc", "lambda": 10, "penalty": "literal"},
            "MOON": {"name": "moon", "mu": MU.get(dataset, 1.0), "tau": 0.5},
            "FedAvg": {"name": "fedavg"},
            "FedProx": {"name": "fedprox", "mu": 0.01},
        }[name]
    }


def column(dataset: str, model: str, beta: float) -> JsonDict:
    section = (
        {"name": MODELS[model]} if model != "ResNet18" else {"name": MODELS[model], "stem": "cifar"}
    )
    return {"model": section, "data": {"dataset": DATASETS[dataset], "partition": {"alpha": beta}}}


def cell(
    table: str,
    base: JsonMapping,
    name: str,
    dataset: str,
    model: str,
    beta: float,
    figures: JsonDict,
    **rest: Rest,
) -> Cell:
    over = [column(dataset, model, beta), method(name, dataset), rest.pop("over", {})]
    return make(
        "fedpdc",
        table,
        base,
        over,
        method=name,
        dataset=dataset,
        heterogeneity=f"beta={beta}",
        variant=model,
        figures=figures,
        grids=GRIDS.get(name, {}),
        **rest,
    )


def accuracy(table: str, dataset: str) -> Callable[..., Iterator[Cell]]:
    """Tables II and III: a row a method, a column a model and beta ("CNN beta=0.1")."""

    def cells(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
        for name, row in printed["rows"].items():
            for heading, figure in zip(printed["columns"], row, strict=True):
                model, _, beta = heading.partition(" beta=")
                if figure is not None:  # SOLO was run in the first column only
                    measure = "solo_accuracy" if name == "SOLO" else "final_accuracy"
                    yield cell(table, base, name, dataset, model, float(beta), {measure: figure})

    return cells


def table4(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for model, row in printed["rows"].items():
        for name, figure in zip(printed["columns"], row, strict=True):
            yield cell(
                "table4", base, name, "Tiny-ImageNet", model, 0.3, {"final_accuracy": figure}
            )


def table5(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    runs = [
        ("CIFAR-10", "CNN", 0.1, 100),
        ("CIFAR-100", "CNN", 0.1, 100),
        ("Tiny-ImageNet", "ResNet18", 0.3, 20),
    ]
    for name, row in printed["rows"].items():
        for k, (dataset, model, beta, rounds) in enumerate(runs):
            speedup = row[2 * k + 1]
            figures = {
                "rounds_to_target": row[2 * k],
                "speedup": None if speedup == "<1" else speedup,
            }
            yield cell(
                "table5",
                base,
                name,
                dataset,
                model,
                beta,
                figures,
                over={"rounds": rounds},
                versus="FedAvg",
                target_round=rounds,
            )


TABLES = {
    "table2": accuracy("table2", "CIFAR-10"),
    "table3": accuracy("table3", "CIFAR-100"),
    "table4": table4,
    "table5": table5,
}
