"""For all tests: each process uses one thread, parts that a test registers are forgotten after it,
a test that needs a missing package is skipped, and a bare `pytest` leaves out what is long.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fednet import loading, registry
from fednet.errors import ConfigError, lacking

# Several test processes with several threads each would wait for one another on few cores. Set
# before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests in these folders start processes that are killed, cut off, compared bit by bit or timed.
LONG = ("bench", "chaos", "parity")
LONGEST = ("golden",)

# Packages of extras that the extra `test` does not bring.
EXTRAS = ("mlflow", "pandas", "ray", "tensorboard", "wandb")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with forgotten():
        yield


@pytest.fixture
def readings() -> None:
    """Register the methods that stand beside those of the papers' tables."""
    loading.load_parts([Path(__file__).parents[1] / "configs" / "papers" / "readings.py"])


@contextmanager
def forgotten() -> Iterator[None]:
    """Take away the parts that are registered inside, and count their files as not loaded: other
    tests run over every registered part. fednet's own parts stay: a module that is imported does
    not register its parts a second time.
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
    """Skip a test whose run says that such a package is not installed."""
    try:
        return (yield)
    except ConfigError as wrong:
        if str(wrong).endswith(tuple(lacking("", package) for package in EXTRAS)):
            pytest.skip(str(wrong))
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, unless it was asked for by a folder, a file, or -m. First
    comes what takes a minute, so that no process ends long after the others.
    """
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    for item, folder in folders.items():
        if folder in LONG:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: folders[item] not in LONGEST)
    all_paths = config.args == config.getini("testpaths")
    if not all_paths or config.option.markexpr != "not slow and not gpu":
        return
    left = [item for item in items if item.get_closest_marker("long") is not None]
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
    config.hook.pytest_deselected(items=left)
