"""Imported once by the server that forks the processes of tests, which then have it all at hand:
modules, the names of parts, and what msgspec and yaml find out about the configuration.

No tensor is computed here: a process chooses its kernels before the first one.
"""

# ruff: noqa: F401
from __future__ import annotations

import numpy.ctypeslib
import numpy.ma
import torch._dynamo
import torch.optim

import fednet.algorithms.fedavg
import fednet.cli.api
import fednet.cli.client
import fednet.cli.display
import fednet.cli.main
import fednet.cli.metrics
import fednet.cli.run
import fednet.cli.server
import fednet.client.join
import fednet.client.worker
import fednet.data.datasets.synthetic
import fednet.data.loading
import fednet.data.partitioners.dirichlet
import fednet.launch.in_process
import fednet.launch.supervisor
import fednet.models.networks
import fednet.server.asynchronous
import fednet.server.process
import fednet.server.summary
import fednet.training.hosts
import fednet.transport.zeromq.client
import fednet.transport.zeromq.server
from fednet import config, registry
from tests import processes

for parts in registry.ALL.values():
    parts.index()
config.from_text(config.to_yaml(config.from_mapping({})), "here")
