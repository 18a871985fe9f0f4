"""Which runs a client can go on with where its state is not at hand."""

from __future__ import annotations

import pytest

from fednet.client.workplace import Workplace
from fednet.experiment import build
from fednet.experiment.store import ClientStore
from tests.rooms import small

TOPK = {"state": ["topk(0.1)"]}
NORM = {"name": "mlp", "hidden": [8], "norm": "batch"}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"algorithm": {"name": "scaffold"}}, True),
        ({"wire": {"up": TOPK}}, True),
        ({"wire": {"down": TOPK}}, False),
        ({"model": NORM}, False),
        ({"model": {**NORM, "buffers": "local"}}, True),
    ],
    ids=["nothing", "the method's", "left out", "the server's", "buffers", "own buffers"],
)
def test_state_is_needed_where_training_starts_from_it(tmp_path, changes, needed):
    exp = build.build(small(**changes), None)
    store = ClientStore(tmp_path, exp.algorithm.Client)
    place = Workplace(exp, store, lambda client: exp.federation.site(client, "cpu"))
    assert place.needs_state is needed
