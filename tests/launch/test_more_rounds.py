"""A run that goes on with other rounds than it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet.errors import ConfigError
from fednet.records.manifest import read_manifest
from tests.rooms import hashes, lines, run


@pytest.mark.parametrize("schedule", ["constant", "exponential(0.5)", "step(1, 0.5)"])
def test_a_run_with_more_rounds_has_the_bits_of_one_that_had_them_from_the_start(
    tmp_path: Path, schedule: str
) -> None:
    train = {"train": {"schedule": schedule}}
    whole = run(tmp_path / "whole", rounds=4, **train)
    run(tmp_path / "more", rounds=2, **train)
    more = run(tmp_path / "more", rounds=4, resume=True, **train)
    assert len(set(hashes(whole))) == 4
    assert hashes(more) == hashes(whole)
    # The run's clock goes on where it was.
    taken = sum(row["seconds"] for row in lines(more / "rounds.jsonl"))
    assert read_manifest(more / "checkpoint")[0].seconds == pytest.approx(taken)


def test_where_the_rates_depend_on_all_rounds_a_run_cannot_have_other_rounds(
    tmp_path: Path,
) -> None:
    train = {"train": {"schedule": "cosine"}}
    first = run(tmp_path, rounds=3, **train)
    before = hashes(first)
    for rounds in (2, 6):
        with pytest.raises(ConfigError, match=r"train.schedule: cosine .* Keep rounds=3"):
            run(tmp_path, rounds=rounds, resume=True, **train)
    assert hashes(run(tmp_path, rounds=3, resume=True, **train)) == before
