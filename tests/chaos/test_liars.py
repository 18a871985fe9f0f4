"""Clients that speak the protocol as they should, and whose replies are not what they ought to be,
over real connections: each is refused or left out with its reason, and the run is that of the
others, also when its server is killed once a reply was left out, and goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import federation
from tests.federation import Federation

HONEST = 3


def said(up: Any, **changes: Any) -> Any:
    from fednet.algorithms.base import Run

    run = {"n": up.run.n, "steps": up.run.steps, "loss": up.run.loss, **changes}
    return type(up)(x=up.x, s=up.s, run=Run(**run))


def images(up: Any, x: Any, y: Any) -> Any:
    from fednet.algorithms.base import Samples

    return type(up)(x=up.x, s=Samples(x, y), run=up.run)


# What a client makes of its reply, and what is said of that.
LIES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda up: images(up, up.s.x, up.s.y.float()), "field s: "),
    (lambda up: images(up, up.s.x[:1], up.s.y[:1].view(1, 1)), "field s: "),
    (lambda up: images(up, up.s.x, up.s.y + 3), "field s: labels from "),
    (lambda up: said(up, n=1 << 62), "samples; there are "),
    (lambda up: said(up, steps=1 << 62), "steps; "),
    (
        lambda up: type(up)(x=up.x * 1e17, s=up.s, run=up.run),
        "security.max_norm: auto allows ",
    ),
]
LIARS = range(HONEST, HONEST + len(LIES))
SETTINGS: dict[str, Any] = {
    "algorithm": {"name": "feddc", "iterations": 1, "ft_epochs": 1},
    "clients": HONEST + len(LIES),
    "rounds": 2,
    "data": {"classes": 3},
    "checkpoint": {"every": 2},
    "round": {"lost": {"closed": 1.0}},
}


def lying(ids: str, run: Path, state: Path) -> int:
    """A client process whose clients say what `LIES` has for them."""
    from fednet.algorithms.feddc import FedDC

    honest = FedDC.client_update

    def local(self: Any, phase: int, client: Any, down: Any, host: Any) -> tuple[Any, Any]:
        kept, up = honest(self, phase, client, down, host)
        return kept, LIES[host.client_id - HONEST][0](up)

    FedDC.client_update = local  # type: ignore[method-assign]
    return federation.client(ids, run, None, state)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_liars_are_left_out_also_after_a_kill(tmp_path: Path) -> None:
    ids = f"{LIARS[0]}-{LIARS[-1]}"
    lost = [{"round": t, "client": c, "kind": "drop_before_sending"} for t in (1, 2) for c in LIARS]
    with Federation(tmp_path / "alone", **SETTINGS, faults={"schedule": lost}) as alone:
        alone.client(f"0-{LIARS[-1]}")
        alone.server()
        alone.finish()
    kill = [{"round": 1, "kind": "server_crash", "at": "evaluating"}]
    with Federation(tmp_path / "lied_to", **SETTINGS, faults={"schedule": kill}) as fed:
        fed.client(f"0-{HONEST - 1}")
        fed.fork(lying, ids, fed.path, tmp_path / "lies")
        fed.server()
        fed.finish()
    assert len(fed.events("started")) == 2
    assert fed.hashes() == alone.hashes()
    assert [r["completed"] for r in fed.rounds()] == [list(range(HONEST))] * 2
    said = json.loads((fed.path / "summary.json").read_text())
    assert said["useful"] == said["predicted"]
    rows = fed.lines("wire.jsonl")
    assert not any(r["useful"] for r in rows if r["client"] in LIARS and r["purpose"] == "train")
    for record in fed.rounds():
        for client, (_, why) in zip(LIARS, LIES, strict=True):
            reason = record["dropped"][str(client)]
            assert reason.startswith("refused: ")
            assert why in reason
            told = [
                e["round"]
                for e in fed.events("dropped")
                if e["client"] == client and e["reason"] == reason
            ]
            assert record["round"] in told
