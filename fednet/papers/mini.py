"""A table's cells cut down until they end in minutes on two cores. No figure of a paper is to be expected from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fednet.papers.cell import Cell, lay

ROUNDS, COHORT, STEPS, CLIENTS = 10, 4, 15, 20
HEAVY = ("resnet", "vgg", "convnet")  # models
CONDENSATION = {"iterations": 5, "ft_epochs": 1}  # of FedDC

SAID = (f"mini scale: at most {ROUNDS} rounds, {CLIENTS} clients of which {COHORT} take part, {STEPS} SGD steps of at most "
        f"64 samples each, ResNet, VGG and the three-layer ConvNet replaced by LeNet5, FedDC condensing for {CONDENSATION['iterations']} "
        "iterations. This is not the paper's setting, and its figures are no test of the paper's.")


def mini(cell: Cell) -> Cell:
    """The same cell at mini scale (`SAID` says how it differs), under a name that says so."""
    config = cell.config
    train = config.get("train", {})
    clients = min(CLIENTS, int(config["clients"]))
    over: dict[str, Any] = {
        "rounds": min(ROUNDS, int(config["rounds"])), "clients": clients, "participation": None,
        "clients_per_round": min(COHORT, clients),
        "train": {"steps": STEPS, "batch_size": min(64, int(train.get("batch_size", 64)))},
    }
    if config["model"]["name"].startswith(HEAVY):
        over["model"] = {"name": "lenet5"}
    if "iterations" in config["algorithm"]:
        over["algorithm"] = CONDENSATION
    small = lay(config, over)
    return replace(cell, config={**small, "name": f"{small['name']}-mini"})
