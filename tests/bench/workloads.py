"""What `python -m tests.bench` runs: models, clients and rounds by name."""

from __future__ import annotations

from dataclasses import dataclass

from fednet.plain import JsonDict, JsonMapping

LENET = {"name": "lenet5"}
PFL_CNN = {"name": "pfl_cnn"}
CONVNET = {"name": "convnet3", "width": 128}
LOGISTIC = {"name": "mlp", "hidden": []}
MLP = {"name": "mlp", "hidden": [2150, 2150]}  # 11.2 M parameters, 45 MB

BIG_MLP = {"name": "mlp", "hidden": [11_000, 11_000]}  # 155 M parameters, 620 MB
HUGE_MLP = {"name": "mlp", "hidden": [17_900, 17_900]}  # 376 M parameters, 1.5 GB


@dataclass(frozen=True, slots=True)
class Workload:
    """What a benchmark trains. clients: how many there are; per_round: how many take part in a
    round; samples: of each client; batch_size: samples of a step; steps: of a client in a round,
    None for one epoch; shape: of a sample, (c, h, w).
    """

    name: str
    model: JsonMapping
    clients: int
    per_round: int
    samples: int
    batch_size: int = 64
    steps: int | None = None
    rounds: int = 12
    shape: tuple[int, ...] = (3, 32, 32)
    lr: float = 0.01

    @property
    def text(self) -> str:
        work = "1 epoch" if self.steps is None else f"{self.steps} SGD step"
        return (
            f"{self.model['name']}; {self.clients:,} clients, {self.per_round} a round, "
            f"{self.samples} samples of {self.shape} each, {work} of batch {self.batch_size}"
        )

    def config(
        self, rounds: int, curve: bool = False, train: JsonMapping | None = None
    ) -> JsonDict:
        """The run's configuration: nothing is evaluated. train: further keys of that section."""
        own = {
            "epochs": 1,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "lr": self.lr,
        }
        return {
            "name": "bench",
            "rounds": rounds,
            "clients": self.clients,
            "participation": None,
            "clients_per_round": self.per_round,
            "model": dict(self.model),
            "train": {**own, **(train or {})},
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


ONE_STEP = {"batch_size": 8, "steps": 1}
ALL = (
    Workload("W1", LENET, 10, 10, 1000),
    Workload("W2", MLP, 8, 8, 64, **ONE_STEP),
    Workload("W3", LENET, 100, 10, 500),
    Workload("W4", LENET, 1000, 100, 500, rounds=6),
    Workload("W5", LENET, 10_000, 100, 5, **ONE_STEP, rounds=40),
    # pfl-research's CIFAR-10.
    Workload("W6", PFL_CNN, 1000, 50, 50, 10, rounds=3, lr=0.1),
    # FLUTE's logistic regression on MNIST.
    Workload("W7", LOGISTIC, 1000, 10, 60, 10, rounds=100, shape=(1, 28, 28), lr=0.03),
    # BlazeFL's CIFAR-10, with one epoch of 100 samples instead of five of 500.
    Workload("W8", LENET, 100, 100, 100, 50, rounds=3, lr=0.1),
    # The quick start's size.
    Workload("Q", LENET, 10, 5, 140, rounds=40, shape=(1, 28, 28)),
    # How the server's memory grows: by participants of a model of 45 MB, and by clients.
    *(Workload(f"P{n}", MLP, n, n, 8, **ONE_STEP, rounds=3) for n in (8, 32, 128)),
    *(Workload(f"N{n}", LENET, n, 20, 5, **ONE_STEP, rounds=20) for n in (100, 1000, 10_000)),
    Workload("L", BIG_MLP, 3, 3, 8, **ONE_STEP, rounds=1),  # a model of 620 MB
    Workload("XL", HUGE_MLP, 3, 3, 8, **ONE_STEP, rounds=1),  # a model of 1.5 GB: 20 GB of memory
    # What `pack` trains, for as many clients as it is asked for.
    Workload("cnn", LENET, 10, 10, 1024),
    Workload("mlp", MLP, 10, 10, 48, 8),
    Workload("pfl", PFL_CNN, 10, 10, 50, 10),
    Workload("resnet18", {"name": "resnet18_gn"}, 10, 10, 256),
    Workload("feddc", CONVNET, 10, 10, 5000),  # FedDC's Table 1
    Workload("convnet", CONVNET, 10, 10, 1024),
)
WORKLOADS = {work.name: work for work in ALL}
