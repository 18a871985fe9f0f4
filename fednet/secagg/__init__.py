"""Secure aggregation: the server learns the sum of its clients' vectors, and no single one.

Three protocols, each as a client and a server machine without I/O: bytes go in, bytes come out.

    secagg       Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
                 Learning", CCS 2017, Figure 4: keys, shares, masked input, consistency, unmasking
    secagg+      Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead",
                 CCS 2020 (ePrint 2020/704), Algorithm 2: the same over a random k-regular graph
    lightsecagg  So et al., "LightSecAgg: a Lightweight and Versatile Design for Secure Aggregation
                 in Federated Learning", MLSys 2022 (arXiv:2109.14236), Algorithm 1: one mask a
                 client, coded so that the sum of those that are needed is found at once

Read in this order: terms, fixed, primitives, field, steps, pairwise, light.

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

from fednet.secagg.light import LightClient as LightClient
from fednet.secagg.light import LightServer as LightServer
from fednet.secagg.pairwise import PairwiseClient as PairwiseClient
from fednet.secagg.pairwise import PairwiseServer as PairwiseServer
from fednet.secagg.steps import BelowThreshold as BelowThreshold
from fednet.secagg.steps import Refused as Refused
from fednet.secagg.steps import SecureClient as SecureClient
from fednet.secagg.steps import SecureServer as SecureServer
from fednet.secagg.terms import PROTOCOLS as PROTOCOLS
from fednet.secagg.terms import Terms as Terms


def client(terms: Terms, me: int) -> SecureClient:
    """Returns the client machine of this round's protocol."""
    if terms.protocol == "lightsecagg":
        return LightClient(terms, me)
    return PairwiseClient(terms, me)


def server(terms: Terms) -> SecureServer:
    """Returns the server machine of this round's protocol."""
    return LightServer(terms) if terms.protocol == "lightsecagg" else PairwiseServer(terms)
