"""What a process was writing when it was killed is gone once another works there."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fednet.algorithms.scaffold import Scaffold
from fednet.algorithms.state import write_state
from fednet.experiment.privacy import Noise
from fednet.experiment.rundir import clear_run
from fednet.experiment.store import ClientStore, Record
from fednet.files import ASIDE, clear_asides, write_aside
from fednet.server.checkpoint import Checkpoints, RunProgress
from fednet.server.rows import RowStore
from fednet.tensors import Layout, Slot, Tensors

ROW = Tensors.pack(Layout((Slot("w", (3,), "parameter"),)), {"w": torch.ones(3)})
RECORD = Record(algorithm=Scaffold.Client(c=ROW))


def killed(work: Callable[[], object], by: signal.Signals = signal.SIGKILL) -> None:
    """`work` in a process that is killed as a file is about to get its own name."""

    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        try:
            Path.replace = os.link = end  # type: ignore[assignment, method-assign]
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -by


def left(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if ASIDE.fullmatch(p.name)]


@pytest.mark.parametrize(
    ("work", "again"),
    [
        (
            lambda p: ClientStore(p, Scaffold.Client).save(3, "1-0-0", RECORD, ROW),
            lambda p: ClientStore(p, Scaffold.Client).prune(3, "2-0-0", ()),
        ),
        (lambda p: RowStore(p).write(ROW), RowStore),
        (lambda p: Checkpoints(p).save(RECORD, RunProgress(run="a"), {}), Checkpoints),
        (lambda p: write_aside(p / "a", "text"), clear_asides),
        (lambda p: write_aside(p / "a", "text", first=True), clear_asides),
        (lambda p: Noise(p / "noise.key"), clear_asides),
    ],
    ids=["state", "row", "checkpoint", "file", "first", "noise"],
)
def test_what_a_killed_process_was_writing_is_cleared_by_the_next(
    work: Callable[[Path], object],
    again: Callable[[Path], object],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    killed(lambda: work(folder))
    assert len(left(tmp_path)) == 1
    again(folder)
    assert left(tmp_path) == []


def test_a_state_of_which_half_was_written_is_cleared_with_the_earlier_ones(tmp_path: Path) -> None:
    """The package safetensors wrote it under a name that nothing cleared."""
    large = Tensors.pack(Layout((Slot("w", (9000,), "parameter"),)), {"w": torch.ones(9000)})
    store = ClientStore(tmp_path, Scaffold.Client)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process at its 9000th byte
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        store.save(3, "1-0-0", RECORD, large)

    killed(save, by=signal.SIGXFSZ)
    (half,) = (tmp_path / "client-3").iterdir()
    assert half.stat().st_size == 9000
    store.prune(3, "2-0-0", ())
    assert not half.exists()


def test_a_run_is_cleared_with_the_folders_that_its_server_writes(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "condensed", tmp_path / "personal", tmp_path / "mine"):
        folder.mkdir(exist_ok=True)
        (folder / ".a.safetensors.here.12").touch()
    clear_run(tmp_path)
    assert left(tmp_path) == left(tmp_path / "mine") != []


def test_what_a_signal_breaks_off_leaves_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_aside(tmp_path / "a", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_of_several_that_write_a_file_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert write_aside(path, "one", 0o600, first=True)
    assert not write_aside(path, "two", 0o600, first=True)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one", 0o600)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_said_of_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (path := tmp_path / "x").mkdir()
    for work in (
        lambda: write_aside(path, "{}"),
        lambda: write_state(path, RECORD.algorithm),
    ):
        with pytest.raises(OSError, match="directory") as said:
            work()
        assert said.value.filename == str(path)
        assert not left(tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space") as said:
        write_aside(tmp_path / "y", "{}", first=True)
    assert said.value.filename == str(tmp_path / "y")
