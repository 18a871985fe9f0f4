"""`fednet-client`: one process that hosts one or several clients; it needs no configuration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fednet import ids, loading
from fednet.cli import values
from fednet.cli.common import device_argument, path_argument, proxied, standalone
from fednet.descriptors import named
from fednet.errors import ConfigError

DEFAULT_SERVER = "tcp://127.0.0.1:5555"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--id",
        type=_ids,
        metavar="K",
        help="which clients: 3, 0-24,40, or 3/4 for the third of four shares of all [the policy's]",
    )
    _reaching(parser)
    _at_home(parser)
    _allowed(parser)
    parser.add_argument(
        "--give-up",
        type=values.seconds,
        metavar="TIME",
        help="end, with status 3, when no server has taken this client in for so long [never]",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="when a run is over, take part in the next one at that address",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say what would leave this site each round, what is read and stored, and exit",
    )
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.py",
        help="your own parts; may be repeated",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def _at_home(parser: argparse.ArgumentParser) -> None:
    """What this machine has for the clients."""
    device_argument(parser)
    path_argument(parser, "--data", "where this site's data lie")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="where the clients' states are kept [client-state/RUN in FEDNET_OUT, else in runs]",
    )
    parser.add_argument(
        "--state-lost",
        choices=["reset"],
        help="start anew a client whose state is missing, instead of refusing",
    )
    path_argument(parser, "--keys", "the client's CURVE keys", "FILE")


def _allowed(parser: argparse.ArgumentParser) -> None:
    """What a server may ask of them."""
    parser.add_argument(
        "--allow",
        type=values.kinds,
        metavar="KINDS",
        help="refuse to join a run that sends up anything else, such as state,statistics,accuracy",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE.yaml",
        help="what this site lets a server ask of it; it has the last word over anything it says",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="let the server's configuration have data sets fetched (data.download)",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="act out the faults that the server's configuration plans",
    )


def _reaching(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and how it is reached."""
    found = parser.add_mutually_exclusive_group()
    found.add_argument(
        "--server", metavar="ADDRESS", help=f"the server [FEDNET_SERVER, else {DEFAULT_SERVER}]"
    )
    found.add_argument(
        "--run",
        type=Path,
        metavar="OUT/NAME",
        help="a run directory on a shared file system: find its server there, and follow it",
    )
    proxied(parser)


def _ids(text: str) -> str:
    try:
        ids.parse(text)
    except ConfigError as wrong:
        raise argparse.ArgumentTypeError(
            str(wrong).removeprefix(f"--id {text}: ").rstrip(".")
        ) from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    return standalone("fednet-client", __doc__ or "", add, run, argv)


def run(args: argparse.Namespace) -> int:
    from fednet.client import join
    from fednet.client import policy as policies

    if args.id is None:
        own = policies.read(args.policy).ids if args.policy is not None else None
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
    policy = policies.policy(
        args.policy, args.data, args.allow, download=args.download, faults=args.faults
    )
    policy.check_asked(ids.parse(args.id))
    for place in policy.places:
        try:
            named(place, there=False)
        except OSError as wrong:
            raise ConfigError(f"--data {place}: {wrong.strerror}.") from None
    server = args.server or (
        None if args.run else os.environ.get("FEDNET_SERVER") or DEFAULT_SERVER
    )
    options = join.Options(
        args.id,
        policy,
        server=server,
        run=args.run,
        device=args.device,
        state=args.state,
        keys=args.keys,
        load=args.load,
        reset=args.state_lost is not None,
        explain=args.explain,
        quiet=args.quiet,
        give_up_s=args.give_up,
    )
    status = 0
    while status == 0:
        status = join.main(options)
        if not args.stay or args.explain:
            break
    return max(0, status)


if __name__ == "__main__":
    sys.exit(main())
