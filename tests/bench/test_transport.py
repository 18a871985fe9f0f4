"""The book against the kernel's count of each connection, and against a network interface's."""

from __future__ import annotations

import pytest

from fednet import registry
from tests import rooms
from tests.bench.transport import configured, lines, namespace, reckon
from tests.contract.test_ledger import IMAGES, method


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_the_book_is_what_the_kernel_counted(tmp_path, curve):
    found = reckon(configured("r", curve), tmp_path)
    assert found.booked == found.kernel  # greetings, handshakes, heartbeats, farewells and all
    assert found.exact
    assert found.connections == 2


@pytest.mark.slow
@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize("name", registry.algorithm.names())
def test_the_book_of_every_method_is_what_the_kernel_counted(tmp_path, name, curve):
    mapping = rooms.merged(
        rooms.SMALL,
        {
            "algorithm": method(name),
            "data": IMAGES,
            "security": {"curve": curve},
            "evaluate": {"clients": "auto"},
        },
    )
    found = reckon(mapping, tmp_path)
    assert found.exact, found


@pytest.mark.skipif(namespace() is None, reason="no network namespace can be made here")
def test_the_interface_of_a_namespace_saw_what_the_book_says(tmp_path):
    found = reckon(configured("r", False), tmp_path)
    assert found.packets > 0
    assert abs(found.off) < 0.02
    assert any("interface" in line for line in lines([found]))
