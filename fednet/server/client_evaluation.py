"""When there is an evaluation by clients, which of them it asks, and what they counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from fednet import seeds
from fednet.config import Config
from fednet.experiment import selection
from fednet.experiment.evaluations import DetailedEvaluationReply, EvaluationReply
from fednet.plain import JsonDict
from fednet.records import EVALUATED_MODELS
from fednet.training.evaluation import Counts


def evaluation_due(config: Config, round: int) -> bool:
    """Returns whether a round is evaluated."""
    every = config.evaluate.every
    return every > 0 and (round % every == 0 or round == config.rounds)


def evaluated_clients(config: Config, round: int = 0) -> list[int]:
    """Returns the clients that an evaluation after a round asks, those that are held out too: all,
    or the same sample each time (`evaluate.most`), less those that are gone.
    """
    most = config.evaluate.most
    if most is None or config.clients <= most:
        drawn = list(range(config.clients))
    else:
        draw = seeds.rng(config.seed, "evaluate/clients")
        drawn = sorted(int(one) for one in draw.choice(config.clients, most, replace=False))
    left_out = selection.clients_gone(config, round)
    return [client for client in drawn if client not in left_out]


def counts_by_model(
    payload: EvaluationReply, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Counts]:
    """Returns the counts by model; models that were not evaluated are left out. shapes:
    `Setting.more`.
    """
    found = {}
    for row, name in enumerate(EVALUATED_MODELS):
        table = payload.counts[row].numpy().astype(np.int64)
        n = int(table[1].sum())
        more: Callable[[], JsonDict] = dict
        if isinstance(payload, DetailedEvaluationReply):
            more = functools.partial(payload.of, row, shapes)  # dense only while it is used
        if n:
            found[name] = Counts(table, float(payload.losses[row]), n, more)
    return found
