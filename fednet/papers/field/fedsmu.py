"""FedSMU's Table 2 on CIFAR-10, of the methods that are here: compression on the way up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fednet.papers.cell import Cell, make
from fednet.plain import JsonDict, JsonMapping

SHARES = {"L": 0.03, "H": 0.1}
# FedEF (Li and Li, ICML 2023) with plain averaging: what crosses is compressed, what that leaves
# out is added to the next update.
METHODS: dict[str, JsonDict] = {
    "FedAvg": {"algorithm": {"name": "fedavg"}},
    "SCAFFOLD": {"algorithm": {"name": "scaffold", "option": "II"}},
    "FedEF-TopK": {"algorithm": {"name": "fedavg"}, "wire": {"up": {"state": ["topk(0.01)"]}}},
    "FedEF-Sign": {"algorithm": {"name": "fedavg"}, "wire": {"up": {"state": ["sign"]}}},
    "FedSMU": {
        "algorithm": {
            "name": "fedsmu",
            "server_lr": 0.015,
            "server_lr_decay": 0.9988,
            "decay": 0.01,
            "beta_1": 0.9,
            "beta_2": 0.9,
        },
        "wire": {"up": {"delta": ["qsgd(2)"]}},  # -1, 0 and 1, exactly
    },
}
# As in the paper: of gamma_1's nine values, four.
LR = {"train.lr": [1, 0.1, 0.01, 0.001]}
SERVER_LR = {"algorithm.server_lr": [0.1, 0.015, 0.005, 0.001]}
# What 6,000 rounds have against overfitting: in the mini scale's sixty an image is seen less than
# once.
UNFITTED: JsonDict = {
    "data": {"augment": "none"},
    "train": {"weight_decay": 0.0, "clip_norm": None},
}


def table2(base: JsonMapping, printed: JsonMapping) -> Iterator[Cell]:
    for setting, row in printed["rows"].items():
        level, _, heterogeneity = setting.partition(" ")
        alpha = float(heterogeneity.removeprefix("alpha="))
        for name, figure in zip(printed["columns"], row, strict=True):
            own = SERVER_LR if name == "FedSMU" else {}
            over: list[JsonDict] = [
                {"participation": SHARES[level]},
                {"data": {"partition": {"alpha": alpha}}},
                METHODS[name],
            ]
            made = make(
                "fedsmu",
                "table2",
                base,
                over,
                method=name,
                dataset="CIFAR-10",
                heterogeneity=heterogeneity,
                variant=level,
                figures={"best_accuracy": figure},
                grids={**LR, **own},
            )
            yield replace(made, kept=UNFITTED)


TABLES = {"table2": table2}
