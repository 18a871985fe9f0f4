"""Make and manage CURVE keys. A client's pair is made at its site, and only the public key leaves
it; `lab` makes all keys at once.
"""

from __future__ import annotations

import argparse
import math
import time

from fednet import ids
from fednet.cli import values
from fednet.cli.common import Parser, table
from fednet.errors import ConfigError

MOST_IN_LAB = 100_000  # clients


def add(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(
        dest="does",
        required=True,
        metavar="server | client | allow | revoke | list | show | trust | lab",
        parser_class=Parser,
    )

    def verb(name: str, help: str, file: str = "") -> argparse.ArgumentParser:
        """file: what FILE is; without it the verb is for DIR."""
        made: argparse.ArgumentParser = does.add_parser(name, help=help)
        if file:
            made.add_argument("file", type=values.path, metavar="FILE", help=file)
        else:
            made.add_argument(
                "dir", type=values.path, metavar="DIR", help="folder of the server's keys"
            )
        return made

    verb("server", "make the server's key pair in DIR")
    client = verb(
        "client", "make a client's key pair in FILE and print its public key", "the file to write"
    )
    client.add_argument(
        "--server", metavar="PUBLIC", help="the server's public key, stored in FILE too"
    )
    trust = verb(
        "trust", "at a site: write the server's public key into FILE", "the client's key file"
    )
    trust.add_argument("public", metavar="PUBLIC", help="the server's public key")
    allow = verb("allow", "allow the owner of the public key to run clients K")
    revoke = verb("revoke", "remove the keys of clients K")
    for one in (allow, revoke):
        one.add_argument(
            "ids", type=values.whole_numbers, metavar="K", help="client ids, such as 3 or 0-4"
        )
    allow.add_argument("public", metavar="PUBLIC", help="the client's public key")
    allow.add_argument(
        "--until",
        metavar="TIME",
        help="expiry, such as 2027-01-31 or 2027-01-31T18:00:00+05:00; UTC without a zone [never]",
    )
    allow.add_argument("--name", metavar="SITE", default="", help="the site's name, for people")
    revoke.add_argument("--key", metavar="PUBLIC", help="remove only this public key [all]")
    verb("list", "print which keys may run which clients, until when")
    show = verb(
        "show",
        "print the public key of a key file and its fingerprint",
        "a key file, or the folder of the server's keys",
    )
    show.add_argument(
        "--public", action="store_true", help="print the public key alone, for a script"
    )
    lab = verb(
        "lab",
        "make the keys of the server and of N clients at once, for experiments on your own "
        "machines",
    )
    lab.add_argument(
        "--clients", type=values.at_least_one, required=True, metavar="N", help="number of clients"
    )


def run(args: argparse.Namespace) -> None:
    from fednet.transport import keys

    try:
        match args.does:
            case "server":
                print(keys.make_server_keys(args.dir))
            case "client":
                print(keys.make_client_keys(args.file, args.server))
            case "trust":
                keys.trust(args.file, args.public)
            case "allow":
                until = math.inf
                if args.until is not None:
                    until = keys.time_of(args.until, "--until")
                if until <= time.time():
                    raise ConfigError(
                        f"--until {args.until}: this date is in the past; to block a key now, use "
                        f"`fednet keys revoke`."
                    )
                keys.allow(args.dir, args.ids, args.public, until, args.name)
            case "revoke":
                keys.revoke(args.dir, args.ids, args.key)
            case "list":
                rows = []
                for clients, public, (until, name) in keys.all_keys(args.dir):
                    date = "-" if until == math.inf else keys.date_text(until)
                    state = "expired" if until <= time.time() else "allowed"
                    who = ids.as_text(clients)
                    rows.append((who, name or "-", keys.fingerprint(public), date, state, public))
                table(
                    ("clients", "site", "fingerprint", "until (UTC)", "state", "public key"), rows
                )
            case "show":
                pair = keys.load(args.file / "server.key" if args.file.is_dir() else args.file)
                if args.public:
                    print(pair.public)
                    return
                named = {"this key": pair.public, "its server": pair.server}
                found = [(what, keys.fingerprint(key), key) for what, key in named.items() if key]
                table(("", "fingerprint", "public key"), found)
            case "lab":
                if args.clients > MOST_IN_LAB:
                    raise ConfigError(
                        f"--clients {args.clients}: each gets a key file; expected at most "
                        f"{MOST_IN_LAB}."
                    )
                for path in keys.lab(args.dir, args.clients):
                    print(path)
    except BrokenPipeError:
        raise
    except OSError as closed:
        raise ConfigError(
            f"{closed.filename}: {closed.strerror}; expected "
            f"{'a file' if args.does in ('client', 'trust') else 'a folder'} that keys can be "
            f"written to."
        ) from closed
