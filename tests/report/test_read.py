from __future__ import annotations

import json

import pytest

from fednet import files
from fednet.errors import ConfigError, StateError
from fednet.report.read import open_run
from tests.report.fake_run import opened, write


def test_a_record_reads_by_attribute_and_by_key(tmp_path):
    run = opened(tmp_path / "a", accuracy=[0.1, 0.2, 0.3], rounds=3)
    assert run.rounds[-1].test_accuracy == run.rounds[-1]["test_accuracy"] == 0.3
    # A field of the format that this line leaves out.
    assert run.rounds[-1].evaluated_sha256 is None
    with pytest.raises(AttributeError, match="test_accuracy"):
        _ = run.rounds[-1].test_acuracy


def test_a_line_still_being_written_is_left_out(tmp_path):
    path = write(tmp_path / "a", rounds=3)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "sel')
    assert [r.round for r in open_run(path).rounds] == [1, 2, 3]


def test_a_torn_line_amid_the_book_is_damage(tmp_path):
    path = write(tmp_path / "a", rounds=1)
    whole = (path / "wire.jsonl").read_text()
    (path / "wire.jsonl").write_text(whole + '{"round": 1, "dir\n' + whole)
    with pytest.raises(StateError, match=rf"wire\.jsonl:{len(whole.splitlines()) + 1}: not what"):
        _ = open_run(path).wire


def test_one_changed_byte_amid_many_lines_is_named_by_its_line(tmp_path):
    path = write(tmp_path / "a", rounds=1)
    lines = [files.line({"round": 1, "client": i, "bytes": 64}) for i in range(5000)]
    lines[4321] = lines[4321].replace(b"64", b"65")
    (path / "wire.jsonl").write_bytes(b"".join(lines))
    found = open_run(path).lines("wire")
    assert [next(found).client for _ in range(4321)] == list(range(4321))
    with pytest.raises(StateError, match=r"wire\.jsonl:4322: .*check is of another text"):
        next(found)


def test_a_live_run_without_summary_opens(tmp_path):
    path = write(tmp_path / "a")
    (path / "summary.json").unlink()
    (path / "clients.jsonl").unlink()
    run = open_run(path)
    assert not run.summary
    assert run.clients == []
    assert not run.finished


def test_a_path_that_is_no_run_names_the_runs_beside_it(tmp_path):
    write(tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine"):
        open_run(tmp_path / "mime")


def test_an_unknown_frame_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'rounds'"):
        opened(tmp_path / "a").frame("round")


@pytest.mark.parametrize("what", ["rounds", "clients", "wire", "events"])
def test_frames_of_all_runs_have_the_same_columns_of_the_same_types_and_flat_values(tmp_path, what):
    pytest.importorskip("pandas", reason="pandas is an extra")
    whole = opened(tmp_path / "whole", rounds=3, personalised=True, drop={1: {0: "late"}})
    bare = opened(tmp_path / "bare", rounds=2, accuracy=[None, None])
    empty = opened(tmp_path / "empty")
    (empty.dir / f"{what}.jsonl").write_text("")
    frames = [run.frame(what) for run in (whole, bare, empty)]
    assert len(frames[2]) == 0
    for frame in frames[1:]:
        assert frame.dtypes.to_dict() == frames[0].dtypes.to_dict()
    assert not any(isinstance(v, list | dict) for v in frames[0].to_numpy().ravel())


def test_a_frame_has_the_values_of_the_lines(tmp_path):
    pytest.importorskip("pandas", reason="pandas is an extra")
    run = opened(tmp_path / "a", rounds=2, personalised=True, accuracy=[None, 0.5])
    frame = run.frame("rounds")
    assert [json.loads(v) for v in frame["selected"]] == [r.selected for r in run.rounds]
    assert list(frame["test_accuracy"].isna()) == [True, False]
    assert frame["client_accuracy.personal"][1] == run.rounds[1].client_accuracy["personal"]
    assert frame["seconds_by_phase.waiting"].isna().all()  # not measured
    assert str(frame["staleness"].dtype) == "string"


def test_a_run_without_weights_says_so(tmp_path):
    with pytest.raises(StateError, match=r"model\.safetensors is missing"):
        opened(tmp_path / "a").model()
