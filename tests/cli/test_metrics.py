"""What `--metrics` serves, and that nothing of it stands in a run's way."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from urllib.request import Request, urlopen

import msgspec
import pytest

from fednet.cli import main
from fednet.cli.metrics import Metrics, address
from fednet.errors import ConfigError
from fednet.launch.start import run_command
from fednet.serve.http import MAX_CONNECTIONS
from fednet.server.watch import ServerOptions
from tests.cli.test_display import RECORD
from tests.processes import port as free
from tests.rooms import small

pytest.importorskip("prometheus_client")
OPEN = "application/openmetrics-text; version=1.0.0"


def served(port: int) -> dict[str, float]:
    """Every sample, by its name and labels."""
    asked = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPEN})
    with urlopen(asked, timeout=10) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        text = answer.read().decode()
    assert text.endswith("# EOF\n")
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows if "_created" not in name}


def test_rounds_clients_bytes_by_kind_losses_and_phases_are_served_while_it_runs():
    port = free()
    with Metrics(str(port), quiet=True) as metrics:
        metrics.round_started(3, 20, [0, 1, 2])
        metrics.progress({"waiting": [{}, {}]})
        assert metrics.waiting == {"waiting": [{}, {}]}  # which its own line shows
        record = msgspec.structs.replace(
            RECORD,
            useful={"up": {"delta": 40, "statistics": 2}, "down": {"state": 60}},
            seconds_by_phase={"train": 1.0, "evaluate": 0.25},
        )
        metrics.round_done(record)
        metrics.round_done(record)
        found = served(port)
    assert found["fednet_round"] == 3
    assert found["fednet_rounds_planned"] == 20
    assert found["fednet_waiting"] == 2
    assert found['fednet_rounds_total{outcome="done"}'] == 2
    assert found["fednet_replies_total"] == 4
    assert found['fednet_clients{did="dropped"}'] == 1
    assert found['fednet_bytes_total{direction="up"}'] == 3_000_000
    assert found['fednet_useful_bytes_total{direction="up",kind="delta"}'] == 80
    assert found['fednet_phase_seconds_total{phase="evaluate"}'] == 0.5
    assert found["fednet_accuracy"] == 0.875
    assert found["fednet_train_loss"] == 0.5
    assert "fednet_client_accuracy" not in found  # nobody measured it


def test_each_site_is_served_with_when_it_was_heard_of_and_why_it_is_absent():
    port = free()
    here = {"clients": [(0, 2)], "host": "a", "connected": True, "seen": 50.0, "why": ""}
    here |= {"site": "uke", "since": 40.0, "round": 7}
    gone = {"clients": [4], "host": "b", "connected": False, "seen": 20.0, "why": "key expired"}
    never = {"clients": [3], "host": "", "connected": False, "seen": None, "why": "not yet"}
    keys = [{"clients": [(0, 2)], "site": "uke", "until": 90.0}]
    with Metrics(str(port), quiet=True) as metrics:
        metrics.progress({"sites": [here, gone, never], "keys": keys, "refusals": {"join": 3}})
        metrics.progress({"sites": [here, gone, never], "keys": keys, "refusals": {"join": 5}})
        found = served(port)
        metrics.progress({"sites": [here]})
        later = served(port)
    assert found['fednet_key_expires_seconds{clients="0-2",site="uke"}'] == 90
    assert found['fednet_refusals_total{what="join"}'] == 5
    sites = {name: value for name, value in found.items() if "fednet_site" in name}
    assert sites == {
        'fednet_site_connected{clients="0-2",host="a",site="uke"}': 1,
        'fednet_site_connected{clients="4",host="b",site=""}': 0,
        'fednet_site_connected{clients="3",host="",site=""}': 0,
        'fednet_site_connected_since_seconds{clients="0-2",host="a",site="uke"}': 40,
        'fednet_site_round{clients="0-2",host="a",site="uke"}': 7,
        'fednet_site_last_seen_seconds{clients="0-2",host="a",site="uke"}': 50,
        'fednet_site_last_seen_seconds{clients="4",host="b",site=""}': 20,
        'fednet_site_absent{clients="4",host="b",site="",why="key expired"}': 1,
        'fednet_site_absent{clients="3",host="",site="",why="not yet"}': 1,
    }
    assert not any("fednet_site_absent{" in name for name in later)


def test_a_run_serves_its_numbers_until_it_ends(tmp_path):
    port = free()
    seen = []

    class Looker(Metrics):
        def round_done(self, record):
            super().round_done(record)
            seen.append(served(port)['fednet_rounds_total{outcome="done"}'])

    how = ServerOptions(Looker(str(port), quiet=True), device="cpu")
    assert run_command(small(), tmp_path, how, lambda *_: None, in_process=True) == 0
    assert seen == [1, 2]
    with pytest.raises(OSError, match="refused"):
        served(port)


def test_connections_that_ask_for_nothing_take_a_few_threads_and_leave_a_reader_its_place():
    port = free()
    before = threading.active_count()
    with Metrics(str(port), quiet=True), ExitStack() as stack:
        for number in range(20 * MAX_CONNECTIONS):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            if number % 2:
                idle.sendall(b"GET /metrics HTTP/1.0\r\nX-")  # and never the rest
        assert "fednet_round" in served(port)
        assert threading.active_count() - before <= MAX_CONNECTIONS + 1


def test_numbers_are_served_at_an_address_of_ipv6_too():
    with Metrics("[::1]:0", quiet=True) as metrics:
        port = metrics._pages.server_address[1]
        with urlopen(f"http://[::1]:{port}/metrics", timeout=10) as answer:
            assert b"fednet_round" in answer.read()


def test_an_address_is_loopback_unless_it_says_more():
    assert address("9464") == address(":9464") == ("127.0.0.1", 9464)
    assert address("0.0.0.0:1") == ("0.0.0.0", 1)
    assert address("[::1]:80") == ("::1", 80)
    for wrong in ("", "a:b", "1.2.3.4", "70000", "h:70000"):
        with pytest.raises(ConfigError, match="expected PORT or HOST:PORT"):
            address(wrong)


def test_a_port_that_is_taken_is_said_and_nothing_is_begun(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["run", "--in-process", "--out", str(tmp_path), "--metrics", port]
        assert main.main(words) == 2
    assert f"--metrics {port}: nothing can be served there" in capsys.readouterr().err
    assert not list(tmp_path.glob("*-digits"))
