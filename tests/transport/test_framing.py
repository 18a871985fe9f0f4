"""The arithmetic of framing against the kernel's own counts."""

from __future__ import annotations

import pytest

from fednet.transport.base import Closed, Received
from fednet.transport.framing import connection_bytes, framing
from fednet.transport.keys import Keyring, lab, load
from tests.transport.pairs import LIMIT_S, of, pump, said

UP = [
    [b""],
    [b"x" * 222],
    [b"x" * 223],
    [b"x" * 255],
    [b"x" * 256],
    [b"h" * 90, b"b" * 2**20],
    [b"h" * 300, b"b" * 7],
]
DOWN = [[b"x" * 40], [b"h" * 90, memoryview(bytes(2**20))], [b"h", b""]]


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_the_kernel_counts_the_same_bytes_on_both_sides_while_open_and_after_closing(
    curve, tmp_path, new_pair
):
    files = lab(tmp_path / "keys", 1) if curve else []
    pair = new_pair(keyring=Keyring(tmp_path / "keys") if curve else None)
    client = pair.client(keys=load(files[0]) if curve else None)
    handshakes = [connection_bytes(curve, "client"), connection_bytes(curve, "server")]
    # Each side is done when it has the other's last word, which its own may still be on the way
    # to.
    pump(
        pair.server,
        client,
        until=lambda seen: (
            [*client.traffic().values(), *pair.server.traffic().values()] == handshakes
        ),
    )
    conn = said(pair, client, *UP[0]).conn
    pair.server.vouch(conn)
    for frames in UP[1:]:
        client.send(frames)
    pump(pair.server, client, until=lambda seen: len(of(seen, Received)) == len(UP) - 1)
    for frames in DOWN:
        pair.server.send(conn, frames)
    pump(pair.server, client, until=lambda seen: len(of(seen, Received)) == len(DOWN))

    up, down = (
        sum(framing(len(f), curve=curve) for frames in messages for f in frames)
        for messages in (UP, DOWN)
    )
    sent, received = connection_bytes(curve, "client")
    sent = sent + up
    received = received + down
    assert list(client.traffic().values()) == [(sent, received)]
    assert pair.server.traffic() == {conn: (received, sent)}

    client.send([b"bye"])
    client.close(LIMIT_S)
    sent += framing(3, curve=curve)
    pump(pair.server, until=lambda seen: of(seen, Closed))
    assert list(client.traffic().values()) == [(sent, received)]
    assert pair.server.traffic() == {0: (received, sent)}
