"""What a configuration asks of a machine is asked for before it is taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fednet import capacity, models
from fednet.client import join
from fednet.client.policy import Policy
from fednet.config import from_mapping
from fednet.data.loading import load
from fednet.errors import ConfigError
from fednet.launch import start
from fednet.server.watch import ServerOptions


def test_a_model_that_memory_cannot_hold_is_refused_with_the_figure_and_not_built():
    size = models.nbytes({"name": "mlp", "hidden": [200_000, 200_000]}, (1, 28, 28), 10)
    assert size == 4 * (
        200_000 * (28 * 28 + 1) + 200_000 * (200_000 + 1) + 10 * (200_000 + 1)
    )  # weights and biases
    with pytest.raises(ConfigError, match=r"model mlp takes 321\.3 GB of memory; .* are free here"):
        models.build({"name": "mlp", "hidden": [200_000, 200_000]}, (1, 28, 28), 10, 0)


def test_a_size_is_found_without_a_draw_and_a_builder_that_needs_values_is_left_alone(monkeypatch):
    import torch

    before = torch.random.get_rng_state()
    assert models.nbytes({"name": "mlp", "hidden": [4]}, (3,), 2) == 4 * (3 * 4 + 4 + 4 * 2 + 2)
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr(models, "make", lambda *a: torch.zeros(2).tolist())
    assert models.nbytes({"name": "own"}, (3,), 2) is None


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 10**12},
        {"samples": 10**12, "shape": [4]},
        {"classes": 10**12},
        {"shape": [10**5, 10**5, 10**5]},
        {"shape": [10**15]},
    ],
    ids=str,
)
def test_samples_that_the_machine_cannot_hold_are_refused_with_the_figure(options):
    section = from_mapping({"data": {"dataset": "synthetic", **options}}).data
    with pytest.raises(ConfigError, match=r"takes .* (GB|MB).* are free"):
        load(section)


def test_what_fits_is_not_refused_and_a_control_groups_limit_counts(tmp_path, monkeypatch):
    capacity.check_memory(1, "one byte")
    limit = tmp_path / "limit"
    used = tmp_path / "used"
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    monkeypatch.setattr(capacity, "_GROUP", (str(limit), str(used)))
    assert capacity.free_memory() == 2_000_000
    capacity.check_memory(2_000_000, "as much")
    with pytest.raises(ConfigError, match=r"^more takes 2\.0 MB of memory; 2\.0 MB are free here"):
        capacity.check_memory(2_000_001, "more")
    limit.write_text("max\n")
    assert capacity.free_memory() > 2_000_000


@pytest.mark.parametrize("who", ["run", "server", "client"])
def test_another_system_than_linux_is_refused(who, tmp_path, monkeypatch):
    monkeypatch.setattr(capacity.sys, "platform", "darwin")
    given = from_mapping({}), tmp_path, ServerOptions(start.Silent()), lambda *_: None
    bound = {"resume": False, "bind": "tcp://127.0.0.1:0", "insecure": False, "keys": None}
    asked = {
        "run": lambda: start.run_command(*given),
        "server": lambda: start.serve(*given, **bound),
        "client": lambda: join.main("0", Policy(), server="tcp://127.0.0.1:1"),
    }
    with pytest.raises(ConfigError, match=r"runs on Linux alone, .* is darwin"):
        asked[who]()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_keeps_freed_memory_gives_it_back_when_it_is_asked_to():
    """Freed blocks between others that are in use, as messages leave them: 64 MiB of them."""
    script = (
        "import re\nfrom pathlib import Path\nfrom fednet import capacity\n"
        "def held():\n"
        "    found = re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())\n"
        "    return int(found[1]) / 1024\n"
        "capacity.keep_freed_memory()\n"
        "blocks = [bytes([1]) * 2**20 for _ in range(128)]\n"
        "most = held()\n"
        "del blocks[::2]\n"
        "kept = held()\n"
        "capacity.give_back_freed()\n"
        "print(most - kept, kept - held())\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    given, asked = map(float, said.stdout.split())
    assert given < 8
    assert asked > 56
