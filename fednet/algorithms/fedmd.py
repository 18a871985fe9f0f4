"""FedMD: Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019
workshop (arXiv:1910.03581), Algorithm 1.

D_0   public samples, labelled, at every client     D_k  private samples of client k
f_k   model of client k, which never leaves it      d_j  subset of D_0 of round j
f_k(d_j)  class scores (logits), (n_j, C)           f~   their mean: the consensus

    transfer learning: f_k is trained on D_0, then on D_k, before its first round
    round: client k sends f_k(d_j); the server averages the scores to f~; f_k is trained to give f~
    on d_j (digest: mean absolute difference of the scores), then on D_k (revisit)

Both sides draw d_j from the run's seed, so that no indices cross; D_0 crosses once, with a client's
first task. Digest and transfer learning are plain SGD at the run's learning rate; the paper trains
to convergence with Adam. The mean over clients is uniform, as printed.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms.base import *
from fednet.plain import part_of
from fednet.training.evaluation import logits

LABEL_BYTES = 8  # int64
BATCH = 256  # of samples whose scores are computed
Scores = kind("statistics", "array", dtype="float32", rank=2)
Draw = kind("statistics", "int", low=0)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@algorithm("fedmd")
class FedMD(Algorithm):
    """Clients send scores on public samples, and no weights; models stay at the clients."""

    paper = "Li & Wang, 2019 (arXiv:1910.03581)"
    weighting = "uniform"  # the mean over clients is plain
    personalised = True
    has_global = False
    classes_only = True
    architecture_free = True
    needs_public = True
    model_field = None

    class Config(AlgorithmConfig):
        subset: Fraction = 1.0
        """Share of the public samples D_0 that is used per round."""
        public_epochs: Count = 1
        """Epochs on the public samples before a client's first round."""
        private_epochs: Count = 1
        """Epochs on its own samples before a client's first round."""
        digest_epochs: Count = 1
        """Epochs per round in which a client fits the consensus scores."""
        batch: Count = 64
        """Batch size of training on public samples."""

    class Enrolment(Payload):
        samples: Shared

    class Ask(Payload):
        draw: Draw

    class Answer(Payload):
        scores: Scores
        run: Statistics

    class Consensus(Payload):
        scores: Scores
        draw: Draw

    class Done(Payload):
        run: Statistics

    exchanges = (Exchange(Ask, Answer, "communicate"), Exchange(Consensus, Done, "train"))

    class Server(State):
        draw: int = 0  # key of the rounds' subsets
        scores: torch.Tensor | None = None

    class Client(State):
        w: Tensors
        x: Inputs | None = None  # public samples, raw
        y: torch.Tensor | None = None
        begun: bool = False

    class Accumulator(State):
        scores: torch.Tensor | None = None
        clients: int = 0

    # -- what crosses ------------------------------------------------------------------------------
    def sizes(self, payload, client):
        if payload is self.Enrolment:
            return {"samples": client.public_n * (client.sample_nbytes + LABEL_BYTES)}
        if payload in (self.Answer, self.Consensus):
            rows = part_of(self.config.subset, client.public_n)
            return {"scores": rows * len(client.class_counts) * 4}
        return {}

    def prepare(self, server, host):
        return self.Server(draw=int(host.rng("fedmd").integers(2**62)))

    def init_client(self, x):
        return self.Client(w=x)

    def enroll(self, server, client_id, host):
        x, y = host.public.train
        return self.Enrolment(samples=Samples(x, y))

    def receive_enrolment(self, client, payload, host):
        return client.replace(x=payload.samples.x, y=payload.samples.y)

    def broadcast(self, server, phase, client_id):
        if phase == 0:
            return self.Ask(draw=server.draw)
        return self.Consensus(scores=server.scores, draw=server.draw)

    # -- a round -----------------------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        c = self.config
        x, y = host.inputs(Samples(client.x, client.y))
        draws = seeds.rng(down.draw, "fedmd/subset", host.round)  # the same at every client
        rows = draws.choice(len(y), part_of(c.subset, len(y)), replace=False)
        d_j = x[torch.from_numpy(rows).sort().values.to(y.device)]
        if phase == 0:
            w = client.w
            if not client.begun:  # transfer learning
                w = self.fit(w, x, y, F.cross_entropy, c.public_epochs, "transfer", host)
                if c.private_epochs:
                    w = host.train(w, epochs=c.private_epochs, stream="transfer").x
            found = logits(host.frozen(w), d_j, BATCH).cpu()
            answer = self.Answer(scores=found, run=LocalRun(host.n, 0, 0.0))
            return client.replace(w=w, begun=True), answer
        target = down.scores.to(host.device)
        w = self.fit(client.w, d_j, target, F.l1_loss, c.digest_epochs, "digest", host)
        y = host.train(w)  # revisit
        return client.replace(w=y.x), self.Done(run=y.run)

    def fit(self, w: Tensors, x, target, loss: Loss, epochs: int, stream: str, host) -> Tensors:
        """SGD over public samples at the run's learning rate, without momentum."""
        if not epochs or not len(target):
            return w
        model = host.model(w)
        draws = host.rng(f"fedmd/{stream}")
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        with host.drawing(f"fedmd/{stream}"):
            for _ in range(epochs):
                order = torch.from_numpy(draws.permutation(len(target))).to(target.device)
                for part in order.split(max(1, self.config.batch)):
                    value = loss(model(x[part]), target[part])
                    gradients = torch.autograd.grad(value, parameters)
                    with torch.no_grad():
                        for p, g in zip(parameters, gradients):
                            p.sub_(g, alpha=host.lr)
        return Tensors.of(model, w.layout)

    def accumulate(self, accumulator, server, client_id, up, host):
        if not isinstance(up, self.Answer):
            return accumulator
        found = up.scores.double()
        return self.Accumulator(
            scores=found if accumulator.scores is None else accumulator.scores + found,
            clients=accumulator.clients + 1,
        )

    def server_update(self, accumulator, server, cohort, host):
        if accumulator.scores is None:  # the second exchange
            return server.replace(scores=None)
        return server.replace(scores=(accumulator.scores / accumulator.clients).float())

    def personal_model(self, client, local, host):
        return client.w
