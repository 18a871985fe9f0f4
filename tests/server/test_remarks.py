"""What a run says of its configuration when it starts."""

from __future__ import annotations

import pytest

from fednet.config import from_mapping
from fednet.server.remarks import without_effect


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"aggregation": {"bound": 1.0}}, ["aggregation.bound has no effect", "rule is mean"]),
        (
            {"privacy": {"secagg": {"counts": "masked", "bits": 20}}},
            ["privacy.secagg.bits and privacy.secagg.counts have no effect", "protocol is none"],
        ),
        ({"faults": {"malicious": {"strength": 2.0}}}, ["malicious.strength has", "clients is 0"]),
        ({"privacy": {"clip": 1.0, "where": "client"}}, ["privacy.where has", "noise is 0"]),
        ({"link": {"step_ms": "uniform(1, 2)"}}, ["link.step_ms has", "clock is real"]),
        ({"aggregation": {"rule": "norm_bound", "bound": 1.0}}, []),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "where": "client"}}, []),
        ({"privacy": {"secagg": {"protocol": "secagg", "clip": 1.0}}}, []),
        ({"link": {"clock": "virtual", "step_ms": 3.0}}, []),
    ],
)
def test_a_key_of_a_protection_or_a_clock_that_is_off_is_remarked_on(given, says):
    said = " ".join(without_effect(from_mapping(given)))
    assert all(words in said for words in says)
    assert bool(said) == bool(says)
