"""Connections of one key, or of one address without CURVE, are bounded, and what all strangers may
send.
"""

from __future__ import annotations

import socket

import pytest

from fednet.transport import keys
from fednet.transport.base import Closed
from fednet.transport.zeromq.server import (
    MAX_ALL_BYTES,
    MAX_FIRST_BYTES,
    MAX_STRANGERS,
    unwelcome,
)
from tests.transport.pairs import Pair, joined, of, pump, spoken

EACH = 3
MORE = f"more than {EACH} connections of one key or address"


def stranger(pair: Pair, address: str = "127.0.0.1") -> socket.socket:
    one = pair.stranger(address)
    one.sendall(b"\xff")  # and no more of a handshake
    return one


def test_an_address_without_keys_has_so_many_connections_and_others_have_theirs(new_pair):
    pair = new_pair(max_each=EACH)
    _client, conn = joined(pair)
    try:
        other = stranger(pair, "127.0.0.2")
    except OSError:
        pytest.skip("this system has one address of its own")
    crowd = [stranger(pair) for _ in range(EACH + 2)]
    pump(pair.server, until=lambda seen: pair.refusals(MORE) == EACH)
    assert [pair.ends(one) for one in crowd] == [True] * EACH + [False] * (EACH - 1)
    assert not pair.ends(other)
    assert pair.server.send(conn, [b"still"])
    crowd.pop().close()  # and who has gone is counted no more
    pump(pair.server, until=lambda seen: len(pair.server._by_descriptor) == EACH)
    assert not pair.ends(stranger(pair))
    assert pair.refusals(MORE) == EACH


def test_a_key_has_so_many_connections_and_others_have_theirs(tmp_path, new_pair):
    here, there, _ = map(keys.load, keys.lab(tmp_path, 2))
    ring = keys.Keyring(tmp_path)
    pair = new_pair(keyring=ring, max_each=EACH)
    (other, _), (first, conn) = (joined(pair, keys=site) for site in (there, here))
    strangers = [stranger(pair) for _ in range(EACH + 1)]  # of no key yet: they count for none
    pump(pair.server, until=lambda seen: len(pair.server._by_descriptor) == 2 + len(strangers))
    crowd = [spoken(pair, keys=here) for _ in range(EACH)]
    second = crowd[0][0]
    pump(pair.server, second, until=lambda seen: of(seen, Closed, second))
    assert pair.refusals(MORE) == 1
    assert not of(pump(pair.server, other, first, until=lambda seen: True), Closed)
    for one in (conn, *(c for _, c in crowd[1:])):
        assert pair.server.send(one, [b"still"])


FIT = MAX_ALL_BYTES // MAX_FIRST_BYTES


@pytest.mark.parametrize(
    ("sent", "gone"),
    [
        ([600] * MAX_STRANGERS, []),
        ([64] * (MAX_STRANGERS + 2), [0, 1]),
        ([64, MAX_FIRST_BYTES, MAX_FIRST_BYTES + 1, 600], [2]),
        ([MAX_FIRST_BYTES] * FIT, []),
        ([MAX_FIRST_BYTES] * (FIT + 3), [0, 1, 2]),
    ],
    ids=["in their handshakes", "too many", "one too long", "all they may send", "too much"],
)
def test_of_strangers_that_are_too_many_or_send_too_much_the_oldest_go(sent, gone):
    assert [n for n, _ in unwelcome(enumerate(sent))] == gone
