"""What the kernel counts of a connection, and what of it are bytes that a peer has sent."""

from __future__ import annotations

import select
import socket
import struct

import pytest

from fednet.transport import kernel as kernels
from fednet.transport.kernel import KernelSocket


def ended(connection: socket.socket) -> None:
    """Waits until the kernel has heard of the end, without reading."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    assert poll.poll(5000)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("unread", [False, True])
def test_an_end_is_no_byte_whether_it_is_a_fin_a_reset_or_both(looked: bool, unread: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near:
        kernel = KernelSocket(near.fileno())
        if kernel.bytes() is None:
            pytest.skip("no TCP_INFO here")
        far.sendall(b"x" * 10)
        if unread:  # then the peer's end is a reset, without a FIN
            near.sendall(b"y")
            select.select([far], [], [], 5)
        far.close()
        select.select([near], [], [], 5)
        assert near.recv(10) == b"x" * 10
        if looked:
            assert kernel.bytes() == (1 if unread else 0, 10)
        if not unread:  # what is sent to nobody is answered with a reset
            near.sendall(b"y")
        ended(near)
        assert kernel.bytes() == (1, 10)
        assert kernel.over
        assert kernel.bytes() == (1, 10)
        kernel.close()


def test_a_kernel_that_counts_less_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_STATE_RECEIVED_SENT_RETRANSMITTED", struct.Struct("=B511x"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        kernel = KernelSocket(near.fileno())
        assert kernel.bytes() is None
        assert kernel.close() is None
