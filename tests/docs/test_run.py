"""What runs the commands on the pages: `python docs/run.py`."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.docs import ROOT, script


@pytest.fixture(scope="module")
def runner():
    return script("run")


def test_every_block_is_run_or_says_why_not(runner):
    found = [(page.name, block) for page in runner.pages() for block in runner.blocks(page)]
    assert len(found) > 30
    for name, block in found:
        why = block.mark.removeprefix("skip: ")
        assert block.mark in ("", "background") or len(why) > 10, f"{name}:{block.line}"
    skipped = [block for _, block in found if block.mark.startswith("skip")]
    assert len(skipped) <= 7


def test_every_page_is_in_the_sites_contents():
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/name:", "")
    named = str(yaml.safe_load(text)["nav"])
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in named


def test_blocks_of_a_page_follow_one_another_and_the_first_that_fails_is_shown(
    runner, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "HERE", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\necho one > file\n```\n```python\nassert open('file').read() == 'one\\n'\n```\n"
        "```sh skip: never to be run\nexit 3\n```\n```sh background\nsleep 60\n```\n"
        "```sh\ntest -f file && echo told && exit 7\n```\n"
    )
    (failed,) = runner.run(page)
    assert failed.startswith("page.md:13: status 7")
    assert "told" in failed
    page.write_text(
        "```sh background\necho lost && exit 5\n```\n```sh background\nsleep 60\n```\n"
        "```sh\nsleep 600\n```\n"
    )
    (failed,) = runner.run(page)
    assert failed == "page.md:1: status 5\nlost\n"
    cells = [{"cell_type": "code", "source": s} for s in ("x = 1", "assert x == 2, 'no'")]
    notebook = tmp_path / "book.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    (failed,) = runner.run(notebook)
    assert "AssertionError: no" in failed
