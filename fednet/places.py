"""The default places of files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fednet.errors import ConfigError


def runs() -> Path:
    """Returns the folder of runs: FEDNET_OUT, else `runs` in the working directory."""
    return Path(os.environ.get("FEDNET_OUT") or "runs")


def cache() -> Path:
    """Returns the user's cache: $XDG_CACHE_HOME/fednet, else ~/.cache/fednet. Without a home
    directory, as in many containers, a folder among the temporary files; raises ConfigError where
    that is another user's.
    """
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "fednet"
    try:
        return Path.home() / ".cache" / "fednet"
    except RuntimeError:
        pass
    folder = Path(tempfile.gettempdir()) / f"fednet-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(
            f"{folder}: this user has no home directory, and that folder for its cache is another "
            f"user's; set XDG_CACHE_HOME."
        )
    return folder


def expanded(path: Path | str, key: str) -> Path:
    """Returns a path that a user gave, with `~` as the home directory. key: for the error."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key}: there is no home directory for the ~ of {str(path)!r}; give the whole path."
        ) from None
