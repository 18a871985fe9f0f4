"""For all tests: one thread a process, also in the processes that tests start; which of them
`python -m pytest` leaves to a second command; and which want a package that need not be there.

Several test processes with several threads each wait for one another in turns on a machine with few
cores.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fednet import loading, registry
from fednet.errors import ConfigError, lacking

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch

# Every test below these starts processes that are killed, cut off or compared bit by bit.
LONG = ("chaos", "parity")


# Packages of extras that the extra `test` does not bring.
EXTRAS = ("dp-accounting", "mlflow", "pandas", "ray", "tensorboard", "wandb")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with forgotten():
        yield


@contextmanager
def forgotten() -> Iterator[None]:
    """The parts that were registered inside are taken away after it, whether from a file or in the
    test itself, and the files count as not loaded: other tests run over every registered part.
    Only fednet's own stay: a module that is imported does not register its parts a second time.
    """
    known = {kind: set(parts._parts) for kind, parts in registry.ALL.items()}
    loaded = dict(loading._loaded)
    try:
        yield
    finally:
        for kind, parts in registry.ALL.items():
            for name in set(parts._parts) - known[kind]:
                if not parts._parts[name].__module__.startswith("fednet."):
                    del parts._parts[name]
        loading._loaded.clear()
        loading._loaded.update(loaded)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """A test whose run says that such a package is not installed is skipped."""
    try:
        return (yield)
    except ConfigError as wrong:
        if str(wrong).endswith(tuple(lacking("", package) for package in EXTRAS)):
            pytest.skip(str(wrong))
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `long` where nobody asked for it: by a folder or file, or by -m."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in LONG:
            item.add_marker(pytest.mark.long)
    if (
        config.args != config.getini("testpaths")
        or config.option.markexpr != "not slow and not gpu"
    ):
        return
    left = [item for item in items if item.get_closest_marker("long") is not None]
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
    config.hook.pytest_deselected(items=left)
