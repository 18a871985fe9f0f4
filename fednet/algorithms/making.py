"""Makes the method of a configuration. Secure aggregation is imported where a run has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fednet import registry
from fednet.algorithms.base import Algorithm

if TYPE_CHECKING:
    from typing import TypeGuard

    from fednet.algorithms.secure import Secure
    from fednet.config import Config


def make_method(config: Config) -> Algorithm:
    """Makes the method of a configuration, under secure aggregation if that asks for it."""
    kind = registry.algorithm.get(config.algorithm.name)
    section = config.privacy.secagg
    if section.protocol != "none":
        from fednet.algorithms.secure import secure_class

        kind = secure_class(kind, section)
    return kind(msgspec.convert(config.algorithm.options, kind.Config), config.clients)


def is_secure(method: Algorithm) -> TypeGuard[Secure]:
    """Returns whether it runs under secure aggregation."""
    return not all(exchange.summation.known for exchange in method.exchanges)
