"""What `python -m tests.bench` runs: models, clients and rounds by name."""

from __future__ import annotations

from dataclasses import dataclass

from fednet.plain import JsonDict, JsonMapping

LENET = {"name": "lenet5"}
PFL_CNN = {"name": "pfl_cnn"}
MLP = {"name": "mlp", "hidden": [2150, 2150]}  # 11.2 M parameters, 45 MB


@dataclass(frozen=True, slots=True)
class Workload:
    """What a benchmark trains. clients: how many there are; per_round: how many take part in a
    round; samples: of each client; batch_size: samples of a step; steps: of a client in a round,
    None for one epoch; shape: of a sample, (c, h, w).
    """

    name: str
    text: str
    model: JsonMapping
    clients: int
    per_round: int
    samples: int
    batch_size: int = 64
    steps: int | None = None
    rounds: int = 12
    shape: tuple[int, ...] = (3, 32, 32)
    lr: float = 0.01

    def config(
        self, name: str, rounds: int, curve: bool = False, train: JsonMapping | None = None
    ) -> JsonDict:
        """The run's configuration: nothing is evaluated. curve: whether the network has CURVE;
        train: further keys of that section.
        """
        return {
            "name": name,
            "rounds": rounds,
            "clients": self.clients,
            "participation": None,
            "clients_per_round": self.per_round,
            "model": dict(self.model),
            "train": {
                "epochs": 1,
                "batch_size": self.batch_size,
                "steps": self.steps,
                "lr": self.lr,
                **(train or {}),
            },
            "data": {
                "dataset": "synthetic",
                "samples": self.clients * self.samples,
                "shape": list(self.shape),
                "client_test": "none",
                "partition": {"scheme": "iid"},
            },
            "evaluate": {"every": 0, "clients": "none"},
            "checkpoint": {"best": False},
            "security": {"curve": curve},
        }


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "W1",
            "LeNet-5; 10 clients, all take part, 1000 samples each, 1 epoch, batch 64",
            LENET,
            10,
            10,
            1000,
        ),
        Workload(
            "W2",
            "MLP of 11.2 M parameters (45 MB); 8 clients, all take part, one SGD step of batch 8 "
            "each",
            MLP,
            8,
            8,
            64,
            8,
            1,
            12,
        ),
        Workload("W3", "LeNet-5; 100 clients, 10 a round, 500 samples each", LENET, 100, 10, 500),
        Workload(
            "W4",
            "LeNet-5; 1,000 clients, 100 a round, 500 samples each",
            LENET,
            1000,
            100,
            500,
            rounds=6,
        ),
        Workload(
            "W5",
            "LeNet-5; 10,000 clients, 100 a round, one SGD step each",
            LENET,
            10_000,
            100,
            5,
            8,
            1,
            40,
        ),
        Workload(
            "W6",
            "pfl-research's CIFAR-10: CNN of 1.6 M parameters; 1,000 clients, 50 a round, "
            "50 samples each, batch 10",
            PFL_CNN,
            1000,
            50,
            50,
            10,
            rounds=3,
            lr=0.1,
        ),
        Workload(
            "Q",
            "the quick start's size: LeNet-5; 10 clients, 5 a round, 140 samples of 28x28 each",
            LENET,
            10,
            5,
            140,
            rounds=40,
            shape=(1, 28, 28),
        ),
    )
}


SCALES = {
    w.name: w
    for w in (
        *(
            Workload(
                f"P{n}",
                f"a model of 45 MB, {n} participants a round, one SGD step each",
                MLP,
                n,
                n,
                8,
                8,
                1,
                3,
            )
            for n in (8, 32, 128)
        ),
        *(
            Workload(
                f"N{n}",
                f"LeNet-5, {n} clients, 20 a round, one SGD step each",
                LENET,
                n,
                20,
                5,
                8,
                1,
                20,
            )
            for n in (100, 1000, 10_000)
        ),
    )
}
