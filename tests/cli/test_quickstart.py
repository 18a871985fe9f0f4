"""The quick start: all defaults, however the run is started."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import fednet
from fednet import config
from fednet.cli.common import config_of
from fednet.cli.main import main
from fednet.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def asked(*sets: str, file: str | None = None):
    return config_of(argparse.Namespace(config=file, set=list(sets), load=[], quiet=False))


def test_the_quick_start_states_the_defaults():
    assert config.load(QUICKSTART) == config.load() == asked()
    assert asked("rounds=3") == asked().replace(rounds=3)


def test_a_command_a_mapping_and_a_file_of_two_lines_train_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"rounds": 1, "report": False}
    Path("two.yaml").write_text("rounds: 1\nreport: false\n")
    sets = [word for key in changes for word in ("--set", f"{key}={changes[key]}".lower())]
    assert main(["run", "--in-process", "--quiet", *sets]) == 0
    fednet.run("two.yaml", in_process=True)
    fednet.run(changes, in_process=True)
    fednet.run(QUICKSTART, set=changes, in_process=True)
    runs = [fednet.open_run(run) for run in sorted(Path("runs").glob("fedavg-digits*"))]
    assert len(runs) == 4
    assert len({run.summary["model_sha256"] for run in runs}) == 1


def test_the_directory_of_a_run_is_gone_on_with_but_never_begun_anew(tmp_path, monkeypatch):
    held = tmp_path / "runs" / "mine-2"
    held.mkdir(parents=True)
    (held / "config.yaml").write_text(config.to_yaml(asked("name=mine", "rounds=7")))
    args = argparse.Namespace(
        config=str(held), set=["rounds=9"], load=[], quiet=False, out=Path("runs"), resume=True
    )
    made = config_of(args)
    assert (made.name, made.rounds, args.out / made.name) == ("mine-2", 9, held)
    monkeypatch.chdir(tmp_path)
    near = argparse.Namespace(**{**vars(args), "config": "runs/mine-2"})
    assert (config_of(near).name, near.out) == ("mine-2", Path("runs"))
    monkeypatch.chdir(held)
    within = argparse.Namespace(**{**vars(args), "config": "."})
    assert (config_of(within).name, within.out) == ("mine-2", held.parent)
    again = argparse.Namespace(**{**vars(args), "config": str(held), "resume": False})
    with pytest.raises(ConfigError, match=r"continue it with --resume, or .*mine-2/config\.yaml"):
        config_of(again)
