"""A payload that all workers of a launcher read where the server laid it once."""

from __future__ import annotations

import gc
import os

import pytest

from fednet.transport.broadcasts import FILES, Broadcasts
from fednet.transport.references import REFERENCE
from fednet.wire.codec import Body

SIZE = 3 << 20


def payload(first: int = 0, size: int = SIZE) -> Body:
    """One of two segments."""
    return Body([bytes([first]), bytes(size - 1)])


def sent(all: Broadcasts, worker: int, body: Body) -> bytes:
    """The reference to it, as it leaves to that worker."""
    laid = all.lay(body, all.lanes[worker])
    assert laid is not None
    all.lanes[worker].leaves(laid.reference)
    return laid.reference


def test_a_payload_is_laid_once_and_read_by_each_worker():
    all, body = Broadcasts(2), payload(7)
    reference = sent(all, 0, body)
    assert sent(all, 1, body) == reference
    found = [lane.read(reference) for lane in all.lanes]
    assert [bytes(f) for f in found] == [bytes(body.whole())] * 2
    assert all.lay(body, all.lanes[0]) is None  # it has it still
    with pytest.raises(TypeError, match="read-only"):
        found[0][0] = 1


def test_it_lies_there_for_as_long_as_the_server_or_a_worker_holds_it():
    all, bodies = Broadcasts(2), [payload(k) for k in range(FILES)]
    references = [sent(all, 0, body) for body in bodies]
    assert len({REFERENCE.unpack(r)[1] for r in references}) == FILES
    part = all.lanes[0].read(references[0])[1:9]
    assert all.lay(payload(), all.lanes[1]) is None  # no room
    del bodies[0]
    gc.collect()
    assert all.lay(payload(), all.lanes[1]) is None  # the worker has it
    del part
    gc.collect()
    after = payload(9, SIZE + 1)
    assert bytes(all.lanes[1].read(sent(all, 1, after))) == bytes(after.whole())
    assert all.lanes[0].read(references[0]) is None


def test_what_was_sent_to_one_that_is_gone_or_held_by_one_that_died_is_room():
    all = Broadcasts(1)
    (lane,) = all.lanes
    held = [lane.read(sent(all, 0, payload(k))) for k in range(FILES - 1)]
    reference = sent(all, 0, payload())
    gc.collect()
    assert all.lay(payload(), lane) is None
    lane.cut()  # it was never read
    assert lane.read(reference) is None
    assert bytes(lane.read(sent(all, 0, payload(5)))[:1]) == b"\5"
    gc.collect()
    lane.renew()
    bodies = [payload(k) for k in range(FILES)]
    again = [sent(all, 0, body) for body in bodies]
    held.clear()  # what the dead one held lets go of nothing that is another's now
    gc.collect()
    assert [bytes(lane.read(r)[:1])[0] for r in again] == list(range(FILES))


def test_one_that_is_about_to_be_sent_it_is_not_sent_it_again():
    all, body = Broadcasts(2), payload(3)
    lane, other = all.lanes
    laid = all.lay(body, lane)
    assert all.lay(body, lane) is None
    assert all.lay(body, other) is not None
    lane.leaves(laid.reference)
    assert bytes(lane.read(laid.reference)[:1]) == b"\3"
    gc.collect()
    assert all.lay(body, lane) is not None
    lane.cut()  # by the next server: this one ended before it left
    assert all.lay(body, lane) is not None


def test_where_the_system_refuses_such_memory_nothing_is_laid(monkeypatch):
    given = iter([os.memfd_create("fednet")])

    def refused(name):
        if (file := next(given, None)) is None:
            raise PermissionError(13, "vm.memfd_noexec")
        return file

    monkeypatch.setattr(os, "memfd_create", refused)
    all, bodies = Broadcasts(1), [payload(), payload()]
    assert [all.lay(body, all.lanes[0]) is not None for body in bodies] == [True, False]
    assert all.lay(payload(), Broadcasts(1).lanes[0]) is None


@pytest.mark.parametrize("missing", ["posix_fallocate", "ftruncate"])
def test_without_memory_nothing_is_laid(monkeypatch, missing):
    def full(*args):
        raise OSError(28, "no space")

    all = Broadcasts(1)
    monkeypatch.setattr(os, missing, full)
    assert all.lay(payload(), all.lanes[0]) is None
    monkeypatch.undo()
    assert all.lay(payload(), all.lanes[0]) is not None


def test_a_reference_of_another_length_gives_nothing():
    all = Broadcasts(1)
    token, place, number, size = REFERENCE.unpack(sent(all, 0, payload()))
    (lane,) = all.lanes
    assert lane.read(REFERENCE.pack(token, place, number, size + 1)) is None
    assert lane.read(REFERENCE.pack(token, FILES, number, size)) is None
    assert lane.read(REFERENCE.pack(token, place, number, size)) is not None
