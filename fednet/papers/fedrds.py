"""FedRDS's tables. beta, the shared fraction, is `data.public.fraction`; alpha of it goes to each
client.
"""

from __future__ import annotations

from collections.abc import Iterator

from fednet.papers.cell import DATASETS, Cell, Rest, make
from fednet.papers.choices import variants
from fednet.plain import JsonDict, JsonMapping

# Table 2 of the paper; the networks' sizes are its own for MNIST only
COLUMNS: dict[str, JsonDict] = {
    "MNIST": {"model": {"name": "rds_mnist"}, "train": {"lr": 0.001, "batch_size": 8}},
    "Fashion-MNIST": {"model": {"name": "rds_fmnist"}, "train": {"lr": 0.0001, "batch_size": 14}},
    "SVHN": {"model": {"name": "rds_cifar"}, "train": {"lr": 0.1, "batch_size": 500}},
    "CIFAR-10": {"model": {"name": "rds_cifar"}, "train": {"lr": 0.01, "batch_size": 10}},
}
METHODS: dict[str, JsonDict] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},
    "MOON": {"name": "moon", "mu": 1.0, "tau": 0.5},  # unstated
    "FedRDS": {"name": "fedrds", "alpha": 0.5, "sigma_mode": "fixed", "sigma0": 0.01},
}
BETAS = (0.02, 0.05, 0.1, 0.2, 0.3)  # of Figure A1: which values it has is not said in the text
ALPHAS = (0.0, 0.1, 0.5, 1.0)  # Figure A1 (c) begins without sharing
SIGMA = {"algorithm.sigma0": [0.001, 0.01, 0.1, 1.0]}  # section 4.7's own grid


def cell(
    table: str,
    base: JsonMapping,
    name: str,
    dataset: str,
    figures: JsonDict,
    beta: float = 0.1,
    **rest: Rest,
) -> Cell:
    over = [
        COLUMNS[dataset],
        {"algorithm": METHODS[name]},
        {"data": {"dataset": DATASETS[dataset], "public": {"fraction": beta}}},
        rest.pop("over", {}),
    ]
    rest.setdefault("grids", SIGMA if name == "FedRDS" else {})
    return make(
        "fedrds",
        table,
        base,
        over,
        method=name,
        dataset=dataset,
        heterogeneity="2 shards",
        figures=figures,
        **rest,
    )


def table3(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for dataset, row in printed["rows"].items():
        for name, figure in zip(printed["columns"], row, strict=True):
            # The caption's measure is the mean over the 200 rounds; the text reads it as the best.
            figures = {"best_accuracy": figure, "mean_accuracy": figure}
            yield cell("table3", base, name, dataset, figures)


def table4(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    headings = printed["columns"][::2]
    for name, row in printed["rows"].items():
        for k, heading in enumerate(headings):
            yield cell(
                "table4",
                base,
                name,
                heading.removesuffix(" rounds"),
                {"rounds_to_target": row[2 * k], "speedup": row[2 * k + 1]},
                versus="FedAvg",
                target_round=100,
            )


def section43(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    rows, table = printed["rows"], "text_section43"
    for dataset in ("MNIST", "Fashion-MNIST"):
        yield cell(
            table,
            base,
            "FedRDS",
            dataset,
            {"flat_after_round": rows[f"{dataset}_FedRDS_flat_after_round"]},
        )
    steady = {"steady_after_round": rows["SVHN_CIFAR_fluctuation_before_round"]}
    yield cell(table, base, "FedRDS", "SVHN", steady)
    gain = {"points_gained": rows["CIFAR-10_FedAvg_below_FedRDS_points"]}
    yield cell(table, base, "FedRDS", "CIFAR-10", {**gain, **steady}, versus="FedAvg")
    yield cell(table, base, "FedAvg", "CIFAR-10", {"best_accuracy": None})


def figure_a1(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    rows, table = printed["rows"], "figureA1_text"
    at_beta = {"best_accuracy": rows["beta_10_percent"]}
    yield cell(table, base, "FedRDS", "CIFAR-10", at_beta, variant="beta=0.1", grids={})
    yield cell(
        table,
        base,
        "FedRDS",
        "CIFAR-10",
        {"best_accuracy": rows["best_over_beta"]},
        variant="best beta",
        grids={"data.public.fraction": list(BETAS)},
        by_search=True,
    )


# -- figures whose numbers the paper does not print ------------------------------------------------
SHOWN: dict[str, float | None] = {"best_accuracy": None}


def figure4(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    """Table 3's runs over the rounds: (a) to (d) accuracy, (e) to (h) training loss."""
    for dataset in COLUMNS:
        for name in METHODS:
            figures = {**SHOWN, "final_train_loss": None}
            yield cell("figure4", base, name, dataset, figures)


def figure5(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for dataset in COLUMNS:  # (a) to (d), in this order
        for epochs in (10, 20, 40, 80):
            for name in METHODS:
                yield cell(
                    "figure5",
                    base,
                    name,
                    dataset,
                    dict(SHOWN),
                    variant=f"E={epochs}",
                    over={"train": {"epochs": epochs}},
                )


def figure6(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for dataset in COLUMNS:
        yield cell("figure6", base, "FedAvg", dataset, dict(SHOWN))
        whole = cell("figure6", base, "FedRDS", dataset, dict(SHOWN))
        yield from (whole, *(v for v in variants(whole) if v.method.endswith("alone")))


def figure7(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for dataset in ("MNIST", "SVHN"):
        for sigma in SIGMA["algorithm.sigma0"]:
            yield cell(
                "figure7",
                base,
                "FedRDS",
                dataset,
                dict(SHOWN),
                variant=f"sigma={sigma:g}",
                grids={},
                over={"algorithm": {"sigma_mode": "fixed", "sigma0": sigma}},
            )


def figure_a1_curves(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    shares = [(0.5, beta) for beta in BETAS] + [
        (alpha, beta) for beta in (0.1, 0.2) for alpha in ALPHAS if alpha != 0.5
    ]
    for alpha, beta in shares:
        yield cell(
            "figureA1",
            base,
            "FedRDS",
            "CIFAR-10",
            {**SHOWN, "emd": None},
            beta=beta,
            variant=f"beta={beta:g} alpha={alpha:g}",
            grids={},
            over={"algorithm": {"alpha": alpha}},
        )


TABLES = {
    "table3": table3,
    "table4": table4,
    "text_section43": section43,
    "figureA1_text": figure_a1,
}
FIGURES = {
    "figure4": figure4,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "figureA1": figure_a1_curves,
}
CAPTIONS = {
    "figure4": "accuracy (a to d) and training loss (e to h) over the rounds of Table 3's runs",
    "figure5": "accuracy over the number of local epochs: (a) MNIST, (b) Fashion-MNIST, (c) SVHN, "
    "(d) CIFAR-10",
    "figure6": "ablation: data sharing alone, regularisation alone, both, neither",
    "figure7": "accuracy with a fixed sigma of the regularisation",
    "figureA1": "on CIFAR-10 (a) how far the clients' class shares are from all data's (EMD) and "
    "(b) accuracy over the shared fraction beta, (c) accuracy over each client's part alpha of it, "
    "from none, at beta 0.1 and 0.2",
    "text_section43": "the curves of Table 3's runs: the round after which they are flat or "
    "steady, and how far FedAvg lies below",
}
