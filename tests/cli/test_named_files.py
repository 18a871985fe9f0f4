"""A file that a user names is read to its end, or refused: whoever reads a named pipe, or a device,
may wait for ever.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import fednet
from fednet.cli import main
from fednet.descriptors import named
from fednet.errors import ConfigError
from fednet.models import adapters
from fednet.world import reading
from tests.cli.test_flags import call

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes there")
REFUSED = "a named pipe or a device, and no regular file"


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """A named pipe that nobody writes to."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe", 0o600)
    return "pipe"


@pytest.mark.parametrize(
    "line",
    [
        "fednet run pipe",
        "fednet run --resume pipe",
        "fednet partition pipe",
        "fednet doctor pipe",
        "fednet doctor --keys pipe",
        "fednet sweep pipe",
        "fednet sweep pipe --grid train.lr=0.1,0.2",
        "fednet queue submit pipe",
        "fednet partition --out pipe.png",
        "fednet partition --export pipe.json",
        "fednet-client --id 0 --give-up 1 --policy pipe",
        "fednet-client --id 0 --give-up 1 --keys pipe",
        "fednet-client --id 0 --give-up 1 --data pipe",
        "fednet-client --id 0 --give-up 1 --run pipe",
    ],
)
def test_a_command_says_that_the_file_it_was_given_is_a_pipe(line, pipe, capsys):
    name = line.split()[-1]
    if name.startswith("pipe."):
        os.rename(pipe, name)
    assert call(line) == 2
    told = capsys.readouterr()
    assert re.search(f"{REFUSED}|is no regular file|--run pipe: is no folder", told.err + told.out)


def test_a_configuration_may_name_no_pipe(pipe):
    with pytest.raises(ConfigError, match=REFUSED):
        reading.text(f"./{pipe}", "availability.trace", ["phones"])
    for at, name in enumerate(adapters.FILES):  # either of the two
        folder = Path(f"peft{at}")
        folder.mkdir()
        (folder / adapters.FILES[0]).write_text(json.dumps({"r": 1, "lora_alpha": 1}))
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ConfigError, match=REFUSED):
            adapters.read_peft(None, folder)


def test_a_run_s_directory_whose_configuration_is_a_pipe_is_none(pipe, capsys):
    Path("run").mkdir()
    os.rename(pipe, "run/config.yaml")
    assert main.main(["report", "run"]) == 2
    assert "expected a run directory" in capsys.readouterr().err


@pytest.fixture(scope="module")
def over(tmp_path_factory):
    """The directory of a run."""
    sets = {"rounds": 1, "train.steps": 1, "name": "run", "report": False}
    found = fednet.run(None, set=sets, in_process=True, out=tmp_path_factory.mktemp("runs"))
    return found.dir


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rounds.jsonl", ["compare"]),
        ("clients.jsonl", ["compare"]),
        ("summary.json", ["compare"]),
        ("status.json", ["status"]),
        ("clients.jsonl", ["run", "--resume"]),
        ("wire.jsonl", ["run", "--resume"]),
        ("checkpoint/manifest.json", ["run", "--resume"]),
        ("checkpoint/state-*.safetensors", ["run", "--resume"]),
    ],
)
def test_no_command_waits_for_a_file_of_a_run_that_is_a_pipe(
    name, words, over, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(over, "run")
    (lost,) = Path("run").glob(name)
    lost.unlink()
    os.mkfifo(lost)
    if "--resume" in words:
        Path("run", "summary.json").unlink()
        words = [*words, "--in-process", "--quiet"]
    assert main.main([words[0], "run", *words[1:]])
    said = capsys.readouterr().err
    assert REFUSED in said
    assert lost.name in said
    assert "fault of fednet" not in said


def test_a_device_is_refused_and_what_the_shell_pipes_in_is_read():
    with pytest.raises(OSError, match=REFUSED):
        named("/dev/zero")
    out, into = os.pipe()
    os.write(into, b"rounds: 1")
    os.close(into)
    try:
        assert named(f"/dev/fd/{out}").read_text() == "rounds: 1"
    finally:
        os.close(out)
