"""Releases that live together: what an earlier one sends and leaves behind is read by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fednet import config as configuration
from fednet.config import from_mapping, from_text, to_yaml
from fednet.errors import StateError
from fednet.experiment import build
from fednet.files import read_lines, read_record, write_record
from fednet.launch.in_process import run_in_process
from fednet.launch.start import Silent, open_directory
from fednet.records.manifest import FORMATS
from fednet.server.checkpoint import Checkpoints
from fednet.server.hosting import Hosting
from fednet.server.results.hashes import model_hashes
from fednet.wire import messages as m
from fednet.wire.frames import decode_from_client, decode_from_server
from tests.golden import make

GOLDEN = Path(make.__file__).parent
VERSIONS = range(m.SPEAKS[0], m.SPEAKS[1] + 1)
BEGAN = range(FORMATS[0], FORMATS[1] + 1)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def within(part: Any, whole: Any) -> bool:
    """Whether all of `part` is in `whole`, which may have more fields."""
    if isinstance(part, dict):
        return all(k in whole and within(v, whole[k]) for k, v in part.items())
    if isinstance(part, list):
        return len(part) <= len(whole) and all(map(within, part, whole))
    return bool(part == whole)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("side", ["client", "server"])
def test_messages_of_each_version_spoken_are_read_as_they_were_meant(version, side):
    decode = decode_from_client if side == "client" else decode_from_server
    for said in golden(f"protocol-{version}.json")[side]:
        message, _ = decode([bytes.fromhex(said["header"])])
        assert within(said["fields"], msgspec.to_builtins(message, builtin_types=())), said


def test_the_golden_messages_are_those_of_this_release():
    assert golden(f"protocol-{m.SPEAKS[1]}.json") == json.loads(json.dumps(make.messages())), (
        "the messages have changed: run python -m tests.golden.make; where a release with "
        "the old ones is out, raise the protocol's number first"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_no_default_has_changed_among_releases_that_talk(version):
    """An older client is not sent what stands at its default."""
    before, now = golden(f"defaults-{version}.json"), make.defaults()
    changed = [k for k in before if k in now and now[k] != before[k]]
    assert not changed, f"{changed}: run python -m tests.golden.make, or raise SPEAKS[0]"


@pytest.mark.parametrize(
    "changes", [{}, make.CONFIG, {"algorithm": "moon", "stop": {"seconds": 9}}]
)
def test_a_configuration_without_what_stands_at_its_default_is_the_same(changes):
    config = from_mapping(changes)
    assert from_text(to_yaml(config, defaults=False), "the wire") == config
    assert "max_share" not in to_yaml(config, defaults=False)


def test_what_a_part_has_at_its_default_is_left_out_too():
    """An option that a method got in a later release is none to an older client."""
    config = from_mapping(
        {
            "algorithm": {"name": "scaffold", "server_lr": 0.5},
            "data": {"partition": {"scheme": "shards"}},
            "model": {"name": "mlp", "hidden": [3]},
        }
    )
    text = to_yaml(config, defaults=False)
    assert from_text(text, "the wire") == config
    assert "server_lr" in text
    assert "hidden" in text
    assert not [key for key in ("divisor", "option:", "per_client") if key in text]


@pytest.mark.parametrize("form", BEGAN)
def test_a_run_that_an_earlier_release_began_is_gone_on_with(form, tmp_path):
    shutil.copytree(GOLDEN / f"run-{form}", tmp_path / "golden")
    config = configuration.load(tmp_path / "golden" / "config.yaml")
    checkpoints = Checkpoints(tmp_path / "golden" / "checkpoint")
    experiment = build.build(config, None)
    server, progress, _ = checkpoints.load(experiment.algorithm.Server)
    before = list(read_lines(tmp_path / "golden" / "rounds.jsonl"))[: progress.round]
    known = [*before, *progress.records.get("rounds", ())][progress.round - 1]
    assert model_hashes(experiment.algorithm, server)[0] == known["model_sha256"]
    with open_directory(config, tmp_path, resume=True) as (own, directory, _):
        run_in_process(
            own,
            directory,
            Hosting(Silent(), ["test"], "cpu"),
        )
    rounds = list(read_lines(tmp_path / "golden" / "rounds.jsonl"))
    assert [r["round"] for r in rounds] == list(range(1, make.ROUNDS + 1))
    assert all(r["completed"] == [0, 1, 2] for r in rounds)


@pytest.mark.parametrize(
    ("form", "says"),
    [(FORMATS[1] + 1, "begun by a later release"), (FORMATS[0] - 1, "begun by an earlier release")],
)
def test_a_run_of_a_release_too_far_away_is_refused_in_a_sentence(form, says, tmp_path):
    shutil.copytree(GOLDEN / f"run-{FORMATS[1]}", tmp_path / "golden")
    file = tmp_path / "golden" / "checkpoint" / "manifest.json"
    write_record(file, {**read_record(file, ""), "format": form})
    with pytest.raises(StateError, match=f"golden: its run was {says} of fednet"):
        Checkpoints(file.parent).progress()
