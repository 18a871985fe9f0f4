"""`fednet.run` from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import fednet
from tests.federation import settings


@pytest.mark.parametrize("in_process", [True, False])
def test_a_run_goes_where_the_commands_write_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNET_OUT", "elsewhere")
    made = fednet.run(settings(rounds=1), in_process=in_process)
    assert made.dir.resolve() == tmp_path / "elsewhere" / "run"
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]
