"""What the README says is so: its table is the registry's, its commands are understood, its files
are there.
"""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from fednet import registry
from fednet.cli import client, server
from fednet.cli.common import Parser
from fednet.cli.main import FILES, VERBS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def methods() -> list[str]:
    """The table of methods, from what each declares."""
    lines = [
        "| method | what it does | down | up | server keeps | client keeps | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in registry.algorithm.entries():
        cells = [
            f"`{e.name}`",
            e.summary.rstrip("."),
            *e.facts.get("cost", ("|w|", "|w|")),
            *e.facts.get("keeps", ("w", "-")),
            e.facts["paper"],
        ]
        lines.append("| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |")
    return lines


def test_table_of_methods_is_what_the_methods_declare():
    found = [line for line in methods() if not line.startswith("|---")]
    missing = [line for line in found if line not in TEXT]
    assert not missing, "README.md lacks:\n" + "\n".join(missing)
    section = TEXT.partition("## Methods")[2].partition("\n## ")[0]
    assert sum(line.startswith("| `") for line in section.splitlines()) == len(
        registry.algorithm.names()
    )


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [
        part.strip()
        for line in lines
        for part in line.split("&&")
        if part.strip().startswith("fednet")
    ]


@pytest.mark.parametrize("line", commands())
def test_command_is_understood(line):
    words = shlex.split(line)
    if words[0] == "fednet":
        assert words[1] in VERBS
        verb = importlib.import_module(f"fednet.cli.{FILES.get(words[1], words[1])}")
        words = words[1:]
    else:
        verb = {"fednet-server": server, "fednet-client": client}[words[0]]
    parser = Parser(prog=words[0])
    verb.add(parser)
    parser.parse_args(words[1:])


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target
