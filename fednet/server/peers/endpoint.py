"""The server's end of the network, as its process uses it: over ZeroMQ by `listening`; to clients
of the same process by `launch.in_process`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import descriptors
from fednet.config import Config
from fednet.errors import ConfigError, why
from fednet.files import write_record
from fednet.server.peers.admission import beat_seconds, check_bind, keyring_of, patience
from fednet.server.peers.limits import at_once
from fednet.transport.base import reached_at

if TYPE_CHECKING:
    from fednet.protocol.tasks import Rules
    from fednet.server.peers.events import Events
    from fednet.transport.base import ServerTransport
    from fednet.transport.keys import Keyring
    from fednet.transport.zeromq.router import ZmqServer


def nothing() -> None:
    """What an endpoint of sockets does at the end beside closing them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """transport: a server's (see `transport.base`), closed by whoever uses this. beat_s: how often
    a worker is to be heard of. rules: until the first phase opens; None: the protocol's own. pump:
    does the work of clients in this process; None: they have processes of their own. announce:
    called with the server's events and its incarnation, once there is a place to record them.
    listen: called once all is built: until then strangers would take the descriptors of files.
    leave: called at the end, after the last message has gone out. alone: others start the clients,
    whenever they do.
    """

    transport: ServerTransport
    keyring: Keyring | None
    beat_s: float
    rules: Rules | None = None
    pump: Callable[[], bool] | None = None
    announce: Callable[[Events, int], None] = lambda events, incarnation: None
    listen: Callable[[], None] = nothing
    leave: Callable[[], None] = nothing
    alone: bool = False


def listen(config: Config, bind: str, keys: Path | None, insecure: bool) -> ZmqServer:
    """Binds the server's address, before anything of the run is changed. Raises ConfigError where
    that cannot be.
    """
    from fednet.transport.zeromq.router import ZmqServer

    descriptors.keep_back()
    keyring = keyring_of(config, keys)
    check_bind(bind, config.security.curve, insecure)
    if bind.startswith(("tcp://127.", "tcp://localhost:")):
        check_loopback()
    return ZmqServer(bind, keyring=keyring, max_each=at_once(config.clients), later=True)


def check_loopback() -> None:
    """Raises ConfigError where this machine's network has no loopback, so that no process could
    reach a server there.
    """
    with socket.socket() as server, socket.socket() as client:
        client.settimeout(5.0)
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.connect(server.getsockname())
        except OSError as wrong:
            raise ConfigError(
                f"this machine's network has no loopback: 127.0.0.1 cannot be reached "
                f"({why(wrong)}). Switch it on (ip link set lo up), or use fednet run --in-process."
            ) from None


def listening(
    config: Config,
    directory: Path,
    transport: ZmqServer,
    note: Callable[[str], None] | None = None,
) -> Endpoint:
    """The endpoint of a bound address, which server.json says to whoever follows the run. note:
    gets a sentence on how clients join, where nobody else starts them.
    """
    keyring = transport.keyring

    def say_where(incarnation: int) -> None:
        write_record(
            directory / "server.json",
            {
                "address": transport.address,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "public_key": keyring.pair.public if keyring is not None else None,
                "incarnation": incarnation,
            },
            mode=0o600,
        )

    def announce(events: Events, incarnation: int) -> None:
        transport.on_refused = lambda reason, address: events.tell(
            "refused", {"what": "connection", "reason": reason, "address": address}
        )
        transport.on_renewed = lambda: say_where(incarnation)
        say_where(incarnation)
        if note is not None:
            keys = " --keys FILE" if keyring is not None else ""
            note(
                f"{config.name}: listening at {transport.address}; clients join by: fednet-client "
                f"--id K --server {reached_at(transport.address, socket.gethostname())}{keys}"
            )

    return Endpoint(
        transport,
        keyring,
        beat_seconds(config),
        patience(config),
        announce=announce,
        listen=transport.listen,
        alone=note is not None,
    )
