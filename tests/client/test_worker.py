"""What a site answers to the tasks of a server, and when it needs what its clients kept."""

from __future__ import annotations

import contextlib
import shutil
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch

from fednet import config as configuration
from fednet import registry
from fednet.algorithms.base import AlgorithmConfig, Payload, Weights
from fednet.algorithms.fedavg import FedAvg
from fednet.client.policy import Policy
from fednet.client.worker import Device
from fednet.errors import StateError, without_paths
from fednet.experiment import build
from fednet.wire import messages as m
from tests.chaos.mallory import Liar
from tests.chaos.test_hostile_server import (
    exp,  # noqa: F401  # a fixture
    site,
    task,
    told,
)
from tests.rooms import lines, run

ATTACK = {"malicious": {"clients": 1.0, "attack": "sign_flip", "strength": 2.0}}


@contextlib.contextmanager
def asked(exp, folder, config=None, policy=None):  # noqa: F811
    """A server whose client is ready, and has been sent its first task."""
    server = Liar(config or told())
    with site(server, folder, policy=policy):
        server.listen(lambda: server.said(m.Ready))
        server.say(*task(exp, m.Key(1, 0, 0, 0)))
        yield server


def answer(exp, folder, config=None, policy=None):  # noqa: F811
    """Returns what a site answers to its first task: a reply with its payload, or a failure."""
    with asked(exp, folder, config, policy) as server:
        server.listen(lambda: server.said(m.Reply) or server.said(m.Failed))
    return next(found for found in server.heard if isinstance(found[0], (m.Reply, m.Failed)))


def replaced(monkeypatch, update):
    """Puts update(honest, method, ...) in the place of FedAvg's client update."""
    honest = FedAvg.client_update

    def client_update(self, phase, client, down, host):
        return update(lambda: honest(self, phase, client, down, host), host)

    monkeypatch.setattr(FedAvg, "client_update", client_update)


def test_a_damaged_payload_is_refused_though_the_same_came_whole_before(tmp_path, exp):  # noqa: F811
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Reply))
        body = task(exp, m.Key(1, 0, 0, 0))[1]
        damaged = bytes([body[0] ^ 1]) + body[1:]
        server.say(task(exp, m.Key(2, 0, 0, 0))[0], damaged)
        server.listen(lambda: server.said(m.Failed))
    (failed,) = server.said(m.Failed)
    assert failed.key == m.Key(2, 0, 0, 0)
    assert failed.reason == "the payload was damaged on its way"
    assert failed.again


def test_a_form_that_is_not_the_methods_is_refused_though_the_same_bytes_came_before(tmp_path, exp):  # noqa: F811
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Reply))
        message, body = task(exp, m.Key(2, 0, 0, 0))
        form = [msgspec.structs.replace(field, kind="statistics") for field in message.form]
        server.say(msgspec.structs.replace(message, form=form), body)
        server.listen(lambda: server.said(m.Failed))
    (failed,) = server.said(m.Failed)
    assert failed.key == m.Key(2, 0, 0, 0)


def test_a_task_that_enrols_a_client_of_a_method_without_enrolments_is_refused(tmp_path, exp):  # noqa: F811
    message, body = task(exp, m.Key(1, 0, 0, 0))
    enrols = msgspec.structs.replace(message, enrol=1)
    server = Liar(told())
    with site(server, tmp_path):
        server.listen(lambda: server.said(m.Ready))
        server.say(enrols, body)
        server.listen(lambda: server.said(m.Failed))
    assert server.said(m.Failed)[0].reason == "the task enrols a client, which this method does not"


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_method_that_exits_fails_its_task_and_the_thread_goes_on(
    tmp_path,
    monkeypatch,
    exp,  # noqa: F811
    raised,
):
    left = [1]

    def update(honest, host):
        if left:
            left.pop()
            raise raised("enough")
        return honest()

    replaced(monkeypatch, update)
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Failed))
        assert server.said(m.Failed)[0].reason == f"{raised.__name__}: enough"
        server.say(*task(exp, m.Key(1, 0, 1, 0)))
        server.listen(lambda: server.said(m.Reply))


def many_reports(honest, host):
    host.report(**{f"n{k}": 0.5 for k in range(m.REPORTS + 1)})
    return honest()


def failing(honest, host):
    raise ValueError("/srv/patients/7.png is not\n~/what it was, but 3/4 of ..\\x86 is")


def diverging(honest, host):
    state, up = honest()
    up.x.vector[-1] = torch.nan
    return state, up


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (
            diverging,
            "x is not finite after training; a smaller train.lr, or train.clip_norm, may help",
        ),
        (many_reports, "fedavg reports 17 numbers of a client in a round; expected at most 16."),
        # No file of the site is named.
        (failing, "ValueError: (a path) is not (a path) it was, but 3/4 of (a path) is"),
    ],
)
def test_why_a_task_failed_is_said_in_one_line(tmp_path, exp, monkeypatch, update, reason):  # noqa: F811
    replaced(monkeypatch, update)
    failed, _ = answer(exp, tmp_path)
    assert failed.reason == reason
    assert without_paths("7 / 8, and/or http") == "7 / 8, and/or http"


def test_a_client_is_malicious_only_where_its_site_allows_planned_faults(tmp_path, exp):  # noqa: F811
    honest = answer(exp, tmp_path / "honest")
    careful = answer(exp, tmp_path / "careful", told(faults=ATTACK), Policy())
    allowed = answer(exp, tmp_path / "allowed", told(faults=ATTACK), Policy(faults=True))
    assert bytes(careful[1]) == bytes(honest[1])
    assert len(allowed[1]) == len(honest[1])
    assert bytes(allowed[1]) != bytes(honest[1])


class Quiet(FedAvg):
    """FedAvg that sends no statistics of its own, and reports a number of each client."""

    summed: ClassVar = {"x": "plain"}

    class Config(AlgorithmConfig):
        weighting: str = "uniform"

    class Up(Payload):
        x: Weights

    def client_update(self, phase, client, down, host):
        host.report(sigma=0.5)
        return client, self.Up(x=host.train(down.x).x)


@pytest.mark.parametrize(
    ("allow", "reported"),
    [(None, {"sigma": 0.5}), (("state", "statistics"), {"sigma": 0.5}), (("state",), {})],
)
def test_a_site_that_lets_no_statistics_out_reports_nothing(tmp_path, monkeypatch, allow, reported):
    monkeypatch.setitem(registry.algorithm._parts, "quiet", Quiet)
    config = told(algorithm="quiet", evaluate={"clients": "none"})
    quiet = build.build(configuration.from_text(config, "the test"))
    reply, _ = answer(quiet, tmp_path, config, Policy(allow=allow))
    assert reply.reported == reported


TOPK = {"state": ["topk(0.1)"]}
NORM = {"name": "mlp", "hidden": [8], "norm": "batch"}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"algorithm": {"name": "scaffold"}}, True),
        ({"wire": {"up": TOPK}}, True),
        ({"wire": {"down": TOPK}}, False),
        ({"wire": {"down": {"state": ["delta", "topk(0.1)"]}}}, True),
        ({"train": {"keep_optimizer": True, "momentum": 0.9}}, True),
        ({"model": NORM}, False),
        ({"model": {**NORM, "buffers": "local"}}, True),
    ],
    ids=[
        "nothing",
        "the method's",
        "left out",
        "the server's",
        "the last broadcast",
        "the optimizer's",
        "buffers",
        "own buffers",
    ],
)
def test_a_client_that_lost_what_it_kept_trains_unless_training_starts_from_it(
    tmp_path, changes, needed
):
    def lose(record):
        if record.round == 1:
            (folder,) = (tmp_path / "r" / "state").glob("*/client-1")
            shutil.rmtree(folder)

    # Every client keeps its local model, which the last evaluation alone would need.
    evaluate = {"clients": "auto", "every": 100}

    def both_rounds():
        return run(tmp_path, callback=lose, rounds=2, evaluate=evaluate, **changes)

    if needed:
        with pytest.raises(StateError, match="client 1: its state of round 1 is not in"):
            both_rounds()
    else:
        assert lines(both_rounds() / "rounds.jsonl")[1]["completed"] == [0, 1, 2]


def test_a_card_keeps_the_data_of_the_clients_that_were_used_last(monkeypatch):
    """A device with room for 100 bytes of clients' data; a client has 40, client 9 has 200."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1000))
    monkeypatch.setattr(Device, "synchronize", lambda self: None)
    loaded = []

    def load(client):
        loaded.append(client)
        return SimpleNamespace(nbytes=200 if client == 9 else 40)

    device = Device("cuda:0", load)
    first = device.site(0)
    device.site(1)
    assert device.site(0) is first
    device.site(2)  # in the place of 1, which was not used for longest
    assert device.site(0) is first
    device.site(1)
    assert loaded == [0, 1, 2, 1]
    device.site(9)  # one that is too large is there alone
    device.site(9)
    device.site(0)
    assert loaded == [0, 1, 2, 1, 9, 0]
    device.forget()
    device.site(0)
    device.site(1)
    device.site(0)
    assert loaded == [0, 1, 2, 1, 9, 0, 0, 1]
