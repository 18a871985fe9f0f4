"""CURVE, as a user meets it: real processes, keys made by `fednet keys`."""

from __future__ import annotations

import json
import re
import signal
import stat
import time

import pytest

from fednet.cli.main import main
from fednet.cli.server import main as server_main
from fednet.files import write_record
from fednet.report import status
from fednet.transport.keys import allow, load
from tests.processes import Federation, Processes, in_process, lines, small, until

pytestmark = pytest.mark.long

CURVE = ("security.curve=true",)


def keys(*words: object) -> None:
    assert main(["keys", *map(str, words)]) == 0


@pytest.fixture
def own_keys(tmp_path):
    """The server's keys, and those of two clients made at their sites, who know nothing of the
    server.
    """
    keys("server", tmp_path / "server")
    for k in (0, 1):
        keys("client", tmp_path / f"{k}.key")
        keys("allow", tmp_path / "server", k, load(tmp_path / f"{k}.key").public)
    return tmp_path


def test_only_whoever_holds_the_key_of_an_id_speaks_for_it(own_keys):
    tmp = own_keys
    keys("client", tmp / "stranger.key")
    with Processes(tmp) as all:
        server = all.server("--keys", tmp / "server", sets=CURVE)
        thief = all.client(0, "--keys", tmp / "1.key")
        stranger = all.client(0, "--keys", tmp / "stranger.key")
        assert until(lambda: thief.poll(), "the thief ends", server) == 2
        assert "this key may not speak for client 0" in thief.said()
        until(
            lambda: "the server does not allow this key" in stranger.said(),
            "the stranger is told",
            server,
            stranger,
        )
        clients = [all.client(k, "--keys", tmp / f"{k}.key") for k in (0, 1)]
        assert server.wait(120) == 0, server.said()
        assert [c.wait(60) for c in clients] == [0, 0]
    told = [
        (e["what"], e["reason"])
        for e in lines(tmp / "run" / "events.jsonl")
        if e["type"] == "refused"
    ]
    assert ("join", "join: this key may not speak for client 0.") in told
    assert ("connection", f"key not allowed: {load(tmp / 'stranger.key').public}") in told
    assert [r["completed"] for r in lines(tmp / "run" / "rounds.jsonl")] == [[0, 1], [0, 1]]
    found = json.loads((tmp / "run" / "server.json").read_text())
    assert found["public_key"] == load(tmp / "server" / "server.key").public
    assert stat.S_IMODE((tmp / "run" / "server.json").stat().st_mode) == 0o600


def test_why_a_site_is_gone_is_on_the_console_in_the_records_the_log_and_the_status(own_keys):
    tmp = own_keys
    rounds = own_keys / "run" / "rounds.jsonl"
    public = load(tmp / "1.key").public
    with Processes(tmp) as all:
        words = ("--keys", tmp / "server")
        sets = (*CURVE, "rounds=100000", "round.lost={closed: 0.2, silent: 5}")
        server = all.server(*words, sets=sets)
        clients = [all.client(k, "--keys", tmp / f"{k}.key") for k in (0, 1)]
        both = lambda: any(r["completed"] == [0, 1] for r in lines(rounds))  # noqa: E731
        until(both, "a round with both", server, *clients)
        allow(tmp / "server", [1], public, until=time.time() - 1.0)

        def absent():
            found = status.read(tmp / "run")  # up to a second old: perhaps of before it came
            gone = any(site.why == "key expired" for site in found.sites)
            return found if gone and lines(rounds)[-1]["completed"] == [0] else None

        found = until(absent, "client 1 is absent", server, clients[0])
        shown = status.text(found, tmp / "run", time.time())
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 4, server.said()
    (site,) = [site for site in found.sites if not site.connected]
    # Noticed at its next message, or as its connection is ended.
    assert (site.clients, site.why) == ((1,), "key expired")
    assert site.since < site.seen < time.time()
    assert re.search(r"1 client not connected:\n(.*\n)*  1 .* s ago .*key expired", shown)
    events = lines(tmp / "run" / "events.jsonl")
    assert ([1], "key expired") in [(e["clients"], e["why"]) for e in events if e["type"] == "away"]
    reason = f"key expired: {public} (of client 1)"
    assert reason in [e["reason"] for e in events if e["type"] == "refused"]
    dropped = [r["dropped"].get("1") for r in lines(rounds)]
    assert "lost: key expired" in dropped
    log = (tmp / "run" / "log" / "server.log").read_text()
    for text in (server.said(), log):
        assert re.search(r"client\(s\) 1 .*: key expired", text)


def test_fednet_run_with_curve_makes_its_keys_and_computes_the_same(tmp_path):
    plain = in_process(tmp_path / "plain")
    with Federation(tmp_path, security={"curve": True}) as fed:
        fed.supervisor()
        fed.finish()
    assert fed.hashes() == plain.hashes()
    # Each frame carries 33 bytes more.
    assert fed.summary()["bytes"]["total"] > plain.summary()["bytes"]["total"]
    assert stat.S_IMODE((fed.path / "keys" / "server.key").stat().st_mode) == 0o600


# Before anything starts


def refused(capsys, tmp_path, *words: object) -> str:
    assert server_main([*small(), "--out", str(tmp_path), "--device", "cpu", *map(str, words)]) == 2
    assert not (tmp_path / "run").exists()
    return capsys.readouterr().err


def test_an_address_beyond_loopback_wants_keys_or_insecure(capsys, tmp_path):
    assert "use CURVE keys" in refused(capsys, tmp_path, "--bind", "tcp://*:0")


def test_keys_that_would_not_be_used_are_an_error(capsys, tmp_path):
    keys("server", tmp_path / "server")
    assert "add --set security.curve=true" in refused(
        capsys, tmp_path, "--keys", tmp_path / "server"
    )


def test_a_client_without_keys_is_told_that_the_server_has_some(capsys, tmp_path):
    from fednet.cli.client import main as client_main

    write_record(
        tmp_path / "server.json",
        {"address": "tcp://127.0.0.1:1", "host": "h", "public_key": "x" * 40},
    )
    assert client_main(["--id", "0", "--run", str(tmp_path), "--device", "cpu"]) == 2
    assert "give --keys FILE" in capsys.readouterr().err
