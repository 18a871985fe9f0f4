"""Run a whole federation on this machine: a server process and worker processes over TCP on
loopback.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.cli import values
from fednet.cli.common import RESUMED, add_flags, common_arguments, config_of
from fednet.config import Config
from fednet.errors import StateError

if TYPE_CHECKING:
    from fednet.server.watch import ServerOptions


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, RESUMED)
    run_arguments(parser)
    add_flags(parser, "--workers", "--in-process")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the configuration, build everything, train on one batch, and stop "
        "before the run",
    )
    parser.add_argument("--on", choices=["ray"], help="start the workers on a Ray cluster")


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --resume, --until and --metrics."""
    add_flags(parser, "--device")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument(
        "--until",
        type=values.seconds,
        metavar="TIME",
        help="stop after this time, such as 3h50m, so that --resume can continue",
    )
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        help="serve metrics for Prometheus at PORT (loopback only) or HOST:PORT [off]",
    )


def run(args: argparse.Namespace) -> int:
    from fednet.buffers import without_collection
    from fednet.data import ahead

    with without_collection():
        config = config_of(args, partial(ahead.begin, root=None))
        from fednet.launch.start import run_command
    from fednet.cli.api import report

    if args.check:
        return check(config, args.quiet)
    data = Path(config.data.root) if config.data.root else None
    try:
        return run_command(
            config,
            args.out,
            hosting(args, data),
            report,
            resume=args.resume,
            workers=args.workers,
            in_process=args.in_process,
            on=args.on,
        )
    except StateError as damaged:
        if args.resume:
            damaged.exit_status = StateError.resuming
        raise


def hosting(args: argparse.Namespace, data: Path | None) -> ServerOptions:
    """How a server runs, as `run_arguments` describe it, with its display."""
    from fednet.cli.display import Display
    from fednet.server.watch import ServerOptions

    display = Display(args.quiet)
    if args.metrics is not None:
        from fednet.cli.metrics import Metrics

        display = Metrics(args.metrics, args.quiet)
    until = None if args.until is None else time.monotonic() + args.until
    return ServerOptions(display, args.command, args.device, data, until)


def check(config: Config, quiet: bool) -> int:
    """Builds everything that a run needs before its first round, and stops."""
    from fednet import world
    from fednet.experiment import build, privacy, selection
    from fednet.server.faults import Replay

    selection.cohort(config, 1)
    world.of(config), world.links(config, 0)
    exp = build.build(config, None)
    Replay.of(config, len(exp.algorithm.exchanges))
    privacy.check(exp)
    if quiet:
        return 0
    for remark in exp.remarks:
        print(remark)
    models = " and ".join(
        f"{own.config.model.name} "
        f"({sum(slot.numel for slot in own.layout.parameters.slots):,} parameters)"
        for own in exp.settings
    )
    tried = "" if exp.data is None else "; one batch went forward and backward"
    print(
        f"{config.name}: {config.algorithm.name} with {models} "
        f"on {config.data.dataset}, {config.clients} clients: it can start{tried}."
    )
    return 0
