"""A real browser, where the machine has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find() -> str:
    found = os.environ.get("CHROME") or next((p for n in NAMES if (p := shutil.which(n))), None)
    if found is None:
        pytest.skip("no chromium on this machine: the page is not looked at in a browser")
    return found


def probe(page: Path, folder: Path, script: str, width: int, *flags: str) -> tuple[str, list[str]]:
    """Opens a copy of the page that runs `script` once loaded, which calls `say(text)`.

    Returns what it said, and the lines on the console.
    """
    tail = (
        "<pre id=said></pre><script>addEventListener('load', () => {"
        "const said = document.getElementById('said'), say = t => said.textContent += t + '\\n';"
        f"try {{ {script} }} catch (e) {{ say('error ' + e) }} }});</script>"
    )
    copy = folder / f"probe-{width}.html"
    copy.write_text(
        page.read_text(encoding="utf-8").replace("</body>", tail + "</body>"), encoding="utf-8"
    )
    run = subprocess.run(
        [
            find(),
            *QUIET,
            *flags,
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},900",
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = re.search(r'<pre id="said">(.*?)</pre>', run.stdout, re.S)
    assert said, "the page did not load"
    return said[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"), [
        x for x in run.stderr.splitlines() if ":CONSOLE" in x
    ]
