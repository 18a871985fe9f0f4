"""The name under which clients bring their own data; see `fednet.data.site`."""

from __future__ import annotations

from typing import Annotated

from fednet.config.schema import AtLeast1
from fednet.data.base import Data
from fednet.errors import ConfigError
from fednet.registry import dataset


@dataset("site")
def site(
    *,
    shape: Annotated[list[AtLeast1], "Shape of one input, such as [3, 32, 32] or [16]."],
    classes: Annotated[
        AtLeast1 | list[str] | None,
        "Number of classes, or their names in order; null: y holds values.",
    ] = None,
    targets: Annotated[AtLeast1, "Values per sample, if y holds values. [values]"] = 1,
    format: Annotated[
        str | None,
        "Dataset that reads the data at each site, with its options beside this one; null: folder "
        "or arrays, by what is there.",
    ] = None,
) -> Data:
    """Each client brings its own data (--data DIR); the server knows only shape and classes."""
    raise ConfigError(
        "data.dataset: site is read by each client from its own --data DIR; nothing is loaded here."
    )
