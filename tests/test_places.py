"""Where files are kept, also for a user without a home directory."""

from __future__ import annotations

import os

import pytest

from fednet import places
from fednet.data import load
from fednet.errors import ConfigError
from tests.rooms import small


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user that the system does not know; returns its folder for temporary files."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDNET_DATA", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does for such a user
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_directory_has_a_cache_of_its_own(homeless):
    assert places.cache() == homeless / f"fednet-{os.getuid()}"
    assert places.cache().stat().st_mode & 0o777 == 0o700
    assert load(small().data).n_train  # whose root is the cache where nobody names another
    with pytest.raises(ConfigError, match=r"data.root: there is no home directory for the ~ of"):
        load(small().data, "~/data")


def test_a_folder_of_another_user_is_no_cache(homeless, monkeypatch):
    other = os.getuid() + 1
    (homeless / f"fednet-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match="is another user's; set XDG_CACHE_HOME"):
        places.cache()
