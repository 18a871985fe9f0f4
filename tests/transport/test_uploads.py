"""Large replies in files that a worker writes and its server reads: the same bytes, never written
over while anybody wants them, and nobody else's.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import threading

import numpy as np
import pytest

from fednet.transport.references import READ, REFERENCE, WRITTEN
from fednet.transport.uploads import FILES, IN_VAIN, Uploads

ONE, OTHER = memoryview(b"a" * 100_000), memoryview(b"b" * 70_000)


@pytest.fixture
def uploads(tmp_path):
    made = Uploads()
    made.put(tmp_path / "0")
    return made


def sent(uploads, *segments):
    laid = uploads.lay(segments or [ONE])
    uploads.leaves(laid.reference)
    return laid.reference


def test_what_was_written_in_segments_is_read_as_one_and_stays_while_it_is_held(uploads):
    reference = sent(uploads, ONE, OTHER)
    body = uploads.read(reference)
    assert body == bytes(ONE) + bytes(OTHER)
    assert uploads.read(reference) is None  # once
    part = body[99_998:100_002]
    del body
    gc.collect()
    assert sent(uploads, OTHER) != reference
    assert part == b"aabb"
    assert sorted(os.listdir(uploads.folder)) == ["0.bin", "1.bin"]


def test_a_file_is_written_over_once_nobody_holds_it_and_by_a_shorter_reply_too(uploads):
    for body in (ONE, OTHER, ONE):
        assert uploads.read(sent(uploads, body)) == body
        gc.collect()
    assert os.listdir(uploads.folder) == ["0.bin"]


def test_what_a_forked_process_writes_to_memory_that_is_lent_stays_there(uploads):
    sent(uploads)
    array = uploads.lend(len(ONE))
    array[:] = 1
    if not (child := os.fork()):
        seen = int(array[5])
        array[:] = 2
        os._exit(seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1  # it has what was there
    assert set(array) == {1}


def test_what_a_forked_process_lets_go_of_the_one_that_forked_it_still_holds(uploads):
    body, laid = uploads.read(sent(uploads)), uploads.lay([OTHER])
    if not (child := os.fork()):
        del body, laid
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (uploads._state[0], uploads._state[1]) == (READ, WRITTEN)


def test_a_file_with_a_second_name_is_left_as_it_is_by_whoever_comes_next(uploads, tmp_path):
    body = uploads.read(sent(uploads))
    kept = tmp_path / "kept.bin"
    os.link(uploads.folder / "0.bin", kept)
    del body
    gc.collect()
    uploads.put(tmp_path / "0")  # another server
    uploads.renew_sender()  # and another worker
    uploads._used.clear()
    assert uploads.read(sent(uploads, OTHER)) == OTHER
    assert kept.read_bytes() == ONE
    kept.unlink()
    uploads._used.clear()
    assert uploads.read(sent(uploads, OTHER)) == OTHER
    assert sorted(os.listdir(uploads.folder)) == ["0.bin", "1.bin"]


def test_what_was_not_sent_and_what_a_connection_took_with_it_leave_their_files_free(uploads):
    laid = uploads.lay([ONE])
    uploads.leaves(laid.reference)
    uploads.take_back(laid.reference)
    laid = uploads.lay([ONE])
    del laid  # the task was called off
    gc.collect()
    lost = sent(uploads)
    uploads.cut()
    assert uploads.read(lost) is None
    sent(uploads)
    assert uploads.read(lost) is None  # another reply lies there
    assert os.listdir(uploads.folder) == ["0.bin"]


def test_what_a_dead_server_held_is_free_for_the_next(uploads, tmp_path):
    held = uploads.read(sent(uploads))
    assert uploads._state[0] == READ
    uploads.put(tmp_path / "0")
    again = uploads.read(sent(uploads, OTHER))
    assert again == OTHER
    del held
    gc.collect()
    assert uploads._state[0] == READ  # what the dead one let go of was not the next one's
    del again


@pytest.mark.parametrize("change", [{"file": FILES}, {"file": 1}, {"number": 9}, {"size": 1}])
def test_a_reference_to_what_is_not_there_gives_nothing(uploads, change):
    token, file, number, size = REFERENCE.unpack(sent(uploads))
    wrong = {"file": file, "number": number, "size": size} | change
    assert uploads.read(REFERENCE.pack(token, *wrong.values())) is None


def test_a_token_is_nobody_elses(uploads):
    reference = sent(uploads)
    assert uploads.refers(reference)
    assert not Uploads().refers(reference)
    assert not uploads.refers(reference[:-1])


def test_where_nothing_can_be_written_a_reply_crosses_as_elsewhere(tmp_path):
    uploads = Uploads()
    assert uploads.lay([ONE]) is None  # there is no server yet
    uploads.put(tmp_path / "0")
    shutil.rmtree(tmp_path / "0")  # its run is over
    assert uploads.lay([ONE]) is None
    uploads.put(tmp_path / "0")
    assert uploads.lay([ONE]) is not None
    uploads.put(tmp_path / ("long" * 60) / ("long" * 60))
    assert uploads.lay([ONE]) is not None


def test_a_file_that_was_cut_short_gives_nothing(uploads):
    reference = sent(uploads)
    os.truncate(uploads.folder / "0.bin", 5)
    assert uploads.read(reference) is None
    os.truncate(uploads.folder / "0.bin", 0)
    assert uploads.read(reference) is None


def test_a_reply_that_there_is_no_room_for_leaves_no_half_of_it(uploads):
    uploads.read(sent(uploads, OTHER))
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(OTHER), hard))  # as on a disk that is full then
    try:
        assert uploads.lay([OTHER, ONE]) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(uploads.folder) == []
    assert uploads.read(sent(uploads)) == ONE


def test_what_a_link_in_place_of_a_file_leads_to_is_left_alone(uploads, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(OTHER)
    (uploads.folder / "0.bin").symlink_to(elsewhere)
    assert uploads.lay([ONE]) is None
    assert elsewhere.read_bytes() == OTHER
    (uploads.folder / "0.bin").unlink()
    reference = sent(uploads)
    (uploads.folder / "0.bin").unlink()
    (uploads.folder / "0.bin").symlink_to(elsewhere)
    os.truncate(elsewhere, len(ONE))
    assert uploads.read(reference) is None


@pytest.mark.timeout(20)
def test_nobody_waits_for_a_pipe_in_place_of_a_file(uploads):
    reference = sent(uploads)
    for index in (0, 1):
        (uploads.folder / f"{index}.bin").unlink(missing_ok=True)
        os.mkfifo(uploads.folder / f"{index}.bin")
    assert uploads.read(reference) is None
    assert uploads.lay([ONE]) is None


def test_where_there_is_no_folder_any_more_a_reply_crosses_as_elsewhere(uploads):
    sent(uploads)
    uploads.cut()
    shutil.rmtree(uploads.folder)
    uploads.folder.write_text("")
    assert uploads.lay([ONE]) is None


# -- replies that come to be in their files --------------------------------------------------------
def lent(uploads, fill):
    array = uploads.lend(len(ONE))
    array[:] = fill
    return array


def inode(uploads, index):
    return os.stat(uploads.folder / f"{index}.bin").st_ino


def test_memory_is_lent_once_a_reply_began_with_so_much_and_what_lies_there_is_sent(uploads):
    assert uploads.lend(len(ONE)) is None
    held = uploads.read(sent(uploads, ONE, OTHER))
    assert uploads.lend(len(OTHER)) is None  # another size
    array = lent(uploads, 3)
    there = inode(uploads, 1)
    body = uploads.read(sent(uploads, array.data, OTHER))
    assert body == b"\x03" * len(ONE) + bytes(OTHER)
    assert held == bytes(ONE) + bytes(OTHER)
    assert inode(uploads, 1) == there  # nothing was copied into another
    array[5] = 9
    assert body[5] == 9
    assert sorted(os.listdir(uploads.folder)) == ["0.bin", "1.bin"]


def test_memory_is_lent_again_once_neither_its_worker_nor_the_server_holds_it(uploads):
    sent(uploads)
    uploads.cut()
    first = lent(uploads, 1)
    place = first.ctypes.data
    body = uploads.read(sent(uploads, first.data))
    second = lent(uploads, 2)  # the first is held by both
    assert second.ctypes.data != place
    del first
    gc.collect()
    third = lent(uploads, 3)  # and here by the server alone
    assert third.ctypes.data not in (place, second.ctypes.data)
    assert body == b"\x01" * len(ONE)
    del body
    gc.collect()
    assert lent(uploads, 4).ctypes.data == place


def test_what_lies_in_a_file_is_copied_where_the_file_has_been_sent_or_is_another_by_now(uploads):
    sent(uploads)
    uploads.cut()
    array = lent(uploads, 1)
    first, again = sent(uploads, array.data), sent(uploads, array.data)
    assert uploads.read(first) == uploads.read(again) == b"\x01" * len(ONE)
    assert REFERENCE.unpack(first)[1] != REFERENCE.unpack(again)[1]
    gc.collect()
    for place in ("gone", "another"):
        index = REFERENCE.unpack(first)[1]
        (uploads.folder / f"{index}.bin").unlink(missing_ok=True)
        if place == "another":
            (uploads.folder / f"{index}.bin").write_bytes(OTHER)
        assert uploads.read(sent(uploads, array.data)) == b"\x01" * len(ONE)
        gc.collect()
    part = sent(uploads, array.data[:-1])
    assert uploads.read(part) == b"\x01" * (len(ONE) - 1)


def test_a_mapped_file_with_a_second_name_is_not_written_to(uploads, tmp_path):
    sent(uploads)
    uploads.cut()
    array = lent(uploads, 1)
    reference = sent(uploads, array.data)
    body, kept = uploads.read(reference), tmp_path / "kept.bin"
    os.link(uploads.folder / f"{REFERENCE.unpack(reference)[1]}.bin", kept)
    del array, body
    gc.collect()
    for fill in (2, 3):
        uploads.read(sent(uploads, lent(uploads, fill).data))
        gc.collect()
    assert kept.read_bytes() == b"\x01" * len(ONE)


def test_nothing_is_lent_where_there_is_no_room_or_where_it_was_never_sent(uploads):
    sent(uploads)
    uploads.cut()
    held = uploads.lend(len(ONE))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(OTHER), hard))
    try:
        assert uploads.lend(len(ONE)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    del held
    for _ in range(IN_VAIN - 1):
        assert uploads.lend(len(ONE)) is not None
        gc.collect()
        uploads.read(sent(uploads, ONE))
        gc.collect()
    assert uploads.lend(len(ONE)) is None
    assert len(os.listdir(uploads.folder)) <= 3


def test_two_threads_are_never_lent_or_given_the_same_file(uploads):
    sent(uploads)
    uploads.cut()
    held: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: held.append(uploads.lend(len(ONE)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    laid = {REFERENCE.unpack(sent(uploads, ONE, OTHER))[1] for _ in range(8)}
    for thread in threads:
        thread.join()
    places = {a.ctypes.data for a in held if a is not None}
    assert len(places) == sum(a is not None for a in held) > 0
    assert len(os.listdir(uploads.folder)) == len(laid) + len(places) == 8 + len(places)
