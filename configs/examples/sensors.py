"""Parts of one's own, in one file: a method, a way to divide the data, and a dataset that is no
image.

    fednet check configs/examples/sensors.py
    fednet run configs/examples/sensors.yaml

The names become known as the file is loaded: by `load:` in a configuration, or by `--load` at any
command.
"""

from __future__ import annotations

import numpy as np

from fednet import (
    Algorithm,
    AlgorithmConfig,
    Data,
    Fraction,
    Payload,
    State,
    Statistics,
    Tensors,
    Weights,
    algorithm,
    dataset,
    partitioner,
)


# -- a method --------------------------------------------------------------------------------------
@algorithm("servermomentum")
class FedAvgM(Algorithm):
    """Federated averaging with momentum at the server: v <- beta v + (mean of w_i) - w, then w <- w
    + v.

    w  global model    w_i  local models    v  the server's momentum
    """

    paper = "Hsu et al., 2019 (arXiv:1909.06335)"

    class Config(AlgorithmConfig):
        beta: Fraction = 0.9
        """Server momentum."""

    # What goes to a client; its type says under which kind the ledger books it.
    class Down(Payload):
        x: Weights

    class Up(Payload):  # what comes back
        x: Weights
        run: Statistics  # samples, steps, mean loss

    class Server(State):  # what the server keeps from round to round; a client keeps nothing here
        x: Weights  # the shared model
        v: Tensors

    def init_server(self, x):
        return self.Server(x=x, v=x.params.zeros_like())

    def broadcast(self, server, phase, client_id):
        return self.Down(x=server.x)

    # Runs at the client, which sees `down`, its own state and `host`: no more.
    def client_update(self, phase, client, down, host):
        done = host.train(down.x)
        return client, self.Up(x=done.x, run=done.run)

    # init_accumulator and accumulate are the defaults: a mean of the replies, weighted by samples.

    def server_update(self, accumulator, server, cohort, host):
        mean = accumulator.x.mean()
        v = self.config.beta * server.v + (mean - server.x).params
        return self.Server(x=(server.x.params + v).with_buffers(mean), v=v)


# -- a way to divide the data ----------------------------------------------------------------------
@partitioner("favourite")
def favourite(y, clients, rng, *, share: float = 0.8):
    """Each class has a home: its samples go there with probability `share`, else to any client.
    Options: share.
    """
    home = rng.permutation(clients)[y % clients]
    owner = np.where(rng.random(len(y)) < share, home, rng.integers(0, clients, len(y)))
    return [np.flatnonzero(owner == client) for client in range(clients)]


# -- data that are no images -----------------------------------------------------------------------
ACTIVITIES = ("lying", "sitting", "standing", "walking", "stairs", "running")


@dataset("sensors")
def sensors(seed, *, people: int = 12, windows: int = 60):
    """Accelerometer readings, made up: (3 axes, 64 readings) a window, six activities. Options:
    people, windows (a person).

    An activity is a posture (where gravity points) and a pace; a person wears the sensor tilted,
    and moves more or less.
    """
    draw = np.random.default_rng(seed)
    posture = np.array([[1, 0, 0], [0.7, 0.7, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0.2], [0, 1, 0.1]])
    pace = np.array([0, 0, 0, 1.8, 1.5, 2.9])
    effort = np.array([0, 0, 0, 0.3, 0.4, 0.9])
    seconds = np.arange(64) / 32
    x = []
    y = []
    owner = []
    for person in range(people):
        tilt = draw.normal(0, 0.15, 3)
        vigour = draw.uniform(0.7, 1.3)
        for activity in draw.integers(0, len(ACTIVITIES), windows):
            swing = (
                vigour
                * effort[activity]
                * np.sin(2 * np.pi * (pace[activity] * seconds + draw.random()))
            )
            still = (posture[activity] + tilt)[:, None]
            x.append(still + swing * np.array([[0.3], [1.0], [0.5]]) + draw.normal(0, 0.1, (3, 64)))
            y.append(activity)
            owner.append(person)
    x, y, owner = np.stack(x).astype(np.float32), np.array(y), np.array(owner)
    test = np.arange(len(y)) % 5 == 0
    # groups, test_groups: who owns which sample by nature, for `partition: {scheme: natural}`
    return Data(
        train=(x[~test], y[~test]),
        test=(x[test], y[test]),
        classes=len(ACTIVITIES),
        groups=owner[~test],
        test_groups=owner[test],
        names=ACTIVITIES,
    )
