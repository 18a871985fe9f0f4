from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.transport.pairs import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)
