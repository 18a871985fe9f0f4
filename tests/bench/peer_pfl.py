"""pfl-research (the package `pfl`) on a workload of these benchmarks: FedAvg in its one process, on
data that lie in memory. It needs nothing of fednet's, so that it may run in an environment of its
own.

    PYTHON tests/bench/peer_pfl.py WORKLOAD.json      prints {"seconds": [...]}, one figure a round
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    work = json.loads(Path(path).read_text())
    os.environ["PFL_PYTORCH_DEVICE"] = work["device"]
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch import nn

    torch.set_num_threads(work["threads"])
    torch.backends.cuda.matmul.allow_tf32 = work["tf32"]
    torch.backends.cudnn.allow_tf32 = work["tf32"]

    class Net(nn.Sequential):
        """pfl-research's CNN for CIFAR-10."""

        def __init__(self, side: int) -> None:
            super().__init__(
                nn.Conv2d(3, 32, 3),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.25),
                nn.Flatten(),
                nn.Linear(64 * ((side - 4) // 2) ** 2, 128),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(128, 10),
            )

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
            return {}

    draw = torch.Generator().manual_seed(0)
    device = torch.device(work["device"])
    n = work["samples"]
    count = work["clients"]
    xs = torch.randn((count * n, *work["shape"]), generator=draw).to(device)
    ys = torch.randint(0, 10, (count * n,), generator=draw).to(device)

    def user(k: int) -> PyTorchTensorDataset:
        mine = slice(k * n, (k + 1) * n)
        return PyTorchTensorDataset(
            tensors=[xs[mine], ys[mine]], user_id=str(k), eval_kwargs={"eval": True}
        )

    seconds: list[float] = []

    class Clock(TrainingProcessCallback):
        """Notes when each round has ended."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            self.last = time.perf_counter()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now
            return False, Metrics()

    np.random.seed(0)
    net = Net(work["shape"][1]).to(device)
    rounds = work["rounds"] + work["untimed"]
    backend = SimulatedBackend(
        training_data=FederatedDataset(user, get_user_sampler("random", list(range(count)))),
        val_data=None,
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work["per_round"],
            val_cohort_size=0,
        ),
        backend=backend,
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work["lr"],
            local_batch_size=work["batch_size"],
        ),
        model_eval_params=None,
        callbacks=[Clock()],
    )
    print(json.dumps({"seconds": seconds[work["untimed"] :]}))


if __name__ == "__main__":
    main(sys.argv[1])
