"""How much one client may weigh in a mean by samples (`round.max_share`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fednet.experiment.build import Experiment

ENOUGH = 3  # replies: of fewer none can have less than half


def share_of_one(experiment: Experiment, replies: int) -> float | None:
    """The largest part that one client may have in a mean by samples (`round.max_share`); None:
    there is no bound.
    """
    share = experiment.config.round.max_share
    if share == "auto":
        return 0.5 if experiment.federation is None and replies >= ENOUGH else None
    return share


def lowered(counts: Mapping[int, int], share: float) -> dict[int, int]:
    """The counts that have to be lowered so that none is more than `share` of their sum, or of an
    equal part where so few cannot have less.
    """
    share = max(share, 1 / max(1, len(counts)))
    ordered = sorted(counts.items(), key=lambda item: item[1])
    high: list[int] = []
    rest = sum(counts.values())
    most = share * rest
    while ordered and ordered[-1][1] > most:
        client, n = ordered.pop()
        high.append(client)
        rest -= n
        left = 1 - share * len(high)
        most = share * rest / left if left > 1e-9 else float(ordered[-1][1] if ordered else n)
    cap = max(1, math.floor(most))
    return {c: cap for c in high if counts[c] > cap}
