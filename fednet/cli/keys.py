"""Make and manage CURVE keys. A client's pair is made at its site, and only the public key leaves
it; `lab` makes all keys at once.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fednet import ids
from fednet.cli import values
from fednet.cli.common import Parser, table
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
        metavar="server | client | allow | revoke | list | show | trust | lab",
        parser_class=KeyParser,
    )
    server = does.add_parser("server", help="make the server's key pair in DIR")
    server.add_argument("dir", type=Path, metavar="DIR", help="folder of the server's keys")
    client = does.add_parser(
        "client", help="make a client's key pair in FILE and print its public key"
    )
    client.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    client.add_argument(
        "--server",
        type=_public,
        metavar="PUBLIC",
        help="the server's public key, stored in FILE too",
    )
    trust = does.add_parser("trust", help="at a site: write the server's public key into FILE")
    trust.add_argument("file", type=Path, metavar="FILE", help="the client's key file")
    trust.add_argument("public", type=_public, metavar="PUBLIC", help="the server's public key")
    allow = does.add_parser("allow", help="allow the owner of the public key to run clients K")
    allow.add_argument("dir", type=Path, metavar="DIR", help="folder of the server's keys")
    allow.add_argument(
        "ids", type=values.whole_numbers, metavar="K", help="client ids, such as 3 or 0-4"
    )
    allow.add_argument("public", type=_public, metavar="PUBLIC", help="the client's public key")
    allow.add_argument("--until", metavar="TIME", help="expiry (UTC), such as 2027-01-31 [never]")
    revoke = does.add_parser("revoke", help="remove the keys of clients K")
    revoke.add_argument("dir", type=Path, metavar="DIR", help="folder of the server's keys")
    revoke.add_argument(
        "ids", type=values.whole_numbers, metavar="K", help="client ids, such as 3 or 0-4"
    )
    revoke.add_argument(
        "--key", type=_public, metavar="PUBLIC", help="remove only this public key [all]"
    )
    listed = does.add_parser("list", help="print which keys may run which clients, until when")
    listed.add_argument("dir", type=Path, metavar="DIR", help="folder of the server's keys")
    show = does.add_parser("show", help="print the public key of a key file and its fingerprint")
    show.add_argument(
        "file", type=Path, metavar="FILE", help="a key file, or the folder of the server's keys"
    )
    show.add_argument(
        "--public", action="store_true", help="print the public key alone, for a script"
    )
    lab = does.add_parser(
        "lab",
        help="make the keys of the server and of N clients at once, for experiments on"
        " your own machines",
    )
    lab.add_argument("dir", type=Path, metavar="DIR", help="folder of the server's keys")
    lab.add_argument(
        "--clients",
        type=values.count(100_000),
        required=True,
        metavar="N",
        help="number of clients",
    )


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
        return [keys.make_server_keys(args.dir)]
    if args.does == "client":
        return [keys.make_client_keys(args.file, args.server)]
    if args.does == "lab":
        return [str(path) for path in keys.lab(args.dir, args.clients)]
    if args.does == "show" and args.file.is_dir():
        args.file /= "server.key"
    if args.does == "list":
        _list(args.dir)
    elif args.does == "show" and args.public:
        return [keys.load(args.file).public]
    elif args.does == "show":
        _show(args.file)
    elif args.does == "trust":
        keys.trust(args.file, args.public)
    elif args.does == "revoke":
        keys.revoke(args.dir, args.ids, args.key)
    else:
        until = keys.time_of(args.until, "--until") if args.until else math.inf
        if until <= time.time():
            raise ConfigError(
                f"--until {args.until}: this date is in the past; to block a key now, use `fednet "
                f"keys revoke`."
            )
        keys.allow(args.dir, args.ids, args.public, until)
    return []


def _list(directory: Path) -> None:
    from fednet.transport import keys

    rows = []
    for clients, public, until in keys.listed(directory):
        date = "-" if until == math.inf else keys.date_text(until)
        state = "expired" if until <= time.time() else "allowed"
        rows.append((ids.as_text(clients), keys.fingerprint(public), date, state, public))
    table(("clients", "fingerprint", "until (UTC)", "state", "public key"), rows)


def _show(file: Path) -> None:
    from fednet.transport import keys

    pair = keys.load(file)
    named = [("this key", pair.public)]
    if pair.server is not None:
        named.append(("its server", pair.server))
    rows = [(name, keys.fingerprint(key), key) for name, key in named]
    table(("", "fingerprint", "public key"), rows)
