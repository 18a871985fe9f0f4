"""A run's directory says by which format it was written; that of another release is refused."""

from __future__ import annotations

import pytest

from fednet.errors import StateError, Stopped
from fednet.files import read_record, write_record
from fednet.records.manifest import FORMAT, read_manifest
from tests.rooms import run


def stop(record: object) -> None:
    raise Stopped("enough")


def test_a_run_of_another_release_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, callback=stop)
    file = tmp_path / "r" / "checkpoint" / "manifest.json"
    write_record(file, {**read_record(file, ""), "format": FORMAT + 1})
    with pytest.raises(StateError, match="r: another release of fednet wrote this run"):
        read_manifest(file.parent)[0]
