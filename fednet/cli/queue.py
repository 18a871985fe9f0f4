"""Submit runs to a folder that `fednet serve` works through, list them, and cancel them."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli import values
from fednet.cli.common import CONFIG, Parser, common_arguments, config_of, table
from fednet.errors import ConfigError


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
            type=values.path,
            default=Path("serve"),
            metavar="DIR",
            help="the folder of `fednet serve DIR` [serve]",
        )


def run(args: argparse.Namespace) -> None:
    from fednet.serve.queue import OPEN, Queue

    queue = Queue(args.at)
    if args.does == "submit" and args.resume is None:
        entry = queue.submit(config_of(args))
    elif args.does == "submit" and (args.config is not None or args.set or args.load):
        raise ConfigError(
            "--resume continues a run as it was submitted: leave out CONFIG, --set and --load."
        )
    elif not queue.exists:
        raise ConfigError(
            f"--at {args.at}: nothing was submitted there, and no fednet serve runs there; "
            f"expected the folder of a fednet serve."
        )
    elif args.does == "submit":
        entry = queue.resume(args.resume)
    elif args.does == "cancel":
        entry = queue.cancel(args.number)
        print(f"run {entry.number} ({entry.name}) cancelled")
        return
    else:
        entries = queue.entries()
        rows = [(str(entry.number), entry.name, entry.state, entry.reason) for entry in entries]
        table(("run", "name", "state", "reason"), rows)
        if any(entry.state in OPEN for entry in entries) and not queue.has_server:
            print(
                f"No server is running for {args.at}: `fednet serve {args.at}` continues the queue."
            )
        return
    print(f"{entry.number}" if args.quiet else f"run {entry.number} ({entry.name}) submitted")
