"""Writes the pages that follow from the code: `python docs/pages.py`. With --check it writes
nothing and names those that are not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fednet.config import keys as declared

HERE = Path(__file__).parent


def configuration() -> str:
    """docs/configuration.md: a table of keys for each section."""
    about = declared.sections()
    keys: dict[str, list[declared.Key]] = {name: [] for name in about}
    for key in declared.keys():  # noqa: SIM118 (a function)
        top = key.path.partition(".")[0]
        keys[top if top in about else ""].append(key)
    lines = [
        "# Configuration",
        "",
        "Every key with its type, default and unit, what it does, and the module that reads it.",
        "`python docs/pages.py` writes this page from the declarations in `fednet/config`;",
        "`fednet list keys [PREFIX]` shows the same. Options of a method, a model, a dataset or a",
        "partition stand beside its name: see `fednet list algorithms`, `models`, `datasets` and",
        "`partitions`.",
    ]
    for name, found in keys.items():
        lines += ["", f"## `{name}`" if name else "## The run", ""]
        lines += [about[name], ""] if name else []
        lines += ["| key | type | default | unit | what it does | read by |"]
        lines += ["|---|---|---|---|---|---|"]
        for k in found:
            cells = (f"`{k.path}`", k.type, f"`{k.default}`", k.unit, k.about, k.reader)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {"configuration.md": configuration}


def stale() -> list[str]:
    """The pages whose file is not what the code says now."""
    return [
        name
        for name, made in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text(encoding="utf-8") != made()
    ]


def main() -> int:
    old = stale()
    if "--check" in sys.argv:
        print("\n".join(f"docs/{name} is out of date: run python docs/pages.py" for name in old))
        return bool(old)
    for name in old:
        (HERE / name).write_text(PAGES[name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
