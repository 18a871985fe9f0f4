"""A user's own files: what they are called, and what they may not end."""

from __future__ import annotations

import pytest

import fednet
from fednet import config as configuration
from fednet import loading, registry
from fednet.errors import ConfigError
from fednet.launch import start
from fednet.loading import UserFileError, load_parts
from tests.conftest import forgotten


@pytest.fixture
def alone(monkeypatch):
    """As in a process that has loaded nothing."""
    monkeypatch.setattr(loading, "_loaded", {})


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file to load; expected a Python file"):
        load_parts([tmp_path / "mine.py"])
    with pytest.raises(ConfigError, match="Is a directory; expected a Python file"):
        load_parts([tmp_path])


def test_a_decorator_without_a_name_is_refused(tmp_path, alone):
    (tmp_path / "unnamed.py").write_text("import fednet\n@fednet.model\nclass Net: ...\n")
    with pytest.raises(ConfigError, match=r'@model is given a name: @model\("mine"\)'):
        load_parts([tmp_path / "unnamed.py"])


def test_a_file_is_run_once_however_often_it_is_named(tmp_path, alone):
    """Its parts stay the same objects, which those that were made of them are compared with."""
    path = tmp_path / "counted.py"
    path.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n")
    assert load_parts([path, path]) == load_parts([path]) * 2
    assert (tmp_path / "runs").read_text() == "x"


def test_two_files_of_one_name_are_two(tmp_path, alone):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"WHICH = {folder!r}\n")
    first, second = load_parts([tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py"])
    assert loading.loaded_files() == {"mine.py": first.sha256, "mine-2.py": second.sha256}
    copy = tmp_path / "mine-2.py"
    copy.write_bytes(second.path.read_bytes())
    assert load_parts([copy]) == [second]  # the same file under another name
    assert loading.names(["x/a.py", "y/a.py", "z/a.py", "a-2.py"]) == [
        "a.py",
        "a-2.py",
        "a-3.py",
        "a-2-2.py",
    ]


PART = """
import fednet

@fednet.model("edited-part")
def edited(*, input_shape, classes):
    "{}"
"""


def test_a_file_that_was_edited_is_loaded_anew(tmp_path, alone):
    file = tmp_path / "edited.py"
    file.write_text(PART.format("before"))
    load_parts([file])
    assert registry.model.get("edited-part").__doc__ == "before"
    file.write_text(PART.format("after"))
    load_parts([file])
    assert registry.model.get("edited-part").__doc__ == "after"
    (tmp_path / "other.py").write_text(PART.format("third"))
    with pytest.raises(ConfigError, match=r"in \S+edited\.py and in \S+other\.py\.$"):
        load_parts([tmp_path / "other.py"])
    file.write_text("")
    load_parts([file])
    assert "edited-part" not in registry.model.names()


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_what_a_file_registered_before_it_raised_is_not_there(tmp_path, alone, error):
    (tmp_path / "half.py").write_text(PART.format("half") + f"raise {error}(0)\n")
    with pytest.raises(UserFileError, match=rf"half\.py: raised {error}: 0"):
        load_parts([tmp_path / "half.py"])
    assert "edited-part" not in registry.model.names()


def test_a_resume_with_an_edited_file_says_which_file_the_run_began_with(tmp_path, alone):
    file = tmp_path / "mine.py"
    file.write_text("WHICH = 1\n")
    config = configuration.from_mapping({"name": "r"}).replace(load=(str(file),))
    with start.own_directory(config, tmp_path, False) as path:
        start.fill(config, path)
        file.write_text("WHICH = 2\n")
        with pytest.raises(ConfigError, match=r"--resume: .*mine\.py was edited since this run"):
            start.fill(config, path)


def test_a_part_of_a_notebooks_cell_is_refused_where_processes_would_not_see_it(tmp_path):
    def cell(*, input_shape, classes):
        """A model."""

    cell.__module__ = "__main__"
    registry.model("of-a-cell")(cell)
    with pytest.raises(ConfigError, match=r"'of-a-cell' was defined here.*in_process=True"):
        fednet.run({"model": {"name": "of-a-cell"}}, out=tmp_path)


def test_a_method_whose_init_takes_other_things_is_told_where_they_belong(tmp_path, alone):
    (tmp_path / "mine.py").write_text(
        "import fednet\nfrom fednet.algorithms.fedavg import FedAvg\n"
        '@fednet.algorithm("own-init")\nclass Mine(FedAvg):\n'
        "    def __init__(self, mu=0.1): ...\n"
    )
    with pytest.raises(ConfigError, match=r"own-init cannot be made .*put its options in its Con"):
        configuration.load(None, {"algorithm": "own-init"}, [tmp_path / "mine.py"])


def test_a_part_of_an_installed_package_is_found_by_name_or_says_what_its_import_raised(
    tmp_path, monkeypatch
):
    held = tmp_path / "theirs-1.0.dist-info"
    held.mkdir()
    (held / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (held / "entry_points.txt").write_text(
        "[fednet.models]\ntheirs_ok = theirs_parts:made\ntheirs_gone = theirs_nowhere:made\n"
        "theirs_unnamed = theirs_parts:mde\n"
    )
    (tmp_path / "theirs_parts.py").write_text("def made(input_shape, classes): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = registry.Registry("model", "fednet.models")
    assert found.get("theirs_ok").__name__ == "made"
    with pytest.raises(ConfigError, match="'theirs_gone', which an installed package offers"):
        found.get("theirs_gone")
    with pytest.raises(ConfigError, match=r"AttributeError: .* no attribute 'mde'"):
        found.get("theirs_unnamed")


DRAWS = """
import random
import fednet, numpy, torch

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        noise = torch.randn(3) + numpy.random.rand() + random.random()
        return noise + {shift} * i % 2, i % 2

@fednet.dataset("draws")
def draws(root):
    return fednet.Data(train=Noisy(), test=Noisy(), classes=2)
"""


@pytest.mark.long
def test_a_dataset_that_draws_at_random_gives_the_same_bits_in_each_process_and_is_said(tmp_path):
    config = {"rounds": 1, "clients": 2, "model": {"name": "mlp", "hidden": [4]}, "report": False}
    config["data"] = {"dataset": "draws", "partition": {"scheme": "iid"}}
    runs = {}
    for name, shift, here in (("one", 0, True), ("two", 0, False), ("other", 1, True)):
        file = tmp_path / f"{name}.py"
        file.write_text(DRAWS.format(shift=shift))
        with forgotten():
            runs[name] = fednet.run(
                {**config, "name": name}, load=[file], in_process=here, out=tmp_path, quiet=True
            )
    bits = {name: run.summary["model_sha256"] for name, run in runs.items()}
    assert bits["one"] == bits["two"] != bits["other"]
    data = {name: run.summary["provenance"]["data_sha256"] for name, run in runs.items()}
    assert data["one"] == data["two"] != data["other"]  # labels and parts are the same
    said = (tmp_path / "one" / "events.jsonl").read_text()
    assert said.count("samples are drawn at random as they are read") == 2  # train and test
