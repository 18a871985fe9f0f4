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
    "fednet.cli.api": "run",
    "fednet.report.read": "open_run",
    "fednet.registry": "algorithm model dataset partitioner selection compressor task",
    "fednet.algorithms.base": (
        "Algorithm AlgorithmConfig Exchange NonNegative Positive Fraction Count"
    ),
    "fednet.algorithms.state": "State Empty PerClient",
    "fednet.wire.payload": (
        "Payload Nothing LocalRun Samples kind Weights Delta Control Accuracy Scalar Statistics "
        "Condensed Shared"
    ),
    "fednet.tensors": "Tensors Layout Sum mean",
    "fednet.training.metrics": "metric",
    "fednet.data.base": "Data",
    "fednet.records.manifest": "Candidate",
    "fednet.errors": "FednetError ConfigError DataError",
}
_HOME = {name: module for module, names in _FROM.items() for name in names.split()}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:  # `as`: they are exported
    from fednet.algorithms.base import Algorithm as Algorithm
    from fednet.algorithms.base import AlgorithmConfig as AlgorithmConfig
    from fednet.algorithms.base import Count as Count
    from fednet.algorithms.base import Exchange as Exchange
    from fednet.algorithms.base import Fraction as Fraction
    from fednet.algorithms.base import NonNegative as NonNegative
    from fednet.algorithms.base import Positive as Positive
    from fednet.algorithms.state import Empty as Empty
    from fednet.algorithms.state import PerClient as PerClient
    from fednet.algorithms.state import State as State
    from fednet.cli.api import run as run
    from fednet.data.base import Data as Data
    from fednet.errors import ConfigError as ConfigError
    from fednet.errors import DataError as DataError
    from fednet.errors import FednetError as FednetError
    from fednet.records.manifest import Candidate as Candidate
    from fednet.registry import algorithm as algorithm
    from fednet.registry import compressor as compressor
    from fednet.registry import dataset as dataset
    from fednet.registry import model as model
    from fednet.registry import partitioner as partitioner
    from fednet.registry import selection as selection
    from fednet.registry import task as task
    from fednet.report.read import open_run as open_run
    from fednet.tensors import Layout as Layout
    from fednet.tensors import Sum as Sum
    from fednet.tensors import Tensors as Tensors
    from fednet.tensors import mean as mean
    from fednet.training.metrics import metric as metric
    from fednet.wire.payload import Accuracy as Accuracy
    from fednet.wire.payload import Condensed as Condensed
    from fednet.wire.payload import Control as Control
    from fednet.wire.payload import Delta as Delta
    from fednet.wire.payload import LocalRun as LocalRun
    from fednet.wire.payload import Nothing as Nothing
    from fednet.wire.payload import Payload as Payload
    from fednet.wire.payload import Samples as Samples
    from fednet.wire.payload import Scalar as Scalar
    from fednet.wire.payload import Shared as Shared
    from fednet.wire.payload import Statistics as Statistics
    from fednet.wire.payload import Weights as Weights
    from fednet.wire.payload import kind as kind


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fednet' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
