"""A run's directory says by which format it was written; that of another release is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet.errors import StateError, Stopped
from fednet.files import read_record, write_record
from fednet.records.manifest import FORMATS
from fednet.server.checkpoint import Checkpoints
from tests.rooms import run


def stop(record: object) -> None:
    raise Stopped("enough")


@pytest.mark.parametrize(
    ("form", "says"),
    [(FORMATS[1] + 1, "begun by a later release"), (FORMATS[0] - 1, "begun by an earlier release")],
)
def test_a_run_of_a_release_too_far_away_is_refused_in_a_sentence(
    form: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(tmp_path, callback=stop)
    file = tmp_path / "r" / "checkpoint" / "manifest.json"
    write_record(file, {**read_record(file, ""), "format": form})
    with pytest.raises(StateError, match=f"r: its run was {says} of fednet"):
        Checkpoints(file.parent).progress()
