"""What is fuzzed: each takes bytes, and returns a short word for what became of them. Anything
raised is a failure.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
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

    run: Callable[[bytes], str]
    seeds: Callable[[], list[bytes]]
    framed: bool = False


def _fail(why: str) -> str:
    raise AssertionError(why)


def shape_of(text: object) -> str:
    """A reason, without what in it is the input's own."""
    return "".join(ch for ch in str(text) if ch.isalpha() or ch == " ")[:40]


# -- messages --------------------------------------------------------------------------------------
def message(decode: Any) -> Callable[[bytes], str]:
    def run(data: bytes) -> str:
        try:
            found, body = decode(unpack(data))
        except RemoteProtocolError as refused:
            return (
                shape_of(refused)
                if len(str(refused)) < 1000
                else _fail("a reason longer than its bound")
            )
        assert decode([encode(found)])[0] == found
        assert body is None or len(body) <= m.PART
        return type(found).__name__ + str(body is not None)

    return run


# -- payloads --------------------------------------------------------------------------------------
def payload(data: bytes) -> str:
    """Frames: a byte for the chain of compressors; a form in msgpack; a body."""
    frames = [*unpack(data), b"", b"", b""]
    codec = Codec(LAYOUT, chained(CHAINS[(frames[0] or b"\0")[0] % len(CHAINS)]))
    try:
        form = msgspec.convert(msgpack.unpackb(frames[1], raw=False), list[m.Field])
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        # ValidationError is a ValueError
        return "no form"
    try:
        codec.check(Everything, form, BOUNDS)
        found: Any = codec.decode(Everything, form, bytearray(frames[2]), fill=tensors(0))
    except RemoteProtocolError as refused:
        return shape_of(refused)
    for name in found.fields:
        value = getattr(found, name)
        assert not isinstance(value, Tensors) or value.is_finite()
        assert (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or bool(torch.isfinite(value).all())
        )
    assert len(found.s.y) <= BOUNDS["s"]
    return f"payload of {len(found.s.y)} samples"


def payload_seeds() -> list[bytes]:
    made = []
    for n, items in enumerate(CHAINS):
        encoded = Codec(LAYOUT, chained(items)).encode(
            everything(n, n % 3, n % 2 == 1), lambda name: np.random.default_rng(0), {}
        )
        made.append(
            pack(
                [
                    bytes([n]),
                    msgpack.packb(msgspec.to_builtins(list(encoded.form))),
                    bytes(encoded.body.whole()),
                ]
            )
        )
    return made


# -- the two machines ------------------------------------------------------------------------------
FORM = [m.Field("x", "state", 12, 12)]


def _job(client: int) -> Job:
    body = Body([bytes(12)])
    return Job(client, FORM, body, body.check(), judge=True)


def _key(client: int, attempt: int = 0, purpose: Any = "train") -> m.Key:
    return m.Key(1, 0, attempt, client, purpose)


def declared(key: m.Key, form: Any) -> None:
    if [(f.name, f.kind) for f in form] != [("x", "state")] or sum(
        f.size for f in form
    ) > 4 * m.PART:
        raise RemoteProtocolError("not what was declared")


class Server:
    """A server's machine amid a phase, with an honest worker on connection `good`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = ServerProtocol(
            "run",
            1,
            4,
            lambda ids, session: m.Welcome(
                run="run", inc=1, session=session, name="n", config="c", ids=ids
            ),
            0.0,
            layout="L",
            declared=declared,
        )
        self.stored: dict[m.Key, int] = {}
        self.done: set[int] = set()
        self.todo: list[m.Task] = []
        self.gone: set[bytes] = set()
        self.say(b"good", m.Join(worker="good", ids=[0, 1, 2, 3], slots=4))
        self.say(b"good", m.Ready(run="run", inc=1, layout="L"))
        self.do(
            self.machine.begin(
                1,
                0,
                "train",
                [_job(i) for i in range(4)],
                Rules(closed=1.0, silent=None, stalled=5.0),
                0.0,
            )
        )

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
            elif isinstance(i, s.Arrived):
                self.do(
                    self.machine.accept(i.key, self.now)
                    if i.size == 12
                    else self.machine.reject(i.key, "size", self.now)
                )
            elif isinstance(i, s.Resolved):
                assert i.client not in self.done
                self.done.add(i.client)
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
        """The honest worker does what it is given. However others behaved, the phase ends."""
        for _ in range(200):
            while self.todo:
                task = self.todo.pop(0)
                self.say(
                    b"good",
                    m.Reply(run="run", inc=1, key=task.key, form=FORM, size=12),
                    memoryview(bytes(12)),
                )
            if not self.machine.open():
                return
            self.pass_time(1.0)
        raise AssertionError(f"the phase does not end: {self.machine.waiting()}")


def server(data: bytes) -> str:
    """Frames: a byte that names one of two bad connections, or lets time pass, or cuts one; then a
    message's two.
    """
    world, frames, told = Server(), unpack(data)[:300], 0
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
            told += 1
            world.say(conn, message, body)
    refused = world.machine.refused
    world.finish()
    assert world.done == set(range(4))
    left = f"{len(world.machine.workers)} workers, {len(world.stored)} stored"
    return f"{min(told, 5)} heard, {min(refused, 5)} refused, {left}"


def server_seeds() -> list[bytes]:
    def say(control: int, what: m.Message, body: bytes = b"") -> list[bytes]:
        fields = msgspec.to_builtins(
            msgspec.structs.replace(what, run="run", inc=1), builtin_types=(bytes,)
        )
        return [bytes([control]), msgpack.packb({"v": 1, **fields}), body]

    joins = [
        m.Join(worker="bad", ids=[0, 1]),
        m.Join(worker="bad", share=(1, 2), slots=1024),
        m.Join(worker="good", ids=[0, 1, 2, 3]),
    ]
    ready = m.Ready(layout="L")
    replies = [(m.Reply(key=_key(0, a), form=FORM, size=12, check=b"1"), bytes(12)) for a in (0, 1)]
    long = m.Reply(
        key=_key(1, 1), form=[m.Field("x", "state", 3 * m.PART, 3 * m.PART)], size=3 * m.PART
    )
    more = [
        (m.Reply(key=_key(0, 1, "evaluate"), form=FORM, size=12), bytes(12)),
        (m.Failed(key=_key(0, 1), reason="no", again=True), b""),
        (m.Pull(key=_key(0, 1), first=0, count=1), b""),
        (m.Part(key=_key(1, 1), index=0), bytes(100)),
        (m.Progress(client=0, phase="training"), b""),
        (m.Slots(slots=7), b""),
        (m.Leave(), b""),
        (long, b""),
    ]
    made = [pack([*say(n, join), *say(n, ready)]) for n, join in enumerate(joins)]
    silence = [b"\xca", b"", b""]
    for join in joins[:2]:
        for message, body in [*replies, *more]:
            made.append(
                pack(
                    [
                        *say(0, join),
                        *say(0, ready),
                        *silence,
                        *say(0, message, body),
                        *silence,
                        *say(0, message, body),
                    ]
                )
            )
    made.append(
        pack(
            [
                *say(0, joins[0]),
                *say(0, ready),
                b"\xf0",
                b"",
                b"",
                *say(0, joins[0]),
                *say(1, joins[1]),
                *say(1, ready),
                *silence,
            ]
        )
    )
    return made


def client(data: bytes) -> str:
    """Frames: a message's two, from the server; of a first byte FE a cut, of FF a second passes."""
    machine = ClientProtocol("w", ids=[0, 1], slots=2)
    machine.opened(0.0)
    frames, now, given, heard = unpack(data)[:300], 0.0, 0, 0
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
        heard += 1
        for i in done:
            if isinstance(i, c.Welcomed):
                machine.ready("L")
            elif isinstance(i, c.Given):
                given += 1
                assert len(i.body) == i.task.size
                out = Body([bytes(12)])
                machine.reply(
                    m.Reply(
                        run=machine.run,
                        inc=machine.inc,
                        key=i.task.key,
                        form=FORM,
                        size=12,
                        check=out.check(),
                    ),
                    out,
                )
            elif isinstance(i, c.Out):
                encode(i.message)
        if machine.state == "over":
            break
    return f"{machine.state}, {min(heard, 5)} heard, {min(given, 3)} given"


def client_seeds() -> list[bytes]:
    def say(what: m.Message, body: bytes = b"") -> list[bytes]:
        fields = msgspec.to_builtins(
            what
            if isinstance(what, m.Welcome)
            else msgspec.structs.replace(what, run="run", inc=1),
            builtin_types=(bytes,),
        )
        return [msgpack.packb({"v": 1, **fields}), body]

    welcome = m.Welcome(run="run", inc=1, session="s", name="n", config="seed: 0", ids=[0, 1])
    small = m.Task(key=_key(0), form=FORM, size=12, judge=True)
    long = m.Task(
        key=_key(1), form=[m.Field("x", "state", m.PART + 5, m.PART + 5)], size=m.PART + 5
    )
    rest = [
        say(small, bytes(12)),
        say(long),
        say(m.Part(key=_key(1), index=0), bytes(50)),
        say(m.Pull(key=_key(0), first=0, count=1)),
        say(m.Cancel(key=_key(0))),
        say(m.End(over=False, reason="x")),
        say(m.Refuse(reason="no")),
        say(m.Refuse(reason="no", unread=True)),
        [b"\xfe", b""],
        [b"\xff", b""] * 20,
        say(msgspec.structs.replace(welcome, inc=2)),
    ]
    return [pack(say(welcome) + a + b) for a in rest for b in rest]


# -- files -----------------------------------------------------------------------------------------
# As if whoever wrote it had written its digest too.
@patch("fednet.algorithms.state.check_of", lambda tree, tensors: None)
def state(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.safetensors"
        path.write_bytes(data)
        try:
            read_state(path, FedAvg.Server)
            word = "a state"
        except StateError as refused:
            word = shape_of(str(refused).removeprefix(str(path)))
        try:
            read_client(path, Moon.Client)
            word += ", a record"
        except StateError:
            pass
        return word


def state_seeds() -> list[bytes]:
    tree, named = dump(FedAvg.Server(x=tensors(1)))
    record = {
        "$record": {
            "algorithm": {"$record": {}},
            "residuals": {"$dict": [["a", {"$list": [1, None, "x"]}]]},
        }
    }
    return [
        tensor_file(named, metadata={"tree": json.dumps(t)})
        for t in (tree, record, {"$tensor": ".x.vector"}, 5)
    ]


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


def manifest(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_bytes(checked(data))
        (Path(folder) / "state-00.safetensors").write_bytes(state_seeds()[0])
        try:
            Checkpoints(Path(folder)).load(FedAvg.Server)
            return "a checkpoint"
        except StateError as refused:
            return shape_of(str(refused).partition("manifest.json")[2])


SEAL = {
    "key": [1, 0, 0, 2, "train"],
    "form": [["x", "state", 12, 12, []]],
    "check": "",
    "state": "ab",
    "kept": True,
    "task": ["AAAA", "1-0-0"],
    "seconds": 0.5,
    "worker": {"host": "h"},
    "split": [0.1, 0.2],
    "taken_s": 0.7,
}


def spool(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "round-1"
        place.mkdir()
        (place / LOG).write_bytes(b"".join(map(checked, data.split(b"\n"))))
        (place / "0-2-train.bin").write_bytes(bytes(12))
        try:
            return f"{len(Inbox(Path(folder), lambda reply, body: None).found(1, 0))} found"
        except StateError as refused:
            return shape_of(str(refused).partition(LOG)[2])


def configuration(data: bytes) -> str:
    try:
        config.from_text(data.decode("utf-8", "replace"), "the wire")
        return "a configuration"
    except ConfigError as refused:
        return shape_of(refused)


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


def key_file(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.key"
        path.write_bytes(data)
        path.chmod(0o600)
        ring = Path(folder) / "ring"
        keys.make_server_keys(ring)
        (ring / "allowed" / "0").write_bytes(data)
        words = []
        for read in (lambda: keys.load(path), lambda: keys.Keyring(ring)):
            try:
                read()
                words.append("keys")
            except ConfigError as refused:
                words.append(shape_of(str(refused).partition(":")[2]))
        return ", ".join(words)


def key_seeds() -> list[bytes]:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    return [
        key.encode() + b"\n",
        json.dumps({"public": key, "secret": key, "server": key}).encode(),
        json.dumps({"public": key, "secret": 5}).encode(),
    ]


TARGETS = {
    "message_to_server": Target(
        message(decode_from_client),
        lambda: [pack([encode(x)]) for x in FROM_CLIENT],
        True,
    ),
    "message_to_client": Target(
        message(decode_from_server),
        lambda: [pack([encode(x)]) for x in FROM_SERVER],
        True,
    ),
    "payload": Target(payload, payload_seeds, True),
    "server": Target(server, server_seeds, True),
    "client": Target(client, client_seeds, True),
    "state": Target(state, state_seeds),
    "manifest": Target(manifest, lambda: [json.dumps(MANIFEST).encode()]),
    "spool": Target(spool, lambda: [json.dumps(SEAL).encode()]),
    "configuration": Target(configuration, configuration_seeds),
    "key": Target(key_file, key_seeds),
}
