"""A Flower ClientApp, unchanged, as the clients' half of a method. Needs flwr 1.42 or newer.

    PYTHONPATH=configs/examples/flower fednet run configs/examples/flower/flower.yaml

The server's half is that of the base class: `class Flower(FedAdam)` makes another method.
"""

import importlib
import random
import threading

import numpy as np
import torch

import fednet
from fednet import LocalRun, State, Tensors, algorithm
from fednet.algorithms.fedavg import FedAvg

# A ClientApp draws random numbers from generators of the process, and Flower keeps the sender of a
# message in a global: one client of a process trains at a time.
ALONE = threading.Lock()


def identify(node: int) -> None:
    """Say who sends the messages that are made from now on."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 1
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = node


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@algorithm("flower")
class Flower(FedAvg):
    """The training of a Flower ClientApp."""

    paper = "flower.ai"

    class Config(FedAvg.Config):
        app: str = "quickstart.client_app:app"
        """The ClientApp, as module:name."""
        run_config: str = ""
        """The run configuration, as for `flwr run --run-config`."""

    class Client(State):  # Context.state, if the app keeps something in it
        kept: torch.Tensor | None = None

    def client_update(self, phase, client, down, host):
        from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
        from flwr.common import serde
        from flwr.common.config import parse_config_args
        from flwr.proto.recorddict_pb2 import RecordDict as Written

        module, _, name = self.config.app.partition(":")
        app = getattr(importlib.import_module(module), name)
        state = RecordDict()
        if client.kept is not None:
            state = serde.recorddict_from_proto(Written.FromString(client.kept.numpy().tobytes()))
        node = 1 + host.client_id
        context = Context(
            run_id=1,
            node_id=node,
            node_config={"partition-id": host.client_id, "num-partitions": self.clients},
            state=state,
            run_config=parse_config_args([self.config.run_config]),
        )
        net = host.model(down.x)
        config = ConfigRecord({"lr": float(host.lr), "server-round": int(host.round)})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "config": config})
        with ALONE, torch.random.fork_rng():
            identify(node)
            seed(int(host.rng("flower").integers(2**31)))
            reply = app(Message(content, dst_node_id=node, message_type="train"), context)
        net.load_state_dict(reply.content["arrays"].to_torch_state_dict())
        metrics = dict(reply.content["metrics"])
        n = int(metrics.pop("num-examples"))
        host.report(**{name.replace("-", "_"): float(value) for name, value in metrics.items()})
        if context.state:
            written = serde.recorddict_to_proto(context.state).SerializeToString(deterministic=True)
            client = self.Client(kept=torch.frombuffer(bytearray(written), dtype=torch.uint8))
        run = LocalRun(n=n, steps=1, loss=float(metrics.get("train_loss", 0.0)))
        return client, self.Up(x=Tensors.of(net, down.x.layout), run=run)


# What follows is of the app: its model, and the samples of all clients, on which fednet evaluates.
@fednet.model("quickstart")
def model():
    from quickstart import task

    return task.Net()


@fednet.dataset("quickstart")
def data(*, partitions: int = 4):
    from quickstart import task

    loaders = [task.load_data(i, partitions, 32) for i in range(partitions)]
    train, test = ([loader.dataset for loader in kind] for kind in zip(*loaders))
    return fednet.Data(
        train=torch.utils.data.ConcatDataset(train),
        test=torch.utils.data.ConcatDataset(test),
        groups=[i for i, part in enumerate(train) for _ in part],
        test_groups=[i for i, part in enumerate(test) for _ in part],
        classes=task.CLASSES,
    )
