"""Clients that speak the protocol, and whose replies are not what they ought to be, over real
connections: each is refused or dropped with its reason, and the run is that of the others, also
when its server is killed once a reply was dropped, and continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import Federation, undisturbed

HONEST = 3


def change(up: Any, run: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the reply with other fields. run: changes of what it says of its training."""
    from fednet.algorithms.base import Run

    said = {"n": up.run.n, "steps": up.run.steps, "loss": up.run.loss, **(run or {})}
    return type(up)(**{"x": up.x, "s": up.s, "run": Run(**said), **fields})


def images(up: Any, x: Any, y: Any) -> Any:
    from fednet.algorithms.base import Samples

    return change(up, s=Samples(x, y))


# What a client makes of its reply, and what is said of that.
LIES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda up: images(up, up.s.x, up.s.y.float()), "field s: "),
    (lambda up: images(up, up.s.x[:1], up.s.y[:1].view(1, 1)), "field s: "),
    (lambda up: images(up, up.s.x, up.s.y + 3), "field s: samples of another form"),
    (lambda up: change(up, {"n": 1 << 62}), "samples, but has "),
    (lambda up: change(up, {"steps": 1 << 62}), "steps; "),
    (lambda up: change(up, x=up.x * 1e17), "security.max_norm: auto allows "),
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


def lie() -> None:
    """From now on the clients of this process say what `LIES` has for them."""
    from fednet.algorithms.feddc import FedDC

    honest = FedDC.client_update

    def client_update(self: Any, phase: int, client: Any, down: Any, host: Any) -> tuple[Any, Any]:
        kept, up = honest(self, phase, client, down, host)
        return kept, LIES[host.client_id - HONEST][0](up)

    FedDC.client_update = client_update  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_liars_are_left_out_also_after_a_kill(tmp_path):
    lost = [{"round": t, "client": c, "kind": "drop_before_sending"} for t in (1, 2) for c in LIARS]
    kill = [{"round": 1, "kind": "server_crash", "at": "evaluating"}]
    with Federation(tmp_path, **SETTINGS, faults={"schedule": kill}) as fed:
        fed.client(f"{LIARS[0]}-{LIARS[-1]}", state=tmp_path / "lies", before=lie)
        fed.begin(f"0-{HONEST - 1}")
        fed.finish()
    assert len(fed.events("started")) == 2
    assert fed.hashes() == undisturbed(**SETTINGS, faults={"schedule": lost})
    assert fed.completed() == [list(range(HONEST))] * 2
    assert fed.summary()["useful"] == fed.summary()["predicted"]
    rows = fed.lines("wire.jsonl")
    assert not any(r["useful"] for r in rows if r["client"] in LIARS and r["purpose"] == "train")
    dropped = {(e["round"], e["client"], e["reason"]) for e in fed.events("dropped")}
    for record in fed.rounds():
        for client, (_, why) in zip(LIARS, LIES, strict=True):
            reason = record["dropped"][str(client)]
            assert reason.startswith("refused: ")
            assert why in reason
            assert (record["round"], client, reason) in dropped
