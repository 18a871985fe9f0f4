"""`fednet reproduce --plan`: what would run, and about how long it would take: SGD steps times one
measured step.

For each model and dataset of the job one step of one client is timed in this process. How many
steps a round has follows from the division of the data. Evaluation, what is sent, and what a method
computes besides its steps are left out.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from fednet import config as configuration
from fednet.errors import FednetError, complain
from fednet.papers.job import Reproduction
from fednet.papers.tables import Cell
from fednet.plain import align

STEPS = 3  # timed, after one that is not


@dataclass(frozen=True)
class Pace:
    """step: seconds of one SGD step; samples: by client."""

    step: float
    samples: tuple[int, ...]


def plan(job: Reproduction, out: Path, device: str, jobs: int) -> str:
    """Returns the plan as text."""
    runs = job.runs(out)
    paces: dict[str, Pace | str] = {}  # a text: why it could not be measured
    rows = []
    hours = 0.0
    for cell, _, task in runs:
        same = kind(cell)
        if same not in paces:
            paces[same] = measure_pace(cell, device)
        pace = paces[same]
        took = "?"
        if isinstance(pace, Pace):
            seconds = clients_steps(cell, pace) * pace.step
            took = f"{seconds / 3600:.2f} h"
            if task.state not in ("done", "failed"):
                hours += seconds / 3600
        rows.append((task.name, task.state, f"{cell.config['rounds']} rounds", took))
    text = [f"{len(runs)} runs in {job.folder(out)}, scale {job.scale}", *align(rows)]
    if any(isinstance(pace, Pace) for pace in paces.values()):
        text.append(
            f"left: {hours:.2f} hours of one process, {hours / jobs:.2f} hours with --jobs {jobs}, "
            f"without runs marked ?; SGD steps times one measured step:"
        )
    else:
        text.append("left: unknown, because no step could be measured:")
    for same, pace in paces.items():
        about = json.loads(same)
        found = pace if isinstance(pace, str) else f"{1e3 * pace.step:.1f} ms for one step"
        text.append(f"  {about['model']['name']}, {about['dataset']}: {found}")
    return "\n".join(text)


def clients_steps(cell: Cell, pace: Pace) -> float:
    """Returns the SGD steps of a run, if all clients are selected equally often."""
    config = configuration.from_mapping(cell.config, cell.name)
    train = config.train
    steps = [train.steps or train.epochs * math.ceil(n / train.batch_size) for n in pace.samples]
    return config.rounds * config.cohort_size * sum(steps) / len(steps)


def kind(cell: Cell) -> str:
    """Returns what decides how long a step takes and who has how many samples, as JSON."""
    c = cell.config
    return json.dumps(
        {
            "model": c["model"],
            "dataset": c["data"]["dataset"],
            "public": c["data"].get("public"),
            "batch_size": c["train"]["batch_size"],
            "clients": c["clients"],
        },
        sort_keys=True,
    )


def measure_pace(cell: Cell, device: str) -> Pace | str:
    """Times one step of the client with the most samples. Returns what is wrong where there is no
    such run, for example because its data are not there.
    """
    import torch

    from fednet.experiment import build
    from fednet.experiment.placement import place
    from fednet.training.hosts import ClientHost

    complain(f"measuring a step of {cell.name}")
    threads = torch.get_num_threads()
    try:
        config = configuration.from_mapping(cell.config, cell.name)
        torch.set_num_threads(config.train.threads)
        exp = build.build(config, None)
        here = place(device)[0]
        sizes = [len(part) for part in exp.known_federation.parts]
        client = sizes.index(max(sizes))
        splits = exp.known_federation.site(client, here)
        host = ClientHost(exp.setting, exp.scratch(here), client, 1, splits=splits)

        def timed(many: int) -> float:
            begin = time.perf_counter()
            host.train(exp.setting.initial, steps=many)
            return time.perf_counter() - begin

        timed(1)  # the first one of a process takes longer
        # What comes before the first step, such as shuffling all samples, is no part of one.
        before = timed(1)
        step = (timed(1 + STEPS) - before) / STEPS
        return Pace(max(0.0, step), tuple(sizes))
    except FednetError as wrong:
        return f"could not be measured: {wrong}"
    finally:
        torch.set_num_threads(threads)
