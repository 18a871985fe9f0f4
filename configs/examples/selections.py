"""Two selections of clients by what they replied: Power-of-Choice and Oort.

fednet check configs/examples/selections.py
fednet run configs/examples/selections.yaml
"""

from __future__ import annotations

import math

import numpy as np

from fednet import selection


@selection("power-of-choice")
def power_of_choice(available, asked, rng, *, d: int = 8):
    """The clients with the largest losses of d that are drawn by their samples (Cho et al., 2020,
    arXiv:2010.01243): the variant that needs no further message, rpow-d. A client that has not
    trained yet counts as one of infinite loss, and one whose samples are not known as a usual one.
    """
    usual = np.mean([one.n for one in available if one.n] or [1])
    samples = np.array([one.n or usual for one in available])
    chances = samples / samples.sum()
    size = min(max(d, asked), len(available))
    drawn = rng.choice(len(available), size, replace=False, p=chances)
    candidates = [available[i] for i in drawn]
    candidates.sort(key=lambda one: math.inf if one.loss is None else one.loss, reverse=True)
    return [one.id for one in candidates[:asked]]


@selection("oort")
def oort(
    round, available, asked, rng, *, preferred_s: float | None = None, alpha: float = 2.0,
    epsilon: float = 0.9, decay: float = 0.98, least: float = 0.2,
):  # fmt: skip
    """A share of clients that have not trained yet, and those of the highest utility (Lai et al.,
    2021, arXiv:2010.06081, Algorithm 1, without its pacer, clipping and cut-off).
    """
    new = [one.id for one in available if one.loss is None]
    old = [one for one in available if one.loss is not None]
    share = max(least, epsilon * decay ** (round - 1))
    exploring = min(len(new), max(int(share * asked + 0.5), asked - len(old)))
    explored = list(rng.permutation(new)[:exploring])
    old.sort(key=lambda one: utility(one, round, preferred_s, alpha), reverse=True)
    return explored + [one.id for one in old[: asked - exploring]]


def utility(one, round, preferred_s, alpha):
    """Samples times loss, a bonus for who was last selected long ago, and less for who is slow.
    The paper has the root of the mean squared loss of the samples, where this has the mean loss.
    """
    found = one.n * one.loss + math.sqrt(0.1 * math.log(round) / one.round)
    if preferred_s is not None and one.seconds is not None and one.seconds > preferred_s:
        found *= (preferred_s / one.seconds) ** alpha
    return found
