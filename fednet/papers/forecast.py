"""`fednet reproduce --plan`: what would run, how long it would take and what would cross, before
anything starts.

A round's time is that of its SGD steps, of what each epoch begins with (the client's samples are
gathered in a new order and augmented, all at once) and of judging the global model. They are
measured once for each model of the job, in this process: a few steps of one client and a few test
samples, and extrapolated from there; a whole round of the paper's length can take a quarter of an
hour. How many steps and epochs a round has follows from who holds what. Megabytes come from what
the methods declare to send. Left out are the exchange itself, judging every client, and that
methods train differently: a plan, not a promise.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet import config as configuration
from fednet import papers
from fednet.config.tree import compose
from fednet.errors import FednetError, complain
from fednet.papers.cell import Cell
from fednet.papers.job import Reproduction
from fednet.papers.search import SHARE, points
from fednet.plain import JsonDict, part_of
from fednet.sweep import marks
from fednet.sweep.grid import Values
from fednet.tools.costs import cost

ENOUGH_S = 3.0  # of measuring steps, and of measuring evaluation; a few small ones always are
STEPS, SAMPLES = 20, 32  # at most so many steps; test samples at first
TRIES = 3
SMALL = 4  # samples of a step at first: whole batches of a deep network may take minutes


@dataclass(frozen=True)
class StepPace:
    """step: seconds of one step of each participant, one after the other; sample: of one sample of
    each of them made ready for an epoch; rest: of judging the global model. samples: by client;
    public: samples of the server's set.
    """

    rest: float
    step: float
    samples: tuple[int, ...]
    public: int
    sample: float = 0.0

    def seconds(self, cell: Cell) -> float:
        every = int(cell.config.get("evaluate", {}).get("every", 1))
        judging = self.rest / every if every else 0.0
        steps, gathered = work(cell, self.samples, self.public)
        return judging + self.step * steps + self.sample * gathered


def work(cell: Cell, samples: tuple[int, ...], public: int) -> tuple[float, float]:
    """(SGD steps of a client and round, samples made ready for them), in the mean over clients.
    FedRDS trains on its part of the public set too.
    """
    c = cell.config
    train, method = c["train"], c["algorithm"]
    shared = part_of(float(method.get("alpha", 0.5)), public) if method["name"] == "fedrds" else 0
    have = [n + shared for n in samples]
    cuts = [math.ceil(n / int(train["batch_size"])) for n in have]
    given = train.get("steps")
    epochs = [math.ceil(int(given) / k) if given else int(train["epochs"]) for k in cuts]
    steps = [int(given) if given else e * k for e, k in zip(epochs, cuts, strict=True)]
    gathered = sum(e * n for e, n in zip(epochs, have, strict=True))
    return sum(steps) / len(samples), gathered / len(samples)


def forecast(
    job: Reproduction,
    out: Path,
    device: str,
    jobs: int,
    sets: Sequence[str] = (),
    given: Mapping[str, Values] | None = None,
) -> str:
    """The plan as text. sets: of these only those that say where the data come from; the others are
    named as left out. given: values for a search instead of the paper's, by key.
    """
    runs = job.runs(out)
    paces = measured(job, device, [s for s in sets if s not in marks.changes(sets)])
    lines, total, megabytes, left = [], 0.0, 0.0, 0
    wide = max(len(t.name) for _, _, t in runs)
    for cell, _, task in runs:
        state = marks.state_now(task)
        a_round, rounds = a_round_of(cell, paces), int(cell.config["rounds"])
        pace = paces.get(kind(cell))
        mb, part = traffic(cell, pace.public if isinstance(pace, StepPace) else 0)
        time = "?" if a_round is None else f"{a_round * rounds / 3600:.2f} h"
        lines.append(
            f"  {task.name.ljust(wide)}  {state:<7} {rounds:4d} rounds  {time:>8}  "
            f"{'above' if part else '     '} {mb:9.1f} MB"
        )
        if state not in ("done", "failed"):
            total, megabytes, left = (
                total + (a_round or 0) * rounds / 3600,
                megabytes + mb,
                left + 1,
            )
    head = [f"{len(runs)} runs in {job.folder(out)}, {left} left to do; scale {job.scale}"]
    known = (
        "" if all(isinstance(p, StepPace) for p in paces.values()) else ", without those marked ?"
    )
    tail = [
        f"left: {total:.2f} hours of one process, {total / min(jobs, max(1, left)):.2f} hours "
        f"with --jobs {jobs} on as many free cores{known}, "
        f"{megabytes:.0f} MB; extrapolated from a few steps and test samples of each model:"
    ]
    for k, found in paces.items():
        about = json.loads(k)
        said = (
            f"could not be measured: {found}"
            if isinstance(found, str)
            else f"{1e3 * found.step:.1f} ms for one step of each participant, "
            f"{1e6 * found.sample:.1f} us for each sample of an epoch to be made ready, "
            f"{found.rest:.2f} s for judging the global model"
        )
        tail.append(f"  {about['model']['name']}, {about['data']['dataset']}: {said}")
    tail += _searches(job, paces, known, given or {})
    if job.changed:
        tail.append(f"--set {job.changed}: not in this plan, which is of the table's own settings")
    return "\n".join([*head, *lines, *tail])


def _searches(
    job: Reproduction, paces: Mapping[str, StepPace | str], known: str, given: Mapping[str, Values]
) -> list[str]:
    """What `--search` would add: at most one line. A grid of one point is taken without a run."""
    every = [(c, len(points(c, given))) for c in job.cells]
    tried = [(c, many) for c, many in every if many > 1]
    if not tried:
        return []
    seconds = [
        many * math.ceil(int(c.config["rounds"]) / SHARE) * (a_round_of(c, paces) or 0)
        for c, many in tried
    ]
    return [
        f"with --search, before it: {sum(many for _, many in tried)} points at a quarter of the "
        f"rounds, {sum(seconds) / 3600:.1f} hours of one process{known}"
    ]


def a_round_of(cell: Cell, paces: Mapping[str, StepPace | str]) -> float | None:
    pace = paces.get(kind(cell))
    return pace.seconds(cell) if isinstance(pace, StepPace) else None


def kind(cell: Cell) -> str:
    """What decides how long a step and the rest take, the method aside."""
    c = cell.config
    own = ("lr", "momentum", "weight_decay", "epochs", "steps")
    data = {k: c["data"].get(k) for k in ("dataset", "public", "validation")}
    return json.dumps(
        {
            "model": c["model"],
            "data": data,
            "train": {k: v for k, v in c["train"].items() if k not in own},
            "clients": c["clients"],
            "each": [c.get("participation"), c.get("clients_per_round")],
        },
        sort_keys=True,
    )


def measured(job: Reproduction, device: str, sets: Sequence[str] = ()) -> dict[str, StepPace | str]:
    """The pace by `kind`; where the measurement failed, what it said."""
    first: dict[str, Cell] = {}
    for cell in job.cells:
        first.setdefault(kind(cell), cell)
    for k in first:
        about = json.loads(k)
        complain(f"measuring a few steps of {about['model']['name']}, {about['data']['dataset']}")
    return {k: paced(cell, device, sets) for k, cell in first.items()}


def paced(cell: Cell, device: str, sets: Sequence[str] = ()) -> StepPace | str:
    """From one client's steps and some test samples; what was wrong where there is no such run."""
    import torch
    from msgspec.structs import replace

    from fednet.experiment import build
    from fednet.experiment.placement import place
    from fednet.training.evaluation import evaluate
    from fednet.training.hosts import SiteHost
    from fednet.training.samples import piece

    over: JsonDict = {}
    for text in sets:  # those of `WHERE`, such as data.root=DIR
        key, _, value = text.partition("=")
        _, _, leaf = key.strip().partition(".")
        over[leaf] = compose(value, f"--set {text}", one_place=True).plain()
    threads = torch.get_num_threads()
    try:
        config = configuration.from_mapping(papers.lay(cell.config, {"data": over}), cell.name)
        torch.set_num_threads(config.train.threads)
        exp = build.build(config, None)
        here = place(device)[0]
        scratch = exp.scratch(here)
        sizes = [len(part) for part in exp.divided.parts]
        client = sizes.index(max(sizes))
        train = exp.divided.site(client, here).train
        host = SiteHost(exp.setting, scratch, client, 1, train=train)
        settled = host.train_config

        def steps(size: int, n: int) -> None:
            """n steps of a training, in batches of `size` samples."""
            host.train_config = replace(settled, batch_size=size)
            host.train(exp.setting.initial, steps=n)

        data = exp.divided.data
        x, y = piece(data.test[0], 0, config.evaluate.batch_size), data.test[1]

        def judge(n: int) -> None:
            some = data.inputs(piece(x, 0, n), here), y[:n].to(here)
            evaluate(host.model(exp.setting.initial), some, exp.setting.task, n)

        most = min(config.evaluate.batch_size, len(y))
        one, before = _step(steps, settled.batch_size, sizes[client])
        look = _each(judge, min(SAMPLES, most), most) * len(y) if most else 0.0
        each, public = config.cohort_size, len(exp.divided.public)
        return StepPace(look, one * each, tuple(sizes), public, before / sizes[client] * each)
    except FednetError as wrong:
        return f"fednet reproduce: {wrong}"
    finally:
        torch.set_num_threads(threads)


def _step(what: Callable[[int, int], None], batch: int, samples: int) -> tuple[float, float]:
    """(seconds of one step, of what comes before the first one of an epoch). what(size, n): n
    steps, in batches of `size` samples. The second is all that more steps do not add to; where a
    step is slow, it is extrapolated from one of fewer samples.
    """
    batch = min(batch, samples)
    small = min(SMALL, batch)
    what(small, 1)  # the first of a process takes longer
    first, second = _least(what, small, 1), _least(what, small, 2)
    slow = max(0.0, second - first) * batch / small
    epoch = math.ceil(samples / batch)
    many = min(STEPS, epoch if epoch > 1 else STEPS, int(ENOUGH_S / max(slow, 1e-9)))
    if many < 2:
        return slow, max(0.0, first - slow * small / batch)
    first, last = _least(what, batch, 1), _least(what, batch, many)
    one = max(0.0, last - first) / (many - 1)
    return one, max(0.0, first - one)


def _least(what: Callable[[int, int], None], size: int, n: int) -> float:
    """The least seconds of three, as other processes come between; of fewer where they are slow."""
    spent: list[float] = []
    while len(spent) < TRIES and (not spent or sum(spent) + spent[-1] < ENOUGH_S):
        spent.append(_seconds(lambda: what(size, n)))
    return min(spent)


def _each(what: Callable[[int], None], first: int, most: int) -> float:
    """Seconds of one of `first`; where that was quick, of one of more, at most `most`."""
    spent = _seconds(lambda: what(first))
    many = min(most, int(first * ENOUGH_S / max(spent, 1e-9)))
    return spent / first if many <= first else _seconds(lambda: what(many)) / many


def _seconds(what: Callable[[], None]) -> float:
    """The seconds that a call would take with nothing else to do: on a CPU at most the processor's
    time, to which what other processes do adds little.
    """
    import torch

    begin, busy = time.perf_counter(), time.process_time()
    what()
    wall, busy = time.perf_counter() - begin, time.process_time() - busy
    return wall if torch.cuda.is_initialized() else min(wall, busy)


def traffic(cell: Cell, public: int) -> tuple[float, bool]:
    """(MB of the run, whether parts of it depend on the data and are left out). What a client is
    given once, when it first takes part, counts for as many clients as are expected to.
    """
    config = configuration.from_mapping(cell.config, cell.name)
    sent = cost(config, config.algorithm.name, public)
    reached = config.clients * (1 - (1 - config.cohort_size / config.clients) ** config.rounds)
    return (
        config.rounds * config.cohort_size * (sent.down + sent.up) + reached * sent.once
    ) / 1e6, any(sent.more)
