"""A link of a page leads to a file, and to a heading that it has; a file that it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from tests.docs import ROOT, script

FOLDERS = [ROOT / name for name in ("docs", "deploy", "configs")]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]


def text_of(page: Path) -> str:
    """Without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).strip().lower() for h in headings)
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in plain}


def lost(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text_of(page)):
        link = "".join(target)
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (heading and heading not in anchors(file)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    for name in re.findall(r"`((?:tests|docs|configs)/[a-z0-9_./-]+\.[a-z]+)`", text_of(page)):
        if not (ROOT / name).exists():
            found.append(f"{page.relative_to(ROOT)}: {name}")
    return found


def test_every_link_leads_to_a_file_and_a_heading_and_every_file_that_is_named_exists():
    assert len(PAGES) > 25
    assert [link for page in PAGES for link in lost(page)] == []


def test_a_link_to_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(lost.__globals__, "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text(
        "# What it is\n[here](#what-it-is) [no](#it) [gone](b.md) [web](https://x)\n`tests/a.py`"
    )
    assert lost(page) == ["a.md: #it", "a.md: b.md", "a.md: tests/a.py"]


def test_a_link_out_of_the_pages_is_the_name_of_its_file_on_the_site():
    hooks = script("hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/a.md"))
    text = "[keys](../runs.md#a) [GPUs](../../deploy/x.md#gpus) [deploy/x.md](../../deploy/x.md)"
    assert hooks.on_page_markdown(text, page) == (
        "[keys](../runs.md#a) GPUs (`deploy/x.md`) `deploy/x.md`"
    )
