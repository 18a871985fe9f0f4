from __future__ import annotations

import json

import pytest

from fednet import registry
from fednet.cli.main import main


@pytest.mark.parametrize(
    "what", ["algorithms", "models", "datasets", "partitions", "compressors", "tasks"]
)
def test_every_part_has_a_line(what, capsys):
    assert main(["list", what]) == 0
    said = capsys.readouterr().out
    first = [line.split()[0] for line in said.splitlines() if line.strip()]
    assert registry.ALL[what].names()
    assert set(registry.ALL[what].names()) <= set(first)


def test_algorithms_show_their_cost_and_what_each_side_keeps(capsys):
    assert main(["list", "algorithms"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("scaffold")
    )
    assert "2|w|" in line.replace(" ", "")
    assert "c_i" in line


def test_cost_in_mb_is_that_of_the_declared_payloads(capsys):
    assert (
        main(
            [
                "list",
                "algorithms",
                "--model",
                "lenet5",
                "--set",
                "data={dataset: synthetic, shape: [3, 32, 32], classes: 10}",
            ]
        )
        == 0
    )
    lines = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    # lenet5 on 10 classes: 248,024 bytes of weights (algorithms.md 0.4); up, 24 bytes of n_i, K_i
    # and loss beside them.
    assert lines["fedavg"][2:4] == ["0.248", "0.248"]
    assert lines["scaffold"][2:4] == ["0.496", "0.496"]


def test_partition_shows_and_exports_what_each_client_holds(tmp_path, capsys):
    sets = [
        "--set",
        "data={dataset: synthetic, samples: 200, shape: [4], classes: 4, partition: {scheme: iid}}",
        "--set",
        "clients=5",
        "--set",
        "model={name: mlp, hidden: [8]}",
    ]
    file = tmp_path / "p.json"
    assert main(["partition", *sets, "--export", str(file)]) == 0
    said = capsys.readouterr().out
    held = json.loads(file.read_text())
    assert [len(part) for part in held["train"]] == [40] * 5
    assert sorted(i for part in held["train"] for i in part) == list(range(200))
    assert (
        len([line for line in said.splitlines() if line.split() and line.split()[0].isdigit()]) == 5
    )
