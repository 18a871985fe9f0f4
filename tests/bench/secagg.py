"""What secure aggregation costs a client and the server, by protocol, number of clients and share
of them that is lost.

The machines alone, in one process and thread, on random vectors: bytes are those of their messages,
seconds are of the processor. Who is lost is lost after its shares were handed on and before its
vector came, where that costs the most: the masks of the lost have to be found.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fednet import secagg, seeds
from fednet.plain import JsonDict, JsonMapping
from fednet.secagg import SecureClient, SecureServer, Terms
from fednet.secagg.fixed import FixedPoint
from fednet.secagg.server import Gathered
from fednet.secagg.terms import draw_order

PLAIN = "plain"
PROTOCOLS = (PLAIN, *secagg.PROTOCOLS)
ENTRIES = 44_426  # LeNet-5's, of the quick start
BITS = 24
# So that 30 % may be lost; of secagg+, of a client's neighbours as many more as chance has it.
THRESHOLDS = {"secagg": 0.66, "secagg+": 0.51}
LEAST = 20  # neighbours
VOID = 1e-3  # how likely a round of secagg+ may be void, for too many of somebody's neighbours


def neighbours(n: int, gone: int) -> int:
    """The fewest, an even number, with which a round of secagg+ that loses `gone` of n clients is
    void with a chance of at most `VOID`: somebody's share threshold is missed (union bound over the
    hypergeometric tails).
    """
    for k in range(2, n - 1, 2):
        t = math.ceil(THRESHOLDS["secagg+"] * (k + 1))
        ways = sum(
            math.comb(gone, x) * math.comb(n - 1 - gone, k - x)
            for x in range(max(0, k - t + 1), min(k, gone) + 1)
        )
        if n * ways <= VOID * math.comb(n - 1, k):
            return max(k, LEAST)
    return n - 1


def terms(protocol: str, n: int, gone: int, entries: int) -> Terms:
    """The terms of a round of n clients."""
    point = FixedPoint(BITS, 1.0)
    order = draw_order(n, seeds.rng(0, "secagg/graph", n))
    cohort = tuple(range(n))
    context = b"bench"
    return Terms(  # type: ignore[arg-type]
        protocol,  # type: ignore[arg-type]
        cohort,
        THRESHOLDS[protocol],
        entries,
        point.largest,
        context,
        neighbours(n, gone),
        order,
    )


def machines(protocol: str, n: int, lost: float, entries: int) -> JsonDict:
    """One round. Raises BelowThreshold where too many are lost."""
    rng = seeds.rng(0, "bench/secagg", n)
    gone = {int(c) for c in rng.permutation(n)[: math.floor(lost * n + 0.5)]}
    record = {"protocol": protocol, "clients": n, "dropout": lost, "entries": entries}
    if protocol == PLAIN:
        return record | _plain(n, gone, entries)
    t = terms(protocol, n, len(gone), entries)
    clients = {c: SecureClient(t, c) for c in t.cohort}
    server = SecureServer(t)
    vector = np.zeros(entries, dtype=np.int64)
    up = Counter[str]()
    down = 0
    work = {"client": 0.0, "server": 0.0}
    while (step := server.step) is not None:
        gathered = Gathered()
        for c in server.asked:
            begun = time.process_time()
            question = server.question(c)
            asked = time.process_time()
            down += len(question)
            if step == "masked" and c in gone:
                continue
            answer = clients[c].answer(step, question, vector + c)
            answered = time.process_time()
            up[step] += len(answer)
            server.take(gathered, c, answer)
            work["client"] += answered - asked
            work["server"] += time.process_time() - answered + asked - begun
        begun = time.process_time()
        server = server.finish(gathered)
        work["server"] += time.process_time() - begun
    survivors = set(t.cohort) - gone
    assert np.array_equal(server.total, np.full(entries, sum(survivors))), "the sum is wrong"
    return record | {
        "neighbours": max(map(len, t.circle.values())) - 1,
        "up": {step: bytes / n for step, bytes in up.items()},
        "up_bytes": up.total() / n,
        "down_bytes": down / n + 4 * entries,  # the model comes down as ever
        "client_s": work["client"] / n,
        "server_s": work["server"],
    }


def _plain(n: int, gone: set[int], entries: int) -> JsonDict:
    """Updates of float32, summed in float64."""
    update = np.ones(entries, dtype=np.float32)
    total = np.zeros(entries)
    begun = time.process_time()
    for _ in range(n - len(gone)):
        total += update
    spent = time.process_time() - begun
    sent = 4 * entries * (n - len(gone)) / n
    return {
        "up": {"state": sent},
        "up_bytes": sent,
        "down_bytes": float(4 * entries),
        "client_s": 0.0,
        "server_s": spent,
    }


def bench(
    clients: Sequence[int], dropouts: Sequence[float], entries: int = ENTRIES
) -> Iterator[JsonDict]:
    """A record for each protocol, number of clients and share of them that is lost."""
    for n, lost, protocol in itertools.product(clients, dropouts, PROTOCOLS):
        yield machines(protocol, n, lost, entries)


HEAD = (
    "| protocol | clients | lost | up, MB a client | down, MB a client | client, s | server, s |\n"
    + "|---" * 7
    + "|"
)


def line(r: JsonMapping) -> str:
    """A row of the table."""
    sparse = r["protocol"] == "secagg+"
    cells = [
        r["protocol"] + (f", {r['neighbours']} neighbours" if sparse else ""),
        r["clients"],
        f"{r['dropout']:.0%}",
        f"{r['up_bytes'] / 1e6:.3f}",
        f"{r['down_bytes'] / 1e6:.3f}",
        f"{r['client_s']:.3f}",
        f"{r['server_s']:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"
