"""Values of flags, such as a length of time or a list of numbers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from fednet import places
from fednet.errors import ConfigError

LONGEST_S = 10_000 * 86400.0  # a longer time is a mistake
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds(text: str) -> float:
    """`3h50m`, `90s`, `1d`, `90` (seconds)."""
    found = _SPAN.fullmatch(text.strip())
    if not text.strip() or found is None:
        raise argparse.ArgumentTypeError(
            f"expected a length of time such as 3h50m, 45m or 90s, got {text!r}"
        )
    total = sum(float(n) * unit for n, unit in zip(found.groups(default="0"), (86400, 3600, 60, 1)))
    if not 0 < total <= LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"expected a length of time above zero and of at most 10000 days, got {text!r}"
        )
    return total


def numbers(text: str) -> list[float]:
    """`0.6,0.7`."""
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, got {text!r}"
        ) from None


def whole_numbers(text: str) -> list[int]:
    """`0,1,2`, or `0-4`."""
    from fednet import ids

    try:
        found = ids.parse(text)
    except ConfigError:
        found = None
    if found is None or found.share is not None:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers such as 0,1,2 or 0-4, got {text!r}"
        )
    return list(found.listed)


def seeds(text: str) -> list[int]:
    """`0,1,2`, or `0-4`; each is a run."""
    found = whole_numbers(text)
    if len(found) > 1000:
        raise argparse.ArgumentTypeError(f"expected at most 1000 seeds, got {len(found)}")
    return found


def at_least_one(text: str) -> int:
    """A number of processes, runs or clients."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def names(text: str) -> list[str]:
    """`FedAvg,FedProx`."""
    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return found


def path(text: str) -> Path:
    """A file or folder, with `~` as the home directory, also where the shell leaves it, as in
    `--out=~/runs`.
    """
    try:
        return places.expand_home(text, "a path")
    except ConfigError as homeless:
        raise argparse.ArgumentTypeError(str(homeless)) from None


def new_file(*kinds: str) -> Callable[[str], Path]:
    """A file to be written: its name ends in one of `kinds`, and its folder exists. Checked before
    anything is computed for it.
    """

    def check(text: str) -> Path:
        file = path(text)
        if file.suffix[1:].lower() not in kinds:
            raise argparse.ArgumentTypeError(
                f"expected a file of the kind {' or '.join(f'.{kind}' for kind in kinds)}, "
                f"got {text!r}"
            )
        if file.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected a file")
        if file.exists() and not file.is_file():  # writing a pipe would wait for its reader
            raise argparse.ArgumentTypeError(f"{text!r} is no regular file")
        if not file.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {str(file.parent)!r}")
        return file

    return check
