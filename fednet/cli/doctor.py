"""Check this machine: versions, device, data, keys, disk, and its rounding."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fednet.cli.common import (
    CONFIG,
    common_arguments,
    data_argument,
    device_argument,
    proxy_argument,
)


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, CONFIG)
    parser.add_argument(
        "--server",
        default=os.environ.get("FEDNET_SERVER") or None,
        metavar="ADDRESS",
        help="also check that this server is reachable [FEDNET_SERVER]",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        default=os.environ.get("FEDNET_KEYS") or None,
        metavar="PATH",
        help="also check these keys [FEDNET_KEYS]",
    )
    proxy_argument(parser)
    data_argument(parser)
    device_argument(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.tools import doctor

    return int(doctor.main(args))
