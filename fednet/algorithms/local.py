"""Local-only training, called SOLO by some: every client alone, from the common w^0.

w^0  the initial model, sent once        w_i  client i's own model, which never leaves it

A "round" trains the selected clients E epochs from their own models, so that the work is that of
the federated runs.
"""

from typing import Literal

from fednet.algorithms.base import *


@algorithm("local")
class Local(Algorithm):
    """No federation: each client trains its own model."""

    paper = "the baseline without communication"
    personalised = True
    has_global = False

    class Config(AlgorithmConfig):
        init: Literal["shared", "own"] = "shared"
        """shared: all clients start from the same model; own: each from a model of its own seed."""

    class Enrolment(Payload):
        x: Weights

    Down = Nothing

    class Up(Payload):
        run: Statistics

    class Client(State):
        x: Tensors
        started: bool = False

    Accumulator = Empty

    def __init__(self, config=None, clients=1):
        super().__init__(config, clients)
        if self.config.init == "own":  # nothing is sent: each makes its own
            self.Enrolment = None

    def init_client(self, x):
        return self.Client(x=x)

    def enroll(self, server, client_id, host):
        return self.Enrolment(x=server.x) if self.config.init == "shared" else None

    def receive_enrolment(self, client, payload, host):
        return self.Client(x=host.initial.merge(payload.x))

    def client_update(self, phase, client, down, host):
        own = self.config.init == "own" and not client.started
        y = host.train(host.fresh("own", 0) if own else client.x)
        return self.Client(x=y.x, started=True), self.Up(run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        return accumulator

    def server_update(self, accumulator, server, cohort, host):
        return server
