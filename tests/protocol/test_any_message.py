"""Whatever peers send, and in whatever order, it is answered or refused: a phase with an honest
worker ends, and nothing that a peer may not send is stored.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednet.errors import RemoteProtocolError
from fednet.protocol import client as c
from fednet.protocol.client import ClientProtocol
from fednet.protocol.instructions import HangUp, Send
from fednet.protocol.tasks import Rules
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import encode
from tests.protocol.net import PART, Net, Site, form, spec

ANY = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
SIZES = st.sampled_from([0, 5, PART, PART + 5, 4 * PART])
KEYS = st.builds(
    m.Key,
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 4),
    st.sampled_from(["train", "evaluate"]),
)
MARKS = {"run": st.sampled_from(["run", "other"]), "inc": st.integers(0, 2)}


def sized(kind: type[m.Message], **more: object) -> st.SearchStrategy[m.Message]:
    """Messages that announce a payload, nearly always with a form of that size."""
    shape = st.tuples(SIZES, SIZES).map(lambda s: {"size": s[0], "form": form(s[s[1] == 0])})
    made = st.fixed_dictionaries({"key": KEYS, **MARKS, **more})
    return st.tuples(made, shape).map(lambda both: kind(**both[0], **both[1]))


PULLS = st.builds(m.Pull, key=KEYS, first=st.integers(0, 5), count=st.integers(1, 9), **MARKS)
PARTS = st.builds(m.Part, key=KEYS, index=st.integers(0, 5), **MARKS)
FROM_CLIENT: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.Join: st.builds(
        m.Join,
        worker=st.sampled_from(["bad", "good", "w"]),
        ids=st.lists(st.integers(0, 5), max_size=3),
        slots=st.integers(1, 9),
        holding=st.lists(KEYS, max_size=2),
    ),
    m.Ready: st.builds(m.Ready, layout=st.sampled_from(["L", "M"]), **MARKS),
    m.Alive: st.builds(m.Alive, **MARKS),
    m.Progress: st.builds(m.Progress, client=st.integers(0, 4), stage=st.just("training"), **MARKS),
    m.Slots: st.builds(m.Slots, slots=st.integers(1, 9), **MARKS),
    m.Reply: sized(m.Reply),
    m.Failed: st.builds(m.Failed, key=KEYS, reason=st.just("no"), again=st.booleans(), **MARKS),
    m.Leave: st.builds(m.Leave, **MARKS),
    m.Pull: PULLS,
    m.Part: PARTS,
}
FROM_SERVER: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.Welcome: st.builds(
        m.Welcome,
        run=st.sampled_from(["run", "other"]),
        inc=st.integers(1, 2),
        session=st.just("s"),
        name=st.just("n"),
        config=st.just("c"),
        ids=st.lists(st.integers(0, 3), max_size=4),
    ),
    m.Refuse: st.builds(m.Refuse, reason=st.just("no"), final=st.booleans(), unread=st.booleans()),
    m.Standing: st.builds(m.Standing, text=st.just("round 1 (training)")),
    m.Task: sized(m.Task, evaluates=st.booleans()),
    m.Cancel: st.builds(m.Cancel, key=KEYS, **MARKS),
    m.End: st.builds(m.End, over=st.booleans(), **MARKS),
    m.Alive: st.builds(m.Alive, **MARKS),
    m.Pull: PULLS,
    m.Part: PARTS,
}
# Raises KeyError for a kind of message that is not above.
SAID_BY_CLIENTS = st.one_of([FROM_CLIENT[kind] for kind in m.FROM_CLIENT])
SAID_BY_SERVERS = st.one_of([FROM_SERVER[kind] for kind in m.FROM_SERVER])
BODIES = st.one_of(st.none(), SIZES.map(lambda n: Body([bytes(n)])))


def worked(site: Site) -> Callable[[], None]:
    def work() -> None:
        for key in list(site.given):
            site.answer(key, b"done!")

    return work


@ANY
@given(st.lists(st.tuples(st.sampled_from(["1", "2", "cut", "wait"]), SAID_BY_CLIENTS, BODIES)))
def test_a_phase_with_an_honest_worker_ends_whatever_others_send(said):
    def declared(key: m.Key, announced: list[m.Field], evaluates: bool) -> None:
        if announced[0].size > 4 * PART:
            raise RemoteProtocolError("too large")

    net = Net(4, declared=declared)
    good = net.site("good", range(4), slots=4)
    work = worked(good)
    net.begin([spec(i, evaluates=True) for i in range(4)], Rules(closed=1.0, silent=None))
    hung_up = set[bytes]()
    for what, message, body in said:
        conn = b"bad%s" % what.encode()
        if what == "wait":
            net.pass_time(2.0)
        elif what == "cut":
            net.do(net.server.closed(b"bad1", net.now))
        elif conn not in hung_up:
            out = net.server.received(conn, message, body, net.now)
            hung_up |= {i.conn for i in out if isinstance(i, HangUp)}
            for i in out:
                if isinstance(i, Send):
                    encode(i.message)
            net.do([i for i in out if not (isinstance(i, Send) and i.conn == conn)])
        work()
        net.settle()
    for _ in range(400):
        if not net.server.open_tasks():
            break
        net.pass_time(1.0)
        net.settle()
        work()
    assert {r.key.client for r in net.resolved} == set(range(4))


@ANY
@given(st.lists(st.tuples(st.integers(0, 9), SAID_BY_SERVERS, BODIES)))
def test_a_client_takes_or_refuses_whatever_a_server_sends(said):
    machine = ClientProtocol(m.Join(worker="w", ids=[0, 1, 2], slots=2), part=PART)
    now = 0.0
    machine.opened(now)
    for what, message, body in said:
        done: list[c.Instruction] = []
        if what == 8:
            done = [*machine.closed(), *machine.opened(now)]
        elif what == 9:
            now += 10.0
            done = machine.tick(now)
        else:
            try:
                done = machine.received(message, body, now)
            except RemoteProtocolError:
                continue
        for i in done:
            if isinstance(i, c.Prepare):
                machine.ready("L")
            elif isinstance(i, c.DoTask):
                assert len(i.body) == i.task.size
                reply = m.Reply(
                    run=machine.run, inc=machine.inc, key=i.task.key, form=form(5), size=5
                )
                machine.finish([(reply, Body([bytes(5)]))])
            elif isinstance(i, c.Send):
                encode(i.message)
