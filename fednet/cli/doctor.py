"""Whether this machine is ready: versions, device, data, ports, keys, disk, clock, and the bits it
computes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fednet.cli.common import CONFIG, data_argument, device_argument, everywhere, proxied


def add(parser: argparse.ArgumentParser) -> None:
    everywhere(parser, CONFIG)
    parser.add_argument(
        "--server",
        default=os.environ.get("FEDNET_SERVER") or None,
        metavar="ADDRESS",
        help="also whether that server can be reached from here [FEDNET_SERVER]",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        default=os.environ.get("FEDNET_KEYS") or None,
        metavar="PATH",
        help="also whether these keys are in order [FEDNET_KEYS]",
    )
    proxied(parser)
    data_argument(parser)
    device_argument(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.tools import doctor

    return int(doctor.main(args))
