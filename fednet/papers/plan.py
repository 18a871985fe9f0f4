"""`fednet reproduce --plan`: what would run, how long it would take and how much would be sent.

Hours are SGD steps times one measured step: for each model and dataset of the job, one step of one
client is timed in this process. How many steps a round has follows from the division of the data.
Megabytes come from what the methods declare to send. Evaluation, the exchange itself and what a
method computes besides its steps are left out: a plan, not a promise.
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
from fednet.plain import part_of
from fednet.tools.costs import cost

STEPS = 3  # timed, after one that is not


@dataclass(frozen=True)
class Pace:
    """step: seconds of one SGD step; samples: by client; public: samples of the server's set."""

    step: float
    samples: tuple[int, ...]
    public: int


def plan(job: Reproduction, out: Path, device: str, jobs: int) -> str:
    """Returns the plan as text."""
    runs = job.runs(out)
    paces = measured(job, device)
    lines, hours, megabytes, left = [], 0.0, 0.0, 0
    wide = max(len(t.name) for _, _, t in runs)
    for cell, _, task in runs:
        state, rounds = task.state, int(cell.config["rounds"])
        pace = paces[kind(cell)]
        mb, part = traffic(cell, pace.public if isinstance(pace, Pace) else 0)
        took, time = 0.0, "?"  # of all its clients' steps, one after the other
        if isinstance(pace, Pace):
            cohort = configuration.from_mapping(cell.config, cell.name).cohort_size
            took = cohort * steps(cell, pace) * pace.step * rounds / 3600
            time = f"{took:.2f} h"
        lines.append(
            f"  {task.name.ljust(wide)}  {state:<7} {rounds:4d} rounds  {time:>8}  "
            f"{'above' if part else '     '} {mb:9.1f} MB"
        )
        if state not in ("done", "failed"):
            hours += took
            megabytes += mb
            left += 1
    unknown = any(isinstance(p, str) for p in paces.values())
    known = ", without those marked ?" if unknown else ""
    text = [
        f"{len(runs)} runs in {job.folder(out)}, {left} left to do; scale {job.scale}",
        *lines,
        f"left: {hours:.2f} hours of one process, {hours / min(jobs, max(1, left)):.2f} hours "
        f"with --jobs {jobs} on as many free cores{known}, {megabytes:.0f} MB; SGD steps times one "
        f"measured step, without evaluation:",
    ]
    for key, found in paces.items():
        about = json.loads(key)
        if isinstance(found, str):
            pace = f"could not be measured: {found}"
        else:
            pace = f"{1e3 * found.step:.1f} ms for one step"
        text.append(f"  {about['model']['name']}, {about['dataset']}: {pace}")
    return "\n".join(text)


def steps(cell: Cell, pace: Pace) -> float:
    """SGD steps of a client in a round, in the mean over clients. FedRDS trains on its part of the
    public set too.
    """
    train, method = cell.config["train"], cell.config["algorithm"]
    if train.get("steps"):
        return float(train["steps"])
    shared = 0
    if method["name"] == "fedrds":
        shared = part_of(float(method.get("alpha", 0.5)), pace.public)
    batches = [math.ceil((n + shared) / int(train["batch_size"])) for n in pace.samples]
    return int(train["epochs"]) * sum(batches) / len(batches)


def kind(cell: Cell) -> str:
    """What decides how long a step takes and who has how many samples."""
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


def measured(job: Reproduction, device: str) -> dict[str, Pace | str]:
    """Returns the pace by `kind`; where the measurement failed, why."""
    first: dict[str, Cell] = {}
    for cell in job.cells:
        first.setdefault(kind(cell), cell)
    found = {}
    for key, cell in first.items():
        about = json.loads(key)
        complain(f"measuring a step of {about['model']['name']}, {about['dataset']}")
        found[key] = paced(cell, device)
    return found


def paced(cell: Cell, device: str) -> Pace | str:
    """One step of the client with the most samples, timed; what was wrong where there is no such
    run.
    """
    import torch

    from fednet.experiment import build
    from fednet.experiment.placement import place
    from fednet.training.hosts import ClientHost

    threads = torch.get_num_threads()
    try:
        config = configuration.from_mapping(cell.config, cell.name)
        torch.set_num_threads(config.train.threads)
        exp = build.build(config, None)
        here = place(device)[0]
        sizes = [len(part) for part in exp.divided.parts]
        client = sizes.index(max(sizes))
        splits = exp.divided.site(client, here)
        host = ClientHost(exp.setting, exp.scratch(here), client, 1, splits=splits)

        def timed(many: int) -> float:
            begin = time.perf_counter()
            host.train(exp.setting.initial, steps=many)
            return time.perf_counter() - begin

        timed(1)  # the first one of a process takes longer
        # What comes before the first step, such as shuffling all samples, is no part of one.
        before = timed(1)
        step = (timed(1 + STEPS) - before) / STEPS
        return Pace(max(0.0, step), tuple(sizes), len(exp.divided.public))
    except FednetError as wrong:
        return f"fednet reproduce: {wrong}"
    finally:
        torch.set_num_threads(threads)


def traffic(cell: Cell, public: int) -> tuple[float, bool]:
    """Returns (MB of the run, whether parts of it depend on the data and are left out). What a
    client is given once, when it first takes part, counts for as many clients as are expected to.
    """
    config = configuration.from_mapping(cell.config, cell.name)
    sent = cost(config, config.algorithm.name, public)
    n = config.training_clients
    reached = n * (1 - (1 - config.cohort_size / n) ** config.rounds)
    rounds = config.rounds * config.cohort_size * (sent["down"][0] + sent["up"][0])
    more = any(is_open for _, is_open in sent.values())
    return (rounds + reached * sent["once"][0]) / 1e6, more
