"""Any bytes are taken or refused: what is sent to either side, and the files that are read.

    pytest tests/fuzz
        every kept input, and a few new ones of each
    FEDNET_FUZZ_S=600 pytest -m slow tests/fuzz -s
        so many seconds a target; what fails is written to its corpus

An input that failed stays in `corpus/TARGET/`, under the name of its SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, shape_of

CORPUS = Path(__file__).parent / "corpus"


@functools.cache
def inputs_of(name: str) -> list[bytes]:
    """Return a target's seeds, and the inputs that are kept."""
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]
    assert kept, "the corpus is not there"
    return [*TARGETS[name].seeds(), *kept]


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_taken_or_refused(name: str) -> None:
    for data in inputs_of(name):
        assert isinstance(TARGETS[name].run(data), str)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_what_is_made_from_them_is_taken_or_refused(name: str, seed: int) -> None:
    target, draw, inputs = TARGETS[name], random.Random(seed), inputs_of(name)
    target.run(mutated(draw, draw.choice(inputs), inputs, target.framed))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", TARGETS)
def test_for_as_long_as_asked(name: str) -> None:
    """Inputs with new outcomes are changed further; a failure is kept, as short as leaving out
    pieces makes it.
    """
    target, seconds = TARGETS[name], float(os.environ.get("FEDNET_FUZZ_S", "30"))
    seed = int(os.environ.get("FEDNET_FUZZ_SEED", time.time_ns()))
    draw, inputs = random.Random(seed), list(inputs_of(name))
    outcomes, failures = {target.run(data) for data in inputs}, dict[str, str]()
    tried, end = 0, time.monotonic() + seconds
    while time.monotonic() < end and len(failures) < 5:
        data = mutated(draw, draw.choice(inputs), inputs, target.framed)
        tried += 1
        try:
            word = target.run(data)
        except Exception as broken:
            why = f"{type(broken).__name__}: {broken}"
            if shape_of(why) not in failures:
                least = smaller(target.run, data, type(broken), time.monotonic() + 5)
                path = CORPUS / name / f"{hashlib.sha256(least).hexdigest()[:12]}.bin"
                path.write_bytes(least)
                failures[shape_of(why)] = f"{path}: {why}"
            continue
        if word not in outcomes:
            outcomes.add(word)
            inputs.append(data)
    print(f"{name}: {tried} inputs, {len(outcomes)} outcomes, seed {seed}")
    assert not failures, "\n".join(failures.values())


def smaller(run: Callable[[bytes], str], data: bytes, kind: type[Exception], end: float) -> bytes:
    """Return `data` without the pieces that its failure does not need."""
    size = len(data) // 2
    while size and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            less = data[:at] + data[at + size :]
            try:
                run(less)
            except kind:
                data = less
                continue
            except Exception:
                pass
            at += size
        size //= 2
    return data
