"""The base model at a client, where the server sends it (`model.base: server`).

It comes with a client's first task. It is kept beside the clients' states, under its digest, for
all clients of the process and for a process that is started again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fednet.descriptors import named
from fednet.errors import BaseAbsent
from fednet.experiment.build import Experiment
from fednet.files import write_aside
from fednet.models.base import BASE, unpacked
from fednet.wire import messages as m


def split_base_model(
    experiment: Experiment, task: m.Task, body: memoryview
) -> tuple[m.Task, memoryview, memoryview | None]:
    """Splits the base model off a task's payload.

    Returns (the task without it, its payload, the base model's bytes or None if it did not come).
    """
    if not experiment.base_comes or not task.enrol or task.form[0].kind != BASE:
        return task, body, None
    size = task.form[0].size
    rest = msgspec.structs.replace(
        task, form=list(task.form[1:]), enrol=task.enrol - 1, size=task.size - size
    )
    return rest, body[size:], body[:size]


def with_base_model(experiment: Experiment, root: Path, sent: memoryview | None) -> Experiment:
    """The experiment with the base model that was sent, or else the one that is kept in `root`.

    Raises BaseAbsent if it is in neither place, ConfigError if it is another model.
    """
    path = root / f"base-{experiment.config.model.sha256}.safetensors"
    kept = path.exists()
    if sent is None and not kept:
        raise BaseAbsent(f"the base model is not in {root}; the server is asked to send it again.")
    data = named(path).read_bytes() if kept else bytes(sent or b"")
    complete = experiment.starting_from(unpacked(data))
    if not kept:
        write_aside(path, data)
    return complete
