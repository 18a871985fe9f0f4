"""The quick start: shipped inside the package, the same as the file a reader finds under
configs/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fednet import config
from fednet.cli import common
from fednet.cli.common import configured, quickstart
from fednet.errors import ConfigError

ROOT = Path(__file__).parents[2]


def asked(*sets: str, file: str | None = None):
    return configured(argparse.Namespace(config=file, set=list(sets), load=[], quiet=False))


def test_without_a_configuration_it_is_the_quick_start():
    made = asked()
    assert made == config.load(ROOT / "configs" / "quickstart.yaml")
    assert quickstart().read_text() == (ROOT / "configs" / "quickstart.yaml").read_text()
    assert (made.name, made.algorithm.name) == ("fedavg-digits", "fedavg")
    assert (made.clients, made.cohort_size, made.data.partition.options["alpha"]) == (10, 5, 0.3)
    assert asked("rounds=3") == made.replace(rounds=3)


def test_without_a_configuration_it_is_said_whose_values_stand_in(capsys):
    parser = argparse.ArgumentParser()
    common.common_arguments(parser, config=True)
    config = common.configured(parser.parse_args(["--set", "train.lr=1.0", "--set", "rounds=2"]))
    said = capsys.readouterr().err
    assert (config.train.lr, config.train.momentum) == (1.0, 0.9)
    assert said.startswith(
        "no configuration file given; keys that you did not set are the quick start's: "
    )
    assert "train.momentum 0.9" in said
    assert "algorithm fedavg" in said
    assert "train.lr" not in said
    assert "rounds" not in said
    common.configured(parser.parse_args(["--set", "rounds=2", "--quiet"]))
    common.configured(parser.parse_args([]))
    assert capsys.readouterr().err == ""


def test_the_directory_of_a_run_is_gone_on_with_but_never_begun_anew(tmp_path, monkeypatch):
    held = tmp_path / "runs" / "mine-2"
    held.mkdir(parents=True)
    (held / "config.yaml").write_text(config.to_yaml(asked("name=mine", "rounds=7")))
    args = argparse.Namespace(
        config=str(held), set=["rounds=9"], load=[], quiet=False, out=Path("runs"), resume=True
    )
    made = configured(args)
    assert (made.name, made.rounds, args.out / made.name) == ("mine-2", 9, held)
    monkeypatch.chdir(tmp_path)
    near = argparse.Namespace(**{**vars(args), "config": "runs/mine-2"})
    assert (configured(near).name, near.out) == ("mine-2", Path("runs"))
    monkeypatch.chdir(held)
    within = argparse.Namespace(**{**vars(args), "config": "."})
    assert (configured(within).name, within.out) == ("mine-2", held.parent)
    again = argparse.Namespace(**{**vars(args), "config": str(held), "resume": False})
    with pytest.raises(ConfigError, match=r"continue it with --resume, or .*mine-2/config\.yaml"):
        configured(again)
