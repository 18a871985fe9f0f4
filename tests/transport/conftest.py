from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.transport.pairs import Pair


@pytest.fixture
def new_pair() -> Iterator[Callable[..., Pair]]:
    """Pairs with options, closed after the test."""
    with ExitStack() as stack:
        yield functools.partial(Pair, stack)


@pytest.fixture
def pair(new_pair: Callable[..., Pair]) -> Pair:
    return new_pair()
