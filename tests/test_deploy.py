"""The files in deploy/ fit the commands they call, the schemas they are read by, and each other."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fednet.cli import client, server
from fednet.cli.common import Parser
from fednet.cli.main import main

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def containers() -> list[dict]:
    jobs = [d for path in KUBERNETES for d in documents(path) if d["kind"] == "Job"]
    return [
        c
        for j in jobs
        for c in (
            *j["spec"]["template"]["spec"]["containers"],
            *j["spec"]["template"]["spec"]["initContainers"],
        )
    ]


def understood(words: list[str]) -> None:
    """Raises where a command of ours would refuse these words."""
    room = {"fednet-server": server, "fednet-client": client}[words[0]]
    parser = Parser(prog=words[0])
    room.add(parser)
    parser.parse_args(
        [w.replace("$(JOB_COMPLETION_INDEX)", "3").replace("${SHARE}", "1/4") for w in words[1:]]
    )


def test_each_command_in_compose_and_kubernetes_is_understood():
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    found = [
        c["command"]
        for c in (*services.values(), *containers())
        if c["command"][0].startswith("fednet-")
    ]
    assert len(found) == 5 + 2
    for words in found:
        understood(words)


def test_compose_gives_each_client_its_own_id_key_and_state():
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    for k in range(4):
        words, volumes = services[f"client-{k}"]["command"], services[f"client-{k}"]["volumes"]
        assert words[words.index("--id") + 1] == str(k)
        assert words[words.index("--keys") + 1] == f"/keys/clients/{k}.key"
        assert f"state-{k}:/state" in volumes
    assert set(services) == {"keys", "server", *(f"client-{k}" for k in range(4))}


def test_kubernetes_manifests_fit_the_api_schemas():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for path in KUBERNETES:
        for document in documents(path):
            kubernetes_validate.validate(document, "1.29", strict=True)


def test_pods_have_no_rights_and_mount_what_they_name():
    jobs = [d for path in KUBERNETES for d in documents(path) if d["kind"] == "Job"]
    assert len(jobs) == 2
    for job in jobs:
        spec = job["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        named = {v["name"] for v in spec["volumes"]}
        for container in (*spec["containers"], *spec["initContainers"]):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {m["name"] for m in container["volumeMounts"]} <= named


def test_the_batch_file_is_bash_and_its_commands_are_understood():
    path = DEPLOY / "slurm" / "fednet.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = re.sub(r'"\$\{safety\[@\]\}"|\$\{KEYS:\+[^}]*\}|&$', "", path.read_text(), flags=re.M)
    commands = re.findall(
        r"^(?:    |srun --ntasks=1 )(fednet-(?:server|client) .*)$", text, flags=re.M
    )
    assert len(commands) == 2
    for command in commands:
        understood(shlex.split(command.replace("$SHARE", "${SHARE}")))


def test_keys_of_a_lab_are_what_the_pages_say(tmp_path):
    assert main(["keys", "lab", str(tmp_path), "--clients", "2"]) == 0
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "allowed/0",
        "allowed/1",
        "clients/0.key",
        "clients/1.key",
        "clients/all.key",
        "server.key",
    ]
