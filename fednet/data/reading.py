"""Calls the functions of datasets, and of other parts that choose their own options. Imports no
torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fednet import places
from fednet.config.fit import fit
from fednet.config.tree import wrap
from fednet.options import options_of, takes
from fednet.plain import JsonDict, JsonMapping
from fednet.registry import Part

T = TypeVar("T")


def read(
    part: Part, given: JsonDict, root: Path | str | None, download: bool, seed: int, with_test: bool
) -> object:
    """Returns what the function of a dataset returns. It gets those of root, download, seed and
    with_test that it takes, and its options. root, with_test: see `loading.load`.
    """
    has: JsonDict = {"download": download, "seed": seed, "with_test": with_test}
    if takes(part, "root"):  # else no home directory is needed
        has["root"] = place(root)
    return call(part, has, given, "data")


def place(root: Path | str | None) -> Path:
    """Returns the folder of datasets. root: see `loading.load`."""
    given = root or os.environ.get("FEDNET_DATA")
    return places.expand_home(given, "data.root") if given else places.cache()


def call(part: Callable[..., T], given: JsonMapping, options: JsonMapping, path: str) -> T:
    """Calls part(**given, **options) with those of `given` that it takes. Options are its annotated
    keyword parameters; raises ConfigError for others. path: their configuration key, such as
    `data`.
    """
    parameters = inspect.signature(part).parameters
    declared = options_of(part, given)
    values = dict(options)
    if declared is not None:
        name = getattr(part, "__name__", str(part))
        made = fit(wrap(values, f"the options of {name}"), declared, path)
        values = {
            f.name: getattr(made, f.name)
            for f in msgspec.structs.fields(made)
            if f.encode_name in options
        }
    return part(**{n: v for n, v in given.items() if n in parameters}, **values)
