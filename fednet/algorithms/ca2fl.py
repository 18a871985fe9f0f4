"""CA2FL: Wang, Cao, Wu, Chen, Chen, "Tackling the Data Heterogeneity in Asynchronous Federated
Learning with Cached Update Calibration", ICLR 2024 (https://openreview.net/forum?id=4aywmeb97I),
Algorithm 2.

x        global model        N    all clients        S  the replies in the buffer, M of them
Delta_i  = y_i - x, of a reply and the model that it started from        eta  server rate
h_i      the server's memory of client i's last Delta_i (0 before)       h    mean h_i over all N

    v = h + 1/M  sum over S of (Delta_i - h_i)
    x <- x + eta v;    h_i <- Delta_i for i in S

This is FedVARP's round with the buffer as S, so both halves are FedVARP's. Its names have the other
sign: its Delta_i is x - y_i, its y_i is -h_i and its ybar is -h.

The paper's text was not available; this follows FLGo's public implementation, which has the same v,
x and h_i. Two things differ: its buffer may hold two replies of one client, of which h_i keeps the
later, and it sums h from all h_i each time, where h is moved by their changes here. Stale replies
have no smaller weight; the memory replaces the clients that are not in the buffer.
"""

from fednet.algorithms.base import *
from fednet.algorithms.fedvarp import FedVARP


@algorithm("ca2fl")
class CA2FL(FedVARP):
    """The server's memory of every client's last update calibrates a buffer of replies."""

    paper = "Wang et al., ICLR 2024 (https://openreview.net/forum?id=4aywmeb97I)"
    own_schedule = {"mode": "async"}

    class Config(AlgorithmConfig):
        server_lr: Positive = 1.0
        """Server learning rate eta: the step along the calibrated mean update."""
