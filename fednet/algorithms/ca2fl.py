"""CA2FL: Wang, Cao, Wu, Chen, Chen, "Tackling the Data Heterogeneity in Asynchronous Federated
Learning with Cached Update Calibration", ICLR 2024 (https://openreview.net/forum?id=4aywmeb97I),
Algorithm 2.

x        global model        N    all clients        S  the replies in the buffer, M of them
Delta_i  = y_i - x, of a reply and the model that it started from        eta  server rate
h_i      the server's memory of client i's last Delta_i (0 before)       h    mean h_i over all N

    v = h + 1/M  sum over S of (Delta_i - h_i)
    x <- x + eta v;    h_i <- Delta_i for i in S

The paper's text was not available; this follows FLGo's public implementation, which has the same v,
x and h_i. Two things differ: its buffer may hold two replies of one client, of which h_i keeps the
later, and it sums h from all h_i each time, where h is moved by their changes here. Stale replies
have no smaller weight; the memory replaces the clients that are not in the buffer. If nothing is
stale, this is FedVARP.
"""

from fednet.algorithms.base import *


@algorithm("ca2fl")
class CA2FL(Algorithm):
    """The server's memory of every client's last update calibrates a buffer of replies."""

    paper = "Wang et al., ICLR 2024 (https://openreview.net/forum?id=4aywmeb97I)"
    weighting = "uniform"
    own_schedule = {"mode": "async"}

    class Config(AlgorithmConfig):
        server_lr: Positive = 1.0
        """Server learning rate eta: the step along the calibrated mean update."""

    class Up(Payload):
        d: Delta  # Delta_i
        run: Statistics

    class Server(State):
        x: Weights
        h_i: PerClient
        h: Tensors

    class Accumulator(State):
        change: Sum  # of Delta_i - h_i
        h_i: PerClient

    def with_more_clients(self, server, before, now):
        return server.replace(h=before / now * server.h)  # h_i of a new client is 0

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        return client, self.Up(d=(y.x - down.x).with_buffers(y.x), run=y.run)

    def init_accumulator(self, server, phase):
        return self.Accumulator(change=Sum.empty(), h_i=server.h_i)

    def accumulate(self, accumulator, server, client_id, up, host):
        change = accumulator.change.add(up.d, less=server.h_i.known(client_id))
        return self.Accumulator(change=change, h_i=accumulator.h_i.put(client_id, up.d.params))

    def server_update(self, accumulator, server, cohort, host):
        v = accumulator.change.step(server.h)  # with the old h_i
        x = server.x.plus(v, self.config.server_lr).with_buffers(v)
        h = accumulator.change.step(server.h, divisor=host.clients).params
        return self.Server(x=x, h_i=accumulator.h_i, h=h)
