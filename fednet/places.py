"""The default places of files, and `~` in the paths that users give."""

from __future__ import annotations

import os
from pathlib import Path

from fednet.errors import ConfigError


def runs_as_named() -> str:
    """Returns the folder of runs: FEDNET_OUT, else `runs` in the working directory."""
    return os.environ.get("FEDNET_OUT") or "runs"


def runs() -> Path:
    """Returns the folder of runs, with `~` as the home directory."""
    return expand_home(runs_as_named(), "FEDNET_OUT")


def cache() -> Path:
    """Returns the user's cache: $XDG_CACHE_HOME/fednet, else ~/.cache/fednet."""
    if os.environ.get("XDG_CACHE_HOME"):
        return expand_home(os.environ["XDG_CACHE_HOME"], "XDG_CACHE_HOME") / "fednet"
    return expand_home("~/.cache/fednet", "the cache ($XDG_CACHE_HOME)")


def expand_home(path: Path | str, key: str) -> Path:
    """Returns a path that a user gave, with `~` as the home directory: every path of a
    configuration, a command and a function is read so. key: for the error.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key}: there is no home directory for the ~ of {str(path)!r}; give the whole path."
        ) from None
