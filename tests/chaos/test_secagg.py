"""Secure aggregation between real processes: the bits of one process, clients and servers that are
killed at each step, and what a server holds meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednet import config as configuration
from fednet.experiment import build
from fednet.experiment.store import LocalModel, read_state
from fednet.secagg import fixed
from fednet.server.faults import POINTS
from tests.processes import Federation, crashes, finished, undisturbed


def masked(protocol: str = "secagg", **more: Any) -> dict[str, Any]:
    section = {"protocol": protocol, "clip": 4.0}
    lost = {"lost": {"closed": 0.6}}
    return {"privacy": {"secagg": section}, "round": lost, "rounds": 2, **more}


def strikes(*planned: tuple[int, int, int], kind: str = "drop_before_training", **more: Any):
    """(round, client, exchange) of faults."""
    rows = [{"round": r, "client": c, "exchange": x, "kind": kind, **more} for r, c, x in planned]
    return {"faults": {"schedule": rows}}


def late(exchange: int, client: int = 1, seconds: float = 60) -> dict[str, Any]:
    """The client's answer in round 1 is kept back, so that something can be killed meanwhile."""
    return strikes((1, client, exchange), kind="delay", seconds=seconds)


def check_models(fed: Federation, **changes: Any) -> None:
    """They are those of the same run in one process."""
    assert [h[:2] for h in fed.hashes()] == [h[:2] for h in undisturbed(**changes)]


@pytest.mark.parametrize("protocol", ["secagg", "secagg+"])
def test_the_bits_are_those_of_one_process_with_all_that_drops_out(tmp_path, protocol):
    changes = masked(protocol, **strikes((1, 2, 1), (2, 0, 2)))
    fed = finished(tmp_path, "0-1", "2", "3", **changes)
    assert fed.completed() == [[0, 1, 3], [1, 2, 3]]
    check_models(fed, **changes)
    fed.check()


def test_workers_of_one_command_over_encrypted_connections_give_the_same_bits(tmp_path):
    """Two processes host all clients: each step goes to the one that has the client's keys."""
    with Federation(tmp_path, **masked("secagg+", security={"curve": True})) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
        assert not fed.events("failed")
        check_models(fed, **masked("secagg"))


@pytest.mark.parametrize("exchange", [1, 2, 4])
def test_a_client_killed_at_a_step_has_dropped_out_there(tmp_path, exchange):
    with Federation(tmp_path, **masked(**late(exchange))) as fed:
        one = fed.client("1")
        fed.begin("0", "2-3")
        fed.until(lambda: fed.events("fault"))
        fed.lose(one)
        fed.finish()
        check_models(fed, **masked(**strikes((1, 1, exchange), (2, 1, 0))))
        counted = [0, 2, 3] if exchange <= 2 else [0, 1, 2, 3]
        assert fed.completed() == [counted, [0, 2, 3]]
        assert not any(r["void"] for r in fed.rounds())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exchange", [1, 4])
def test_a_client_is_not_awaited_for_ever_once_another_is_in_its_place(tmp_path, exchange):
    """Its keys are gone with it: it has dropped out of the round, and the next has it again."""
    changes = {**masked(**late(exchange)), "round": {"lost": {"closed": None}}}
    with Federation(tmp_path, **changes) as fed:
        one = fed.client("1")
        fed.begin("0", "2-3")
        fed.until(lambda: fed.events("fault"))
        fed.lose(one)
        fed.client("1")
        fed.finish()
        assert not any(r["void"] for r in fed.rounds())
        assert fed.completed()[1] == [0, 1, 2, 3]


def test_a_server_killed_at_every_point_ends_its_round_with_the_clients_that_live_on(tmp_path):
    """A round whose manifest is written is not passed again, so that the last point is struck
    after the first round.
    """
    again = [point for point in POINTS if point != "between"]
    planned = crashes(*[(2, point) for point in again], (1, "between"))
    fed = finished(tmp_path, **masked(faults=planned))
    struck = {(2, -1, f"server_crash {point}") for point in again}
    assert {*fed.faults()} == {*struck, (1, -1, "server_crash between")}
    assert not any(r["void"] for r in fed.rounds())
    check_models(fed, **masked())


@pytest.mark.parametrize("exchange", [1, 4])
def test_a_run_killed_whole_discards_the_round_that_was_under_way(tmp_path, exchange):
    """Its keys are gone, and no second sum is made of vectors that have left."""
    with Federation(tmp_path, **masked(**late(exchange, client=0))) as fed:
        fed.begin("0-3")
        fed.until(lambda: fed.events("fault"))
        for process in tuple(fed.all):
            fed.lose(process)
        fed.begin("0-3", resume=True)
        fed.finish()
        assert [r["void"] for r in fed.rounds()] == [True, False]
        assert fed.completed()[1] == [0, 1, 2, 3]
        reasons = " ".join(fed.rounds()[0]["dropped"].values())
        assert "keys of round 1 were with another process" in reasons


# -- what a server holds ---------------------------------------------------------------------------
def regions(pid: int) -> Iterator[bytes]:
    """Yield what is in a process's memory that it may read."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, rights, *_ = line.split()
            if "r" not in rights or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            if "w" not in rights and ".so" in line:  # gigabytes of code, as on the disk
                continue
            start, end = (int(x, 16) for x in where.split("-"))
            try:
                memory.seek(start)
                yield memory.read(end - start)
            except (OSError, ValueError):
                continue  # a page whose file is gone


def found(needles: dict[str, bytes], haystack: Iterable[bytes]) -> set[str]:
    seen = set[str]()
    for part in haystack:
        seen |= {name for name, needle in needles.items() if needle in part}
    return seen


def forms(x: np.ndarray, y: np.ndarray, point: fixed.FixedPoint, weight: int) -> dict[str, bytes]:
    """Some entries of a client's vector in every form that it could have: trained weights y, update
    y - x, and the update in fixed point.
    """
    at = slice(200, 208)
    update = y - x
    whole = point.encode(update, weight)[:-1]
    values = {"weights": y, "update": update}
    made = {
        f"{n} {t}": v[at].astype(t).tobytes() for n, v in values.items() for t in ("<f4", "<f8")
    }
    ring = fixed.residues(whole[at], 1 << 32)
    made |= {"fixed i8": whole[at].tobytes(), "ring u4": fixed.pack(ring, 4)}
    made |= {"ring u8": ring.tobytes(), "ring i4": whole[at].astype("<i4").tobytes()}
    return made


@pytest.mark.parametrize("protocol", ["none", "secagg"])
def test_a_server_holds_no_single_vector_in_memory_log_or_checkpoint(tmp_path, protocol):
    """Searched in the server when all vectors have come, and at the end. Without masks the same
    search finds them.
    """
    delay = late(4, seconds=4)
    if protocol == "none":
        del delay["faults"]["schedule"][0]["exchange"]
    keep = {"evaluate": {"clients": "auto"}, "checkpoint": {"every": 1}}
    with Federation(tmp_path, **masked(protocol, **keep, **delay)) as fed:
        fed.client("0")
        server = fed.begin("1-3")
        fed.until(lambda: fed.events("fault"))
        path = fed.until(lambda: next(fed.path.glob("state/*/client-0/*.local.safetensors"), None))
        exp = build.build(configuration.from_mapping(fed.mapping))
        x = exp.initial_shared.vector.numpy()
        y = read_state(path, LocalModel).x.vector.numpy()
        plan = configuration.from_mapping({**fed.mapping, **masked("secagg")})
        point = build.build(plan).algorithm.point["weighted"]
        needles = forms(x, y, point, len(exp.federation.parts[0]))
        if protocol == "none":  # the client's file is there before its reply has come
            fed.until(lambda: found(needles, texts(fed)))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            here = found(needles, regions(server.pid)) | found(needles, texts(fed))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        fed.finish()
        here |= found(needles, texts(fed))
    if protocol == "none":
        assert "weights <f4" in here
    else:
        assert here == set()


def texts(fed: Federation) -> Iterator[bytes]:
    """Yield the server's files."""
    for path in fed.path.rglob("*"):
        if path.is_file() and "state" not in path.parts:
            yield path.read_bytes()
