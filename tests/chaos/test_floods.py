"""A server without keys while a peer floods it: it lives, its memory is bounded, rounds continue at
some pace, and honest clients can join.

    pytest tests/chaos/test_floods.py -m slow -s     prints what each attack takes of memory
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from fednet.client.loop import read_server
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.chaos.mallory import Mallory
from tests.processes import Federation

MOST_MB = 256
"""What all of these attacks together add to the server's peak: the figure in SECURITY.md."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def memory(pid: int, name: str) -> int:
    """Return VmRSS or VmHWM of a process, in bytes."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(name))


# -- the attacks: each is a process that goes on until it is ended ---------------------------------
def paced(a_second: float) -> Iterator[int]:
    """Yield numbers from 0, at most so many a second."""
    began = time.monotonic()
    n = 0
    while True:
        ahead = n / a_second - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(max(ahead, 0.001))
        elif ahead < -0.5:  # what could not be sent is not made up for
            began -= ahead
        yield n
        n += 1


def flood(address: str, a_second: float, say: Callable[[Mallory, int], object], join: bool) -> None:
    """One connection after the other, over which messages go until the server closes it. join: as
    a worker that hosts client 3.
    """
    mallory = Mallory(address)
    joins = 0
    for n in paced(a_second):
        while not mallory.open or (join and not mallory.run):
            mallory.run = ""
            if not mallory.open:
                mallory.transport.reconnect()
                mallory.listen(lambda: mallory.open)
            if join:
                joins += 1
                mallory.frames(encode(m.Join(worker=f"insider-{joins}", ids=[3])))
                with contextlib.suppress(AssertionError):
                    mallory.listen(lambda: bool(mallory.run) or not mallory.open, 5.0)
        say(mallory, n)
        if n % 16 == 0 or not join:
            mallory.poll(0)
            mallory.heard.clear()


def crowd(address: str, most: int, first: bytes, linger_s: float) -> None:
    """Connections that say no more than `first`, kept for `linger_s` or until they are closed."""
    host, port = address.removeprefix("tcp://").split(":")
    held: dict[socket.socket, float] = {}

    def closed(one: socket.socket, since: float) -> bool:
        try:
            while time.monotonic() - since < linger_s and one.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    for n in paced(2000):
        with contextlib.suppress(OSError):
            one = socket.create_connection((host, int(port)), timeout=1)
            one.sendall(first)
            one.setblocking(False)
            held[one] = time.monotonic()
        while n % 100 == 0 or len(held) >= most:
            for one in [one for one, since in held.items() if closed(one, since)]:
                one.close()
                del held[one]
            if len(held) < most:
                break
            time.sleep(0.05)


def many_frames(mallory: Mallory, n: int) -> None:
    """A message of more frames than are allowed."""
    with contextlib.suppress(zmq.Again):
        mallory.transport._dealer.send_multipart([b""] * 5, zmq.NOBLOCK)


# As large as a header may be, of clients that do not exist; and headers that announce many lists.
LARGE = encode(m.Join(worker="large", ids=[10**9] * (m.MAX_HEADER // 5 - 100)))
BOMB = b"\xdc\xff\xff" * (m.MAX_HEADER // 3)
BEAT = m.Progress(client=3, stage="training")
FLOODS: dict[str, tuple[float, Callable[[Mallory, int], object], bool]] = {
    "joins": (400, lambda mallory, n: mallory.frames(LARGE), False),
    "bombs": (400, lambda mallory, n: mallory.frames(BOMB), False),
    "beats": (10_000, lambda mallory, n: mallory.say(BEAT), True),
    # A new round is named each time.
    "rounds": (
        10_000,
        lambda mallory, n: mallory.say(m.Part(key=m.Key(n, 0, 0, 3), index=0)),
        True,
    ),
    "frames": (20_000, many_frames, False),
}
CROWDS: dict[str, tuple[int, bytes, float]] = {
    "idle": (2000, b"", 1e9),
    "greetings": (200, GREETING, 0.05),  # of peers that get no further than their handshake
}


def attack(name: str, address: str) -> int:
    print("it begins", flush=True)
    if name in FLOODS:
        flood(address, *FLOODS[name])
    else:
        crowd(address, *CROWDS[name])
    return 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_lives_through_each_flood_and_lets_honest_clients_in(tmp_path):
    shape = {"model": {"name": "mlp", "hidden": [64]}, "train": {"batch_size": 10}}
    quiet = {"evaluate": {"every": 0, "clients": "none"}}
    with Federation(tmp_path, rounds=10**6, **shape, **quiet) as fed:

        def five_rounds() -> None:
            before = len(fed.rounds())
            fed.until(lambda: len(fed.rounds()) >= before + 5)

        worker = fed.client("0-3")
        fed.server()
        five_rounds()
        calm = memory(fed.last.pid, "VmHWM")
        address = read_server(fed.path)[0]
        for name in (*FLOODS, *CROWDS):
            peer = fed.fork(attack, name, address)
            fed.until(peer.said)
            five_rounds()
            fed.lose(worker)
            worker = fed.client("0-3")
            five_rounds()
            assert peer.poll() is None
            fed.lose(peer)
            more = (memory(fed.last.pid, "VmHWM") - calm) / 1e6
            print(f"{name:10s} {more:6.1f} MB above the peak in peace", flush=True)
        assert more < MOST_MB
        fed.stop()
