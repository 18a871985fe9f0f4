"""`train.portable`: the same bits on x86-64 processors of unlike makers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fednet.experiment import determinism
from tests.parity.test_parity import SHAPE, bits
from tests.processes import ROOT, Federation, Rig

pytestmark = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or "AVX" not in determinism.processor(),
    reason="needs an x86-64 processor with AVX2",
)
# Adam takes square roots, which torch's own kernels round as each maker's processor does.
PORTABLE = {**SHAPE, "train": {"epochs": 2, "optimizer": "adam", "portable": True}}


def python(code: str, *before: str) -> str:
    """Return what the code prints in a new process."""
    words = [*before, sys.executable, "-c", code]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def execute(code: str, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    exec(code, {})
    return 0


def forked(folder: Path, code: str, **environment: str) -> str:
    """Return what the code prints in a process that has imported torch and computed nothing yet."""
    with Rig(folder) as rig:
        status, said = rig.ended(rig.fork(execute, code, environment))
    assert status == 0, said
    return said.strip()


def test_in_one_process_in_many_after_a_crash_and_with_clients_started_by_themselves(tmp_path):
    found = []
    for workers in (0, 2):
        with Federation(tmp_path / str(workers), **PORTABLE) as fed:
            fed.supervisor(workers)
            fed.finish()
        found.append(bits(fed.path))
    with Federation(tmp_path / "killed", **PORTABLE) as fed:
        fed.begin("0-4")
        fed.until(fed.rounds)
        fed.lose(fed.last)
        fed.server(resume=True)
        fed.finish()
    assert found == [bits(fed.path)] * 2
    assert not [e for e in fed.events() if e.get("differs")]
    assert "processor" in fed.summary()["provenance"]


def test_square_roots_are_those_of_ieee_754(tmp_path):
    """The float32 nearest to the root, in each way that torch has of asking for one."""
    said = forked(
        tmp_path,
        "import numpy as np, torch\n"
        "from fednet.experiment import determinism\n"
        "determinism.choose_kernels(True)\n"
        "x = torch.randn(10_007, generator=torch.Generator().manual_seed(1)).abs()\n"
        "nearest = torch.from_numpy(np.sqrt(x.double().numpy()).astype(np.float32))\n"
        "out = torch.empty(0)\n"
        "torch.sqrt(x, out=out)\n"
        "ways = [x.sqrt(), x.clone().sqrt_(), torch._foreach_sqrt([x])[0], out]\n"
        "print([int((way != nearest).sum()) for way in ways])\n"
        "w = torch.tensor([4.0, 0.25], requires_grad=True)\n"
        "w.sqrt().sum().backward()\n"
        "print(w.grad.tolist(), torch.tensor([4, 9]).sqrt().tolist(), torch.tensor(-1.0).sqrt())\n"
        "half = torch.tensor([2.0], dtype=torch.bfloat16).sqrt()\n"
        "print(half.dtype, half.item(), torch.ones(2, 3).t().sqrt().shape)\n",
    )
    assert said.splitlines() == [
        "[0, 0, 0, 0]",
        "[0.25, 1.0] [2.0, 3.0] tensor(nan)",
        "torch.bfloat16 1.4140625 torch.Size([3, 2])",
    ]


@pytest.mark.parametrize(
    ("before", "portable", "capability", "says"),
    [
        (
            "determinism.choose_kernels(True)",
            False,
            "",
            "has computed with train.portable: true already",
        ),
        ("torch.ones(9).exp()", True, "default", "train.portable: this processor has no AVX2"),
        ("determinism.choose_kernels(True)", True, "", "chosen"),
    ],
)
def test_it_is_refused_where_another_choice_has_been_made(
    tmp_path, before, portable, capability, says
):
    said = forked(
        tmp_path,
        "from fednet.experiment import determinism\n"
        "from fednet.errors import ConfigError\n"
        f"import torch\n{before}\n"
        "try:\n"
        f"    determinism.choose_kernels({portable})\n"
        "    print('chosen')\n"
        "except ConfigError as wrong:\n"
        "    print(wrong)\n",
        **({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
    )
    assert says in said


def test_nothing_is_computed_before_the_configuration_is_known():
    """torch asks once, at its first kernel, which ones to take: no import may run one."""
    modules = (
        *("fednet.cli.run", "fednet.cli.server", "fednet.cli.client", "fednet.server.process"),
        *("fednet.client.preparing", "fednet.experiment.build", "fednet.launch.supervisor"),
        "fednet.training.hosts",
    )
    said = python(
        f"import {', '.join(modules)}, os, torch\n"
        "os.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
        "print(torch.backends.cpu.get_cpu_capability())\n"
    )
    assert said == "DEFAULT"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["EPYC", "Haswell", "EPYC-Milan"])
def test_processors_of_other_makers_compute_the_same_fingerprint(model):
    """As QEMU has them; of torch's own choice each maker's would be another."""
    qemu = shutil.which("qemu-x86_64")
    if qemu is None:
        pytest.skip("needs qemu-user")
    code = (
        "from fednet.experiment import determinism\n"
        "from fednet.tools.doctor import fingerprint\n"
        "determinism.choose_kernels(True)\n"
        "print(fingerprint())\n"
    )
    assert python(code) == python(code, qemu, "-cpu", model)
