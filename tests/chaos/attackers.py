"""What a peer may do to slow a server down, each as one process that goes on until it is ended:

    python -m tests.chaos.attackers NAME ADDRESS

With bounded load: none sends more than what stands here, and all talk to that address alone.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator

import zmq

from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.chaos.mallory import Mallory

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def paced(a_second: float) -> Iterator[int]:
    """Numbers from 0, at most so many a second."""
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


def talking(address: str, a_second: float, frames: Callable[[int], bytes]) -> None:
    """One connection after the other, over which messages go until it is hung up on."""
    mallory = Mallory(address)
    for n in paced(a_second):
        if not mallory.open:
            mallory.transport.reconnect()
            mallory.listen(lambda: mallory.open)
        mallory.frames(frames(n))
        mallory.poll(0)
        mallory.heard.clear()


def joins(address: str) -> None:
    """Joins that are as large as a header may be, of clients that there are not."""
    ids = [10**9] * (m.MAX_HEADER // 5 - 100)
    frame = encode(m.Join(worker="large", ids=ids))
    talking(address, 400, lambda n: frame)


def bombs(address: str) -> None:
    """Headers of many announced lists."""
    frame = b"\xdc\xff\xff" * (m.MAX_HEADER // 3)
    talking(address, 400, lambda n: frame)


def joined(address: str, a_second: float, frame: Callable[[Mallory, int], m.Message]) -> None:
    mallory, joins = Mallory(address), 0
    for n in paced(a_second):
        while not mallory.open or not mallory.run:
            mallory.run = ""
            if not mallory.open:
                mallory.transport.reconnect()
                mallory.listen(lambda: mallory.open)
            joins += 1
            mallory.frames(encode(m.Join(worker=f"insider-{joins}", ids=[3])))
            with contextlib.suppress(AssertionError):
                mallory.listen(lambda: bool(mallory.run) or not mallory.open, 5.0)
        mallory.say(frame(mallory, n))
        if n % 16 == 0:
            mallory.poll(0)
            mallory.heard.clear()


def beats(address: str) -> None:
    joined(address, 10_000, lambda mallory, n: m.Progress(client=3, phase="training"))


def rounds(address: str) -> None:
    """Ever new rounds are named."""
    joined(address, 10_000, lambda mallory, n: m.Part(key=m.Key(n, 0, 0, 3), index=0))


def frames(address: str) -> None:
    """Messages of more frames than there may be."""
    mallory = Mallory(address)
    for n in paced(20_000):
        if not mallory.open:
            mallory.transport.reconnect()
            mallory.listen(lambda: mallory.open)
        with contextlib.suppress(zmq.Again):
            mallory.transport._dealer.send_multipart([b""] * 5, zmq.NOBLOCK)
        if n % 16 == 0:
            mallory.poll(0)


def crowd(address: str, most: int, first: bytes, linger_s: float) -> None:
    """Connections that say no more than `first`, kept for `linger_s` or until hung up on."""
    host, port = address.removeprefix("tcp://").split(":")
    held: dict[socket.socket, float] = {}
    for n in paced(2000):
        with contextlib.suppress(OSError):
            one = socket.create_connection((host, int(port)), timeout=1)
            one.sendall(first)
            one.setblocking(False)
            held[one] = time.monotonic()
        while n % 100 == 0 or len(held) >= most:
            for one, since in list(held.items()):
                with contextlib.suppress(BlockingIOError):
                    try:
                        while time.monotonic() - since < linger_s and one.recv(4096):
                            pass
                    except OSError as ended:
                        if isinstance(ended, BlockingIOError):
                            raise
                    one.close()
                    del held[one]
            if len(held) < most:
                break
            time.sleep(0.05)


def idle(address: str) -> None:
    crowd(address, 2000, b"", 1e9)


def greetings(address: str) -> None:
    """Of a peer that gets no further than its handshake, again and again."""
    crowd(address, 200, GREETING, 0.05)


ATTACKS = {f.__name__: f for f in (joins, bombs, beats, rounds, frames, idle, greetings)}

if __name__ == "__main__":
    print(flush=True)  # whoever started it knows that it is under way
    ATTACKS[sys.argv[1]](sys.argv[2])
