"""Submit runs to a folder that `fednet serve` works through, list them, and cancel them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.cli import values
from fednet.cli.common import CONFIG, Parser, common_arguments, configured, table
from fednet.cli.serve import place
from fednet.errors import ConfigError

if TYPE_CHECKING:
    from fednet.serve.queue import Queue


def add(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(
        dest="does", required=True, metavar="submit | list | cancel", parser_class=Parser
    )
    submit = does.add_parser(
        "submit", help="check a configuration and put its run at the end of the queue"
    )
    common_arguments(submit, CONFIG, out=False)
    submit.add_argument(
        "--resume",
        type=values.at_least_one,
        metavar="N",
        help="continue run N, which failed, from its checkpoint, instead of submitting a new run",
    )
    listed = does.add_parser("list", help="print the runs that were submitted, and their states")
    cancel = does.add_parser("cancel", help="stop run N, or remove it from the queue")
    cancel.add_argument(
        "number", type=values.at_least_one, metavar="N", help="its number in `fednet queue list`"
    )
    for verb in (submit, listed, cancel):
        verb.add_argument(
            "--at",
            type=Path,
            default=place(),
            metavar="DIR",
            help="the folder of `fednet serve DIR` [FEDNET_SERVE, else serve]",
        )


def run(args: argparse.Namespace) -> int:
    return {"submit": _submit, "list": _list, "cancel": _cancel}[args.does](args)


def _submit(args: argparse.Namespace) -> int:
    from fednet.serve.queue import Queue

    if args.resume is None:
        entry = Queue(args.at).submit(configured(args))
    elif args.config is not None or args.set or args.load:
        raise ConfigError(
            "--resume continues a run as it was submitted: leave out CONFIG, --set and --load."
        )
    else:
        entry = _queue(args.at).resume(args.resume)
    print(f"{entry.number}" if args.quiet else f"run {entry.number} ({entry.name}) submitted")
    return 0


def _list(args: argparse.Namespace) -> int:
    from fednet.serve.queue import OPEN
    from fednet.serve.queue import table as rows

    queue = _queue(args.at)
    entries = queue.entries()
    table(("run", "name", "state", "reason"), rows(entries))
    if any(entry.state in OPEN for entry in entries) and not queue.served:
        print(f"No server is running for {args.at}: `fednet serve {args.at}` continues the queue.")
    return 0


def _cancel(args: argparse.Namespace) -> int:
    entry = _queue(args.at).cancel(args.number)
    print(f"run {entry.number} ({entry.name}) cancelled")
    return 0


def _queue(folder: Path) -> Queue:
    """The queue of a folder. Raises ConfigError if nothing was submitted there and nobody serves
    it.
    """
    from fednet.serve.queue import Queue

    queue = Queue(folder)
    if not queue.exists:
        raise ConfigError(
            f"--at {folder}: nothing was submitted there, and no fednet serve runs there; expected "
            f"the folder of a fednet serve."
        )
    return queue
