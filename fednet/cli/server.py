"""`fednet-server`: run the server alone. Clients connect to it over the network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fednet.cli.common import (
    RESUMED,
    add_flags,
    common_arguments,
    configured,
    execute,
    path_argument,
)
from fednet.cli.run import hosting, run_arguments


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, RESUMED)
    run_arguments(parser)
    parser.add_argument(
        "--bind",
        default=os.environ.get("FEDNET_SERVER") or "tcp://127.0.0.1:5555",
        metavar="ADDRESS",
        help="address to listen at; tcp://*:0 takes a free port [FEDNET_SERVER, else "
        "tcp://127.0.0.1:5555]",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address beyond loopback without CURVE keys",
    )
    path_argument(parser, "--keys", "folder of the server's keys")
    add_flags(parser, "--data")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return execute("fednet-server", sys.modules[__name__], words, argv is None)


def run(args: argparse.Namespace) -> int:
    from fednet.buffers import uncollected

    with uncollected():
        config = configured(args)
        from fednet.launch.start import serve
    from fednet.cli.api import report

    return serve(
        config,
        args.out,
        hosting(args, args.data),
        report,
        resume=args.resume,
        bind=args.bind,
        insecure=args.insecure,
        keys=args.keys,
    )


if __name__ == "__main__":
    sys.exit(main())
