"""A federation over real network stacks: a server and three client hosts, each a network namespace,
joined by a bridge.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fednet.cli.main import main
from tests.processes import Processes, lines, until

pytestmark = pytest.mark.long

CLIENTS = 3


class Network:
    """Namespaces fednetPID-sw (the bridge), -s (the server, 10.77.0.1) and -c0, ... (the clients,
    10.77.0.10, ...).
    """

    def __init__(self) -> None:
        self.name = f"fednet{os.getpid()}"

    def space(self, host: str) -> str:
        return f"{self.name}-{host}"

    def inside(self, host: str) -> tuple[str, ...]:
        """The words before a command that is to run on `host`."""
        return ("ip", "netns", "exec", self.space(host))

    def ip(self, host: str, words: str) -> None:
        _run("ip", "-n", self.space(host), *words.split())

    def join(self, host: str, address: str) -> None:
        _run("ip", "netns", "add", self.space(host))
        self.ip("sw", f"link add {host} type veth peer name eth0 netns {self.space(host)}")
        self.ip("sw", f"link set {host} master bridge up")
        self.ip(host, f"addr add {address}/24 dev eth0")
        self.ip(host, "link set eth0 up")
        self.ip(host, "link set lo up")

    def shape(self, host: str, rate: str) -> None:
        """What `host` sends leaves it no faster than that."""
        words = f"qdisc replace dev eth0 root tbf rate {rate} burst 256kbit latency 400ms"
        _run("tc", "-n", self.space(host), *words.split())

    def cut(self, host: str, off: bool) -> None:
        self.ip("sw", f"link set {host} {'down' if off else 'up'}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        try:
            _run("ip", "netns", "add", made.space("sw"))
            made.ip("sw", "link add bridge type bridge")
            made.ip("sw", "link set bridge up")
            made.join("s", "10.77.0.1")
            for k in range(CLIENTS):
                made.join(f"c{k}", f"10.77.0.{10 + k}")
            made.shape("c2", "4mbit")
        except (OSError, subprocess.CalledProcessError) as cannot:
            pytest.skip(
                f"no network namespaces, bridge or tbf here: "
                f"{(getattr(cannot, 'stderr', '') or str(cannot)).strip()}"
            )
        yield made
    finally:
        for host in ("s", *(f"c{k}" for k in range(CLIENTS)), "sw"):
            subprocess.run(
                ["ip", "netns", "del", made.space(host)], check=False, capture_output=True
            )


def test_a_host_that_is_cut_off_is_counted_out_and_takes_part_again_when_it_is_back(tmp_path):
    with network() as hosts, Processes(tmp_path) as all:
        assert main(["keys", "lab", str(tmp_path / "keys"), "--clients", str(CLIENTS)]) == 0
        server = all.server(
            "--bind",
            "tcp://10.77.0.1:0",
            "--keys",
            tmp_path / "keys",
            prefix=hosts.inside("s"),
            sets=(
                "clients=3",
                "rounds=1000000",
                "security.curve=true",
                "round.lost={closed: 0.5, silent: 3}",
            ),
        )
        clients = [
            all.client(
                k,
                "--keys",
                tmp_path / "keys" / "clients" / f"{k}.key",
                prefix=hosts.inside(f"c{k}"),
            )
            for k in range(CLIENTS)
        ]
        rounds = tmp_path / "run" / "rounds.jsonl"

        def last(*completed: int) -> bool:
            return [r["completed"] for r in lines(rounds)[-1:]] == [list(completed)]

        until(lambda: last(0, 1, 2), "a round of all three", server, *clients)
        hosts.cut("c1", off=True)
        until(lambda: last(0, 2), "a round without the host that is cut off", server, *clients)
        hosts.cut("c1", off=False)
        until(lambda: last(0, 1, 2), "it is back", server, *clients)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 4, server.said()
        assert json.loads((tmp_path / "run" / "server.json").read_text())["address"].startswith(
            "tcp://10.77.0.1:"
        )
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [1] in [e["clients"] for e in events if e["type"] == "away" and e["why"] == "silent"]
    assert [1] in [e["clients"] for e in events if e["type"] in ("back", "rejoined")]
