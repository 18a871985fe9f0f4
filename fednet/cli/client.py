"""`fednet-client`: run one or several clients in one process. It gets the configuration from the
server.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fednet import loading
from fednet.cli import values
from fednet.cli.common import LOOPBACK, add_flags, execute, path_argument
from fednet.errors import ConfigError

STATUS_S = 10.0  # --status waits so long for the server, unless told otherwise


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--id",
        metavar="K",
        help="ids of the clients to run: 3, 0-24,40, or 3/4, the third quarter of all "
        "ids [the policy's]",
    )
    # the way to the server
    found = parser.add_mutually_exclusive_group()
    found.add_argument(
        "--server", metavar="ADDRESS", help=f"the server [FEDNET_SERVER, else {LOOPBACK}]"
    )
    found.add_argument(
        "--run",
        type=values.path,
        metavar="OUT/NAME",
        help="a run's directory on a shared file system, in which the server's address is found",
    )
    # what this site has
    add_flags(parser, "--device")
    path_argument(parser, "--data", "folder of this site's data")
    parser.add_argument(
        "--state",
        type=values.path,
        metavar="DIR",
        help="folder of the clients' states [client-state/RUN in FEDNET_OUT, else in runs]",
    )
    path_argument(parser, "--keys", "file with the client's CURVE keys", "FILE")
    # what the server may ask for
    parser.add_argument(
        "--allow",
        type=values.names,
        metavar="KINDS",
        help="kinds of data that may leave this site, such as "
        "state,statistics,accuracy; a run that sends others is refused [all]",
    )
    parser.add_argument(
        "--policy",
        type=values.path,
        metavar="FILE.yaml",
        help="this site's policy: what the server may ask for; replaces the flags",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="allow the server's configuration to download datasets (data.download)",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="allow the faults that the server's configuration plans",
    )
    parser.add_argument(
        "--give-up",
        type=values.seconds,
        metavar="TIME",
        help="exit with status 3 if no server accepts this client for this time [never]",
    )
    parser.add_argument(
        "--stay", action="store_true", help="after a run, wait for the next one at the same address"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print what would leave this site per round, what is read and stored, and exit",
    )
    parser.add_argument(
        "--status",
        action="store_true",
        help="print what the server knows of these clients, and exit; beside a running client too",
    )
    add_flags(parser, "--load", "--quiet")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return execute("fednet-client", sys.modules[__name__], words, argv is None)


def run(args: argparse.Namespace) -> int:
    from fednet.client import join
    from fednet.client.policy import make_policy, read_file

    if args.id is None:
        own = read_file(args.policy).ids if args.policy is not None else None
        if own is None:
            raise ConfigError("--id is missing: say which clients, such as --id 3 or --id 0-24,40.")
        args.id = str(own)
    if args.stay and args.run is not None:
        raise ConfigError("--stay waits at an address for the next run: give --server, not --run.")
    if args.state is not None and args.state.exists() and not args.state.is_dir():
        raise ConfigError(f"--state {args.state}: is a file; expected a folder for the states.")
    if args.run is not None and args.run.exists() and not args.run.is_dir():
        raise ConfigError(f"--run {args.run}: is no folder; expected the directory of a run.")
    loading.load_parts(args.load)  # the policy may name their kinds of payload and their options
    policy = make_policy(
        args.policy, args.data, args.allow, download=args.download, faults=args.faults
    )
    server = args.server
    if server is None and args.run is None:
        server = os.environ.get("FEDNET_SERVER") or LOOPBACK
    serve = functools.partial(
        join.main,
        args.id,
        policy,
        server=server,
        run=args.run,
        device=args.device,
        state=args.state,
        keys=args.keys,
        load=[Path(file) for file in args.load],
        explain=args.explain,
        status=args.status,
        quiet=args.quiet or args.status,
        give_up_s=STATUS_S if args.status and args.give_up is None else args.give_up,
    )
    status = 0
    while status == 0:
        status = serve()
        if not args.stay or args.explain or args.status:
            break
    return max(0, status)


if __name__ == "__main__":
    sys.exit(main())
