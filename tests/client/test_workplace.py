"""What a client process makes of the payload of a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet.client.work import TaskCancelled
from fednet.client.workplace import Workplace
from fednet.errors import RemoteProtocolError
from fednet.experiment import build
from fednet.experiment.store import ClientStore
from fednet.files import digest
from fednet.wire import messages as m
from tests.rooms import small


def test_a_payload_that_is_not_what_the_server_announced_is_refused_whoever_had_it_whole_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = build.build(small(), None)
    place = Workplace(exp, ClientStore(tmp_path, exp.algorithm.Client), None)  # type: ignore[arg-type]

    def reached(*_: object) -> None:
        raise TaskCancelled("the check is over")

    monkeypatch.setattr(place, "_grounded", reached)
    sound, damaged = memoryview(b"the model of round 1"), memoryview(b"the model of round 2")
    task = m.Task(key=m.Key(1, 0, 1, 0), form=[], check=digest([sound]), size=len(sound))
    for body, raises in ((sound, TaskCancelled), (damaged, RemoteProtocolError)):
        with pytest.raises(raises):
            place.do(task, body, lambda *_: None, lambda: False)
