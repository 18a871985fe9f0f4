"""Reduces a table's cells so that their runs end in minutes on two cores.

The numbers of such runs are not the paper's; the order of methods can be compared. Most of a small
run's time would go into evaluations, large batches and wide networks, so these are reduced first,
and learning rates that suit thousands of steps per round are raised. The paper's share of
participants, its heterogeneity, its ratio of local work and the method's parameters stay.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fednet.papers.tables import Cell, lay
from fednet.plain import JsonDict

CLIENTS = 20
COHORT = 5
BATCH = 16
# SGD steps a round: at least so many, and so many for each local epoch of the paper
STEPS = (10, 2)
SHORT = 30  # rounds
LONG = 60  # rounds, where a round is the least work
EVALUATIONS = 10  # of a run
PERSONAL_EVALUATIONS = 2  # of a run in which every client is evaluated
RATE = (0.05, 0.1)  # of lr / (1 - momentum), the length of a step in the long run
MODELS: dict[str, JsonDict] = {
    "convnet3": {"width": 16},
    "vgg11": {"width": 8},
    "resnet50_bn_proj": {"name": "pdc_cnn"},
    "resnet18_bn_proj": {"name": "pdc_cnn"},
    **{name: {"name": "lenet5"} for name in ("resnet18_gn", "abc_conv", "rds_cifar", "rds_mnist")},
}
CONDENSATION = {"iterations": 25, "real_batch": 64}  # of FedDC

MINI = "mini scale: not the paper's setting"  # above every picture of such runs
# The effect of a wrong variate of SCAFFOLD grows with a client's steps and with the rounds between
# its participations: both are as near to NIID-Bench's as a small run allows.
NIID_STEPS = 80
NIID_CLIENTS = 50
DESCRIPTION = (
    f"mini scale: {SHORT} or {LONG} rounds (never more than the paper), "
    f"at most {COHORT} participants of at most {CLIENTS} clients, {STEPS[1]} SGD steps (at least "
    f"{STEPS[0]}) of {BATCH} samples for each local epoch of the paper, the learning rate brought "
    f"to where lr / (1 - momentum) is {RATE[0]} "
    f"to {RATE[1]}, ConvNet and VGG-11 with an eighth of the channels, the other convolutional "
    f"networks replaced by LeNet5 (ResNets with "
    "a projection head by FedPDC's CNN; that, and FedRDS's smallest, stay), FedDC condensing for "
    f"{CONDENSATION['iterations']} iterations, accuracy taken {EVALUATIONS} times a run "
    f"({PERSONAL_EVALUATIONS} where every client is evaluated); NIID-Bench's clients take "
    f"{NIID_STEPS} steps, as with its 100 parties, for which there are {NIID_CLIENTS}; "
    "FedSMU's table is run without augmentation, local weight decay and clipping. "
    "This is not the paper's setting, and its figures are no test of the paper's."
)


def mini(cell: Cell) -> Cell:
    """Returns the cell at mini scale, with `-mini` in its name (see `DESCRIPTION`)."""
    config = cell.config
    train = config["train"]
    share = float(config["participation"])  # the paper's
    m = min(COHORT, max(1, math.floor(share * int(config["clients"]) + 0.5)))
    clients = min(CLIENTS, int(config["clients"]), math.ceil(m / share))
    epochs = int(train.get("epochs", 0))
    momentum = float(train.get("momentum", 0.0))
    steps = int(train.get("steps") or max(STEPS[0], STEPS[1] * epochs))
    if cell.paper == "niidbench":
        steps = NIID_STEPS
        if share < 1:
            clients = NIID_CLIENTS
    rounds = min(LONG if steps == STEPS[0] else SHORT, int(config["rounds"]))
    rate = min(max(float(train["lr"]) / (1 - momentum), RATE[0]), RATE[1])
    over: JsonDict = {
        "rounds": rounds,
        "clients": clients,
        "participation": None,
        "clients_per_round": m,
        "train": {"steps": steps, "batch_size": BATCH, "lr": round(rate * (1 - momentum), 6)},
        "model": MODELS.get(str(config["model"]["name"]), {}),
    }
    if "iterations" in config["algorithm"]:
        over["algorithm"] = CONDENSATION
    small = lay(lay(config, over), cell.kept)
    target = None if cell.target_round is None else min(cell.target_round, rounds)
    return replace(cell, config={**small, "name": f"{small['name']}-mini"}, target_round=target)
