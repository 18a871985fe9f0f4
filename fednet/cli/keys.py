"""CURVE keys: a client's is made at its site and only the public half travels; `lab` makes all at
once.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fednet.cli import values
from fednet.cli.common import Parser
from fednet.errors import ConfigError


class KeyParser(Parser):
    """A parser that takes a word of the form of a key for a key, also one that begins with `-`."""

    def parse_known_args(  # type: ignore[override]  # argparse has an overload for each namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # argparse takes no word that begins with a space for an option; `_public` removes it.
        from fednet.transport.keys import is_key

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([f" {w}" if is_key(w) else w for w in words], namespace)


def _public(text: str) -> str:
    return text.strip()


def add(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(
        dest="does",
        required=True,
        metavar="server | client | allow | revoke | switch | trust | lab",
        parser_class=KeyParser,
    )
    server = does.add_parser("server", help="make the server's pair in DIR")
    server.add_argument("dir", type=Path, metavar="DIR")
    server.add_argument(
        "--next", action="store_true", help="one that `switch` puts in its place; prints it too"
    )
    switch = does.add_parser("switch", help="the server's next pair takes the place of its pair")
    switch.add_argument("dir", type=Path, metavar="DIR")
    client = does.add_parser("client", help="make a client's pair in FILE; prints the public half")
    client.add_argument("file", type=Path, metavar="FILE")
    client.add_argument(
        "--server", type=_public, metavar="PUBLIC", help="the server's public key, kept beside it"
    )
    trust = does.add_parser("trust", help="at a site: the server may have the key PUBLIC by now")
    trust.add_argument("file", type=Path, metavar="FILE")
    trust.add_argument("public", type=_public, metavar="PUBLIC")
    allow = does.add_parser("allow", help="let the holder of PUBLIC speak for client K")
    allow.add_argument("dir", type=Path, metavar="DIR")
    allow.add_argument("ids", type=values.whole_numbers, metavar="K")
    allow.add_argument("public", type=_public, metavar="PUBLIC")
    allow.add_argument(
        "--until", metavar="TIME", help="only until then (UTC), such as 2027-01-31 [for ever]"
    )
    revoke = does.add_parser("revoke", help="let nobody speak for client K any more")
    revoke.add_argument("dir", type=Path, metavar="DIR")
    revoke.add_argument("ids", type=values.whole_numbers, metavar="K")
    revoke.add_argument(
        "--key", type=_public, metavar="PUBLIC", help="only this key of theirs [all]"
    )
    lab = does.add_parser("lab", help="all keys at once, for experiments in one hand")
    lab.add_argument("dir", type=Path, metavar="DIR")
    lab.add_argument("--clients", type=values.count(100_000), required=True, metavar="N")


def run(args: argparse.Namespace) -> int:
    try:
        said = _done(args)
    except OSError as closed:
        raise ConfigError(
            f"{closed.filename}: {closed.strerror}; expected "
            f"{'a file' if args.does in ('client', 'trust') else 'a folder'} that keys can be "
            f"written to."
        ) from closed
    for line in said:
        print(line)
    return 0


def _done(args: argparse.Namespace) -> list[str]:
    """Does what the command line asks for. Returns what is to be printed."""
    from fednet.transport import keys

    if args.does == "server":
        return [keys.make_server_keys(args.dir, args.next)]
    if args.does == "switch":
        return [keys.switch(args.dir)]
    if args.does == "client":
        return [keys.make_client_keys(args.file, args.server)]
    if args.does == "lab":
        return [str(path) for path in keys.lab(args.dir, args.clients)]
    if args.does == "trust":
        keys.trust(args.file, args.public)
    elif args.does == "revoke":
        keys.revoke(args.dir, args.ids, args.key)
    else:
        until = keys.time_of(args.until, "--until") if args.until else math.inf
        if until <= time.time():
            raise ConfigError(
                f"--until {args.until}: that is over; `fednet keys revoke` ends a key."
            )
        keys.allow(args.dir, args.ids, args.public, until)
    return []
