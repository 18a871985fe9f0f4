"""What a client process makes of the payload of a task."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from fednet.client import workplace
from fednet.client.work import TaskCancelled
from fednet.client.workplace import Workplace
from fednet.experiment import build
from fednet.experiment.store import ClientStore
from fednet.files import digest
from fednet.wire import messages as m
from tests.rooms import small


def test_a_broadcast_for_many_is_checked_once_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = build.build(small(), None)
    place = Workplace(exp, ClientStore(tmp_path, exp.algorithm.Client), None)  # type: ignore[arg-type]
    body, checked = memoryview(b"the model of round 1"), []

    def counted(parts: list[memoryview]) -> bytes:
        checked.append(parts)
        return digest(parts)

    def cancelled(*_: object) -> None:
        raise TaskCancelled("the check is over")

    check = digest([body])
    monkeypatch.setattr(workplace, "digest", counted)
    monkeypatch.setattr(place, "_grounded", cancelled)
    for client in range(3):
        task = m.Task(key=m.Key(1, 0, 1, client), form=[], check=check, size=len(body))
        with pytest.raises(TaskCancelled):
            place.do(task, body, lambda *_: None, lambda: False)
    assert len(checked) == 1
    checked.clear()
    gone = weakref.ref(body)
    del body
    gc.collect()
    assert gone() is None
