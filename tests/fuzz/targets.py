"""What is fuzzed: each function takes bytes, and raises if they break what it reads them with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import msgspec
import numpy as np
import torch
from safetensors.torch import save as tensor_file

from fednet import config
from fednet.algorithms.fedavg import FedAvg
from fednet.algorithms.moon import Moon
from fednet.algorithms.state import dump, read_state
from fednet.errors import ConfigError, RemoteProtocolError, StateError
from fednet.experiment.store import read_client
from fednet.files import checked
from fednet.protocol import client as c
from fednet.protocol import instructions as s
from fednet.protocol.client import ClientProtocol
from fednet.protocol.server import ServerProtocol
from fednet.protocol.tasks import Job, Rules
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import LOG, Inbox
from fednet.tensors import Tensors
from fednet.transport import keys
from fednet.wire import messages as m
from fednet.wire.codec import Body, Codec
from fednet.wire.frames import decode_from_client, decode_from_server, encode
from tests.fuzz.mutate import pack, unpack
from tests.wire.test_codec import BOUNDS, CHAINS, LAYOUT, Everything, chained, everything, tensors
from tests.wire.test_messages import FROM_CLIENT, FROM_SERVER


@dataclass(frozen=True)
class Target:
    """seeds: inputs to begin from. framed: whether inputs are frames, see `mutate.pack`."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    framed: bool = False


def frames_of(what: m.Message, body: bytes = b"") -> list[bytes]:
    """Return a message of run "run" and its body."""
    if not isinstance(what, m.Welcome):
        what = msgspec.structs.replace(what, run="run", inc=1)
    fields = msgspec.to_builtins(what, builtin_types=(bytes,))
    return [msgpack.packb({"v": 1, **fields}), body]


# -- messages --------------------------------------------------------------------------------------
def message(decode: Any) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            found, body = decode(unpack(data))
        except RemoteProtocolError as refused:
            why = str(refused)
            assert len(why) < 1000
            return
        assert decode([encode(found)])[0] == found
        assert body is None or len(body) <= m.PART

    return run


# -- payloads --------------------------------------------------------------------------------------
def payload(data: bytes) -> None:
    """Frames: a byte for the chain of compressors; a form in msgpack; a body."""
    frames = [*unpack(data), b"", b"", b""]
    codec = Codec(LAYOUT, chained(CHAINS[(frames[0] or b"\0")[0] % len(CHAINS)]))
    try:
        form = msgspec.convert(msgpack.unpackb(frames[1], raw=False), list[m.Field])
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return
    try:
        codec.check(Everything, form, BOUNDS)
        found: Any = codec.decode(Everything, form, bytearray(frames[2]), fill=tensors(0))
    except RemoteProtocolError:
        return
    for name in found.fields:
        value = getattr(found, name)
        if isinstance(value, Tensors):
            assert value.is_finite()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            assert bool(torch.isfinite(value).all())
    assert len(found.s.y) <= BOUNDS["s"]


def payload_seeds() -> list[bytes]:
    made = []
    for n, items in enumerate(CHAINS):
        codec = Codec(LAYOUT, chained(items))
        value = everything(n, n % 3, n % 2 == 1)
        encoded = codec.encode(value, lambda name: np.random.default_rng(0), {})
        form = msgpack.packb(msgspec.to_builtins(list(encoded.form)))
        made.append(pack([bytes([n]), form, bytes(encoded.body.whole())]))
    return made


# -- the protocol's two sides ----------------------------------------------------------------------
FORM = [m.Field("x", "state", 12, 12)]


def long_form(size: int) -> list[m.Field]:
    return [m.Field("x", "state", size, size)]


def _job(client: int) -> Job:
    body = Body([bytes(12)])
    return Job(client, FORM, body, body.check(), judge=True)


def _key(client: int, attempt: int = 0, purpose: Any = "train") -> m.Key:
    return m.Key(1, 0, attempt, client, purpose)


def declared(key: m.Key, form: Any) -> None:
    sound = [(f.name, f.kind) for f in form] == [("x", "state")]
    if not sound or sum(f.size for f in form) > 4 * m.PART:
        raise RemoteProtocolError("not what was declared")


def welcome(ids: Any, session: str) -> m.Welcome:
    return m.Welcome(run="run", inc=1, session=session, name="n", config="c", ids=ids)


class Server:
    """A server's protocol in the middle of a phase, with an honest worker on connection `good`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = ServerProtocol("run", 1, 4, welcome, 0.0, layout="L", declared=declared)
        self.stored: dict[m.Key, int] = {}
        self.done: set[int] = set()
        self.todo: list[m.Task] = []
        self.gone: set[bytes] = set()
        self.say(b"good", m.Join(worker="good", ids=[0, 1, 2, 3], slots=4))
        self.say(b"good", m.Ready(run="run", inc=1, layout="L"))
        jobs = [_job(i) for i in range(4)]
        rules = Rules(closed=1.0, silent=None, stalled=5.0)
        self.do(self.machine.begin(1, 0, "train", jobs, rules, 0.0))

    def say(self, conn: bytes, what: m.Message, body: memoryview | None = None) -> None:
        self.do(self.machine.received(conn, what, body, self.now))

    def do(self, instructions: list[s.Instruction]) -> None:
        assert len(instructions) < 500
        for i in instructions:
            if isinstance(i, s.Store):
                assert i.key.client in range(4)
                assert i.offset == (self.stored.get(i.key, 0) if i.offset else 0)
                self.stored[i.key] = i.offset + len(i.data)
                assert self.stored[i.key] <= 4 * m.PART
            elif isinstance(i, s.Arrived) and i.reply.size == 12:
                self.do(self.machine.accept(i.reply.key, self.now))
            elif isinstance(i, s.Arrived):
                self.do(self.machine.reject(i.reply.key, "size", self.now))
            elif isinstance(i, s.Resolved):
                assert i.key.client not in self.done
                self.done.add(i.key.client)
            elif isinstance(i, s.Forget) and i.hang_up:
                self.gone.add(i.conn)
            elif isinstance(i, s.Send):
                encode(i.message)
                if i.conn == b"good" and isinstance(i.message, m.Task):
                    self.todo.append(i.message)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.say(b"good", m.Alive(run="run", inc=1))
        self.do(self.machine.tick(self.now))

    def finish(self) -> None:
        """The honest worker does its tasks. The phase ends whatever others did."""
        for _ in range(200):
            while self.todo:
                reply = m.Reply(run="run", inc=1, key=self.todo.pop(0).key, form=FORM, size=12)
                self.say(b"good", reply, memoryview(bytes(12)))
            if not self.machine.tasks.open():
                return
            self.pass_time(1.0)
        raise AssertionError(f"the phase does not end: {self.machine.tasks.waiting()}")


def server(data: bytes) -> None:
    """Frames: a byte that names one of two bad connections, or lets time pass, or cuts one; then a
    message's two.
    """
    world, frames = Server(), unpack(data)[:300]
    for at in range(0, len(frames) - 2, 3):
        control = (frames[at] or b"\0")[0]
        conn = b"bad%d" % (control % 2)
        if control >= 0xF0:
            world.do(world.machine.closed(conn, world.now))
            world.gone.discard(conn)
        elif control >= 0xC0:
            world.pass_time(0.5 * (control % 16))
        elif conn not in world.gone:
            try:
                message, body = decode_from_client([f for f in frames[at + 1 : at + 3] if f])
            except RemoteProtocolError as refused:
                world.do(world.machine.undecodable(conn, str(refused), world.now))
                continue
            world.say(conn, message, body)
    world.finish()
    assert world.done == set(range(4))


def server_seeds() -> list[bytes]:
    def say(control: int, what: m.Message, body: bytes = b"") -> list[bytes]:
        return [bytes([control]), *frames_of(what, body)]

    joins = [
        m.Join(worker="bad", ids=[0, 1]),
        m.Join(worker="bad", share=(1, 2), slots=1024),
        m.Join(worker="good", ids=[0, 1, 2, 3]),
    ]
    said = [
        (m.Reply(key=_key(0, 0), form=FORM, size=12, check=b"1"), bytes(12)),
        (m.Reply(key=_key(0, 1), form=FORM, size=12, check=b"1"), bytes(12)),
        (m.Reply(key=_key(0, 1, "evaluate"), form=FORM, size=12), bytes(12)),
        (m.Failed(key=_key(0, 1), reason="no", again=True), b""),
        (m.Pull(key=_key(0, 1), first=0, count=1), b""),
        (m.Part(key=_key(1, 1), index=0), bytes(100)),
        (m.Progress(client=0, phase="training"), b""),
        (m.Slots(slots=7), b""),
        (m.Leave(), b""),
        (m.Reply(key=_key(1, 1), form=long_form(3 * m.PART), size=3 * m.PART), b""),
    ]
    ready, silence, cut = m.Ready(layout="L"), [b"\xca", b"", b""], [b"\xf0", b"", b""]
    made = [[*say(n, join), *say(n, ready)] for n, join in enumerate(joins)]
    for join in joins[:2]:
        for message, body in said:
            twice = [*silence, *say(0, message, body)] * 2
            made.append([*say(0, join), *say(0, ready), *twice])
    again = [*say(0, joins[0]), *say(1, joins[1]), *say(1, ready), *silence]
    made.append([*say(0, joins[0]), *say(0, ready), *cut, *again])
    return [pack(frames) for frames in made]


def client(data: bytes) -> None:
    """Frames: a message's two, from the server; of a first byte FE a cut, of FF a second passes."""
    machine = ClientProtocol("w", ids=[0, 1], slots=2)
    machine.opened(0.0)
    frames, now = unpack(data)[:300], 0.0
    for at in range(0, len(frames) - 1, 2):
        head = frames[at]
        if head[:1] == b"\xfe":
            machine.closed(now)
            machine.opened(now)
            continue
        if head[:1] == b"\xff":
            now += 1.0
            machine.tick(now)
            continue
        try:
            message, body = decode_from_server([f for f in frames[at : at + 2] if f])
            done = machine.received(message, body, now)
        except RemoteProtocolError:
            continue
        for i in done:
            if isinstance(i, c.Welcomed):
                machine.ready("L")
            elif isinstance(i, c.Given):
                assert len(i.body) == i.task.size
                out, ours = Body([bytes(12)]), {"run": machine.run, "inc": machine.inc}
                reply = m.Reply(key=i.task.key, form=FORM, size=12, check=out.check(), **ours)
                machine.reply(reply, out)
            elif isinstance(i, c.Out):
                encode(i.message)
        if machine.state == "over":
            return


def client_seeds() -> list[bytes]:
    first = m.Welcome(run="run", inc=1, session="s", name="n", config="seed: 0", ids=[0, 1])
    size = m.PART + 5
    rest = [
        frames_of(m.Task(key=_key(0), form=FORM, size=12, judge=True), bytes(12)),
        frames_of(m.Task(key=_key(1), form=long_form(size), size=size)),
        frames_of(m.Part(key=_key(1), index=0), bytes(50)),
        frames_of(m.Pull(key=_key(0), first=0, count=1)),
        frames_of(m.Cancel(key=_key(0))),
        frames_of(m.End(over=False, reason="x")),
        frames_of(m.Refuse(reason="no")),
        frames_of(m.Refuse(reason="no", unread=True)),
        [b"\xfe", b""],
        [b"\xff", b""] * 20,
        frames_of(msgspec.structs.replace(first, inc=2)),
    ]
    return [pack(frames_of(first) + a + b) for a in rest for b in rest]


# -- files -----------------------------------------------------------------------------------------
# As if a writer of bad values had written their digest too.
@patch("fednet.algorithms.state.check_of", lambda tree, tensors: None)
def state(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.safetensors"
        path.write_bytes(data)
        with suppress(StateError):
            read_state(path, FedAvg.Server)
        with suppress(StateError):
            read_client(path, Moon.Client)


def state_seeds() -> list[bytes]:
    tree, named = dump(FedAvg.Server(x=tensors(1)))
    residuals = {"$dict": [["a", {"$list": [1, None, "x"]}]]}
    record = {"$record": {"algorithm": {"$record": {}}, "residuals": residuals}}
    trees = (tree, record, {"$tensor": ".x.vector"}, 5)
    return [tensor_file(named, metadata={"tree": json.dumps(t)}) for t in trees]


MANIFEST = {
    "files": {"server": "state-00.safetensors"},
    "progress": {
        "run": "r",
        "round": 3,
        "versions": {"0": "1-0-0"},
        "states": {"0": "ab"},
        "lengths": {"rounds.jsonl": 5},
        "records": {"rounds": [{"round": 3}]},
        "best": 0.5,
    },
}


def manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_bytes(checked(data))
        (Path(folder) / "state-00.safetensors").write_bytes(state_seeds()[0])
        with suppress(StateError):
            Checkpoints(Path(folder)).load(FedAvg.Server)


RECORD = {
    "message": {
        "t": "reply",
        "key": [1, 0, 0, 2, "train"],
        "form": [["x", "state", 12, 12, []]],
        "size": 12,
        "check": "",
        "state": "ab" * 32,
        "kept": True,
        "seconds": 0.5,
        "split": [0.1, 0.2],
    },
    "task": ["AAAA", "1-0-0"],
    "worker": {"host": "h"},
    "taken_s": 0.7,
}


def spool(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "round-1"
        place.mkdir()
        (place / LOG).write_bytes(b"".join(map(checked, data.split(b"\n"))))
        (place / "0-2-train.bin").write_bytes(bytes(12))
        with suppress(StateError):
            Inbox(Path(folder), lambda reply, body: None).found(1, 0)


def configuration(data: bytes) -> None:
    with suppress(ConfigError):
        config.from_text(data.decode("utf-8", "replace"), "the wire")


def configuration_seeds() -> list[bytes]:
    texts = [
        "",
        "seed: 1\nrounds: 3\n",
        "algorithm: {name: fedprox, mu: 0.1}\n",
        "data: {dataset: synthetic, shape: [1, 2, 2], partition: {scheme: iid}}\n",
        "name: &a x\nload: [*a]\n",
        "train: {lr: 1e-3, schedule: 'cosine'}\nround: {lost: {closed: null}}\n",
        "wire: {up: {state: [topk(0.1), zstd]}}\n",
        "link: {up_mbps: 'lognormal(1, 2)', per_client: {'0-3': {profile: 3g}}}\n",
        "faults: {schedule: [{round: 1, kind: crash, client: 0}]}\n",
        "availability: {model: bernoulli, p: 0.5}\nsecurity: {curve: true, keys: k, max_norm: 3}\n",
        "privacy: {clip: 1}\ntrack: [tensorboard]\n",
        config.to_yaml(config.from_mapping({})),
    ]
    return [t.encode() for t in texts]


def key_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.key"
        path.write_bytes(data)
        path.chmod(0o600)
        ring = Path(folder) / "ring"
        keys.make_server_keys(ring)
        (ring / "allowed" / "0").write_bytes(data)
        with suppress(ConfigError):
            keys.load(path)
        with suppress(ConfigError):
            keys.Keyring(ring)


def key_seeds() -> list[bytes]:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    return [
        key.encode() + b"\n",
        json.dumps({"public": key, "secret": key, "server": key}).encode(),
        json.dumps({"public": key, "secret": 5}).encode(),
    ]


TARGETS = {
    "message_to_server": Target(
        message(decode_from_client), lambda: [pack([encode(x)]) for x in FROM_CLIENT], True
    ),
    "message_to_client": Target(
        message(decode_from_server), lambda: [pack([encode(x)]) for x in FROM_SERVER], True
    ),
    "payload": Target(payload, payload_seeds, True),
    "server": Target(server, server_seeds, True),
    "client": Target(client, client_seeds, True),
    "state": Target(state, state_seeds),
    "manifest": Target(manifest, lambda: [json.dumps(MANIFEST).encode()]),
    "spool": Target(spool, lambda: [json.dumps(RECORD).encode()]),
    "configuration": Target(configuration, configuration_seeds),
    "key": Target(key_file, key_seeds),
}
