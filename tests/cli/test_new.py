from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fednet.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "probe"),
    [
        (
            "algorithm",
            "a = registry.algorithm.get('my-part'); print(a(a.Config(), 3).config.mu, "
            "sorted(a.Up.kinds()))",
        ),
        (
            "model",
            "import torch; m = registry.model.get('my-part')(input_shape=(3, 8, 8), classes=5, "
            "hidden=7); "
            "print(tuple(m(torch.zeros(2, 3, 8, 8)).shape))",
        ),
        (
            "dataset",
            "d = registry.dataset.get('my-part')(None, 0, samples=50); print(d.classes, "
            "len(d.train[1]), len(d.test[1]))",
        ),
    ],
)
def test_template_is_a_part_that_works(tmp_path, what, probe, capsys):
    file = tmp_path / "My-Part.py"
    assert main(["new", what, str(file)]) == 0
    assert "@" not in file.read_text().replace(f"@{what}(", "")
    code = f"from fednet import loading, registry; loading.load_parts([{str(file)!r}]); {probe}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.strip()
        == {"algorithm": "0.01 ['delta', 'statistics']", "model": "(2, 5)", "dataset": "4 40 10"}[
            what
        ]
    )


def test_nothing_is_overwritten(tmp_path, capsys):
    file = tmp_path / "x.py"
    file.write_text("mine")
    assert main(["new", "model", str(file)]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    assert file.read_text() == "mine"
