"""The name under which clients bring their own data; see `fednet.data.site`."""

from __future__ import annotations

from fednet.config.schema import AtLeast1
from fednet.data.base import Data
from fednet.errors import ConfigError
from fednet.registry import dataset


@dataset("site")
def site(
    *,
    shape: list[AtLeast1],
    classes: AtLeast1 | list[str] | None = None,
    targets: AtLeast1 = 1,
    format: str | None = None,
) -> Data:
    """Each client brings its own data (--data DIR); the server knows only shape and classes.

    These are what every site must hold. What else stands beside them are options of the dataset
    `format`, which reads them there, without one of `folder` and `arrays`.
    """
    raise ConfigError(
        "data.dataset: site is read by each client from its own --data DIR; nothing is loaded here."
    )
