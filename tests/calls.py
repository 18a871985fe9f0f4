"""Count the functions of fednet that one small task and its reply enter.

    python -m tests.calls                 server and clients in one thread, payloads in process
    python -m tests.calls --tcp           server and client process as threads, over TCP
    python -m tests.calls --list client   name the functions of a package, by file

Runs FedAvg with 20 clients for 12 rounds on a small MLP and profiles rounds 4 to 11. A function
counts if it is entered for most replies, so what a round does once is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fednet
from fednet import config as configuration
from fednet.client import join
from fednet.client.policy import Policy
from fednet.launch.start import Silent, listen, listening, run_in_process
from fednet.records import Round
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions
from tests.processes import settings

CLIENTS = 20
# Rounds that are profiled.
FIRST = 4
LAST = 11
MOST = 0.8  # calls a reply: at either end of the profile, a round's tasks may be half done
FEDERATION = settings(
    rounds=12,
    clients=CLIENTS,
    train={"batch_size": 8},
    data={"samples": 8 * CLIENTS, "shape": [16], "classes": 4},
    evaluate={"clients": "none"},
)
PACKAGE = str(Path(fednet.__file__).parent) + "/"


def count(directory: Path, tcp: bool) -> tuple[dict[CodeType, float], int]:
    """Run the federation in `directory`. Return the calls per reply of each function on the way of
    a reply, and how many threads enter one.
    """
    counts = Counter[tuple[int, CodeType]]()  # by thread: each has keys of its own
    counting = False

    def after_round(record: Round) -> None:
        nonlocal counting
        counting = FIRST - 1 <= record.round < LAST

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if counting and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts[threading.get_ident(), frame.f_code] += 1

    config = configuration.from_mapping(FEDERATION)
    how = ServerOptions(Silent(), device="cpu", callback=after_round)
    directory.mkdir(parents=True)
    threading.setprofile(profile)  # of threads that start from now on
    sys.setprofile(profile)
    try:
        (_run_over_tcp if tcp else run_in_process)(config, directory, how)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    replies = CLIENTS * (LAST - FIRST + 1)
    total = Counter[CodeType]()
    for (_, code), times in counts.items():
        total[code] += times
    way = {code: times / replies for code, times in total.items() if times >= MOST * replies}
    return way, len({thread for thread, code in counts if code in way})


def _run_over_tcp(config: configuration.Config, directory: Path, how: ServerOptions) -> None:
    def serve() -> None:
        transport = listen(config, "tcp://127.0.0.1:*", None, False)
        run_server(config, directory, listening(config, directory, transport), how)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    while join.read_server(directory) is None:
        time.sleep(0.01)
    state = directory / "state"
    policy = Policy.of_run(None)
    join.main(f"0-{CLIENTS - 1}", policy, run=directory, state=state)
    server.join()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.calls", description=__doc__)
    parser.add_argument("--tcp", action="store_true", help="over TCP instead of in process")
    parser.add_argument("--list", metavar="PACKAGE", help="also name this package's functions")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        way, threads = count(Path(folder) / "run", options.tcp)
    files = {code: code.co_filename.removeprefix(PACKAGE) for code in way}
    print(
        f"{len(way)} functions in {len(set(files.values()))} files, "
        f"{sum(way.values()):.0f} calls, on {threads} threads"
    )
    for package in sorted({file.split("/")[0] for file in files.values()}):
        own = [code for code in way if files[code].split("/")[0] == package]
        times = sum(round(way[code]) for code in own)
        print(f"{package:<16} {len(own):4d} functions {times:5d} calls")
    for code in sorted(way, key=lambda code: (files[code], code.co_firstlineno)):
        if options.list is not None and files[code].startswith(options.list):
            where = f"{files[code]}:{code.co_firstlineno}"
            print(f"{where:<40} {code.co_name:<32} {way[code]:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
