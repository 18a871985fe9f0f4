from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fednet.errors import CannotGoOn
from fednet.sweep import claims
from tests.processes import Rig, until


def holders(folder, *processes, host=None):
    path = sorted(folder.glob("*.claim.*"))[-1]
    said = json.loads(path.read_text())
    path.write_text(json.dumps({"host": host or said["host"], "processes": list(processes)}))
    return path


def test_a_claim_is_given_once(tmp_path):
    assert claims.claim(tmp_path, "a") is not None
    assert claims.claim(tmp_path, "a") is None
    assert claims.claim(tmp_path, "b") is not None
    assert f"process {os.getpid()}" in (claims.holder(tmp_path, "a") or "")


def test_a_released_claim_is_free(tmp_path):
    first = claims.claim(tmp_path, "a")
    assert first is not None
    first.release()
    assert claims.holder(tmp_path, "a") is None
    assert claims.claim(tmp_path, "a") is not None


def test_of_a_claim_whose_folder_is_deleted_its_holder_is_told_and_makes_it_not_anew(tmp_path):
    held = claims.claim(tmp_path / "books", "work")
    shutil.rmtree(tmp_path / "books")
    with pytest.raises(CannotGoOn, match=r"work.claim.0 was deleted or moved during the sweep"):
        held.beat()
    held.release()
    assert not (tmp_path / "books").exists()


def test_the_claim_of_a_process_that_ended_is_free(tmp_path):
    claims.claim(tmp_path, "a")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holders(tmp_path, {"pid": gone.pid, "started": "1"})
    assert claims.claim(tmp_path, "a") is not None


def test_a_process_id_used_again_is_not_the_holder(tmp_path):
    claims.claim(tmp_path, "a")
    holders(tmp_path, {"pid": os.getpid(), "started": "another time"})
    assert claims.claim(tmp_path, "a") is not None


def test_work_whose_own_process_still_runs_is_not_free(tmp_path):
    held = claims.claim(tmp_path, "a")
    assert held is not None
    held.add(os.getpid())
    said = json.loads(held.path.read_text())["processes"]
    # The sweep died, the run it started did not.
    holders(tmp_path, {"pid": said[0]["pid"], "started": "gone"}, said[1])
    assert claims.claim(tmp_path, "a") is None


def test_on_another_machine_the_age_of_the_last_touch_decides(tmp_path):
    claims.claim(tmp_path, "a")
    path = holders(tmp_path, {"pid": 1, "started": "1"}, host="far")
    assert claims.claim(tmp_path, "a") is None
    os.utime(path, (path.stat().st_mtime - 200,) * 2)
    assert claims.claim(tmp_path, "a") is not None
    assert claims.claim(tmp_path, "a") is None


def test_of_two_that_find_the_holder_gone_one_gets_the_claim(tmp_path, monkeypatch):
    claims.claim(tmp_path, "a")
    holders(tmp_path)
    stale = claims._claims(tmp_path, "a")
    # Both looked before either claimed.
    monkeypatch.setattr(claims, "_claims", lambda folder, work: stale)
    assert [claims.claim(tmp_path, "a") is not None for _ in range(2)] == [True, False]


def drives(folder):
    held = claims.claim(folder, "a")
    assert held is not None
    with open(os.devnull, "wb") as log:
        run = held.start([sys.executable, "-c", "import signal; signal.pause()"], log)
    print(run.pid, flush=True)
    signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_sweep_that_is_killed_takes_its_runs_along_and_leaves_them_free(tmp_path):
    with Rig(tmp_path) as rig:
        driver = rig.fork(drives, tmp_path)
        until(driver.said, "its run was started", driver)
        run = int(driver.said())
        rig.lose(driver)
        until(lambda: claims.started_at(run) is None, "its run has ended")
    assert claims.claim(tmp_path, "a") is not None
