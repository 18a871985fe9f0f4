"""List runs with their size and age, and delete old ones after asking."""

from __future__ import annotations

import argparse
import sys
import time

from fednet import places
from fednet.cli import values
from fednet.cli.common import table
from fednet.errors import ConfigError, complain


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        type=values.path,
        nargs="*",
        metavar="DIR",
        help="runs, or folders with runs, such as DIR/runs of fednet serve DIR [FEDNET_OUT, else "
        "runs]",
    )
    parser.add_argument(
        "--older",
        type=values.at_least_one,
        metavar="DAYS",
        help="only those that have not changed for so many days",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete those that are listed, after asking"
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def run(args: argparse.Namespace) -> int:
    from fednet.records import mb
    from fednet.report import runs

    if args.yes and not args.delete:
        raise ConfigError("--yes answers --delete, which is not given.")
    now = time.time()
    listed = [
        one
        for one in runs.find_runs(args.places or [places.runs()])
        if args.older is None or one.days(now) >= args.older
    ]
    rows = [
        (str(one.path), one.state, str(one.rounds), mb(one.bytes), f"{one.days(now):.1f} days")
        for one in listed
    ]
    whole = mb(sum(one.bytes for one in listed))
    table(("run", "state", "round", "size", "unchanged for"), rows, right=(2, 3, 4))
    print(f"{len(listed)} runs, {whole}")
    if not args.delete or not listed:
        return 0
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("--delete asks at a terminal; give --yes to delete without asking.")
        if input(f"Delete these {len(listed)} runs for good? [y/N] ").strip().lower() != "y":
            print("nothing was deleted")
            return 0
    status = 0
    for one in listed:
        try:
            one.delete()
            print(f"deleted {one.path}")
        except ConfigError as used:
            complain(f"fednet runs: kept {one.path}: {used}")
            status = 2
    return status
