"""What both ends of a ZeroMQ connection share: options, the monitor, frames, and a way to be
woken.
"""

from __future__ import annotations

import errno
import math
import os
import re
import struct
from collections.abc import Callable, Sequence

import zmq

# pyzmq imports it with the first message that is sent without a copy: then strangers may have taken
# all descriptors.
import zmq.utils.garbage

from fednet.errors import ConfigError
from fednet.transport.base import MAX_FRAME_BYTES, MAX_FRAMES, Frame

Refused = Callable[[str, str], None]
"""Called with the reason for which a connection or message was refused, and the peer's address
where it is known."""

SEND_MESSAGES = 64
RECEIVE_MESSAGES = 8
"""High-water marks, in whole messages, of each connection. Beyond them our own queue, or TCP, holds
the rest."""

MAX_PORT = 65535
EXPECTED = "expected tcp://HOST:PORT, or tcp://*:0 (server)"

COPY_BELOW_BYTES = 65536
"""A frame received smaller than this is copied out: cheaper than keeping libzmq's buffer alive."""

# pyzmq's own calls for messages of several frames put the flags together for each frame, as enums,
# which takes longer than to send it.
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MONITOR_EVENT = struct.Struct("=Hi")


def new_curve_pair() -> tuple[str, str]:
    """A new (public, secret) pair, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Waker:
    """A descriptor that any thread, or a signal handler, can make readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        if self.fd >= 0:  # else it is closed: there is nobody to wake
            os.eventfd_write(self.fd, 1)

    def clear(self) -> bool:
        """Whether it had been woken."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        # First: a late `wake` must not write into a descriptor that someone else got.
        fd = self.fd
        self.fd = -1
        os.close(fd)


def common_options(socket: zmq.Socket[bytes], six: bool) -> None:
    """six: whether it will be bound or connected to an address of IPv6."""
    for option, value in {
        # until `close` says otherwise: an error on the way must not hang the process
        zmq.LINGER: 0,
        zmq.SNDHWM: SEND_MESSAGES,
        zmq.RCVHWM: RECEIVE_MESSAGES,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.IPV6: int(six),  # where it is not wanted * would become [::]
        zmq.HEARTBEAT_IVL: 0,  # its heartbeats are bytes that no ledger sees
        zmq.HANDSHAKE_IVL: 30_000,
        zmq.TCP_KEEPALIVE: 1,  # for the NAT on the way, and a peer that vanished without a word
        zmq.TCP_KEEPALIVE_IDLE: 60,
        zmq.TCP_KEEPALIVE_INTVL: 15,
        zmq.TCP_KEEPALIVE_CNT: 4,
    }.items():
        socket.setsockopt(option, value)


def monitor_of(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], number: int = 0
) -> zmq.Socket[bytes]:
    """Where `monitor_events` of that socket are read; a second one of the same context takes
    another number.
    """
    address = f"inproc://monitor-{number}"
    socket.monitor(address, _MONITORED)
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    # No limit on events that wait: with one, libzmq's own thread would wait for us to read them
    # after thousands of connections have ended together, and we, who end the monitor, for it.
    events.setsockopt(zmq.RCVHWM, 0)
    events.connect(address)
    return events


def monitor_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """(event, value) of what has happened since; the value of a connection's event is its
    descriptor.
    """
    events: list[tuple[int, int]] = []
    while True:
        try:
            event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return events
        events.append((event, value))


def close_all(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    others: list[zmq.Socket[bytes]],
    linger_s: float,
) -> None:
    """The monitored socket, its monitor and what else is open, and the context."""
    socket.disable_monitor()
    for other in others:
        other.close(linger=0)
    socket.close(linger=int(linger_s * 1000))
    context.term()  # returns when what was queued has left, or the linger is over


def send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """All frames of a message, or none: raises zmq.Again where they would have to wait."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < COPY_BELOW_BYTES)
    socket.send(frames[-1], _NOW, copy=len(frames[-1]) < COPY_BELOW_BYTES)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The frames of the next message, of more than are allowed the first so many and one. Raises
    zmq.Again where there is none.
    """
    frames = [socket.recv(_NOW, copy=False)]
    more = frames[0].more
    while more:
        frame = socket.recv(_NOW, copy=False)
        more = frame.more
        if len(frames) <= MAX_FRAMES:
            frames.append(frame)
    return frames


def receive_from(router: zmq.Socket[bytes]) -> tuple[bytes, list[zmq.Frame]]:
    """The routing id of the next message's sender, and its frames as of `receive`. Raises
    zmq.Again where there is none.
    """
    conn = router.recv(_NOW)  # a frame of its own, which others always follow
    return conn, receive(router)


def owned_frame(frame: zmq.Frame) -> Frame:
    """A received frame, to be held for as long as one likes."""
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer


def ms(seconds: float) -> int | None:
    """A wait in whole milliseconds; None: for ever. It is rounded up: a wait that ends a fraction
    early would spin through the rest.
    """
    return None if math.isinf(seconds) else math.ceil(max(0.0, seconds) * 1000)


def check_address(address: str) -> None:
    """Raises ConfigError for what is no address between processes: libzmq takes a port that is no
    number, or that there cannot be, for another.
    """
    scheme, _, rest = address.partition("://")
    _, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not rest:
        raise ConfigError(f"{address!r} is no address: {EXPECTED}.")
    if not re.fullmatch(r"[0-9]{1,9}|\*", port):
        shown = f" {port!r}" if colon else ""
        raise ConfigError(f"{address!r} has no port{shown}: {EXPECTED}.")
    if port != "*" and int(port) > MAX_PORT:
        raise ConfigError(f"{address}: there is no port {port}; expected 0 to {MAX_PORT}.")


def why(error: OSError | zmq.ZMQError) -> str:
    """Why an address cannot be bound, or connected to."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use by another process; choose another, or port 0 for any free one"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            "this machine has no such address; tcp://*:PORT listens on all it has, with IPv6 "
            "tcp://[::]:PORT"
        )
    if error.errno in (errno.EINVAL, zmq.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO):
        return EXPECTED
    return str(error.strerror or error).lower()
