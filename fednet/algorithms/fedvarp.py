"""FedVARP: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial
Client Participation in Federated Learning", UAI 2022 (arXiv:2207.14130), Algorithm 1.

w        global model      N  all clients      S  participants
Delta_i  = w - w_i
y_i      the server's memory of client i's last Delta_i (0 before)      ybar  mean y_i

Departs from the paper: Delta_i is not divided by eta_l K, so the server's rate is 1 by default.
"""

from fednet.algorithms.base import *


@algorithm("fedvarp")
class FedVARP(Algorithm):
    """The server's memory of every client's last update replaces those of absent clients."""

    paper = "Jhunjhunwala et al., UAI 2022 (arXiv:2207.14130)"
    weighting = "uniform"  # the mean over clients is plain

    class Config(AlgorithmConfig):
        server_lr: Positive = 1.0
        """Server learning rate."""

    class Up(Payload):
        d: Delta  # Delta_i
        run: Statistics

    class Server(State):
        x: Weights
        y: PerClient
        ybar: Tensors

    class Accumulator(State):
        change: Sum  # of Delta_i - y_i
        y: PerClient

    def with_more_clients(self, server, before, now):
        return server.replace(ybar=before / now * server.ybar)  # y_i of a new client is 0

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        return client, self.Up(d=(down.x - y.x).with_buffers(y.x), run=y.run)

    def init_accumulator(self, server, phase):
        return self.Accumulator(change=Sum.empty(), y=server.y)

    def accumulate(self, accumulator, server, client_id, up, host):
        change = accumulator.change.add(up.d, less=server.y.known(client_id))
        return self.Accumulator(change=change, y=accumulator.y.put(client_id, up.d.params))

    def server_update(self, accumulator, server, cohort, host):
        v = accumulator.change.step(server.ybar)  # with the old y
        x = server.x.plus(v, -self.config.server_lr).with_buffers(v)
        return self.Server(
            x=x,
            y=accumulator.y,
            ybar=accumulator.change.step(server.ybar, divisor=host.clients).params,
        )
