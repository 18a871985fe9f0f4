"""`train.portable`: the same bits on x86-64 processors of unlike makers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from fednet.experiment import determinism
from tests.parity.test_parity import CONFIG, bits, rounds
from tests.processes import ROOT, Processes, lines, until

# Adam takes square roots, which torch's own kernels round as each maker's processor does.
PORTABLE = CONFIG.format(method="fedavg").replace(
    "momentum: 0.9", "optimizer: adam, portable: true"
)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or "AVX" not in determinism.processor(),
    reason="wants an x86-64 processor with AVX2",
)


def python(code: str, *before: str, **extra: str) -> str:
    """What the code prints in a process that has computed nothing yet."""
    words = [*before, sys.executable, "-c", code]
    env = {**os.environ, **extra}
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_in_one_process_in_many_after_a_crash_and_with_clients_started_by_themselves(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(PORTABLE)
    found = {}
    for words in (["--in-process"], ["--workers", 2]):
        out = tmp_path / str(len(found))
        with Processes(tmp_path) as processes:
            status, said = processes.run("main", "run", config, *words, "--out", out)
        assert status == 0, said
        found[words[-1]] = bits(out / "same")
    run = tmp_path / "same"
    with Processes(tmp_path) as processes:
        server = processes.start("server", config, "--bind", "tcp://127.0.0.1:0", "--out", tmp_path)
        client = processes.start("client", "--id", "0-4", "--run", run)
        until(lambda: rounds(run), "round 1", server, client)
        server.kill()
        processes.ended(server)
        server = processes.start("server", "--resume", run)
        for process in (server, client):
            status, said = processes.ended(process)
            assert status == 0, said
    found["resumed"] = bits(run)
    one, *others = found.values()
    assert all(other == one for other in others)
    events = lines(run / "events.jsonl")
    assert not [e for e in events if e.get("differs")]
    assert "processor" in json.loads((run / "summary.json").read_text())["provenance"]


def test_square_roots_are_those_of_ieee_754():
    """The float32 nearest to the root, in each way that torch has of asking for one."""
    said = python(
        "import numpy as np, torch\n"
        "from fednet.experiment import determinism\n"
        "determinism.choose(True)\n"
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
        "print(half.dtype, half.item(), torch.ones(2, 3).t().sqrt().shape)\n"
    )
    assert said.splitlines() == [
        "[0, 0, 0, 0]",
        "[0.25, 1.0] [2.0, 3.0] tensor(nan)",
        "torch.bfloat16 1.4140625 torch.Size([3, 2])",
    ]


def test_it_is_refused_where_another_choice_has_been_made():
    code = (
        "from fednet.experiment import determinism\n"
        "from fednet.errors import ConfigError\n"
        "import torch\n"
        "{before}\n"
        "try:\n"
        "    determinism.choose({portable})\n"
        "except ConfigError as wrong:\n"
        "    print(wrong)\n"
    )
    other = "determinism.choose(True)"
    assert "has computed with train.portable: true already" in python(
        code.format(before=other, portable=False)
    )
    said = python(
        code.format(before="torch.ones(9).exp()", portable=True), ATEN_CPU_CAPABILITY="default"
    )
    assert said == "train.portable: this processor has no AVX2; leave train.portable out."
    assert python(code.format(before=other, portable=True)) == ""


def test_nothing_is_computed_before_the_configuration_is_known():
    """torch asks once, at its first kernel, which ones to take: no import may run one."""
    modules = (
        "fednet.cli.run",
        "fednet.cli.server",
        "fednet.cli.client",
        "fednet.server.process",
        "fednet.client.preparing",
        "fednet.experiment.build",
        "fednet.launch.supervisor",
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
        pytest.skip("wants qemu-user")
    code = (
        "from fednet.experiment import determinism\n"
        "from fednet.tools.fingerprint import fingerprint\n"
        "determinism.choose(True)\n"
        "print(fingerprint())\n"
    )
    assert python(code) == python(code, qemu, "-cpu", model)
