"""The README is true: it names every method, its commands are understood, its files exist."""

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


def test_each_method_is_in_one_family():
    section = TEXT.partition("## Methods")[2].partition("\n## ")[0]
    named = [n for n in re.findall(r"`(\w+)`", section) if n in registry.algorithm.names()]
    assert sorted(named) == registry.algorithm.names()


def test_it_is_short():
    assert len(TEXT.encode()) <= 9000


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
