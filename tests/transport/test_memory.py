"""Bodies in memory that a server and its workers share: the same bytes, a reference in their place
on the wire, and nobody else can refer to them.
"""

from __future__ import annotations

import gc
import os
import time
import types

import pytest

from fednet.transport.base import Closed, Opened, Received
from fednet.transport.memory import (
    FROM_BYTES,
    SLOTS,
    MemoryClient,
    MemoryServer,
    SharedBuffer,
    shared_memory,
)
from fednet.transport.references import REFERENCE
from fednet.wire.frames import Laid
from tests.transport.pairs import Pair, of, pump

BODY = memoryview(bytes(range(256)) * (1 << 12))  # 1 MiB


# -- a buffer --------------------------------------------------------------------------------------
def test_a_body_lies_there_for_as_long_as_anything_holds_it():
    buffer = SharedBuffer()
    references = [buffer.lay(BODY[k:]) for k in range(SLOTS)]
    assert buffer.lay(BODY) is None
    body = buffer.read(references[3])
    assert body is not None
    assert body.readonly
    assert body == BODY[3:]
    part = body[5:9]
    del body
    gc.collect()
    assert buffer.lay(BODY) is None
    assert part == BODY[8:12]
    del part
    gc.collect()
    assert buffer.lay(BODY) is not None


def test_what_a_forked_process_lets_go_of_is_held_by_the_one_that_forked_it():
    buffer = SharedBuffer()
    references = [buffer.lay(BODY[k:]) for k in range(SLOTS)]
    body = buffer.read(references[3])
    if not (child := os.fork()):
        del body
        gc.collect()
        os._exit(buffer.lay(BODY) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert body == BODY[3:]


def test_a_reference_is_read_once_and_not_after_another_body_lies_there():
    buffer = SharedBuffer()
    old = buffer.lay(BODY)
    buffer.cut()
    for _ in range(SLOTS):
        assert buffer.lay(BODY[7:]) is not None
    assert buffer.read(old) is None


def test_what_a_receiver_held_that_died_is_free_for_the_next_one():
    buffer = SharedBuffer()
    held = [buffer.read(buffer.lay(BODY)) for _ in range(SLOTS)]
    assert buffer.lay(BODY) is None
    buffer.cut()  # the sender's business is what was not read
    assert buffer.lay(BODY) is None
    buffer.renew()
    again = buffer.read(buffer.lay(BODY[1:]))
    held.clear()  # what the last one held lets go of no slot that is another's now
    gc.collect()
    assert again == BODY[1:]
    assert sum(buffer.lay(BODY) is not None for _ in range(SLOTS)) == SLOTS - 1


def test_a_reference_to_where_nothing_can_lie_gives_nothing():
    buffer = SharedBuffer()
    reference = buffer.lay(BODY)
    token, slot, number, size = REFERENCE.unpack(reference)
    assert buffer.read(REFERENCE.pack(token, SLOTS, number, size)) is None
    assert buffer.read(REFERENCE.pack(token, slot, number, 1 << 40)) is None
    assert buffer.read(reference) == BODY


@pytest.mark.parametrize("server", [True, False])
def test_what_an_earlier_process_left_is_room_for_the_next(server):
    """What it had sent, and what it held of the other side's."""
    (shared,) = shared_memory(1)
    mine, theirs = (shared.down, shared.up) if server else (shared.up, shared.down)
    held = [(mine.lay(BODY), theirs.read(theirs.lay(BODY))) for _ in range(SLOTS)]
    assert mine.lay(BODY) is theirs.lay(BODY) is None
    MemoryServer(None, [shared]) if server else MemoryClient(None, shared)
    assert mine.lay(BODY) is not None
    assert theirs.lay(BODY) is not None
    del held


def test_a_body_too_long_for_a_slot_crosses():
    assert SharedBuffer().lay(memoryview(bytes(1 << 21))) is None


# -- over sockets ----------------------------------------------------------------------------------
@pytest.fixture
def ends(tmp_path):
    from contextlib import ExitStack

    with ExitStack() as stack:
        pair = Pair(stack)
        (made,) = shared_memory(1)
        server = MemoryServer(pair.server, [made])
        yield pair, server, MemoryClient(pair.client(), made), made


def join(server, client, token=b"") -> bytes:
    pump(server, client, until=lambda seen: of(seen, Opened, client))
    assert client.send([b"join"])
    seen = pump(server, client, until=lambda seen: of(seen, Received, server))
    conn = of(seen, Received, server)[0].conn
    server.vouch(conn, token)
    return conn


def sent_up(server, client, frames) -> Received:
    assert client.send(frames)
    return of(
        pump(server, client, until=lambda seen: of(seen, Received, server)), Received, server
    )[0]


def test_bodies_are_the_same_both_ways_and_only_references_cross(ends):
    _, server, client, made = ends
    conn = join(server, client, made.token)
    before = server.traffic()[conn]
    up = sent_up(server, client, [b"head", client.lay(b"", BODY)])
    assert isinstance(up.frames[1], Laid)
    assert (bytes(up.frames[0]), up.frames[1].body) == (b"head", BODY)
    assert server.send(conn, [b"head", server.lay(conn, BODY[1:])])
    seen = pump(server, client, until=lambda seen: of(seen, Received, client))
    assert of(seen, Received, client)[0].frames[1].body == BODY[1:]
    after = server.traffic()[conn]
    assert max(b - a for a, b in zip(before, after)) < 100


def test_small_bodies_and_those_without_room_cross(ends):
    _, server, client, made = ends
    join(server, client, made.token)
    assert client.lay(b"", BODY[: FROM_BYTES - 1]) == BODY[: FROM_BYTES - 1]
    held = [client.lay(b"", BODY) for _ in range(SLOTS)]
    assert all(isinstance(frame, Laid) for frame in held)
    crossing = client.lay(b"", BODY)
    assert not isinstance(crossing, Laid)
    assert sent_up(server, client, [b"head", crossing]).frames[1] == BODY


def test_nobody_without_a_token_can_name_what_lies_there(ends):
    pair, server, client, made = ends
    join(server, client, made.token)
    reference = made.up.lay(BODY)
    stranger = pair.client()
    conn = join(server, stranger)  # takes part, as a client that was started by hand
    got = sent_up(server, stranger, [b"head", reference])
    assert not isinstance(got.frames[1], Laid)
    assert bytes(got.frames[1]) == reference
    server.vouch(conn, b"x" * 16)
    assert bytes(sent_up(server, stranger, [b"head", reference]).frames[1]) == reference
    assert server.lay(conn, BODY) is BODY


def test_a_reference_to_what_is_gone_ends_the_connection_and_room_comes_back(ends):
    _, server, client, made = ends
    join(server, client, made.token)
    laid = client.lay(b"", BODY)
    made.up.cut()
    assert client.send([b"head", laid])
    seen = pump(server, client, until=lambda seen: of(seen, Closed, client))
    assert not of(seen, Received, server)
    join(server, client, made.token)
    assert all(isinstance(client.lay(b"", BODY), Laid) for _ in range(SLOTS))


def test_what_a_cut_connection_had_under_way_is_room_again(ends):
    _, server, client, made = ends
    conn = join(server, client, made.token)
    for _ in range(SLOTS):
        assert server.send(conn, [b"head", server.lay(conn, BODY)])
    server.drop(conn, hang_up=True)
    pump(server, client, until=lambda seen: of(seen, Closed, server))
    conn = join(server, client, made.token)
    end = time.monotonic() + 10
    while not isinstance(server.lay(conn, BODY), Laid):
        assert time.monotonic() < end
        pump(server, client, until=lambda seen: True)
        gc.collect()


def test_an_end_that_is_told_late_takes_nothing_of_the_next_connection():
    (made,), told, sent = shared_memory(1), [], []
    inner = types.SimpleNamespace(
        vouch=lambda conn: None,
        poll=lambda timeout_s: told,
        send=lambda conn, f: not sent.append(f),
    )
    server = MemoryServer(inner, [made])
    server.vouch(b"old", made.token)
    for _ in range(SLOTS // 2):
        assert isinstance(server.lay(b"old", BODY), Laid)
    server.vouch(b"new", made.token)  # the worker is back, before it is told that it was gone
    for _ in range(SLOTS // 2):
        assert server.send(b"new", [b"head", server.lay(b"new", BODY)])
    told.append(Closed(b"old"))
    server.poll(0.0)
    assert [made.down.read(reference) for _, reference in sent] == [BODY] * (SLOTS // 2)


def test_what_was_not_sent_takes_no_room(ends):
    _, server, client, made = ends
    conn = join(server, client, made.token)
    for _ in range(3 * SLOTS):
        assert not MemoryServer.send(server, b"nobody", [b"head", server.lay(b"nobody", BODY)])
    frames = [b"head", server.lay(conn, BODY)]
    server._inner.send = lambda *_: False
    for _ in range(3 * SLOTS):
        assert not server.send(conn, frames)
        frames = [b"head", server.lay(conn, BODY)]
        assert isinstance(frames[1], Laid)
