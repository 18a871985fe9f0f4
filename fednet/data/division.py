"""`split` divides a dataset between the clients.

In this order, each step with its own random stream: the server's public samples leave the training
pool, then the validation samples, then the pool is divided over the clients, then the test set.
Public and validation samples never come from the test set, and no client has any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fednet.data.base import Data
from fednet.data.federation import Federation, class_table
from fednet.data.partitioners.dirichlet import dealt
from fednet.data.reading import call
from fednet.errors import ConfigError, DataError
from fednet.loading import place
from fednet.options import takes
from fednet.plain import JsonDict, part_of
from fednet.registry import partitioner
from fednet.seeds import rng
from fednet.tensors import map_inputs

if TYPE_CHECKING:
    from fednet.config.schema import DataSection


def split(
    data: Data, section: DataSection, clients: int, seed: int, *, uses_public: bool = True
) -> Federation:
    """Divides `data` over `clients` as `section` (the configuration's `data:`) says.

    seed: the run's; section.partition.seed replaces it for every draw made here, so that runs over
    several seeds may share one partition. uses_public: whether the method has a public set; if not,
    `baseline_pool: full` leaves these samples in the pool. Raises ConfigError for what cannot be
    met.
    """
    scheme = section.partition.scheme
    # An option given as null is left to the partitioner's default.
    options = {k: v for k, v in section.partition.options.items() if v is not None}
    if section.partition.seed is not None:
        seed = section.partition.seed
    y = data.labels()
    public = validation = np.empty(0, dtype=np.int64)
    samples = section.public.samples
    fraction = section.public.fraction
    if (samples or fraction) and (uses_public or section.baseline_pool != "full"):
        draw = rng(seed, "public")
        public = (
            balanced_sample(y, samples, draw) if samples else stratified_sample(y, fraction, draw)
        )
        if not len(public):
            raise ConfigError(f"data.public.fraction: {fraction} of {len(y)} samples is not one.")
    pool = _all_but(data.n_train, public)
    if section.validation:
        draw = rng(seed, "validation")
        validation = pool[stratified_sample(y[pool], section.validation, draw)]
        pool = _all_but(data.n_train, public, validation)

    part = partitioner.get(scheme)
    where = f"data.partition (scheme {scheme!r})"
    noise: JsonDict = {"feature_noise": section.feature_noise, "seed": seed}
    if section.client_test == "merge_split":
        data = _merge_train_and_test(data)
        pool = np.concatenate([pool, np.arange(len(y), data.n_train)])
        parts = _partition(part, where, options, data, pool, clients, seed)
        return replace(_split_each_client(data, parts, public, validation, seed, scheme), **noise)
    parts = _partition(part, where, options, data, pool, clients, seed)
    if section.client_test == "none":
        own = [np.empty(0, dtype=np.int64) for _ in range(clients)]
    else:
        table = class_table(data.labels(), parts, data.table_classes)
        own = _tests(part, options, data, parts, table, seed)
    return Federation(data, _sort_each(parts), _sort_each(own), validation, public, scheme, **noise)


def _all_but(n: int, *others: np.ndarray) -> np.ndarray:
    """The indices below n, in ascending order, that are in none of the others. (NumPy's functions
    of sets sort, and import its masked arrays.)
    """
    free = np.ones(n, dtype=bool)
    for some in others:
        free[some] = False
    return np.flatnonzero(free)


def balanced_sample(y: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """`samples` indices into y, the same number of each class (FedPDC); the remainder goes to the
    first classes. Raises ConfigError where a class has too few.
    """
    classes = np.unique(y)
    chosen = []
    for k, c in enumerate(classes):
        wanted = samples // len(classes) + (k < samples % len(classes))
        of_class = np.flatnonzero(y == c)
        if wanted > len(of_class):
            raise ConfigError(
                f"data.public.samples: {samples} wants {wanted} of class {c}, which has "
                f"{len(of_class)}."
            )
        chosen.append(rng.permutation(of_class)[:wanted])
    return np.sort(np.concatenate(chosen))


def stratified_sample(y: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """floor(fraction * n) indices into y in y's class proportions (FedRDS), by largest remainders;
    of equal remainders the first class.
    """
    classes, counts = np.unique(y, return_counts=True)
    total = part_of(fraction, len(y))
    exact = counts * total
    sizes = exact // len(y)
    missing = total - int(sizes.sum())
    sizes[np.argsort(-(exact % len(y)), kind="stable")[:missing]] += 1
    chosen = [rng.permutation(np.flatnonzero(y == c))[:size] for c, size in zip(classes, sizes)]
    return np.sort(np.concatenate(chosen))


def _partition(
    part: Callable[..., list[np.ndarray]],
    where: str,
    options: JsonDict,
    data: Data,
    pool: np.ndarray,
    clients: int,
    seed: int,
) -> list[np.ndarray]:
    """Returns indices into data.train, one array a client. Checks that every client has samples,
    and no sample two owners.
    """
    if getattr(part, "by_class", False) and (data.classes is None or data.train[1].ndim != 1):
        raise ConfigError(
            f"{where}: wants one class a sample, and y holds values or sequences; use iid, "
            "quantity, natural or file."
        )
    groups = None if data.groups is None else data.groups.numpy()[pool]
    given = {
        "y": data.labels()[pool],
        "groups": groups,
        "clients": clients,
        "rng": rng(seed, "partition"),
        "pool": pool,
    }
    made = call(part, given, options, "data.partition")
    if not isinstance(made, (list, tuple, np.ndarray)) or any(np.ndim(one) != 1 for one in made):
        raise DataError(
            f"{where}: its function ({place(part)}) returned {type(made).__name__}, expected a "
            f"list of one array of indices for each client."
        )
    if len(made) != clients:
        raise DataError(f"{where}: {len(made)} parts for {clients} clients.")
    everything = np.concatenate([np.asarray(m, dtype=np.int64) for m in made])
    empty = [i for i, m in enumerate(made) if not len(m)]
    if empty:
        raise DataError(f"{where}: client {empty[0]} has no samples.")
    if everything.min() < 0 or everything.max() >= len(pool):
        raise DataError(f"{where}: an index is outside the training pool of {len(pool)} samples.")
    if np.bincount(everything).max() > 1:
        raise DataError(f"{where}: a sample has two owners.")
    return [pool[np.asarray(m, dtype=np.int64)] for m in made]


def _tests(
    part: object,
    options: JsonDict,
    data: Data,
    parts: list[np.ndarray],
    table: np.ndarray,
    seed: int,
) -> list[np.ndarray]:
    """Returns indices into data.test: by the scheme's own division of the test set if it has one,
    else like the training samples.
    """
    y = data.labels("test")
    if hasattr(part, "test"):
        given = {
            "y": y,
            "data": data,
            "parts": parts,
            "clients": len(table),
            "rng": rng(seed, "partition"),
            "test_rng": rng(seed, "client_test"),
        }
        own = {k: v for k, v in options.items() if takes(part.test, k)}
        made = call(part.test, given, own, "data.partition")
        if made is not None:
            return list(made)
    return like_train(table, y, rng(seed, "client_test"))


def like_train(train: np.ndarray, y_test: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Divides the test set: each class in proportion to the clients' training samples of it. Every
    test sample is used once.

    train: (N, C) training samples by client and class. The cuts floor(cumsum(n_ic) * test_c / n_c)
    are computed in whole numbers: the cumsum of floats could end just under one and lose a sample.
    A class that no client trains on is cut by the clients' sizes.
    """
    held = train.T.copy()
    held[~held.any(axis=1)] = train.sum(axis=1)
    totals = np.bincount(y_test, minlength=len(held))[:, None]
    cuts = np.cumsum(held, axis=1) * totals // np.maximum(1, held.sum(axis=1, keepdims=True))
    return dealt(y_test, np.diff(cuts, prepend=0, axis=1), rng)


def _merge_train_and_test(data: Data) -> Data:
    """Joins train and test samples to one training set, in that order, which has owners if all
    samples have one.
    """
    x, y = data.train
    x_test, y_test = data.test
    both = map_inputs(x, lambda *parts: torch.cat(parts), x_test), torch.cat([y, y_test])
    groups = data.groups if not data.n_test else None
    if data.groups is not None and data.test_groups is not None:
        groups = torch.cat([data.groups, data.test_groups])
    return data.replace(train=both, test=None, groups=groups, test_groups=None)


def _split_each_client(
    data: Data,
    parts: list[np.ndarray],
    public: np.ndarray,
    validation: np.ndarray,
    seed: int,
    scheme: str,
) -> Federation:
    """merge_split: 75 % of each client's part, at least one sample, is for training, the rest for
    testing. The new data.train has the training, public and validation samples, data.test the
    clients' test samples.
    """
    cuts = []
    for i, part in enumerate(parts):
        shuffled = rng(seed, "client_test", client=i).permutation(part)
        n = max(1, len(part) * 3 // 4)
        cuts.append((shuffled[:n], shuffled[n:]))
    test = np.sort(np.concatenate([t for _, t in cuts]))
    train = _all_but(data.n_train, test)
    groups = test_groups = None
    if data.groups is not None:
        groups = data.groups[train]
        test_groups = data.groups[test]
    laid = data.replace(
        train=data.take(train), test=data.take(test), groups=groups, test_groups=test_groups
    )
    # The positions of the indices among those that were kept.
    parts = _sort_each([np.searchsorted(train, mine) for mine, _ in cuts])
    tests = _sort_each([np.searchsorted(test, mine) for _, mine in cuts])
    validation, public = _sort_each([np.searchsorted(train, kept) for kept in (validation, public)])
    return Federation(laid, parts, tests, validation, public, scheme)


def _sort_each(parts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.sort(np.asarray(p, dtype=np.int64)) for p in parts]
