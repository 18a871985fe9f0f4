"""Datasets, how they are divided between clients, and the samples of one site.

    data = load(section, root, seed)                    # every sample, one tensor a split
    federation = split(data, section, clients, seed)    # who holds which of them
    site = federation.site(3, "cuda:0")                 # one client's slice, as model inputs

Lazy, so that listing the datasets imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednet.data.base import Data
    from fednet.data.division import split
    from fednet.data.federation import Federation, Site, balanced_test
    from fednet.data.loading import load
    from fednet.data.site import load_site

_HOME = {
    "Data": "base",
    "Federation": "federation",
    "Site": "federation",
    "balanced_test": "federation",
    "load": "loading",
    "load_site": "site",
    "split": "division",
}
__all__ = ["Data", "Federation", "Site", "balanced_test", "load", "load_site", "split"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
