"""The commands in README.md and in the files of deploy/ are understood, and those files fit each
other and the schemas by which they are read.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from fednet import registry
from fednet.cli import client, server
from fednet.cli.common import Parser
from fednet.cli.main import FILES, VERBS, main
from tests.docs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "deploy"


def understood(words: list[str]) -> None:
    """Parse a command; raises where it would be refused."""
    if words[0] == "fednet":
        assert words[1] in VERBS
        verb: Any = importlib.import_module(f"fednet.cli.{FILES.get(words[1], words[1])}")
        words = words[1:]
    else:
        verb = {"fednet-server": server, "fednet-client": client}[words[0]]
    parser = Parser(prog=words[0])
    verb.add(parser)
    filled = [w.replace("$(JOB_COMPLETION_INDEX)", "3").replace("${SHARE}", "1/4") for w in words]
    parser.parse_args(filled[1:])


# -- README.md -------------------------------------------------------------------------------------
def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("fednet")]


def test_the_readme_is_short_names_each_method_once_and_its_commands_are_understood():
    assert len(README.encode()) <= 9000
    section = README.partition("## Methods")[2].partition("\n## ")[0]
    named = [n for n in re.findall(r"`(\w+)`", section) if n in registry.algorithm.names()]
    assert sorted(named) == registry.algorithm.names()
    assert re.findall(r"\b(\d+) methods\b", README) == [str(len(named))]
    assert len(commands()) > 10
    for line in commands():
        understood(shlex.split(line))


# -- deploy/ ---------------------------------------------------------------------------------------
SERVICES = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
KUBERNETES = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document
]
PODS = [d["spec"]["template"]["spec"] for d in KUBERNETES if d["kind"] == "Job"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod["initContainers"]]


def test_each_command_in_compose_and_kubernetes_is_understood():
    every = [*SERVICES.values(), *(c for pod in PODS for c in containers(pod))]
    found = [c["command"] for c in every if c["command"][0].startswith("fednet-")]
    assert len(found) == 5 + 2
    for words in found:
        understood(words)


def test_compose_gives_each_client_its_own_id_key_and_state():
    for k in range(4):
        words = SERVICES[f"client-{k}"]["command"]
        volumes = SERVICES[f"client-{k}"]["volumes"]
        assert words[words.index("--id") + 1] == str(k)
        assert words[words.index("--keys") + 1] == f"/keys/clients/{k}.key"
        assert f"state-{k}:/state" in volumes
    assert set(SERVICES) == {"keys", "server", *(f"client-{k}" for k in range(4))}


def test_kubernetes_manifests_fit_the_api_schemas():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in KUBERNETES:
        kubernetes_validate.validate(document, "1.29", strict=True)


def test_pods_have_no_rights_and_mount_what_they_name():
    assert len(PODS) == 2
    for pod in PODS:
        assert pod["securityContext"]["runAsNonRoot"]
        named = {v["name"] for v in pod["volumes"]}
        for container in containers(pod):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {m["name"] for m in container["volumeMounts"]} <= named


def test_the_batch_file_is_bash_and_its_commands_are_understood():
    path = DEPLOY / "slurm" / "fednet.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = re.sub(r'"\$\{safety\[@\]\}"|\$\{KEYS:\+[^}]*\}|&$', "", path.read_text(), flags=re.M)
    start = r"^(?:    |srun --ntasks=1 )(fednet-(?:server|client) .*)$"
    found = re.findall(start, text, flags=re.M)
    assert len(found) == 2
    for command in found:
        understood(shlex.split(command.replace("$SHARE", "${SHARE}")))


UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_units_start_commands_that_are_understood_and_systemd_accepts_them(unit, tmp_path):
    text = unit.read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=/opt/fednet/bin/(.*)$", text, flags=re.M)
    understood(shlex.split(command))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    here = tmp_path / unit.name
    here.write_text(re.sub(r"/opt/fednet/bin/\S+", "/bin/true", text))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_keys_of_a_lab_are_what_the_pages_say(tmp_path):
    assert main(["keys", "lab", str(tmp_path), "--clients", "2"]) == 0
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "allowed.lock",
        "allowed/0",
        "allowed/1",
        "clients/0.key",
        "clients/1.key",
        "clients/all.key",
        "server.key",
    ]
