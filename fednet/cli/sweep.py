"""Run every combination of settings, paired by seed. Run it again to continue; several processes
with the same --out share the cells.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import config as configuration
from fednet.cli import values
from fednet.cli.common import common_arguments, device_argument
from fednet.errors import ConfigError, speaker

if TYPE_CHECKING:
    from fednet.sweep.grid import Sweep
    from fednet.sweep.running import Outcome


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        nargs="+",
        metavar="KEY=A,B",
        help="values of one key, such as train.lr=0.1,0.01; may be repeated",
    )
    shared_arguments(parser, "a YAML configuration, if --grid is given; else a sweep file")


def shared_arguments(parser: argparse.ArgumentParser, config: str) -> None:
    """Adds the arguments of every verb that runs cells. config: what CONFIG is."""
    common_arguments(parser, config)
    parser.add_argument(
        "--seeds",
        type=values.seeds,
        metavar="0,1,2",
        help="seeds of each cell, such as 0,1,2 or 0-4 [0]",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would run and what is done, and stop"
    )
    parser.add_argument(
        "--cell",
        type=cell,
        metavar="I/N",
        help="run only the I-th of N parts of the cells, I from 1",
    )
    parser.add_argument(
        "--workers", type=values.at_least_one, metavar="W", help="worker processes per run"
    )
    parser.add_argument(
        "--jobs",
        type=values.at_least_one,
        default=1,
        metavar="J",
        help="cells to run at a time [1]",
    )
    device_argument(parser)
    parser.add_argument(
        "--in-process", action="store_true", help="run each in one process, without sockets"
    )


def cell(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(
            f"expected I/N with I from 1 to N, such as 2/8, got {text!r}"
        )
    return text


def run(args: argparse.Namespace) -> int:
    from fednet.sweep import grid as sweep
    from fednet.sweep import running

    if args.config is None:
        raise ConfigError("expected a sweep file, or a configuration with --grid key.path=a,b.")
    grid = [text for group in args.grid for text in group]
    if (grid or args.seeds) and not _is_sweep(args.config):
        made = sweep.from_grid(args.config, grid, args.seeds or [0])
    elif grid or args.seeds:
        raise ConfigError(
            f"{args.config} is a sweep file, which says itself what varies; give --grid and "
            f"--seeds with a configuration."
        )
    else:
        made = sweep.load(args.config)
    if args.plan:
        print(running.plan(made, args.out, args.cell, args.load, args.set))
        return 0
    done, say = run_cells(made, args), speaker(args.quiet)
    for path in done.done:
        say(str(path))
    if done.done and configuration.load(made.base, args.set, args.load).report:
        from fednet.report import open_run, page

        say("writing one page over all cells")
        runs = [open_run(path) for path in done.done]
        say(str(page.write(runs, running.home(made, args.out) / "report.html")))
    return 0


def run_cells(made: Sweep, args: argparse.Namespace) -> Outcome:
    """Runs the cells that no other process runs, --jobs at a time."""
    from fednet.sweep import running

    options = ["--workers", str(args.workers)] if args.workers else []
    options += ["--in-process"] if args.in_process else []
    options += ["--quiet"] if args.quiet else []
    say = speaker(args.quiet)
    done = running.run(
        made,
        args.out,
        only=args.cell,
        jobs=args.jobs,
        device=args.device,
        load=args.load,
        sets=args.set,
        options=options,
        say=say,
    )
    if done.elsewhere:
        say(f"{len(done.elsewhere)} more cells are run by other processes")
    return done


def _is_sweep(path: str) -> bool:
    from fednet.config.reading import text_of
    from fednet.config.tree import compose

    top = compose(text_of(Path(path), "a sweep file or a configuration with --grid"), path).value
    return isinstance(top, dict) and "base" in top
