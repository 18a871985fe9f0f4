from __future__ import annotations

from fednet.engine.checkpoint import Spool
from fednet.wire.messages import Key

KEY = Key(1, 0, 0, 3)


def test_an_upload_of_which_no_more_comes_is_held_no_longer(tmp_path):
    spool = Spool(tmp_path)
    spool.store(KEY, 0, memoryview(bytes(100)), 1000)
    assert (spool._held, spool._open) != ({}, {})
    spool.abandon(KEY)
    assert (spool._held, spool._open) == ({}, {})
    assert spool.found(1, 0) == {}


def test_an_upload_begun_anew_replaces_what_was_there_of_it(tmp_path):
    spool = Spool(tmp_path)
    spool.store(KEY, 0, memoryview(b"old"), 5)
    spool.store(KEY, 0, memoryview(b"ne"), 5)
    spool.store(KEY, 2, memoryview(b"wer"), 5)
    assert bytes(spool.whole(KEY, (), 0, "", False, (0, ""), 0.0, {}).body()) == b"newer"
