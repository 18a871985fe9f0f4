"""Check this machine: versions, device, data, keys, disk, and its rounding."""

from __future__ import annotations

import argparse
import os

from fednet.cli.common import CONFIG, add_flags, common_arguments, path_argument


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, CONFIG)
    parser.add_argument(
        "--server",
        default=os.environ.get("FEDNET_SERVER") or None,
        metavar="ADDRESS",
        help="also check that this server is reachable [FEDNET_SERVER]",
    )
    path_argument(parser, "--keys", "also check these keys", "PATH")
    add_flags(parser, "--data", "--device")


def run(args: argparse.Namespace) -> int:
    from fednet.tools import doctor

    return int(doctor.main(args))
