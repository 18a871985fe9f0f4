"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021 (arXiv:2102.07078), Algorithm 1.

phi  representation (base), shared        h_i  head of client i, which never crosses

A participant first trains h_i for `head_epochs` epochs with phi frozen, then phi for `body_epochs`
with h_i frozen. If the run counts steps (`train.steps`), these are divided between the two in the
ratio of the epochs.

The defaults follow the authors' code: of the E local epochs one is the body's, the others the
head's (at least one). Each of the two has an optimizer of its own: with one optimizer, momentum and
weight decay would also move the frozen part. Clients are weighted by samples, as in the code; the
paper's mean is uniform.
"""

from fednet.algorithms.base import *
from fednet.algorithms.split import last_linears, split_model, whole_model


@algorithm("fedrep")
class FedRep(Algorithm):
    """A shared representation: head first with the base frozen, then the base with the head
    frozen.
    """

    paper = "Collins et al., ICML 2021 (arXiv:2102.07078)"
    part = "base"
    personalised = True
    has_global = False
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        head_epochs: Count | None = None
        """Epochs tau_h of the head per round; null: train.epochs - 1, at least 1."""
        body_epochs: Count = 1
        """Epochs tau_phi of the shared body per round."""
        personal_layers: Count = 1
        """Number of last Linear layers that are the personal head."""

    class Client(State):
        head: Tensors | None = None

    def shared(self, layout, module):
        return layout.without(last_linears(module, self.config.personal_layers))

    def client_update(self, phase, client, down, host):
        base = host.shared.parameters.names
        head = host.layout.parameters.without(base).names
        train = host.train_config
        h = self.config.head_epochs
        b = self.config.body_epochs
        if h is None:
            h = max(1, train.epochs - 1)
        unit = "epochs"
        counts = (h, b)
        if train.steps is not None:
            unit = "steps"
            counts = divide_steps(train.steps, h, b)
        x = whole_model(down.x, client.head, host)
        steps = 0
        loss = 0.0
        for count, names, stream in zip(counts, (head, base), ("order", "order/body")):
            if count and names:
                y = host.train(x, **{unit: count}, only=names, stream=stream)
                x = y.x
                steps = steps + y.run.steps
                loss = loss + y.run.loss * y.run.steps
        up, own = split_model(x, host)
        run = LocalRun(n=host.n, steps=steps, loss=loss / steps if steps else 0.0)
        return self.Client(head=own), self.Up(x=up, run=run)

    def refusal(self, run):
        if run.train.steps is not None and self.config.head_epochs is None:
            return (
                "algorithm.head_epochs",
                "fedrep divides train.steps between head and body as head_epochs to body_epochs; "
                "say how many epochs the head has.",
            )
        return None


def divide_steps(steps: int, h: int, b: int) -> tuple[int, int]:
    """`steps` in the ratio h : b, the body's rounded down; each that has epochs has a step, as far
    as there are two.
    """
    body = steps * b // (h + b) if h + b else 0
    body = min(max(body, min(b, 1)), steps - min(h, 1)) if steps > 1 else body
    return (steps - body if h else 0), body
