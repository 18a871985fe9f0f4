"""CURVE keys: a client's is made at its site and only the public half travels; `lab` makes all at
once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli import values


def add(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(
        dest="does",
        required=True,
        metavar="server | client | allow | revoke | lab",
        parser_class=type(parser),
    )
    server = does.add_parser("server", help="make the server's pair in DIR")
    server.add_argument("dir", type=Path, metavar="DIR")
    client = does.add_parser("client", help="make a client's pair in FILE; prints the public half")
    client.add_argument("file", type=Path, metavar="FILE")
    client.add_argument(
        "--server", metavar="PUBLIC", help="the server's public key, kept beside it"
    )
    allow = does.add_parser("allow", help="let the holder of PUBLIC speak for client K")
    allow.add_argument("dir", type=Path, metavar="DIR")
    allow.add_argument("ids", type=values.whole_numbers, metavar="K")
    allow.add_argument("public", metavar="PUBLIC")
    revoke = does.add_parser("revoke", help="let nobody speak for client K any more")
    revoke.add_argument("dir", type=Path, metavar="DIR")
    revoke.add_argument("ids", type=values.whole_numbers, metavar="K")
    lab = does.add_parser("lab", help="all keys at once, for experiments in one hand")
    lab.add_argument("dir", type=Path, metavar="DIR")
    lab.add_argument("--clients", type=values.at_least_one, required=True, metavar="N")


def run(args: argparse.Namespace) -> int:
    from fednet.transport import keys

    if args.does == "server":
        print(keys.make_server_keys(args.dir))
    elif args.does == "client":
        print(keys.make_client_keys(args.file, args.server))
    elif args.does == "allow":
        keys.allow(args.dir, args.ids, args.public)
    elif args.does == "revoke":
        keys.revoke(args.dir, args.ids)
    else:
        for path in keys.lab(args.dir, args.clients):
            print(path)
    return 0
