"""A selection of the user's: a part (`selection:`), or a method's `select`.

It chooses among the available clients by what their earlier replies said (`Candidate`). That is
kept with the run's state and follows from the replies that count, so the same clients are selected
in every placement and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fednet import registry, seeds
from fednet.algorithms.state import State
from fednet.data.reading import call
from fednet.errors import FednetError
from fednet.experiment import selection
from fednet.experiment.build import Experiment
from fednet.loading import WrongPart, error_text, place
from fednet.records.manifest import Candidate
from fednet.wire.payload import LocalRun


def selects(experiment: Experiment) -> bool:
    """Returns whether the run has such a selection."""
    return experiment.config.selection.name is not None or experiment.algorithm.selects


def cohort(
    experiment: Experiment,
    server: State,
    round: int,
    here: Sequence[bool] | None,
    known: Mapping[int, Candidate],
) -> list[int]:
    """Returns the clients asked in a round, ascending. server: the method's state. here: as in
    `selection.cohort`. known: what was replied, by client. Raises WrongPart where the selection
    returns anything but ids of available clients.
    """
    config = experiment.config
    present = selection.available(config, round) if here is None else here
    available = [
        known.get(client) or candidate(experiment, client)
        for client in sorted(selection.order(config, round, present))
    ]
    asked = min(config.asked, len(available))
    if not asked:
        return []
    rng = seeds.rng(config.seed, "selection", round)
    name = config.selection.name
    options = config.selection.options
    given = {"round": round, "available": available, "asked": asked, "rng": rng}
    part: Callable[..., object] = experiment.algorithm.select
    if name is not None:
        part = registry.selection.get(name)
    try:
        found = part(server, **given) if name is None else call(part, given, options, "selection")
    except FednetError:
        raise
    except Exception as broken:
        raise WrongPart(f"the selection {name_of(part)}: {error_text(broken)}.") from broken
    return check_selected(part, found, available, asked)


def check_selected(
    part: Callable[..., object], found: object, available: Sequence[Candidate], asked: int
) -> list[int]:
    """Returns the ids that a selection returned, ascending. Raises WrongPart for anything else."""
    ids = list(found) if isinstance(found, (list, tuple, set, np.ndarray)) else []
    whole = all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids)
    chosen = set(ids) if whole else set()
    strange = chosen - {one.id for one in available}
    if not 1 <= len(ids) <= asked or len(chosen) < len(ids) or strange:
        raise WrongPart(
            f"the selection {name_of(part)} ({place(part)}) returned {found!r:.200}, expected a "
            f"list of 1 to {asked} different ids of clients that are available."
        )
    return sorted(int(i) for i in ids)


def name_of(part: Callable[..., object]) -> str:
    """Returns the name of a selection's function."""
    return getattr(part, "__qualname__", str(part))


def candidate(experiment: Experiment, client: int) -> Candidate:
    """Returns what is known of a client that has not replied yet."""
    federation = experiment.federation
    n = None if federation is None else len(federation.parts[client])
    return Candidate(id=client, n=n)


def after_reply(
    before: Candidate,
    round: int,
    run: LocalRun | None,
    reported: Mapping[str, float],
    seconds: float | None,
) -> Candidate:
    """Returns what is known of a client after a round in which its reply counted. run: what it said
    of its training, if it did.
    """
    loss = None
    if run is not None and math.isfinite(run.loss):
        loss = run.loss
    return Candidate(
        id=before.id,
        n=before.n if run is None else run.n,
        round=round,
        times=before.times + 1,
        loss=loss,
        reported=dict(reported),
        seconds=seconds,
    )
