"""Clients that join a run: after its server was killed in a round, or while it goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest

import fednet
from fednet import config as configuration
from fednet.client.loop import read_server
from fednet.errors import ClientsJoin
from fednet.server import records, rounds
from fednet.wire import messages as m
from tests.chaos.mallory import Mallory
from tests.processes import Federation, crashes, in_process
from tests.rooms import site_data

LISTS = [list(range(k, k + 20)) for k in range(0, 120, 20)]
TESTS = [[2 * k, 2 * k + 1] for k in range(6)]


def test_clients_join_after_a_kill_in_a_round_whose_replies_are_on_disk(tmp_path):
    file = tmp_path / "lists.json"

    def write(clients: int) -> None:
        file.write_text(json.dumps({"train": LISTS[:clients], "test": TESTS[:clients]}))

    # 2 of 4 clients a round, then 3 of 6. The server dies in round 2, with both replies on disk.
    shape = {
        "participation": 0.5,
        "seed": 3,
        "algorithm": "scaffold",
        "data": {"partition": {"scheme": "file", "path": str(file)}},
        "faults": crashes((2, "aggregating")),
    }
    more = {"clients": 6, "rounds": 4}
    write(4)
    with Federation(tmp_path / "killed", rounds=2, **shape) as fed:
        for ids in ("0-1", "2-3"):
            fed.client(ids, "--data", file)
        fed.server()
        assert fed.status() == -signal.SIGKILL
        write(6)
        fed.client("4-5", "--data", file)
        fed.server(resume=True, **more)
        fed.finish()
    fed.check(killed=1)
    (added,) = fed.events("clients_added")
    assert (added["round"], added["clients"]) == (1, [4, 5])
    # A reply of round 2 whose client is not in that round any more was sent in vain.
    reasons = {r["client"]: r["reason"] for r in fed.lines("wire.jsonl") if r.get("reason")}
    selected = fed.rounds()[1]["selected"]
    (client,) = [c for c, reason in reasons.items() if reason.startswith("clients joined")]
    assert client not in selected
    # The same, where the run ended with round 1.
    write(4)
    whole = in_process(tmp_path / "whole", **{**shape, "faults": {}, "rounds": 1})
    write(6)
    mapping = {**whole.mapping, **more}
    fednet.run(mapping, in_process=True, out=tmp_path / "whole", quiet=True, resume=True)
    assert fed.hashes() == whole.hashes()


def die_before_it_grows() -> None:
    """In a server: it is killed when it has decided to grow."""
    ClientsJoin.__init__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def stop_as_it_grows() -> None:
    """In a server: it is asked to stop when it has decided to grow."""
    decided = ClientsJoin.__init__

    def asked(*given) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        decided(*given)

    ClientsJoin.__init__ = asked


def die_with_the_configuration_written() -> None:
    """In a server: it is killed as it grows, before a checkpoint has the new clients."""
    written = records.write_configuration

    def then_die(*given) -> None:
        written(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    records.write_configuration = then_die


@pytest.mark.parametrize(
    ("before", "faults", "own"),
    [
        (None, {}, {"checkpoint": {"every": 3}}),
        (None, {}, {"algorithm": "fedbuff", "link": {"clock": "virtual", "step_ms": 5}}),
        (stop_as_it_grows, {}, {}),
        (die_before_it_grows, {}, {}),
        (die_with_the_configuration_written, {}, {}),
        (None, crashes((1, "checkpointing")), {}),
        (None, crashes((2, "receiving")), {}),
    ],
    ids=["whole", "async", "stopped", "decided", "growing", "before", "after"],
)
def test_clients_join_while_the_run_goes_on(tmp_path, before, faults, own):
    root = tmp_path / "data"
    own_data = {k: v for k, v in site_data(root, *range(6)).items() if k != "root"}
    own = {"algorithm": "scaffold", "rounds": 4, "participation": 0.5, "seed": 3, **own}
    with Federation(tmp_path / "open", **own, faults=faults, round={"open": 6}) as fed:
        fed.mapping["data"] = own_data
        fed.client("0-1", "--data", root)
        fed.server(before=before)
        # The run waits for clients 2 and 3. Meanwhile 5 asks to join, and then 4, without which
        # there would be a gap.
        late = fed.client("5", "--data", root)
        fed.until(lambda: "once client(s) 4 ask to join too" in late.said())
        fed.client("4", "--data", root)
        fed.until(lambda: len(fed.events("asked_to_join")) == 2)
        fed.client("2-3", "--data", root)
        if before is stop_as_it_grows:
            assert fed.status() == 4
            fed.server(resume=True)
        fed.finish()
    fed.check()
    (round,) = {e["round"] for e in fed.events("clients_added")}
    assert {tuple(e["clients"]) for e in fed.events("clients_added")} == {(4, 5)}
    for event in fed.events("kernel"):
        assert (event["sent"], event["received"]) == (event["booked_down"], event["booked_up"])
    if "checkpoint" in own:  # nothing was sent in vain
        sent = [r for r in fed.lines("wire.jsonl") if r["type"] in ("task", "reply")]
        assert len(sent) == 2 * (2 * round + 3 * (4 - round))
        assert all(r["useful"] for r in sent)
    if own["algorithm"] == "scaffold":
        assert [len(r["completed"]) for r in fed.rounds()] == [2] * round + [3] * (4 - round)
    # The same bits as a run that was stopped after that round, and resumed with six clients.
    whole = Federation(tmp_path / "whole", **own)
    play = {"in_process": True, "out": tmp_path / "whole", "quiet": True}
    mapping = {**whole.mapping, "data": {**own_data, "root": str(root)}}
    fednet.run({**mapping, "rounds": round}, **play)
    fednet.run({**mapping, "clients": 6}, **play, resume=True)
    assert fed.hashes() == whole.hashes()


def test_who_asks_to_join_and_goes_is_no_client_of_the_run(tmp_path):
    root = tmp_path / "data"
    site_data(root, *range(3))
    with Federation(tmp_path, clients=2, rounds=6, round={"open": 5, "join": None}) as fed:
        fed.mapping["data"] = {"dataset": "site", "shape": [4], "classes": 2}
        fed.client("0", "--data", root)
        fed.server(before=wait_ten_seconds_for_clients_that_ask)
        fed.client("2", "--data", root)
        fed.until(lambda: fed.events("asked_to_join"))
        stranger = Mallory(read_server(fed.path)[0])
        stranger.say(m.Join(worker="stranger", ids=[3, 4]))
        stranger.listen(stranger.refusals)
        fed.client("1", "--data", root)
        stranger.listen(lambda: not stranger.open)  # the server starts again with five clients
        fed.finish()
    assert {tuple(e["clients"]) for e in fed.events("not_joined")} == {(3, 4)}
    assert {tuple(e["clients"]) for e in fed.events("clients_added")} == {(2,)}
    assert [r["selected"] for r in fed.rounds()] == [[0, 1], *[[0, 1, 2]] * 5]
    assert configuration.load(fed.path / "config.yaml", []).clients == 3


def wait_ten_seconds_for_clients_that_ask() -> None:
    """In a server whose `round.join` is null."""
    rounds.JOIN_S = 10.0


@pytest.mark.parametrize("open", [None, 4])
def test_a_client_that_cannot_join_is_told_why_and_the_run_goes_on(tmp_path, open):
    root = tmp_path / "data"
    site_data(root, *range(4))
    half = {"per_client": {"1/2": {"epochs": 2}}}  # client 0 of three, clients 0 and 1 of four
    with Federation(tmp_path, clients=3, train=half, round={"open": open}) as fed:
        fed.mapping["data"] = {"dataset": "site", "shape": [4], "classes": 2}
        fed.server()
        late = fed.client("3", "--data", root)
        why = "client id 3; this federation has ids 0 to 2."
        if open is not None:
            fed.until(lambda: fed.events("asked_to_join"))
            change = "train.per_client: it would be another for client 1."
            why = f"clients: 4, and the run has 3: {change}"
        fed.client("0-2", "--data", root)
        assert fed.status(late) == 2
        assert f"refused this client: join: {why}" in late.said()
        fed.all.remove(late)
        fed.finish()
    assert fed.completed() == [[0, 1, 2]] * 3
    assert not fed.events("clients_added")
