"""`fednet-server`: run the server alone. Clients connect to it over the network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from fednet.cli.common import (
    RESUMED,
    add_flags,
    bind_arguments,
    common_arguments,
    config_of,
    execute,
)
from fednet.cli.run import hosting, run_arguments


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, RESUMED)
    run_arguments(parser)
    bind_arguments(parser)
    add_flags(parser, "--data")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return execute("fednet-server", sys.modules[__name__], words, argv is None)


def run(args: argparse.Namespace) -> int:
    from fednet.buffers import without_collection
    from fednet.data import ahead

    with without_collection():
        config = config_of(args, partial(ahead.begin, root=args.data))
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
