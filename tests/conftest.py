"""For all tests: one thread a process, also in the processes that tests start; which of them
`python -m pytest` leaves to a second command; and which want a package that need not be there.

Several test processes with several threads each wait for one another in turns on a machine with few
cores.
"""

from __future__ import annotations

import os
from collections.abc import Generator
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
def forgotten() -> Generator[None, None, None]:
    """What a test loads of a user's own parts is not there in the next one."""
    known, loaded, before = _of_users(), loading._loaded, dict(loading._loaded)
    yield
    for module in _of_users() - known:
        registry.forget(module)
    loaded.clear()
    loaded.update(before)


def _of_users() -> set[str]:
    parts = [part for kind in registry.ALL.values() for part in kind._parts.values()]
    return {part.__module__ for part in parts if part.__module__.startswith("fednet_user_")}


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
    if config.args != config.getini("testpaths") or config.option.markexpr != "not slow":
        return
    left = [item for item in items if item.get_closest_marker("long") is not None]
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
    config.hook.pytest_deselected(items=left)
