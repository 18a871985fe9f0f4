"""Where files are kept, also for a user without a home directory."""

from __future__ import annotations

import pytest

from fednet import places
from fednet.errors import ConfigError


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does for such a user
    with pytest.raises(ConfigError, match=r"XDG_CACHE_HOME.* there is no home directory"):
        places.cache()
