"""A site under attack by the server that it joined: it does what its own command line and policy
say, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednet import config as configuration
from fednet.algorithms.secure import StateBetweenSteps
from fednet.client import join
from fednet.client.policy import BudgetSection, Policy, make_policy
from fednet.errors import CannotGoOn, ConfigError, DataError, StateError
from fednet.experiment import build as experiment
from fednet.secagg import SecureServer
from fednet.secagg.server import Gathered
from fednet.wire import messages as m
from fednet.wire.codec import Compression
from fednet.wire.frames import encode
from tests.chaos.mallory import Liar

CONFIG: dict[str, Any] = {
    "name": "hostile",
    "rounds": 2,
    "clients": 4,
    "participation": 1.0,
    "model": {"name": "mlp", "hidden": [4]},
    "data": {
        "dataset": "synthetic",
        "samples": 40,
        "shape": [1, 4, 4],
        "classes": 4,
        "partition": {"scheme": "iid"},
    },
}
SITE = {"dataset": "site", "shape": [4], "classes": 2}


def told(**changes) -> str:
    """Return the configuration that a server sends."""
    return configuration.to_yaml(configuration.from_mapping({**CONFIG, **changes}))


@pytest.fixture(scope="module")
def exp():
    return experiment.build(configuration.from_mapping(CONFIG))


@contextmanager
def site(server: Liar, state: Path, ids: str = "0", policy: Policy | None = None, **more):
    """Run a client of that server in a thread. Yield its `result` or `error`, and whether it is
    `over`.
    """
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = join.main(
                ids, policy or Policy(), server=server.address, state=state, **more
            )
        except BaseException as broken:  # looked at by the test
            found["error"] = broken

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    found["over"] = lambda: not thread.is_alive()
    try:
        yield found
    finally:
        if thread.is_alive() and server.conn:
            server.say(m.End(over=True))
        limit = time.monotonic() + 20
        while thread.is_alive() and time.monotonic() < limit:
            server.poll(0.02)
        server.transport.close(0)
        assert not thread.is_alive()


@contextmanager
def ready(state: Path, config: str | None = None, ids: str = "0", **more) -> Iterator[Liar]:
    """Yield a server of which a client is ready."""
    server = Liar(config or told(), ids=list(range(int(ids[-1]) + 1)))
    with site(server, state, ids=ids, **more):
        server.listen(lambda: server.said(m.Ready))
        yield server


def refused(server: Liar, state: Path, **more) -> str:
    """Return why the site does not take part."""
    with site(server, state, **more) as found:
        server.listen(found["over"])
    assert not server.said(m.Ready)
    assert isinstance(found.get("error"), (ConfigError, DataError, StateError)), found
    text = str(found["error"])
    assert text.isprintable()
    return text


def message(exp, key: m.Key, down, **more) -> tuple[m.Task, bytes]:
    """Return the task that sends `down`, and its body."""
    encoded = exp.down.encode(down, Compression(lambda name: np.random.default_rng(0)))
    body = bytes(encoded.body)
    form = list(encoded.form)
    check = encoded.body.digest()
    return m.Task(key=key, form=form, size=len(body), check=check, **more), body


def task(exp, key: m.Key, **more) -> tuple[m.Task, bytes]:
    """Return a task that the method would give in round 1."""
    server = exp.algorithm.init_server(exp.initial_shared)
    return message(exp, key, exp.algorithm.broadcast(server, key.phase, key.client), **more)


def samples(file: Path, n: int = 8, y=None) -> Path:
    """Write n samples of two classes, for training and for tests."""
    file.parent.mkdir(parents=True, exist_ok=True)
    x = np.zeros((n, 4), np.float32)
    y = np.arange(n) % 2 if y is None else y
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file


# -- paths -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", ["../outside", "/tmp/outside", "a/b", "..", ".", "", "a\n"])
def test_a_run_whose_name_is_a_path_is_no_run(tmp_path, run):
    server = Liar(told(), run=run)
    with site(server, tmp_path / "deep" / "state", give_up_s=0.5) as found:
        server.listen(lambda: len(server.said(m.Join)) >= 2 or found["over"]())
        server.conn = b""
        server.listen(found["over"])
    assert isinstance(found["error"], CannotGoOn)
    assert "--give-up" in str(found["error"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["answers.jsonl", "masked.jsonl", "Answers.JSONL"])
def test_a_run_with_the_name_of_a_sites_account_is_refused(tmp_path, name):
    text = refused(Liar(told(), run=name), tmp_path)
    assert "is the name of an account of this site's" in text
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_neither_written_nor_cut_nor_pruned(tmp_path):
    photos = tmp_path / "photos"
    (photos / "client-0").mkdir(parents=True)
    (photos / "wire.jsonl").write_text("a line without an end")
    (photos / "1-0-0.jpg").write_text("a picture")
    server = Liar(told(), run="photos")
    assert "'1-0-0.jpg' and is no client's" in refused(server, tmp_path)
    assert (photos / "wire.jsonl").read_text() == "a line without an end"


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"dataset": "arrays", "path": "SECRET/x.npz"}, "data.path"),
        ({"dataset": "arrays", "path": "../secret/x.npz"}, "data.path"),
        ({**CONFIG["data"], "partition": {"scheme": "file", "path": "SECRET/p.json"}}, "partition"),
        ({**SITE, "path": "SECRET/x.npz"}, "data.path"),
    ],
    ids=str,
)
@pytest.mark.parametrize("there", [True, False])
def test_a_site_reads_no_data_that_the_server_names(tmp_path, data, key, there):
    """Whether they are there makes no difference: no oracle."""
    secret = tmp_path / "secret"
    own = tmp_path / "own"
    own.mkdir()
    if there:
        samples(secret / "x.npz")
    config = told(data=data, model={"name": "mlp"}).replace("SECRET", str(secret))
    for named in (None, own):
        text = refused(Liar(config), tmp_path / "state", policy=make_policy(None, named, None))
        assert key in text
        assert "refused" in text
        assert "there is no" not in text


def test_what_is_below_the_sites_own_data_may_be_named(tmp_path):
    samples(tmp_path / "x.npz", 40)
    data = {"dataset": "arrays", "path": "x.npz", "partition": {"scheme": "iid"}}
    with ready(tmp_path / "state", told(data=data), policy=make_policy(None, tmp_path, None)):
        pass


def test_the_servers_root_is_not_read(tmp_path):
    secret = tmp_path / "secret"
    (secret / "train" / "a").mkdir(parents=True)
    data = {"dataset": "folder", "root": str(secret), "partition": {"scheme": "iid"}}
    text = refused(
        Liar(told(data=data)), tmp_path / "state", policy=make_policy(None, tmp_path, None)
    )
    assert "secret" not in text
    assert f"{tmp_path}: no folder train/" in text


# -- whom, what and how much -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "welcomed"), [("3", [3, 0]), ("3", []), ("0-1", [0]), ("1/2", [0])]
)
def test_a_site_serves_whom_it_asked_for(tmp_path, ids, welcomed):
    text = refused(Liar(told(), ids=welcomed), tmp_path, ids=ids)
    assert "it was started for" in text


def test_planned_faults_strike_only_where_the_client_was_started_for_them(tmp_path, exp):
    faults = [m.Fault("crash"), m.Fault("corrupt"), m.Fault("delay", 1e9)]
    with ready(tmp_path) as server:
        server.say(*task(exp, m.Key(1, 0, 0, 0), faults=faults))
        server.listen(lambda: server.said(m.Reply))
    reply, body = next((x, b) for x, b in server.heard if isinstance(x, m.Reply))
    assert body.digest() == reply.check


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_no_kind_that_is_not_allowed_leaves_for_any_task(tmp_path, exp, purpose):
    own = Policy(allow=("state", "statistics"))
    with ready(tmp_path, told(evaluate={"every": 0}), policy=own) as server:
        server.say(*task(exp, m.Key(1, 0, 0, 0, purpose), evaluates=True))
        server.listen(lambda: server.said(m.Failed))
        assert "sends nothing of kind 'accuracy'" in server.said(m.Failed)[0].reason
        server.say(*task(exp, m.Key(2, 0, 0, 0)))
        server.listen(lambda: server.said(m.Reply))
    assert {f.kind for r in server.said(m.Reply) for f in r.form} == {"state", "statistics"}


def test_a_payload_beyond_memory_or_beyond_what_the_run_declares_is_not_asked_for(tmp_path, exp):
    """Tasks of a terabyte and of 300 MB, for a model of a few hundred bytes."""

    def announced(client: int, size: int, **more) -> m.Task:
        form = [m.Field("x", "state", size, size)]
        return m.Task(key=m.Key(1, 0, 0, client), form=form, size=size, **more)

    with ready(tmp_path, ids="0-3") as server:
        server.say(announced(0, 1 << 40))
        for client in range(1, 4):
            server.say(announced(client, 300_000_000, check=b""))
        server.listen(lambda: len(server.said(m.Failed)) >= 3)
        assert all("this run declares" in f.reason for f in server.said(m.Failed)[-3:])
        assert not server.said(m.Pull)
        server.say(*task(exp, m.Key(1, 0, 1, 0)))
        server.listen(lambda: server.said(m.Reply))


def test_what_a_server_writes_forges_no_line(tmp_path):
    config = told().replace("name: hostile", 'name: "x\\nall is well\\u202e"')
    assert config != told()
    assert "all is well" in refused(Liar(config), tmp_path)
    server = Liar(told())
    with site(server, tmp_path / "s") as found:
        server.listen(lambda: server.said(m.Ready))
        server.frames(encode(m.Refuse(run="r", inc=1, reason="no\nall is well", final=True)))
        # It leaves that connection, and ignores what is said there.
        server.listen(lambda: len(server.said(m.Ready)) == 2)
        server.say(m.Refuse(reason="no", final=True))
        server.listen(found["over"])
    assert str(found["error"]) == "the server refused this client: no"


PRIVATE = {"clip": 1.0, "noise": 1000.0, "where": "client"}


def answers(server: Liar) -> list[memoryview]:
    """Return the bodies of the replies to training tasks."""
    return [b for x, b in server.heard if isinstance(x, m.Reply) and x.form[0].name == "x"]


def test_noise_is_not_taken_off_by_asking_twice(tmp_path, exp):
    """In one round, with the weights and then with others, and after a welcome with another
    learning rate: each answer has noise of its own, and each is on account.
    """
    with ready(tmp_path, told(privacy=PRIVATE)) as server:
        for attempt, lr in enumerate((0.01, 0.01, 0.02)):
            if lr != 0.01:
                server.welcome["config"] = told(privacy=PRIVATE, train={"lr": lr})
                server.transport.hang_up(server.conn)
                server.listen(lambda: len(server.said(m.Ready)) == 2)
            server.say(*task(exp, m.Key(1, 0, attempt, 0)))
            server.listen(lambda n=attempt: len(answers(server)) > n)
    values = [np.frombuffer(bytes(b), np.float32, exp.shared.nbytes // 4) for b in answers(server)]
    assert np.array_equal(values[0], values[1])  # the same question
    assert float(np.linalg.norm(values[0] - values[2])) > 100.0  # another
    rows = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_nobody_trains_on_a_damaged_broadcast(tmp_path, exp):
    """It is asked for again, and then answered."""
    with ready(tmp_path) as server:
        asked, body = task(exp, m.Key(1, 0, 1, 0))
        damaged = bytearray(body)
        damaged[len(body) // 2] ^= 1  # of a weight
        server.say(asked, bytes(damaged))
        server.listen(lambda: server.said(m.Failed) or server.said(m.Reply))
        (failed,) = server.said(m.Failed)
        assert failed.again
        assert "damaged on its way" in failed.reason
        assert not server.said(m.Reply)
        server.say(*task(exp, m.Key(1, 0, 2, 0)))
        server.listen(lambda: server.said(m.Reply))


# -- secure aggregation ----------------------------------------------------------------------------
SECURE = {"privacy": {"secagg": {"protocol": "secagg", "clip": 8.0, "threshold": 0.51}}}


class SumTaker:
    """A hostile server's rounds of secure aggregation with four clients of one site.

    failed: what clients said instead of an answer.
    """

    def __init__(self, server: Liar, exp) -> None:
        self.server = server
        self.exp = exp
        self.failed = list[str]()

    def total(self, run: str, lost: int | None, **changes) -> np.ndarray | None:
        """Return the sum of round 1 in a run of that name, without the vector of the lost one."""
        server = self.server
        exp = self.exp
        server.welcome |= {"run": run, "config": told(**SECURE, **changes)}
        server.heard.clear()
        if server.conn:
            server.transport.hang_up(server.conn)
        server.listen(lambda: server.said(m.Ready))
        method = exp.algorithm
        inner = exp.algorithm.init_server(exp.initial_shared)
        machine = SecureServer(method.terms(1))
        for phase, step in enumerate(method.steps):
            gathered = Gathered()
            for c in machine.asked:
                if (step, c) == ("masked", lost):
                    continue
                state = StateBetweenSteps(inner=inner, machine=machine)
                answer = self.ask(m.Key(1, phase, 0, c), method.broadcast(state, phase, c))
                if answer is None:
                    return None
                machine.take(gathered, c, answer)
            machine = machine.finish(gathered)
        return machine.total

    def ask(self, key: m.Key, down) -> bytes | None:
        server = self.server
        exp = self.exp
        server.say(*message(exp, key, down))

        def came() -> list:
            return [x for x in server.heard if isinstance(x[0], (m.Reply, m.Failed))]

        server.listen(came)
        ((answer, body),) = came()
        server.heard.clear()
        if isinstance(answer, m.Failed):
            self.failed.append(answer.reason)
            return None
        up = exp.up.decode(exp.algorithm.exchanges[key.phase].up, answer.form, body)
        return bytes(up.answer.numpy())


@pytest.mark.parametrize(
    ("run", "changes", "again"),
    [
        ("r", {}, False),
        ("another", {}, True),
        ("another", {"name": "innocent"}, False),
        ("another", {"rounds": 7, "checkpoint": {"best": False}}, True),
    ],
)
def test_two_sums_whose_difference_is_one_update_are_not_given(tmp_path, run, changes, again):
    """again: by a process that was started again, with keys of its own."""
    exp = experiment.build(configuration.from_mapping({**CONFIG, **SECURE}))
    server = Liar(told(**SECURE), ids=[0, 1, 2, 3])
    taker = SumTaker(server, exp)
    with site(server, tmp_path, ids="0-3"):
        assert taker.total("r", lost=None) is not None
        if not again:
            assert taker.total(run, lost=2, **changes) is None
    if again:
        server = taker.server = Liar(told(**SECURE), ids=[0, 1, 2, 3])
        with site(server, tmp_path, ids="0-3"):
            assert taker.total(run, lost=2, **changes) is None
    assert any(
        "would be revealed" in reason or "another question" in reason for reason in taker.failed
    )


# -- the policy ------------------------------------------------------------------------------------
LARGE = {"name": "mlp", "hidden": [5000, 4]}
LITTLE = {"name": "mlp", "hidden": [4]}
BUDGET = "privacy: {clip: 1.0, noise: 2.0}"


def proto(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Two models, of which the largest counts."""
    return told(algorithm="fedproto", model=[first, {**other, "clients": "1"}])


def changed(text: str, other: str) -> str:
    """Return a configuration with another text, which no configuration of ours has."""
    config = told()
    assert text in config
    return config.replace(text, other)


@pytest.mark.parametrize(
    ("text", "config", "says"),
    [
        ("ids: 1-3", told(), "the policy names clients 1-3, and 0 is none"),
        ("max_model_mb: 0.0001", told(), "max_model_mb is 0.0001"),
        ("max_samples: 10", told(), "max_samples is 10"),
        ("allow: [state]", told(), "'statistics'; this site allows only state"),
        ("allow: [state, statistics]", told(), "its evaluations of kind 'accuracy'"),
        (BUDGET, told(), "noise 0 at the server"),
        (BUDGET, told(privacy={**PRIVATE, "noise": 1.9}), "noise of at least 2 times the bound"),
        (BUDGET, told(privacy={**PRIVATE, "clip": 5.0}), "privacy.clip: the policy's is 1"),
        *(
            ("max_model_mb: 0.1", proto(*two), "has 0.4 MB; the policy's max_model_mb is 0.1")
            for two in ((LARGE, LITTLE), (LITTLE, LARGE))
        ),
        # Whatever the policy: weights of a path that the site does not name.
        ("", told(model={**LITTLE, "weights": "/secret.safetensors"}), "without --data"),
        # And numbers that this machine cannot follow.
        ("", told(model={"name": "mlp", "hidden": [200000, 200000]}), "free"),
        ("", changed("samples: 40", "samples: 1000000000000"), "free"),
        ("", changed("clients: 4", "clients: 1000000000000"), "expected"),
        ("", changed("schedule: constant", "schedule: step(0,0.1)"), "expected"),
        ("", changed("threads: 1", "threads: 1000000000"), "expected"),
    ],
)
def test_the_policy_has_the_last_word_and_what_cannot_be_done_is_refused_at_the_start(
    tmp_path, text, config, says
):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    own = make_policy(file if text else None, None, None)
    assert says in refused(Liar(config), tmp_path / "state", policy=own)


def test_facts_of_a_sites_own_data_leave_only_where_their_kind_is_allowed(tmp_path):
    own = make_policy(None, samples(tmp_path / "x.npz"), ["delta", "state"])
    config = told(data=SITE, evaluate={"every": 0}, algorithm="fedsgd")
    assert "'statistics'" in refused(Liar(config), tmp_path / "state", policy=own)


def test_the_model_is_tried_on_the_data_of_each_client_of_a_process(tmp_path):
    """Client 1 has two labels a sample."""
    samples(tmp_path / "data" / "client-0" / "data.npz")
    samples(tmp_path / "data" / "client-1" / "data.npz", y=np.arange(16).reshape(8, 2) % 2)
    own = Policy(data=tmp_path / "data", places=(tmp_path / "data",))
    liar = Liar(told(data=SITE), ids=[0, 1])
    said = refused(liar, tmp_path / "state", ids="0-1", policy=own)
    assert said.startswith("client 1: task: classification cannot compare outputs of shape (2, 2)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id: 3", "site.yaml:1: unknown key id. Did you mean ids[?]"),
        ("privacy: {clip: 1, nois: 2}", "unknown key privacy.nois. Did you mean privacy.noise[?]"),
        ("ids: 4-1", "site.yaml: ids 4-1: the range"),
    ],
)
def test_a_policy_file_is_strict(tmp_path, text, says):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        make_policy(file, None, None)


def test_a_policy_file_decides_what_the_command_line_does_not(tmp_path):
    file = tmp_path / "site.yaml"
    (tmp_path / "own" / "part").mkdir(parents=True)
    file.write_text(
        "data: own\nallow: [state, statistics]\nfaults: false\n"
        "privacy: {clip: 1.0, noise: 2.0, epsilon: 3}\n"
    )
    found = make_policy(file, None, None)
    assert found.data == tmp_path / "own"
    assert found.privacy == BudgetSection(clip=1.0, noise=2.0, epsilon=3.0)
    narrower = make_policy(file, tmp_path / "own" / "part", None)
    assert (narrower.data, narrower.allow) == (tmp_path / "own" / "part", ("state", "statistics"))
    with pytest.raises(ConfigError, match=r"the policy .* names"):
        make_policy(file, tmp_path, None)
    with pytest.raises(ConfigError, match=r"--faults: the policy .* decides that"):
        make_policy(file, None, None, faults=True)
    with pytest.raises(ConfigError, match=r"--allow: the policy .* decides that"):
        make_policy(file, None, ["state"])


# -- the end ---------------------------------------------------------------------------------------
def test_a_client_gives_up_a_server_that_does_not_come_back(tmp_path):
    server = Liar(told())
    with site(server, tmp_path, give_up_s=0.5) as found:
        server.listen(lambda: server.said(m.Ready))
        server.transport.close(0)
        limit = time.monotonic() + 20
        while not found["over"]():
            assert time.monotonic() < limit
            time.sleep(0.02)
    assert isinstance(found["error"], CannotGoOn)
    assert "no server has accepted this client for 0.5 s" in str(found["error"])
