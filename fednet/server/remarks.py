"""Remarks on a configuration that are shown when its run starts, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import evaluated_clients
from fednet.ids import as_text
from fednet.training.samples import FEW
from fednet.world import held_out


def remarks(experiment: Experiment) -> Iterator[str]:
    """The remarks of the data, then those of the configuration."""
    config = experiment.config
    yield from experiment.remarks
    few = clients_with_small_last_batch(experiment)
    if few:
        yield (
            f"under BatchNorm the last batch of {few} of {config.clients} clients has only "
            f"{FEW} samples or 1; it is left out."
        )
    if config.schedule.mode == "async" and experiment.algorithm.own_schedule:
        yield (
            f"{config.algorithm.name} has no rounds: {config.cohort_size} clients train at a time "
            f"and every {config.buffer} replies are an update (schedule: async)."
        )
    if left_out := held_out(config):
        yield f"client(s) {as_text(left_out)} never train and only evaluate (evaluate.held_out)."
    evaluated = evaluated_clients(config)
    all_asked = len(evaluated) == config.clients
    if config.evaluate.every and config.evaluate.clients != "none" and not all_asked:
        yield (
            f"an evaluation of all asks {len(evaluated)} of {config.clients} clients, drawn from "
            f"the seed (evaluate.most)."
        )


def clients_with_small_last_batch(experiment: Experiment) -> int:
    """How many clients' epochs end with a batch of at most FEW samples that is not their only one,
    if the model has BatchNorm.
    """
    federation = experiment.federation
    if federation is None or not any(own.batch_norm for own in experiment.settings):
        return 0
    sizes = (experiment.config.train_of(k).batch_size for k in range(len(federation.parts)))
    return sum(
        len(part) > size
        and 0 < len(part) % size <= FEW
        and experiment.setting_of(client).batch_norm
        for client, (part, size) in enumerate(zip(federation.parts, sizes))
    )
