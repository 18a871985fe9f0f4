"""Secure aggregation: the server learns the sum of its clients' vectors, and no single one.

Two protocols, as a client and a server machine without I/O: bytes go in, bytes come out.

    secagg   Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
             Learning", CCS 2017, Figure 4: keys, shares, masked input, consistency, unmasking
    secagg+  Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead",
             CCS 2020 (ePrint 2020/704), Algorithm 2: the same over a random k-regular graph

    y_u = x_u + PRG(b_u) + sum_{v < u} PRG(s_uv) - sum_{v > u} PRG(s_uv)      mod R

u, v  clients, v among u's neighbours      s_uv  what X25519 gives of u's and v's mask keys
b_u   u's own seed                         U1, U2, U3  clients that answered keys, shares, masked

Bonawitz et al., Figure 4: Round 0 keys, 1 shares, 2 masked, 3 consistency, 4 unmask. In SecAgg
every client is the neighbour of every other; SecAgg+ (Bell et al., Algorithm 2) has a sparse graph.
For a client of U3 the server gets shares of b_u, for one of U2 that is not in U3 shares of its mask
key, and of no client both.

Departs from the papers:

- Keys for the signatures of the consistency step are advertised with the others; Bonawitz et al.
  have them certified by a third party.
- Each client sends a digest of b_u with its shares. By it (and for a mask key by its public half)
  the server detects wrong shares, and looks for shares that give the right secret.
- A client that cannot decrypt a share goes on, and reports it in the last step, see `evidence`.

Read in this order: terms, fixed, primitives, field, messages, masks, client, server, evidence,
decoding.

Trust. The server may be curious, may collude with some clients, and may claim that other clients
dropped out: a client answers each step once, so that two sets of survivors cannot both get the
threshold of answers if it is above half (and at most 2t - n clients collude with the server). The
server must not replace a client's keys by its own: keys are advertised through it, and nobody else
certifies them. This is the papers' model of an honest-but-curious server, with the consistency step
of the active one.

Ciphers, key agreement and signatures are those of the package `cryptography`; secrets come from the
operating system, never from a run's seed. They stay in memory: a client whose process ends in the
middle of a round has dropped out of it.
"""

from fednet.secagg.client import SecureClient as SecureClient
from fednet.secagg.messages import BelowThreshold as BelowThreshold
from fednet.secagg.messages import Refused as Refused
from fednet.secagg.server import SecureServer as SecureServer
from fednet.secagg.terms import PROTOCOLS as PROTOCOLS
from fednet.secagg.terms import Terms as Terms
