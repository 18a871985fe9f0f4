"""What a server's endpoint says of itself: to clients that join, and how often it is heard from."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.files import read_record
from fednet.protocol.tasks import Rules
from fednet.server import endpoint
from fednet.wire import messages as m
from fednet.wire.frames import encode


def beat(clients: int = 10, **lost: object) -> float:
    return endpoint.beat_seconds(from_mapping({"clients": clients, "round": {"lost": lost}}))


@pytest.mark.parametrize(
    ("clients", "lost", "seconds"),
    [
        (10, {}, 1.5),
        (10, {"closed": 1.0}, 0.5),
        (10, {"silent": 2.0, "closed": 9}, 0.5),
        (10, {"beat": 30, "closed": 60, "silent": None}, 30),  # as configured
        (10, {"closed": None, "silent": None}, 2.0),
        # Of thousands each is heard as seldom as the patience allows; silent: 10.
        (1500, {}, 1.5),
        (2000, {}, 2.0),
        (10_000, {}, 2.5),
        (50_000, {"silent": None}, 50.0),
        (100_000, {"silent": None}, 60.0),
        (5000, {"beat": 1.0}, 1.0),
    ],
)
def test_heartbeats_are_often_enough_for_the_patience_and_seldom_enough_for_thousands(
    clients, lost, seconds
):
    assert beat(clients, **lost) == seconds


def test_clients_are_waited_for_as_long_as_the_configuration_says():
    lost = {"silent": 90, "closed": 60, "beat": 30}
    config = from_mapping({"round": {"lost": lost, "join": 5}})
    rules = endpoint.patience(config, inline=False)
    assert (rules.closed, rules.silent, rules.join) == (60, 90, 5)
    # One that trains in the server's own thread sends no heartbeat meanwhile.
    assert endpoint.patience(config, inline=True).silent is None


def test_not_so_seldom_that_one_who_is_alive_counts_as_lost():
    with pytest.raises(ConfigError, match=r"round.lost.beat: 6 s: round.lost.silent of 10 s"):
        beat(beat=6, closed=60)


def test_clients_are_waited_for_as_configured_and_those_in_this_process_are_never_silent():
    lost = {"silent": 40, "closed": 60}
    config = from_mapping({"round": {"join": 50, "lost": lost}})
    for inline, silent in ((False, 40), (True, None)):
        assert endpoint.patience(config, inline) == Rules(closed=60, silent=silent, join=50)


def test_beyond_loopback_clients_are_waited_for_longer_unless_told_otherwise(tmp_path):
    def made(address: str, said, **round):
        bound = SimpleNamespace(keyring=None, address=address, listen=lambda: None)
        config = from_mapping({"round": round})
        end = endpoint.listening(config, tmp_path, bound, said)  # type: ignore[arg-type]
        end.announce(SimpleNamespace(), 1)  # type: ignore[arg-type]
        return config, end

    notes: list[str] = []
    config, end = made("tcp://0.0.0.0:1", notes.append)
    rules = endpoint.patience(config, inline=False, over_network=end.over_network)
    assert (rules.closed, rules.silent, end.beat_s) == (60, 300, 30)
    assert config.round.void_limit(end.over_network) == 100
    assert "count as lost 60 s after" in notes[0]
    assert "100 discarded rounds" in notes[0]
    told: list[str] = []
    lost = {"closed": 3, "silent": 10, "beat": 1.5}
    config, end = made("tcp://0.0.0.0:1", told.append, lost=lost, void_rounds=3)
    rules = endpoint.patience(config, inline=False, over_network=end.over_network)
    assert (rules.closed, rules.silent, end.beat_s) == (3, 10, 1.5)
    assert len(told) == 1  # how clients join
    for address, said in (("tcp://127.0.0.1:1", told.append), ("tcp://0.0.0.0:1", None)):
        config, end = made(address, said)  # None: `fednet run`, on one machine or a cluster
        rules = endpoint.patience(config, inline=False, over_network=end.over_network)
        assert (rules.closed, rules.silent, end.beat_s) == (3, 10, 1.5)
        assert config.round.void_limit(end.over_network) == 3


def test_clients_find_a_server_once_they_can_connect_to_it(tmp_path):
    file = tmp_path / "server.json"
    found: list[bool] = []
    bound = SimpleNamespace(
        keyring=None, address="tcp://127.0.0.1:7", listen=lambda: found.append(file.exists())
    )
    made = endpoint.listening(from_mapping({}), tmp_path, bound)  # type: ignore[arg-type]
    made.announce(SimpleNamespace(), 3)  # type: ignore[arg-type]
    made.listen(SimpleNamespace())  # type: ignore[arg-type]
    assert found == [False]
    record = read_record(file, "")
    assert (record["address"], record["incarnation"]) == ("tcp://127.0.0.1:7", 3)
    assert record["pid"] == os.getpid()


def test_it_says_how_clients_join(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(endpoint.socket, "gethostname", lambda: "here")
    lost = {"silent": None, "closed": 60, "beat": 30}
    config = from_mapping({"round": {"lost": lost, "void_rounds": 3}})
    for keyring, address in (
        (None, "tcp://10.0.0.0:1"),
        (SimpleNamespace(pair=SimpleNamespace(public="P")), "tcp://0.0.0.0:1"),
    ):
        bound = SimpleNamespace(keyring=keyring, address=address, listen=lambda: None)
        assert not endpoint.listening(config, tmp_path, bound).external_clients  # type: ignore[arg-type]
        made = endpoint.listening(config, tmp_path, bound, said.append)  # type: ignore[arg-type]
        assert made.external_clients
        assert made.beat_s == 30
        made.announce(SimpleNamespace(), 1)  # type: ignore[arg-type]
    ends = [line.partition("--server ")[2] for line in said]
    assert ends == ["tcp://10.0.0.0:1", "tcp://here:1 --keys FILE"]


def test_a_configuration_that_no_client_would_take_is_refused_before_any_waits():
    links = {str(k): {"up_mbps": 1.5} for k in range(3000)}
    with pytest.raises(
        ConfigError,
        match=r"the configuration that clients are sent has .* at most 258048 are allowed",
    ):
        endpoint.text_for_clients(from_mapping({"clients": 3000, "link": {"per_client": links}}))
    links = {"0-2999": {"up_mbps": 1.5}}
    sent = endpoint.text_for_clients(from_mapping({"clients": 3000, "link": {"per_client": links}}))
    ids = list(range(3000))
    whole = sent + "#" * (258048 - len(sent))
    assert encode(m.Welcome(run="r", session="s", name="n", config=whole, ids=ids))
