"""Check whether two runs are bit-identical; else name the first round and tensor in which they
differ. With one run: run its configuration again beside it, in one process, and compare. Says how
many bytes the operating system counted, and how many are recorded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.cli import values
from fednet.errors import StateError

if TYPE_CHECKING:
    from fednet.report.read import Run


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=values.path, metavar="RUN", help="a run's directory, OUT/NAME")
    parser.add_argument(
        "b",
        type=values.path,
        metavar="RUN",
        nargs="?",
        help="the run to compare with; without it, a new run of the first one's configuration, "
        "OUT/NAME-again, in one process",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing; exit status 0: identical, 1: different"
    )


def run(args: argparse.Namespace) -> int:
    from fednet.report import open_run, verify

    a = open_run(args.a)
    b = _again(a, args.quiet) if args.b is None else open_run(args.b)
    verdict = verify.compare(a, b)
    if not args.quiet:
        print(verdict.text)
        for run, name in zip((a, b), verify.names(a, b), strict=True):
            if line := verify.kernel_counts(run, name):
                print(line)
    return 0 if verdict.same else 1


def _again(a: Run, quiet: bool) -> Run:
    """Runs the configuration of `a` in this process, in a directory beside it."""
    from fednet.cli.api import run
    from fednet.experiment.rundir import runs_of

    if not a.finished:
        raise StateError(f"{a.dir} is not finished; continue it with --resume, then verify it.")
    directory = Path(a.dir).resolve()
    name = f"{directory.name}-again"
    unfinished = [p for p in runs_of(directory.parent, name) if not (p / "summary.json").exists()]
    return run(
        directory / "config.yaml",
        set={"name": name, "report": False},
        in_process=True,
        out=directory.parent,
        resume=bool(unfinished),
        quiet=quiet,
    )
