from __future__ import annotations

import fednet
from fednet.cli.main import main
from tests.processes import settings


def test_one_run_is_compared_with_a_new_run_of_its_configuration(tmp_path, capsys):
    run = fednet.run(settings(), in_process=True, out=tmp_path)
    assert main(["verify", str(run.dir)]) == 0
    assert "run and run-again are bit-identical in all 3 rounds" in capsys.readouterr().out
    assert fednet.open_run(tmp_path / "run-again").summary["model_sha256"]


def test_a_run_that_is_not_finished_is_not_run_again(tmp_path, capsys):
    run = fednet.run(settings(rounds=1), in_process=True, out=tmp_path)
    (run.dir / "summary.json").unlink()
    assert main(["verify", str(run.dir)]) != 0
    assert "is not finished; continue it with --resume" in capsys.readouterr().err
    assert not (tmp_path / "run-again").exists()
