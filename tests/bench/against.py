"""Two versions of fednet in one sitting: this clone as it is, and a commit of it.

Each run is a process of its own in that version's tree, by that version's own benchmark. The
versions take turns: this one first, then the commit's first, so that a machine that slows down
favours neither. What counts are ratios, pair by pair.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fednet.errors import CannotGoOn, ConfigError
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import ENVIRONMENT, cell, compile_files, spread

ROOT = Path(__file__).parents[2]
# ("run", a workload, its workers or None for one process, what differs from the workload),
# ("pack", a workload, clients that one process trains together, {}) or
# ("replies", "", connections, {})
Work = tuple[str, str, int | None, dict[str, int]]
# Figures of a run, and what they are called. A version that does not measure one leaves it out.
FIGURES = {
    "cpu_s": "processor seconds of a round",
    "server_cpu_s": "of these the server's",
    "server_ms": "ms of the server's processor a reply",
    "seconds": "seconds of a round",
    "a_second": "replies a second",
    "first_model_s": "seconds to the first model",
    "pss_mb": "memory, MB",
    "server_peak_mb": "the server's memory, MB",
}
RUN = """
import dataclasses, json, sys
from pathlib import Path
kind, name, number, changes, folder = json.loads(sys.argv[1])
if kind == "replies":
    from tests.bench import replies
    found = replies.measure(number, Path(folder))
else:  # without torch: the pages of its libraries would be shared with the run's
    from tests.bench import run
    from tests.bench.workloads import WORKLOADS
    train = None
    if kind == "pack":
        changes = {"clients": number, "per_round": number}
        train = {"pack": number}
        number = None
    work = dataclasses.replace(WORKLOADS[name], **changes)
    found = run.fednet(work, Path(folder), number, train=train)
print(json.dumps(found))
"""


@contextlib.contextmanager
def tree(commit: str) -> Iterator[Path]:
    """A commit's files, in a folder of their own. Raises ConfigError for a name that is none."""
    found = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode:
        raise ConfigError(f"--against: {commit!r} is no commit of the clone {ROOT}.")
    with tempfile.TemporaryDirectory(prefix="fednet-against-") as folder:
        place = Path(folder) / "tree"
        made = _git("worktree", "add", "--detach", str(place), found.stdout.strip())
        if made.returncode:
            raise CannotGoOn(f"git worktree add: {made.stderr.strip()}")
        compile_files(place)
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measured(place: Path, work: Work) -> dict[str, float]:
    """The figures of one run of the version in the tree `place`."""
    with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
        job = json.dumps([*work, str(Path(folder) / "run")])
        done = subprocess.run(
            [sys.executable, "-c", RUN, job],
            cwd=place,
            env={**ENVIRONMENT, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise CannotGoOn(f"the benchmark of {place} failed: {last}")
    found: JsonDict = json.loads(done.stdout.strip().splitlines()[-1])
    # 0: its rounds were over before two looks at the processes
    return {figure: found[figure] for figure in FIGURES if found.get(figure)}


def compare(
    measure: Callable[[Path], dict[str, float]], other: Path, repeat: int, about: JsonMapping
) -> JsonDict:
    """Both versions in turn, `repeat` times: the spread of each figure in both, and of the ratio of
    this version to the other, pair by pair. about: what was measured, for the record.
    """
    pairs = list[dict[Path, dict[str, float]]]()
    for k in range(repeat):
        order = (ROOT, other) if k % 2 == 0 else (other, ROOT)
        pairs.append({place: measure(place) for place in order})
    figures = [f for f in FIGURES if all(f in run for pair in pairs for run in pair.values())]
    return {
        **about,
        "repeat": repeat,
        "here": {f: spread([pair[ROOT][f] for pair in pairs]) for f in figures},
        "there": {f: spread([pair[other][f] for pair in pairs]) for f in figures},
        "ratio": {f: spread([pair[ROOT][f] / pair[other][f] for pair in pairs]) for f in figures},
    }


def lines(record: JsonMapping) -> Sequence[str]:
    """Ratios first."""
    found = [f"{record['what']}: here against {record['commit']}, {record['repeat']} pairs"]
    for figure in record["ratio"]:
        here, there = (cell(record[side], figure) for side in ("here", "there"))
        found.append(
            f"     {FIGURES[figure] + ':':38} ratio {cell(record['ratio'], figure, 2)}; "
            f"here {here}, there {there}"
        )
    return found
