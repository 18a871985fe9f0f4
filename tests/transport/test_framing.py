"""The arithmetic of framing, by hand and against the kernel's own counts."""

from __future__ import annotations

import pytest

from fednet.transport.base import Closed, Received
from fednet.transport.framing import connection_bytes, framing
from fednet.transport.keys import Keyring, lab, load
from tests.transport.pairs import LIMIT_S, of, pump


@pytest.mark.parametrize(
    ("nbytes", "plain", "curve"),
    [
        (0, 2, 35),
        (222, 224, 257),  # 222 + 33 = 255: the last with a short length under CURVE
        (223, 225, 265),
        (255, 257, 297),
        (256, 265, 298),
        (2**20, 2**20 + 9, 2**20 + 42),
    ],
)
def test_a_frame_costs_two_bytes_up_to_255_and_nine_above_and_33_more_under_curve(
    nbytes, plain, curve
):
    assert framing(nbytes) == plain
    assert framing(nbytes, curve=True) == curve


def test_a_connection_costs_what_the_specification_adds_up_to():
    assert connection_bytes(False, "client") == connection_bytes(False, "server") == (107, 107)
    assert connection_bytes(True, "client") == (567, 301)
    assert connection_bytes(True, "server") == (301, 567)


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
    client.send(UP[0])
    seen = pump(pair.server, client, until=lambda seen: of(seen, Received))
    conn = of(seen, Received)[0].conn
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
    sent, received = sent + up, received + down
    assert list(client.traffic().values()) == [(sent, received)]
    assert pair.server.traffic() == {conn: (received, sent)}

    client.send([b"bye"])
    client.close(LIMIT_S)
    sent += framing(3, curve=curve)
    pump(pair.server, until=lambda seen: of(seen, Closed))
    assert list(client.traffic().values()) == [(sent, received)]
    assert pair.server.traffic() == {0: (received, sent)}
