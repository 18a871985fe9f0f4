"""Files that are added to, files that are made where none is, and where they are kept."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fednet import places
from fednet.errors import ConfigError
from fednet.files import (
    Lines,
    last_lines,
    line,
    list_folder,
    plain_line,
    read_lines,
    read_record,
    without_digest,
    write_aside,
    write_json,
    write_new,
)


def test_the_length_of_a_file_of_lines_counts_what_another_thread_adds_meanwhile(tmp_path):
    """A checkpoint holds a run to that length: one line less, and no resume goes on."""
    path = tmp_path / "events.jsonl"

    def text(record):
        if record == {"first": 1}:  # while its line is made, another thread adds one
            other = threading.Thread(target=lines.append, args=({"second": 2},))
            other.start()
            other.join()
        return plain_line(record)

    lines = Lines(path, text)
    lines.append({"first": 1})
    assert lines.flush() == path.stat().st_size
    assert list(read_lines(path)) == [{"second": 2}, {"first": 1}]
    lines.close()


@pytest.mark.parametrize("indent", [None, 1])
def test_what_is_no_finite_number_is_null_in_every_json_file(tmp_path, indent):
    value = {
        "loss": math.nan,
        "most": [math.inf, {"least": (-math.inf, 0.5, 3, True, None, "NaN")}],
        "array": np.array([1.5, math.nan], np.float32),
        "one": np.float64("nan"),
    }
    write_json(tmp_path / "a.json", value, indent)
    (tmp_path / "b.json").write_bytes(without_digest(line(value)))
    expected = {
        "loss": None,
        "most": [None, {"least": [None, 0.5, 3, True, None, "NaN"]}],
        "array": [1.5, None],
        "one": None,
    }
    assert msgspec.json.decode((tmp_path / "a.json").read_bytes()) == expected
    assert msgspec.json.decode((tmp_path / "b.json").read_bytes()) == expected


def test_a_new_file_is_never_written_over(tmp_path):
    path = tmp_path / "new.key"
    write_new(path, "one", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(path, "two")
    assert path.read_text() == "one"


def test_the_last_lines_of_a_log_are_those_after_a_place_in_it(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path) == []
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    assert last_lines(path) == ["thr\ufffdee"]
    assert last_lines(path, 5, start=4) == ["two", "thr\ufffdee"]
    assert last_lines(path, start=path.stat().st_size) == []


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # a user whom the system does not know
    with pytest.raises(ConfigError, match=r"XDG_CACHE_HOME.* there is no home directory"):
        places.cache()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_that_a_failing_disk_does_not_read_or_write_is_named(tmp_path, monkeypatch, number):
    """The system says so of an open file without its name."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "rounds.jsonl"
    lines = Lines(path)
    lines.append({"round": 1})
    lines.flush()
    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    works = {
        path: lambda: read_record(path, ""),
        tmp_path / "new": lambda: write_aside(tmp_path / "new", b"text"),
        tmp_path: lambda: list_folder(tmp_path),
    }
    for place, work in works.items():
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            work()
        assert str(raised.value.filename) == str(place)


def test_a_folder_is_listed_by_a_pattern_in_order_and_one_that_is_not_there_is_empty(tmp_path):
    for name in ("b.json", "a.json", ".c.json", "d.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in list_folder(tmp_path, "*.json")] == [
        ".c.json",
        "a.json",
        "b.json",
    ]
    assert list_folder(tmp_path / "other") == []
