"""The ClientApp, as in Flower's quickstart for PyTorch."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = task.Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = task.load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )
    lr = msg.content["config"]["lr"]
    train_loss = task.train(model, trainloader, context.run_config["local-epochs"], lr)
    metrics = MetricRecord(
        {"train_loss": train_loss, "num-examples": len(trainloader.dataset)},
    )
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)
