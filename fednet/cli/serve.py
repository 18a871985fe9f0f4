"""Run a server that works through a queue of runs, one after the other, at one address, at which
`fednet-client --stay` finds each of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli import values
from fednet.cli.common import add_flags, bind_arguments
from fednet.errors import ConfigError, speaker


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        nargs="?",
        type=values.path,
        default=Path("serve"),
        metavar="DIR",
        help="folder of the queue and the runs [serve]",
    )
    bind_arguments(parser)
    parser.add_argument(
        "--page",
        default="8420",
        metavar="ADDRESS",
        help="address of the web page, PORT or HOST:PORT [8420]",
    )
    add_flags(parser, "--device", "--data", "--quiet")


def run(args: argparse.Namespace) -> None:
    from fednet.cli.metrics import address
    from fednet.experiment import placement
    from fednet.experiment.rundir import writable
    from fednet.serve import page
    from fednet.serve.queue import Queue
    from fednet.serve.runner import Runner
    from fednet.server.endpoint import check_bind
    from fednet.transport.keys import Keyring
    from fednet.transport.zeromq.server import ZmqServer

    if args.bind.endswith((":0", ":*")):
        raise ConfigError(f"--bind {args.bind}: expected a fixed port, at which clients stay.")
    check_bind(args.bind, args.keys is not None, args.insecure, keyed="--keys DIR")
    if args.keys is not None:
        Keyring(args.keys)
    placement.check(args.device)
    where = address(args.page, "--page")
    words = ["--bind", args.bind, "--device", args.device, "--quiet"]
    words += ["--insecure"] if args.insecure else []
    words += ["--keys", str(args.keys), "--set", "security.curve=true"] if args.keys else []
    words += ["--data", str(args.data)] if args.data else []
    say = speaker(args.quiet)
    queue = Queue(args.dir)
    writable(args.dir, "DIR")
    server = page.serve(where, queue)
    try:
        ZmqServer(args.bind).close()  # one after the other, all runs would fail for want of it
        host, port = server.server_address[:2]
        say(f"{args.dir}: runs listen at {args.bind}; the page is http://{host!s}:{port}/")
        Runner(queue, words, say).run()
    finally:
        server.end()
