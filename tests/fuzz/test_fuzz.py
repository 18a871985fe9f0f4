"""Any bytes are accepted or refused: messages to either side, and files that are read.

    pytest tests/fuzz                                every kept input, and a few new ones of each
    FEDNET_FUZZ_EXAMPLES=100000 pytest tests/fuzz    so many new ones

An input that failed is kept in `corpus/TARGET/`.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("FEDNET_FUZZ_EXAMPLES", "25"))


@functools.cache
def inputs_of(name: str) -> list[bytes]:
    """Return a target's seeds, and the inputs that are kept."""
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]
    assert kept, "the corpus is not there"
    return [*TARGETS[name].seeds(), *kept]


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_accepted_or_refused(name):
    for data in inputs_of(name):
        TARGETS[name].run(data)


@pytest.mark.timeout(0 if EXAMPLES > 25 else 300)
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_an_input_made_from_them_is_accepted_or_refused(name, seed):
    target, draw, inputs = TARGETS[name], random.Random(seed), inputs_of(name)
    data = mutated(draw, draw.choice(inputs), inputs, target.framed)
    note(data)
    target.run(data)
