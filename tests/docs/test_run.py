"""What runs the commands on the pages: `python docs/run.py`."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import yaml

from tests.docs import ROOT, script


@pytest.fixture(scope="module")
def runner():
    return script("run")


COMMAND = """#!/usr/bin/env python3
import sys
print(*sys.argv[1:], sys.stdin.read(), "colorsys" in sys.modules, sep="|")
sys.exit(len(sys.argv) - 1)
"""


@pytest.fixture(scope="module")
def programs(runner, tmp_path_factory):
    """A command `fednet` says its words and its input, and has their number as its status."""
    installed = tmp_path_factory.mktemp("installed") / "fednet"
    installed.write_text(COMMAND)
    installed.chmod(0o755)
    path = f"{installed.parent}:{runner.ENVIRONMENT['PATH']}"
    with (
        mock.patch.dict(runner.ENVIRONMENT, PATH=path),
        runner.programs(("colorsys",)) as folder,
    ):
        yield folder


def test_every_block_is_run_or_says_why_not(runner):
    found = [(page.name, block) for page in runner.pages() for block in runner.blocks(page)]
    assert len(found) > 30
    for name, block in found:
        why = block.mark.removeprefix("skip: ")
        assert block.mark in ("", "background") or len(why) > 10, f"{name}:{block.line}"
    skipped = [block for _, block in found if block.mark.startswith("skip")]
    assert len(skipped) <= 8


def test_every_page_is_in_the_sites_contents():
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/name:", "")
    named = str(yaml.safe_load(text)["nav"])
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in named


def test_blocks_of_a_page_follow_one_another_and_the_first_that_fails_is_shown(
    runner, programs, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "HERE", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\necho one > file\n```\n```python\nassert open('file').read() == 'one\\n'\n```\n"
        "```sh skip: never to be run\nexit 3\n```\n```sh background\nsleep 60\n```\n"
        "```sh\ntest -f file && echo told && exit 7\n```\n"
    )
    (failed,) = runner.run(page, programs)
    assert failed.startswith("page.md:13: status 7")
    assert "told" in failed
    page.write_text(
        "```sh background\necho lost && exit 5\n```\n```sh background\nsleep 60\n```\n"
        "```sh\nsleep 600\n```\n"
    )
    (failed,) = runner.run(page, programs)
    assert failed == "page.md:1: status 5\nlost\n"
    cells = [{"cell_type": "code", "source": s} for s in ("x = 1", "assert x == 2, 'no'")]
    notebook = tmp_path / "book.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    (failed,) = runner.run(notebook, programs)
    assert "AssertionError: no" in failed


def test_programs_are_the_installed_ones_forked_from_a_process_that_has_imported_other_modules(
    runner, programs, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "HERE", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        f"""
```python background
import pathlib, signal, sys, time
def stopped(number, _):
    pathlib.Path({str(tmp_path / "stopped")!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, stopped)
pathlib.Path("ready").touch()
time.sleep(60)
```
```python
import pathlib, sys
assert "colorsys" in sys.modules and "fednet" not in sys.modules
assert sys.argv == [__file__] == ["block-11.py"] and pathlib.Path(__file__).exists()
assert sys.stdin.read() == ""
```
```sh
said=$(printf in | fednet run 'a b') || test $? = 2
test "$said" = 'run|a b|in|True'
until test -f ready; do sleep 0.01; done
```
```python
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
```
"""
    )
    (failed,) = runner.run(page, programs)
    assert failed == "page.md:22: status -9\n"
    assert (tmp_path / "stopped").exists()  # each page's end asks what runs beside it to stop
