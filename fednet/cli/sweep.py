"""Run every combination of settings, paired by seed. Run it again to continue; several processes
with the same --out share the cells.
"""

from __future__ import annotations

import argparse

from fednet.cli.common import add_flags, common_arguments
from fednet.errors import ConfigError, speaker


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        nargs="+",
        metavar="KEY=A,B",
        help="values of one key, such as train.lr=0.1,0.01; may be repeated",
    )
    common_arguments(parser, "a YAML configuration, if --grid is given; else a sweep file")
    parser.add_argument(
        "--plan", action="store_true", help="print what would run and what is done, and stop"
    )
    add_flags(parser, "--seeds", "--jobs", "--workers", "--in-process", "--device")


def run(args: argparse.Namespace) -> None:
    from fednet.sweep import grid as sweep

    if args.config is None:
        raise ConfigError("expected a sweep file, or a configuration with --grid key.path=a,b.")
    grid = [text for group in args.grid for text in group]
    if grid or args.seeds:
        made = sweep.from_grid(args.config, grid, args.seeds or [0])
    else:
        made = sweep.load(args.config)
    tasks = sweep.runs(made, args.out, args.load, args.set)
    if args.plan:
        print(sweep.plan(tasks))
        return
    say = speaker(args.quiet)
    options = ["--workers", str(args.workers)] if args.workers else []
    options += ["--in-process"] if args.in_process else []
    options += ["--quiet"] if args.quiet else []
    elsewhere = sweep.run(tasks, args.jobs, args.device, options, say)
    if elsewhere:
        say(f"{len(elsewhere)} more cells are run by other processes")
    done = [task.run for task in tasks if task.state == "done"]
    for path in done:
        say(str(path))
    if done and tasks[0].config["report"]:
        from fednet.report import open_run, page

        say("writing one page over all cells")
        runs = [open_run(path) for path in done]
        say(str(page.write(runs, tasks[0].folder / "report.html")))
