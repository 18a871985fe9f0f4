"""`fednet.run` from Python: where a run goes, and what several threads of one process get."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

import fednet
from fednet import config as configuration
from fednet.cli import api
from fednet.errors import ConfigError
from fednet.files import write_json
from fednet.plain import meet
from tests.processes import settings
from tests.rooms import SMALL

evaluated: list[int] = []


def found() -> type:
    """A hint that says when msgspec looks at it."""
    evaluated.append(1)
    return int


class Late(msgspec.Struct):
    x: found()  # type: ignore[valid-type]


def test_runs_of_several_threads_begin_one_by_one_and_no_struct_is_first_met_by_two(monkeypatch):
    inside = [0]
    most = [0]

    def reading(*_: object, **__: object) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        raise ConfigError("read.")

    monkeypatch.setattr(api.configuration, "load", reading)

    def run(_: int) -> None:
        with pytest.raises(ConfigError, match="read"):
            fednet.run({}, in_process=True)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert most == [1]
    meet()
    assert evaluated
    evaluated.clear()
    msgspec.convert({"x": 1}, Late)
    assert not evaluated


def test_files_that_a_mapping_loads_are_loaded(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import fednet\nfrom fednet.algorithms.fedavg import FedAvg\n\n\n"
        '@fednet.algorithm("in-a-mapping")\nclass Mine(FedAvg):\n    """As FedAvg."""\n'
    )
    monkeypatch.chdir(tmp_path)
    mapping = settings(rounds=1) | {"load": ["own.py"], "report": False}
    found = fednet.run({**mapping, "algorithm": "in-a-mapping"}, in_process=True, out="runs")
    assert found.config["load"] == ["code/own.py"]
    with pytest.raises(ConfigError, match=r"load\[0\]: there is no file .*absent.py"):
        fednet.run({**mapping, "load": ["absent.py"]}, in_process=True, out="runs")


def finished(directory: Path, words: list[str]) -> None:
    directory.mkdir()
    (directory / "config.yaml").write_text("rounds: 1\n")
    write_json(directory / "summary.json", {"provenance": {"command": words}})


def test_runs_of_one_name_at_once_have_each_its_own_configuration_and_directory(
    tmp_path, monkeypatch
):
    asked: list[int] = []
    returned: list[Path] = []

    def command(words: list[str]) -> tuple[int, str]:
        """Another one begins while this one's command has not read its file yet, and ends first;
        and one more run of the name is there before this one's is looked for.
        """
        if not asked:
            asked.append(0)
            returned.append(fednet.run({"name": "x", "seed": 2}, out=tmp_path).dir)
        (text,) = (word for word in words if word.endswith(".yaml"))
        asked.append(configuration.load(Path(text), {}).seed)
        finished(tmp_path / ("x" if len(asked) == 2 else "x-2"), words)
        if len(asked) == 3:
            finished(tmp_path / "x-3", ["fednet", "run"])
        return 0, ""

    monkeypatch.setattr(api, "_call", command)
    returned.append(fednet.run({"name": "x", "seed": 1}, out=tmp_path).dir)
    assert asked[1:] == [2, 1]
    assert returned == [tmp_path / "x", tmp_path / "x-2"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_goes_where_the_commands_write_theirs(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNET_OUT", "elsewhere")
    made = fednet.run(settings(rounds=1), in_process=in_process)
    assert made.dir.resolve() == tmp_path / "elsewhere" / "run"
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]


def test_a_run_in_this_process_leaves_torch_as_it_was(tmp_path):
    def settings() -> list[object]:
        return [
            torch.get_num_threads(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,
        ]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.backends.cudnn.benchmark = True
    try:
        mine = settings()
        fednet.run({**SMALL, "rounds": 1}, in_process=True, out=tmp_path)
        assert settings() == mine
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.benchmark = False
