"""A mixture: groups of clients, each divided by a scheme of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from fednet.data.loading import call
from fednet.errors import ConfigError
from fednet.plain import JsonDict
from fednet.registry import partitioner


@partitioner("mixture")
def mixture(
    y: np.ndarray,
    groups: np.ndarray | None,
    clients: int,
    rng: np.random.Generator,
    *,
    of: Annotated[
        Sequence[JsonDict],
        "The groups, each {clients: n, scheme: NAME, ...} with the scheme's options; their clients "
        "add up to all, in ascending id.",
    ] = (),
) -> list[np.ndarray]:
    """Groups of clients with a scheme each, such as half iid and half Dirichlet.

    The pool, shuffled, is cut in proportion to the
    clients of each group, and each part is divided by its scheme.
    """
    where = "data.partition.of"
    if not of or not all(isinstance(part, dict) for part in of):
        raise ConfigError(f"{where}: expected a list of mappings with clients and scheme.")
    # As a configuration has it; checked on the next line.
    counts: list[Any] = [part.get("clients") for part in of]
    if any(not isinstance(n, int) or n < 1 for n in counts) or sum(counts) != clients:
        raise ConfigError(
            f"{where}: the groups hold {counts} clients; expected whole numbers >= 1 that add up "
            f"to {clients}."
        )
    cuts = [len(y) * sum(counts[:k]) // clients for k in range(1, len(counts))]
    made: list[np.ndarray] = []
    for k, (part, pool) in enumerate(zip(of, np.split(rng.permutation(len(y)), cuts))):
        options = {key: value for key, value in part.items() if key not in ("clients", "scheme")}
        if part.get("scheme") in ("mixture", "file"):
            raise ConfigError(f"{where}[{k}].scheme: {part['scheme']} cannot be part of a mixture.")
        scheme = partitioner.get(part.get("scheme", "dirichlet"))
        given = {
            "y": y[pool],
            "groups": None if groups is None else groups[pool],
            "clients": counts[k],
            "rng": rng,
            "pool": pool,
        }
        made += [pool[found] for found in call(scheme, given, options, f"{where}[{k}]")]
    return made


mixture.by_class = True  # type: ignore[attr-defined]
