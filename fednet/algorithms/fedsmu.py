"""FedSMU: Lu et al., "FedSMU: Communication-Efficient and Generalization-Enhanced Federated
Learning through Symbolic Model Updates", ICML 2025 (PMLR 267:40903), Algorithm 1: Lion, cut in two.

x        global model           y_i     local model after K steps
g_i      = y_i - x              m_i     momentum of client i, 0 at first
u_i      what crosses: signs    beta_1, beta_2  its two decays
gamma_1  global rate            gamma_2  weight decay

    u_i <- Sign(beta_1 m_i + (1 - beta_1) g_i)
    m_i <- beta_2 m_i + (1 - beta_2) g_i
    x   <- x + gamma_1 (mean of u_i - gamma_2 x)

u_i holds -1, 0 and 1; it is 0 where a parameter did not move, as the weights of pixels that are
always black. It crosses as float32 unless `wire.up` says otherwise. `wire.up: {delta: [qsgd(2)]}`
sends it in two bits a value, exactly. The paper counts one bit a value. `[noef, sign]` takes one,
but has no code for 0, which becomes plus or minus the mean magnitude. The paper has no error
feedback: a compressor that adds it by default, as `sign` alone does, is refused.

Buffers are averaged and take no part. The mean is uniform, as printed. The defaults are the paper's
for CIFAR-10 (its Appendix A). In the authors' code gamma_1 shrinks after each round, of which the
paper says nothing: `server_lr_decay: 0.9988` is theirs.
"""

import torch

from fednet.algorithms.base import *
from fednet.wire.compress import chains


@algorithm("fedsmu")
class FedSMU(Algorithm):
    """Clients send the signs of their momenta; the server steps along their mean."""

    paper = "Lu et al., ICML 2025 (PMLR 267:40903)"
    weighting = "uniform"  # the mean over clients is plain
    summed = {"u": "plain"}

    class Config(AlgorithmConfig):
        server_lr: Positive = 0.015
        """Global rate gamma_1."""
        server_lr_decay: Fraction = 1.0
        """Factor of gamma_1 from round to round; 1: constant, the authors' code: 0.9988."""
        decay: NonNegative = 0.01
        """Weight decay gamma_2 at the server."""
        beta_1: Fraction = 0.9
        """Weight of the momentum in the sign that is sent."""
        beta_2: Fraction = 0.9
        """Decay of the client's momentum m_i."""

    class Up(Payload):
        u: Delta
        run: Statistics

    class Client(State):
        m: Tensors

    class Accumulator(State):
        u: Sum

    def refusal(self, run):
        chain = chains(run.wire.up).get("delta")
        if chain is None or len(chain.parts) == len(chain.text):
            return None  # nothing is added to what the configuration names
        return (
            "wire.up.delta",
            f"{chain} adds error feedback, so another vector than fedsmu's signs would be sent; "
            f"qsgd(2) sends -1, 0 and 1 exactly, in two bits a value. To use {chain}, put noef or "
            f"ef in front of it.",
        )

    def init_client(self, x):
        return self.Client(m=x.params.zeros_like())

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        c = self.config

        def signs(y, x, m):
            g = y - x
            return (
                torch.sign(c.beta_1 * m + (1 - c.beta_1) * g),
                c.beta_2 * m + (1 - c.beta_2) * g,
            )

        u, m = blockwise(signs, y.x, down.x, client.m)
        return client.replace(m=client.m.with_vector(m)), self.Up(u=y.x.with_vector(u), run=y.run)

    def server_update(self, accumulator, server, cohort, host):
        u = accumulator.u.mean()
        c = self.config
        gamma_1 = c.server_lr * c.server_lr_decay ** (host.round - 1)
        x = blockwise(lambda u, x: x + gamma_1 * (u - c.decay * x), u, server.x)
        return self.Server(x=u.with_vector(x))
