"""Runs every command on the pages: `python docs/run.py [PAGE ...]`.

A fenced block of `sh` or `python` is run, the blocks of a page one after the other in one empty
folder; of a notebook all cells, from top to bottom. What cannot be run says why beside its
language:

    ```sh skip: needs a second machine
    ```sh background        runs on beside the blocks that follow, and is ended with its page

A page may take ten minutes in all. Ends with 1 where a block fails, also one that runs beside
others, and shows what it said. A command of fednet and a block of `python` is a fork of a process
that has imported torch, which takes two seconds of a processor (`forking.py`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^```(sh|python)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MOST_S = 600.0
LOOK_S = 0.2  # how often it is looked whether what runs beside a block still does
TOGETHER = 2  # pages; each has a folder of its own
COMMANDS = ("fednet", "fednet-server", "fednet-client")
IMPORTED = ("torch._dynamo", "matplotlib.figure")  # of fednet nothing: it imports what it needs
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Block:
    language: str
    mark: str  # what stands beside it
    text: str
    line: int


def pages() -> list[Path]:
    """All that may have commands: first those with many."""
    found = sorted([*HERE.rglob("*.md"), *HERE.rglob("*.ipynb")])
    return sorted(found, key=lambda page: -len(list(blocks(page))))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        yield Block("python", "", "\n".join("".join(cell) for cell in cells), 1)
        return
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[1], found[2].strip(), found[3], line)


@contextmanager
def programs(modules: tuple[str, ...] = IMPORTED) -> Iterator[Path]:
    """A folder with programs that are forks: fednet's installed commands, and `python`, which takes
    a file.
    """
    with tempfile.TemporaryDirectory(prefix="fednet-programs-") as made:
        folder, forking = Path(made), str(HERE / "forking.py")
        where = str(folder / "socket")
        installed = {name: [shutil.which(name, path=ENVIRONMENT["PATH"])] for name in COMMANDS}
        for name, file in {"python-file": [], **installed}.items():
            if None not in file:
                words = shlex.join([sys.executable, "-IS", forking, "ask", where, *file])
                (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
                (folder / name).chmod(0o755)
        with subprocess.Popen(
            [sys.executable, forking, "serve", where, *modules],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,  # its end is the server's
            stdout=subprocess.PIPE,
        ) as server:
            server.stdout.readline()  # it listens
            yield folder


def started(block: Block, folder: Path, programs: Path) -> subprocess.Popen[str]:
    script = folder / f"block-{block.line}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(block.text, encoding="utf-8")
    python = str(programs / "python-file")
    command = [python] if block.language == "python" else ["sh", "-eu"]
    return subprocess.Popen(
        [*command, script.name],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "PATH": f"{programs}:{ENVIRONMENT['PATH']}"},
        start_new_session=True,
    )


Beside = list[tuple[Block, subprocess.Popen[str]]]


def ended(process: subprocess.Popen[str], beside: Beside, until: float) -> str:
    """Waits for its end, and returns what it said. Raises RuntimeError where one beside it fails,
    subprocess.TimeoutExpired after `until`.
    """
    while True:
        for at, (block, other) in enumerate(beside):
            if other.poll():
                said, _ = beside.pop(at)[1].communicate()
                raise RuntimeError(f"{block.line}: status {other.returncode}\n{said[-4000:]}")
        try:
            return process.communicate(timeout=LOOK_S)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise


def run(page: Path, programs: Path) -> list[str]:
    """What failed."""
    name, until = page.relative_to(HERE), time.monotonic() + MOST_S
    beside: Beside = []
    with tempfile.TemporaryDirectory(prefix="fednet-docs-") as folder:
        try:
            for block in blocks(page):
                if block.mark.startswith("skip: "):
                    continue
                if block.mark not in ("", "background"):
                    return [f"{name}:{block.line}: unknown mark {block.mark!r}"]
                began, process = time.monotonic(), started(block, Path(folder), programs)
                if block.mark == "background":
                    beside.append((block, process))
                    continue
                try:
                    said = ended(process, beside, until)
                except subprocess.TimeoutExpired:
                    beside.append((block, process))
                    return [f"{name}:{block.line}: longer than {MOST_S:g} s"]
                except RuntimeError as broken:
                    beside.append((block, process))
                    return [f"{name}:{broken}"]
                if process.returncode:
                    return [f"{name}:{block.line}: status {process.returncode}\n{said[-4000:]}"]
                print(f"{name}:{block.line}: {time.monotonic() - began:.1f} s", flush=True)
        finally:
            for _, process in beside:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                process.communicate()
    return []


def main() -> int:
    chosen = [Path(word).resolve() for word in sys.argv[1:]] or pages()
    with programs() as folder, ThreadPoolExecutor(TOGETHER) as pool:
        failed = [
            what for found in pool.map(partial(run, programs=folder), chosen) for what in found
        ]
    print("\n".join(failed) if failed else f"{len(chosen)} pages: every command runs")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
