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
from fednet.server.process import host_rounds
from fednet.server.watch import Hosting
from tests.processes import settings

CLIENTS = 20
FIRST, LAST = 4, 11  # rounds that are profiled
MOST = 0.8  # calls a reply: at either end of the profile, a round's tasks may be half done
FEDERATION = settings(
    rounds=12,
    clients=CLIENTS,
    train={"batch_size": 8},
    data={"samples": 8 * CLIENTS, "shape": [16], "classes": 4},
    evaluate={"clients": "none"},
)
PACKAGE = str(Path(fednet.__file__).parent) + "/"


class Calls:
    """Counts, while `counting` is set, how often each thread enters each function of fednet.

    Only threads that start after `install` are counted, and the one that called it.
    """

    def __init__(self) -> None:
        self.counting = False
        self._threads: list[Counter[CodeType]] = []
        self._own = threading.local()

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def after_round(self, record: Round) -> None:
        self.counting = FIRST - 1 <= record.round < LAST

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.counting or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        counts = getattr(self._own, "counts", None)
        if counts is None:
            counts = self._own.counts = Counter()
            self._threads.append(counts)
        counts[code] += 1

    def per_reply(self) -> dict[CodeType, float]:
        """Return the calls per reply of each function on the way of a reply."""
        replies = CLIENTS * (LAST - FIRST + 1)
        total = sum(self._threads, Counter[CodeType]())
        return {code: times / replies for code, times in total.items() if times >= MOST * replies}

    def threads(self) -> int:
        """Return how many threads enter a function on the way of a reply."""
        way = self.per_reply()
        return sum(any(code in way for code in counts) for counts in self._threads)


def count(directory: Path, tcp: bool) -> Calls:
    """Run the federation in `directory` and return what was counted."""
    config = configuration.from_mapping(FEDERATION)
    calls = Calls()
    how = Hosting(Silent(), device="cpu", callback=calls.after_round)
    directory.mkdir(parents=True)
    calls.install()
    try:
        if tcp:
            _run_over_tcp(config, directory, how)
        else:
            run_in_process(config, directory, how)
    finally:
        calls.remove()
    return calls


def _run_over_tcp(config: configuration.Config, directory: Path, how: Hosting) -> None:
    def serve() -> None:
        transport = listen(config, "tcp://127.0.0.1:*", None, False)
        host_rounds(config, directory, listening(config, directory, transport), how)

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
        calls = count(Path(folder) / "run", options.tcp)
    way = calls.per_reply()
    files = {code: code.co_filename.removeprefix(PACKAGE) for code in way}
    print(
        f"{len(way)} functions in {len(set(files.values()))} files, "
        f"{sum(way.values()):.0f} calls, on {calls.threads()} threads"
    )
    for package in sorted({file.split("/")[0] for file in files.values()}):
        own = [code for code in way if files[code].split("/")[0] == package]
        times = sum(round(way[code]) for code in own)
        print(f"{package:<16} {len(own):4d} functions {times:5d} calls")
    for code in sorted(way, key=lambda code: (files[code], code.co_firstlineno)):
        if options.list and files[code].startswith(options.list):
            where = f"{files[code]}:{code.co_firstlineno}"
            print(f"{where:<40} {code.co_name:<32} {way[code]:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
