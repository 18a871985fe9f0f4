"""A user's own files: what they are called, and what they may not end."""

from __future__ import annotations

from pathlib import Path

import pytest

import fednet
from fednet import loading
from fednet.loading import UserFileError, load_parts


@pytest.fixture
def alone(monkeypatch):
    """As in a process that has loaded nothing."""
    monkeypatch.setattr(loading, "_loaded", {})


def test_two_files_of_one_name_are_two(tmp_path, alone):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"WHICH = {folder!r}\n")
    first, second = load_parts([tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py"])
    assert loading.loaded() == {"mine.py": first.sha256, "mine-2.py": second.sha256}
    copy = tmp_path / "mine-2.py"
    copy.write_bytes(second.path.read_bytes())
    assert load_parts([copy]) == [second]  # the same file under another name
    assert loading.names(["x/a.py", "y/a.py", "z/a.py", "a-2.py"]) == [
        "a.py",
        "a-2.py",
        "a-3.py",
        "a-2-2.py",
    ]


def test_both_files_of_one_name_are_kept_with_the_run(tmp_path):
    config = {"name": "r", "rounds": 1, "clients": 2, "model": {"name": "mlp", "hidden": [4]}}
    data = {"dataset": "synthetic", "samples": 40, "shape": [4], "classes": 2}
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "mine.py")
        files[-1].write_text(f"WHICH = {str(tmp_path / folder)!r}\n")
    run = fednet.run({**config, "data": data}, load=files, in_process=True, out=tmp_path)
    kept = {p.name: p.read_text() for p in (Path(run.dir) / "code").glob("*.py")}
    assert kept == {"mine.py": files[0].read_text(), "mine-2.py": files[1].read_text()}
    assert "code/mine-2.py" in (Path(run.dir) / "config.yaml").read_text()


def test_a_file_that_exits_is_an_error_of_that_file(tmp_path, alone):
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserFileError, match=r"ends\.py: raised SystemExit: 0"):
        load_parts([tmp_path / "ends.py"])
