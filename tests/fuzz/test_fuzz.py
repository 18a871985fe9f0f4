"""Whatever the bytes, they are taken or refused: what is sent to either side, and the files that
are read.

    pytest tests/fuzz
        every kept input, and a few hundred new ones of each
    FEDNET_FUZZ_S=600 pytest -m slow tests/fuzz -s
        so many seconds a target; what fails is written to its corpus
    FEDNET_FUZZ_S=60 FEDNET_FUZZ_KEEP=1 pytest -m slow ...
        keeps an input for each new outcome too

An input that failed stays in `corpus/TARGET/` for good, under the name of its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, shape_of

CORPUS = Path(__file__).parent / "corpus"
KEPT = 40  # inputs of a target that are kept for their outcome


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]


def keep(name: str, data: bytes) -> Path:
    path = CORPUS / name / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_taken_or_refused(name):
    found = corpus(name)
    assert found, "the corpus is not there"
    for data in [*TARGETS[name].seeds(), *found]:
        assert isinstance(TARGETS[name].run(data), str)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_what_is_made_from_them_is_taken_or_refused(name, seed):
    target, draw = TARGETS[name], random.Random(seed)
    inputs = [*target.seeds(), *corpus(name)]
    target.run(mutated(draw, draw.choice(inputs), inputs, target.framed))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", TARGETS)
def test_for_as_long_as_it_is_told(name):
    """New outcomes are inputs to go on from; a failure is kept, as short as leaving out pieces
    makes it.
    """
    target, seconds = TARGETS[name], float(os.environ.get("FEDNET_FUZZ_S", "30"))
    seed = int(os.environ.get("FEDNET_FUZZ_SEED", time.time_ns()))
    draw, inputs, outcomes, tried = (
        random.Random(seed),
        [*target.seeds(), *corpus(name)],
        dict[str, bytes](),
        0,
    )
    for data in inputs:
        outcomes.setdefault(target.run(data), data)
    known, failures, end = set(outcomes), dict[str, str](), time.monotonic() + seconds
    while time.monotonic() < end and len(failures) < 5:
        data = mutated(draw, draw.choice(inputs), inputs, target.framed)
        tried += 1
        try:
            word = target.run(data)
        except Exception as broken:
            why = f"{type(broken).__name__}: {broken}"
            if shape_of(why) not in failures:
                least = smaller(target.run, data, type(broken), time.monotonic() + 5)
                failures[shape_of(why)] = f"{keep(name, least)}: {why}"
            continue
        if word not in outcomes:
            outcomes[word] = data
            inputs.append(data)
    if os.environ.get("FEDNET_FUZZ_KEEP"):
        for word in [w for w in outcomes if w not in known][: max(0, KEPT - len(corpus(name)))]:
            if len(outcomes[word]) <= 4096:
                keep(name, outcomes[word])
    print(f"{name}: {tried} inputs, {len(outcomes)} outcomes, seed {seed}")
    assert not failures, "\n".join(failures.values())


def smaller(run, data: bytes, kind: type[Exception], end: float) -> bytes:
    """`data` without the pieces that its failure does not need."""
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
