"""What a package index is told of fednet, and what its page shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_to_files_lead_to_the_repository():
    page = "see [a](docs/a.md#b), ![c](i.svg), [d](https://d.org) and [e](#e)"
    assert release().linked(page, "https://example.org/f", "1.2") == (
        "see [a](https://example.org/f/blob/v1.2/docs/a.md#b), "
        "![c](https://example.org/f/raw/v1.2/i.svg), [d](https://d.org) and [e](#e)"
    )


def test_the_metadata_gets_the_repositorys_address():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    described = release().described(project, "https://example.org/f")
    assert '[project.urls]\nRepository = "https://example.org/f"\n' in described
    assert described.count("[project.scripts]") == 1
