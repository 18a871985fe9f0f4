"""How a client finds its server: what it takes from server.json, and what it says while no server
answers and after each round.
"""

from __future__ import annotations

import re
import threading
import weakref

import pytest

from fednet import registry
from fednet.algorithms.fedavg import FedAvg
from fednet.client import join, preparing
from fednet.client import loop as loops
from fednet.client.loop import ClientLoop, read_server
from fednet.client.policy import Policy, make_policy
from fednet.client.round_lines import RoundLines
from fednet.errors import CannotGoOn, ConfigError, StateError
from fednet.files import write_record
from fednet.protocol.client import ClientProtocol
from fednet.records import mb
from fednet.transport import keys
from fednet.transport.inproc import Inproc
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body
from tests.chaos.mallory import Liar
from tests.chaos.test_hostile_server import site, told
from tests.processes import Federation


@pytest.mark.parametrize("text", ["", '{"address": "tcp://10.0.0.7:5555"}'])
def test_a_file_that_the_server_did_not_write_is_refused(tmp_path, text):
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(StateError, match=r"server\.json: not what was written there"):
        read_server(tmp_path)


def test_a_server_at_all_addresses_is_reached_at_its_host(tmp_path):
    record = {"address": "tcp://0.0.0.0:5555", "host": "lab", "public_key": "k"}
    write_record(tmp_path / "server.json", record)
    assert read_server(tmp_path) == ("tcp://lab:5555", "k")


@pytest.mark.parametrize("pinned", [False, True])
def test_the_key_in_a_clients_own_file_goes_before_the_one_in_server_json(
    tmp_path, monkeypatch, pinned
):
    """Whoever may write into the run's directory must not be able to pass for the server."""
    given = []

    class Connected(Exception):
        pass

    def connected(address, *, keys, on_refused):
        given.append(keys.server)
        raise Connected

    monkeypatch.setattr("fednet.transport.zeromq.client.ZmqClient", connected)
    known, found = (keys.make_server_keys(tmp_path / name) for name in ("known", "found"))
    keys.make_client_keys(tmp_path / "client.key", known if pinned else None)
    record = {"address": "tcp://127.0.0.1:5555", "host": "lab", "public_key": found}
    write_record(tmp_path / "server.json", record)
    with pytest.raises(Connected):
        join.main("0", Policy(), run=tmp_path, keys=tmp_path / "client.key")
    assert given == [known if pinned else found]


def test_a_join_says_nothing_that_the_sites_policy_hides(tmp_path):
    whole = m.Join(
        worker="w",
        ids=[3],
        host="ward-7",
        pid=4711,
        device="cuda:0",
        versions={"torch": "2.6"},
        files={"mine.py": "0" * 64},
    )
    assert preparing.told_at_join(whole) == (
        "at each connection: the host name ward-7, the process id, the device cuda:0, versions and "
        "processor (torch), names and digests of mine.py (--load), the client ids"
    )
    (tmp_path / "site.yaml").write_text("hide: [host, pid, device, versions]")
    left = join.without(whole, make_policy(tmp_path / "site.yaml", None, None).hide)
    assert left == m.Join(worker="w", ids=[3], files=whole.files)
    assert join.without(whole, make_policy(None, None, None).hide) == whole
    (tmp_path / "site.yaml").write_text("hide: [name]")
    with pytest.raises(ConfigError, match="hide"):
        make_policy(tmp_path / "site.yaml", None, None)


def test_a_client_without_a_server_says_why_if_that_is_known(monkeypatch):
    monkeypatch.setattr(loops, "UNANSWERED_S", 0.0)
    transport = Inproc().client()
    transport.trouble = "nothing listens there"
    client = ClientLoop(
        ClientProtocol(m.Join(worker="c", ids=[0])), transport, prepare=None, curve=False
    )
    lines: list[str] = []
    with pytest.raises(CannotGoOn, match=r"no server .*nothing listens there.*same --state"):
        client.run(lines.append, give_up_s=1e-3)
    client.close()
    assert ["nothing listens there" in line for line in lines] == [True]


@pytest.mark.parametrize("finished", [True, False])
def test_a_client_of_a_finished_run_waits_only_so_long_for_a_server_with_more_rounds(
    tmp_path, monkeypatch, finished
):
    for name in ("DONE_S", "FIND_S"):
        monkeypatch.setattr(loops, name, 0.0)
    if finished:
        (tmp_path / "summary.json").touch()
    transport = Inproc().client()
    client = ClientLoop(
        ClientProtocol(m.Join(worker="c")), transport, prepare=None, curve=False, run=tmp_path
    )
    if finished:
        assert client.run(give_up_s=20.0) == m.End(over=False, reason="asked to leave")
    else:
        with pytest.raises(CannotGoOn):
            client.run(give_up_s=1e-3)
    client.close()


@pytest.mark.parametrize("end", [SystemExit(0), KeyboardInterrupt()])
def test_a_part_of_ones_own_that_ends_the_process_as_it_is_made_is_an_error(
    tmp_path, monkeypatch, end
):
    """Not an end as if the run were over."""

    class Ends(FedAvg):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            if threading.current_thread().name.startswith("fednet-train"):
                raise end

    monkeypatch.setitem(registry.algorithm._parts, "ends", Ends)
    server = Liar(told(algorithm="ends"))
    with site(server, tmp_path) as found:
        server.listen(found["over"])
    assert isinstance(found["error"], CannotGoOn), found
    assert f"a part of your own raised {type(end).__name__}" in str(found["error"])


def test_a_process_says_each_round_in_a_line_and_nothing_with_quiet(tmp_path):
    """240 samples of four clients: 60 each. The line counts both answers, and the bytes of the
    ledger.
    """
    method = {"name": "scaffold"}
    with Federation(tmp_path, rounds=2, algorithm=method, model={"hidden": [640]}) as fed:
        talks = fed.client("0-1")
        quiet = fed.client("2-3", "--quiet")
        fed.server()
        fed.finish()
        assert quiet.said() == ""
        lines = [line for line in talks.said().splitlines() if "  round " in line]
    replies = [row for client in (0, 1) for row in fed.replies(client)]
    sent = mb(sum(sum(row["kinds"].values()) for row in replies))
    assert sent == "0.77 MB"
    times, texts = zip(*(line.split("  ", 1) for line in lines))
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time in times)
    assert [re.sub(r"in \d+\.\d s", "in T s", text) for text in texts] == [
        f"round 1: trained clients 0-1 on 120 samples in T s, sent {sent}",
        f"round 2: trained clients 0-1 on 120 samples in T s, sent {sent}",
        "round 2: evaluated clients 0-1 in T s, sent 0.00 MB",
    ]


def test_the_line_of_a_round_keeps_no_payload_of_its_replies():
    """A round of a large model may have many."""
    key = m.Key(1, 0, 0, 7, "train")
    body = Body([bytes(2_000_000)])
    left = weakref.ref(body)
    lines = RoundLines()
    said = []
    lines.say = said.append
    lines.samples = {7: 60}
    lines.began(key)
    lines.add_answers([(m.Reply(key=key, form=[], size=2_000_000), body)])
    del body
    assert left() is None
    lines.over(pause_s=3600.0)  # not yet: another reply of the round may follow
    assert said == []
    lines.over()
    assert "round 1: trained client 7 on 60 samples" in said[0]
    assert said[0].endswith("sent 2.00 MB")


def test_the_line_of_a_round_says_who_trained_and_else_who_answered():
    """Clients train in the second exchange."""
    lines = RoundLines()
    said = []
    lines.say = said.append
    lines.main_exchange = 1
    lines.samples = {7: 60, 8: 40}
    for round, phases in ((1, (0,)), (2, (0, 1))):
        for phase in phases:
            keys = [m.Key(round, phase, 0, client) for client in (7, 8)[phase:]]
            lines.began(keys[0])
            lines.add_answers([(m.Reply(key=key, form=[], size=0), NOTHING) for key in keys])
        lines.over()
    assert "round 1: answered for clients 7-8 in" in said[0]
    assert "round 2: trained client 8 on 40 samples in" in said[1]
