"""fednet: federated learning between real processes, every byte counted, the same bits whatever the
placement.

Everything here is imported when it is first asked for (PEP 562): `import fednet` itself costs no
torch. The loop of local training is not among it: a method's client half has it as `host.train`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_FROM = {
    "fednet.cli.api": ("run",),
    "fednet.report.read": ("open_run",),
    "fednet.registry": ("algorithm", "model", "dataset", "partitioner", "compressor", "task"),
    "fednet.algorithms.base": (
        "Algorithm",
        "AlgorithmConfig",
        "Exchange",
        "NonNegative",
        "Positive",
        "Fraction",
        "Count",
    ),
    "fednet.algorithms.state": ("State", "Empty", "PerClient"),
    "fednet.wire.payload": (
        "Payload",
        "Nothing",
        "Run",
        "Samples",
        "kind",
        "Weights",
        "Delta",
        "Control",
        "Accuracy",
        "Scalar",
        "Statistics",
        "Condensed",
        "Shared",
    ),
    "fednet.tensors": ("Tensors", "Layout", "Sum", "mean"),
    "fednet.training.metrics": ("metric",),
    "fednet.data": ("Data",),
    "fednet.errors": ("FednetError", "ConfigError", "DataError"),
}
_HOME = {name: module for module, names in _FROM.items() for name in names}

__all__ = [
    "__version__",
    "Accuracy",
    "Algorithm",
    "AlgorithmConfig",
    "Condensed",
    "ConfigError",
    "Control",
    "Count",
    "Data",
    "DataError",
    "Delta",
    "Empty",
    "Exchange",
    "FednetError",
    "Fraction",
    "Layout",
    "NonNegative",
    "Nothing",
    "Payload",
    "PerClient",
    "Positive",
    "Run",
    "Samples",
    "Scalar",
    "Shared",
    "State",
    "Statistics",
    "Sum",
    "Tensors",
    "Weights",
    "algorithm",
    "compressor",
    "dataset",
    "kind",
    "mean",
    "metric",
    "model",
    "open_run",
    "partitioner",
    "run",
    "task",
]

if TYPE_CHECKING:
    from fednet.algorithms.base import (
        Algorithm,
        AlgorithmConfig,
        Count,
        Exchange,
        Fraction,
        NonNegative,
        Positive,
    )
    from fednet.algorithms.state import Empty, PerClient, State
    from fednet.cli.api import run
    from fednet.data import Data
    from fednet.errors import ConfigError, DataError, FednetError
    from fednet.registry import algorithm, compressor, dataset, model, partitioner, task
    from fednet.report.read import open_run
    from fednet.tensors import Layout, Sum, Tensors, mean
    from fednet.training.metrics import metric
    from fednet.wire.payload import (
        Accuracy,
        Condensed,
        Control,
        Delta,
        Nothing,
        Payload,
        Run,
        Samples,
        Scalar,
        Shared,
        Statistics,
        Weights,
        kind,
    )


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fednet' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
