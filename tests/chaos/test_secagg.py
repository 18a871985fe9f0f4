"""Secure aggregation between real processes: the bits of one process, clients and servers that are
killed at each step, and what a server holds meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednet
from fednet import config as configuration
from fednet.experiment import build
from fednet.experiment.store import LocalModel, read_state
from fednet.secagg import fixed
from tests.federation import Federation

pytestmark = pytest.mark.long
QUICK = {"lost": {"closed": 0.6}}
STEPS = {"secagg": 5, "lightsecagg": 4}


def masked(protocol: str = "secagg", **more: Any) -> dict[str, Any]:
    section = {"protocol": protocol, "clip": 4.0, "colluding": 0.25}
    return {"privacy": {"secagg": section}, "round": QUICK, "rounds": 2, **more}


def strikes(*planned: tuple[int, int, int], kind: str = "drop_before_training", **more: Any):
    """(round, client, exchange) of faults."""
    rows = [{"round": r, "client": c, "exchange": x, "kind": kind, **more} for r, c, x in planned]
    return {"faults": {"schedule": rows}}


def in_process(out: Path, **changes: Any) -> list[tuple[int, str]]:
    """The hashes of the same run in this one process."""
    mapping = {**Federation(out, **changes).mapping, "report": False}
    made = fednet.run(mapping, in_process=True, out=out)
    return [(r.round, r.model_sha256) for r in made.rounds]


def models(fed: Federation) -> list[tuple[int, str]]:
    return [(r, model) for r, model, _ in fed.hashes()]


@pytest.mark.parametrize("protocol", ["secagg", "secagg+", "lightsecagg"])
def test_the_bits_are_those_of_one_process_with_whatever_drops_out(tmp_path, protocol):
    sets = masked(protocol, **strikes((1, 2, 1), (2, 0, 2)))
    with Federation(tmp_path / "many", **sets) as fed:
        for ids in ("0-1", "2", "3"):
            fed.client(ids)
        fed.server()
        fed.finish()
        assert [r["completed"] for r in fed.rounds()] == [[0, 1, 3], [1, 2, 3]]
        assert models(fed) == in_process(tmp_path / "one", **sets)
        fed.check()


def test_workers_of_one_command_over_encrypted_connections_give_the_same_bits(tmp_path):
    """Two processes host all clients: each step goes to the one that has the client's keys."""
    with Federation(tmp_path / "many", **masked("secagg+", security={"curve": True})) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
        assert not fed.events("failed")
        assert models(fed) == in_process(tmp_path / "one", **masked("secagg"))


@pytest.mark.parametrize(
    ("protocol", "exchange"), [(p, x) for p, n in STEPS.items() for x in range(n)]
)
def test_a_client_killed_at_a_step_has_dropped_out_there(tmp_path, protocol, exchange):
    """A planned delay keeps its answer back, so that it can be killed with nothing said."""
    late = strikes((1, 1, exchange), kind="delay", seconds=60)
    with Federation(tmp_path / "killed", **masked(protocol, **late)) as fed:
        for ids in ("0", "2-3"):
            fed.client(ids)
        one = fed.client("1")
        fed.server()
        fed.until(lambda: fed.events("fault"))
        fed.lose(one)
        fed.finish()
        lost = strikes((1, 1, exchange), (2, 1, 0))
        assert models(fed) == in_process(tmp_path / "one", **masked(protocol, **lost))
        counted = [0, 2, 3] if exchange <= 2 else [0, 1, 2, 3]
        assert [r["completed"] for r in fed.rounds()] == [counted, [0, 2, 3]]
        assert not any(r["void"] for r in fed.rounds())


@pytest.mark.parametrize("point", ["receiving", "spooling", "aggregating", "checkpointing"])
def test_a_server_killed_in_a_round_ends_it_with_the_clients_that_live_on(tmp_path, point):
    crash = {"faults": {"schedule": [{"round": 1, "kind": "server_crash", "at": point}]}}
    with Federation(tmp_path / "crash", **masked(**crash)) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        assert fed.faults() == [(1, -1, f"server_crash {point}")]
        assert not any(r["void"] for r in fed.rounds())
        assert models(fed) == in_process(tmp_path / "one", **masked())


def test_a_round_whose_clients_died_after_their_vectors_had_left_is_void(tmp_path):
    """Server and clients are killed before the unmasking: no second sum is made of that round."""
    late = strikes((1, 0, 4), kind="delay", seconds=60)
    with Federation(tmp_path, **masked(**late)) as fed:
        fed.client("0-3")
        fed.server()
        fed.until(lambda: fed.events("fault"))
        for process in tuple(fed.all):
            fed.lose(process)
        fed.client("0-3")
        fed.server(resume=True)
        fed.finish()
        assert [r["void"] for r in fed.rounds()] == [True, False]
        assert fed.rounds()[1]["completed"] == [0, 1, 2, 3]
        reasons = " ".join(fed.rounds()[0]["dropped"].values())
        assert "keys of round 1 were with another process" in reasons


# -- what a server holds ---------------------------------------------------------------------------
def regions(pid: int) -> Iterator[bytes]:
    """What is in a process's memory that it may read."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, rights, *_ = line.split()
            if "r" not in rights or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            if "w" not in rights and ".so" in line:  # gigabytes of code, as it lies on the disk
                continue
            start, end = (int(x, 16) for x in where.split("-"))
            try:
                memory.seek(start)
                yield memory.read(end - start)
            except (OSError, ValueError):
                continue  # a page that no file stands behind any more


def found(needles: dict[str, bytes], haystack: Iterator[bytes]) -> set[str]:
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


@pytest.mark.parametrize("protocol", ["none", "secagg", "lightsecagg"])
def test_a_server_holds_no_single_vector_in_memory_spool_or_checkpoint(tmp_path, protocol):
    """Looked for in the server when all vectors have come, and again at the end. Without masks the
    same search finds them; with masks it finds them at the client.
    """
    keep = {"evaluate": {"keep_local": "always"}}
    sets = masked(protocol, **keep, checkpoint={"every": 1})
    if protocol != "none":
        late = strikes((1, 1, STEPS[protocol] - 1), kind="delay", seconds=4)
        sets |= late
    else:
        sets["faults"] = {"schedule": [{"round": 1, "client": 1, "kind": "delay", "seconds": 4}]}
    with Federation(tmp_path, **sets) as fed:
        fed.client("0")
        fed.client("1-3")
        server = fed.server()
        fed.until(lambda: fed.events("fault"))
        path = fed.until(lambda: next(fed.path.glob("state/*/client-0/*.local.safetensors"), None))
        exp = build.build(configuration.from_mapping(fed.mapping))
        x = exp.agreed.vector.numpy()
        y = read_state(path, LocalModel).x.vector.numpy()
        plan = configuration.from_mapping({**fed.mapping, **masked("secagg")})
        point = build.build(plan).algorithm.plan.point["weighted"]
        needles = forms(x, y, point, len(exp.federation.parts[0]))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            here = found(needles, regions(server.pid))
            here |= found(
                needles, (p.read_bytes() for p in fed.path.glob("checkpoint/**/*") if p.is_file())
            )
        finally:
            os.kill(server.pid, signal.SIGCONT)
        fed.finish()
        files = (p for p in fed.path.rglob("*") if p.is_file() and "state" not in p.parts)
        here |= found(needles, (p.read_bytes() for p in files))
    if protocol == "none":
        assert "weights <f4" in here
    else:
        assert here == set()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exchange", range(STEPS["secagg"]))
def test_a_client_that_is_awaited_for_ever_is_not_awaited_once_another_is_in_its_place(
    tmp_path, exchange
):
    """Its keys are gone with it: it has dropped out of the round, and the next has it again."""
    late = strikes((1, 1, exchange), kind="delay", seconds=60)
    patience = {"round": {"lost": {"closed": None}}}
    with Federation(tmp_path / "killed", **{**masked("secagg", **late), **patience}) as fed:
        for ids in ("0", "2-3"):
            fed.client(ids)
        one = fed.client("1")
        fed.server()
        fed.until(lambda: fed.events("fault"))
        fed.lose(one)
        fed.client("1")
        fed.finish()
        assert not any(r["void"] for r in fed.rounds())
        assert fed.rounds()[1]["completed"] == [0, 1, 2, 3]
