"""FedDC's tables (dataset condensation; FedDC+ has momentum and weight decay in the condensation
only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fednet.papers.cell import Cell, make
from fednet.plain import JsonDict, JsonMapping

CONDENSATION = {
    "iterations": 500,
    "cond_lr": 3.0,
    "clip_v": 1.0,
    "ft_epochs": 10,
    "ft_lr": 0.01,
    "condense": "once",
}
METHODS: dict[str, JsonDict] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},  # unstated
    "SCAFFOLD": {"name": "scaffold", "option": "II"},
    "FedDC": {"name": "feddc", **CONDENSATION},
    "FedDC+": {
        "name": "feddcplus",
        **CONDENSATION,
        "cond_momentum": 0.9,
        "cond_weight_decay": 4.0e-5,
    },
}
MODELS = {"CNN": "convnet3", "VGG-11": "vgg11"}
MEASURES = {
    "acc_100": "accuracy_at_100",
    "acc_500": "accuracy_at_500",
    "class_variance": "class_spread",
}
CLIP = {"algorithm.clip_v": [0.1, 1, 5]}  # v is unstated


def cell(
    table: str,
    base: JsonMapping,
    name: str,
    alpha: str,
    variant: str,
    over: JsonDict,
    figures: JsonDict,
) -> Cell:
    layers = [{"data": {"partition": {"alpha": float(alpha)}}, "algorithm": METHODS[name]}, over]
    return make(
        "feddc",
        table,
        base,
        layers,
        method=name,
        dataset="CIFAR-10",
        heterogeneity=f"alpha={alpha}",
        variant=variant,
        figures=figures,
        grids=CLIP if name.startswith("FedDC") else {},
    )


def table1(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for epochs, blocks in printed["rows"].items():
        for alpha, rows in blocks.items():
            for name, row in rows.items():
                found = {
                    MEASURES.get(c, c): v for c, v in zip(printed["columns"], row, strict=True)
                }
                # What it is about comes first.
                figures = {"accuracy_at_500": found.pop("accuracy_at_500"), **found}
                yield cell(
                    "table1",
                    base,
                    name,
                    alpha,
                    epochs,
                    {"train": {"epochs": int(epochs[1:])}},
                    figures,
                )


def figure2(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for name, row in printed["rows"].items():
        figures = {
            c.replace("round_", "accuracy_in_"): v
            for c, v in zip(printed["columns"], row, strict=True)
        }
        figures |= {"max_drop": None, "class_spread": None}  # what the two rounds stand for
        yield cell("figure2_text", base, name, "0.05", "", {}, figures)


def figure6(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for name, row in printed["rows"].items():
        for model, figure in zip(printed["columns"], row, strict=True):
            over = {"model": {"name": MODELS[model]}}
            yield cell("figure6_text", base, name, "0.05", model, over, {"accuracy_at_500": figure})


# -- what the text names and no number is printed for ----------------------------------------------
def text_e5(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    measures = ("accuracy_at_500", "accuracy_at_100", "class_spread", "max_drop")
    for alpha in ("0.05", "0.1", "1"):
        for name in METHODS:
            figures = dict.fromkeys(measures)
            yield cell("text_E5", base, name, alpha, "E5", {"train": {"epochs": 5}}, dict(figures))


def text_k500(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    """Whether FedDC gains by condensing as long as the paper does, at a scale that a CPU can do."""
    for alpha in ("0.05", "0.1", "1"):
        for name in ("FedAvg", "FedDC"):
            figures = dict.fromkeys(("accuracy_at_500", "class_spread", "max_drop"))
            made = cell("text_K500", base, name, alpha, "E1 K=500", {}, dict(figures))
            iterations = {"algorithm": {"iterations": 500}} if name == "FedDC" else {}
            yield replace(made, kept={"model": {"width": 32}, **iterations})


FIGURES = {"text_E5": text_e5, "text_K500": text_k500}
CAPTIONS = {
    "text_E5": "Table 1's methods with the 5 local epochs that the text names",
    "text_K500": "FedAvg and FedDC of Table 1, E=1; at mini scale with all of the 500 condensation "
    "iterations, and a ConvNet of twice the width",
}
TABLES = {"table1": table1, "figure2_text": figure2, "figure6_text": figure6}
