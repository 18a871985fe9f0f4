from __future__ import annotations

from types import SimpleNamespace

from fednet.engine.summary import predicted


class Down: ...


class Up: ...


class Gift: ...


SIZES = {Down: {"state": 100}, Up: {"delta": 90, "statistics": 24}, Gift: {"shared": 7}}


def experiment(enrolment=None):
    method = SimpleNamespace(exchanges=(SimpleNamespace(down=Down, up=Up),), Enrolment=enrolment)
    return SimpleNamespace(federation=object(), algorithm=method, predicted=lambda kind, way, client: SIZES[kind])


def test_bytes_are_foretold_for_those_who_completed():
    rounds = [{"completed": [0, 2]}, {"completed": []}, {"completed": [2]}]
    assert predicted(experiment(), rounds) == {"up": {"delta": 270, "statistics": 72}, "down": {"state": 300}}


def test_an_enrolment_is_foretold_once_a_client():
    rounds = [{"completed": [0, 2]}, {"completed": [2]}]
    assert predicted(experiment(Gift), rounds)["down"] == {"shared": 14, "state": 300}


def test_nothing_is_foretold_where_the_partition_is_not_known():
    assert predicted(SimpleNamespace(federation=None), []) is None
