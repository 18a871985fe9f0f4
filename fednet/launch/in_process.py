"""A whole federation in one process: the clients work whenever the server waits, on a processor in
several threads (`training_threads`). The code is the same as over sockets, and so are the bytes in
the ledger.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

from fednet import ids, loading
from fednet.config import Config
from fednet.errors import ConfigError
from fednet.experiment import determinism, placement
from fednet.experiment.build import Experiment
from fednet.records import Summary
from fednet.server.endpoint import Endpoint
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions
from fednet.wire.messages import PART, WHOLE, Join, Refuse

# Neither side hears the other while it works, and neither can be lost.
SLOW_BEAT_S = 3600.0
DEFAULTS = Config()


def run_in_process(
    config: Config, directory: Path, how: ServerOptions, workers: int | None = None
) -> Summary:
    """Runs it; returns the summary. workers: threads at most that train; the other arguments are
    those of `run_server`. Nothing is encrypted, but bytes are counted as if it were.
    """
    from fednet.client.loop import ClientLoop
    from fednet.client.policy import Policy
    from fednet.client.preparing import prepare
    from fednet.protocol.client import ClientProtocol
    from fednet.transport.inproc import Inproc

    # Payloads cross whole, and large ones as tensors, unless something needs their bytes
    # (compressors, noise, masks, attacks), they may be cut short (a planned loss, an emulated
    # link), or the order of arrival counts.
    by_reference = _has_defaults(
        config, "wire", "privacy", "aggregation", "link", "availability", "faults", "schedule"
    )
    part = WHOLE if by_reference else PART
    network = Inproc(config.seed)
    transport = network.server()
    device = placement.place(how.device)[0]
    most = training_threads(config, device, workers)
    join = Join(
        worker="in-process",
        ids=list(range(config.clients)),
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        slots=most,
        versions=determinism.versions(),
        files=loading.loaded_files(),
    )
    built: list[Experiment] = []  # the server's, whose data the clients use
    loop = ClientLoop(
        ClientProtocol(join, part=part),
        network.client(),
        partial(
            prepare,
            Policy.of_run(how.data),
            ids.parse(f"0-{config.clients - 1}"),
            [device],
            directory / "state",
            like=lambda: built[0],
        ),
        curve=config.security.curve,
        inline=True,
        faults=True,
        devices=[device],
        most=most,
    )

    def pump() -> bool:
        moved = loop.step(0.0)
        if loop.error is not None:
            raise loop.error
        if isinstance(loop.ended, Refuse):
            raise ConfigError(loop.ended.reason)
        return moved

    def leave() -> None:
        loop.step(0.0)
        loop.close()

    end = Endpoint(transport, None, SLOW_BEAT_S, pump, listen=built.append, leave=leave, part=part)
    return run_server(config, directory, end, how)


def training_threads(config: Config, device: str, workers: int | None = None) -> int:
    """Returns how many threads may train clients: on a processor one a core, or as many as wanted,
    if steps of training are long enough for that (`client.slots`). The server gets all replies in
    the order of the tasks, as from one thread. There is one on a GPU, with packs, and where clients
    may be asked whose replies are not needed: one thread does not begin these.
    """
    waits_for_all = _has_defaults(
        config, "round", "privacy", "link", "availability", "faults", "schedule"
    )
    if device != "cpu" or config.train.pack > 1 or not waits_for_all:
        return 1
    most = workers or placement.cores() // config.train.threads
    return max(1, min(most, config.clients))


def _has_defaults(config: Config, *sections: str) -> bool:
    """Returns whether these sections of the configuration have their defaults."""
    return all(getattr(config, name) == getattr(DEFAULTS, name) for name in sections)
