"""The server's end of the network: over ZeroMQ, made by `listening`, or to clients in the same
process, made by `launch.in_process`. Also: which addresses and keys a server may use.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fednet import descriptors
from fednet.config import Config, to_yaml
from fednet.errors import ConfigError
from fednet.experiment.build import Experiment
from fednet.files import write_record
from fednet.plain import JsonDict
from fednet.protocol.tasks import Rules
from fednet.server.events import Events
from fednet.server.io import most_connections
from fednet.transport import keys
from fednet.transport.base import ServerTransport, reached_at
from fednet.transport.keys import Keyring
from fednet.transport.zeromq.server import ZmqServer
from fednet.transport.zeromq.sockets import check_address
from fednet.wire.messages import MAX_HEADER, MIN_BEAT_S, PART

BEATS = 1000  # heartbeats a second of all clients, if each is a process of its own
MAX_CONFIG = MAX_HEADER - (1 << 12)  # bytes: the rest of the message needs room too
LOOPBACK = ("127.", "localhost", "[::1]")


def text_for_clients(config: Config) -> str:
    """The configuration that clients get when they join. Raises ConfigError if it is too long."""
    text = to_yaml(config)
    size = len(text.encode())
    if size > MAX_CONFIG:
        raise ConfigError(
            f"the configuration that clients are sent has {size} bytes, with every default "
            f"filled in; at most {MAX_CONFIG} are allowed. Use ranges of ids in link.per_client, "
            f"and files for a partition, a trace or the options of your own part."
        )
    return text


def beat_seconds(config: Config, over_network: bool = False) -> float:
    """How often each worker sends a heartbeat. Of thousands each sends fewer, as far as
    `round.lost.silent` allows, so that heartbeats do not displace replies. over_network: see
    `Endpoint`.
    """
    lost = config.round.lost
    if lost.beat is not None:
        return lost.beat
    silent = lost.silent_s(over_network)
    closed = lost.closed_s(over_network)
    most = 60.0 if silent is None else silent / 4
    often = min(lost.beat_most_s(over_network), most, math.inf if closed is None else closed / 2)
    return max(MIN_BEAT_S, often, min(config.clients / BEATS, most))


def patience(config: Config, inline: bool, over_network: bool = False) -> Rules:
    """How long clients are waited for. inline: they are in this process. over_network: see
    `Endpoint`.
    """
    section = config.round
    # A client that trains in the server's own thread sends no heartbeat.
    silent = None if inline else section.lost.silent_s(over_network)
    return Rules(closed=section.lost.closed_s(over_network), silent=silent, join=section.join_s())


def wide_defaults(config: Config) -> str:
    """What a server does otherwise because its clients connect over more than loopback; "" where
    the configuration says all of it.
    """
    section = config.round
    found = []
    if section.lost.closed == "auto":
        found.append(
            f"they count as lost {section.lost.closed_s(True):g} s after their connection closed "
            f"(round.lost.closed)"
        )
    if section.lost.silent == "auto":
        found.append(
            f"after {section.lost.silent_s(True):g} s without a heartbeat they count as lost "
            f"(round.lost.silent)"
        )
    if section.lost.beat is None:
        found.append(f"they send one every {beat_seconds(config, True):g} s (round.lost.beat)")
    if section.void_rounds == "auto":
        found.append(
            f"{section.void_limit(True)} discarded rounds in a row end the run (round.void_rounds)"
        )
    return "; ".join(found)


def check_bind(
    bind: str, curve: bool, insecure: bool, keyed: str = "security.curve: true and --keys DIR"
) -> None:
    """Raises ConfigError for an address that may not be used. keyed: how the user asks for keys."""
    check_address(bind)
    scheme, _, rest = bind.partition("://")
    if scheme != "tcp" or curve or insecure or rest.startswith(LOOPBACK):
        return
    raise ConfigError(
        f"--bind {bind}: beyond loopback anyone could take part; use CURVE keys ({keyed}), or "
        f"--insecure."
    )


def run_keys(config: Config, directory: Path) -> Path | None:
    """The CURVE keys of a run whose workers fednet starts: those that the configuration names, as
    `fednet keys lab` makes them, or new ones in the run's directory.
    """
    if not config.security.curve:
        return None
    if config.security.keys:
        given = Path(config.security.keys)
        keys.load(given / "clients" / "all.key")  # an error now rather than in each worker
        return given
    folder = directory / "keys"
    if not (folder / "clients" / "all.key").exists():
        shutil.rmtree(folder, ignore_errors=True)  # half made by one that was interrupted
        server = keys.make_server_keys(folder)
        keys.allow(
            folder,
            range(config.clients),
            keys.make_client_keys(folder / "clients" / "all.key", server),
        )
    return folder


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a server reaches its clients."""

    transport: ServerTransport
    """The user of this endpoint closes it."""
    keyring: Keyring | None
    beat_s: float
    """How often a worker sends a heartbeat."""
    pump: Callable[[], bool] | None = None
    """Does the work of clients in this process; None: they have processes of their own."""
    announce: Callable[[Events, int], None] = lambda events, incarnation: None
    """Called with the server's events and its incarnation once these can be recorded."""
    listen: Callable[[Experiment], None] = lambda experiment: None
    """Called with the server's experiment as the last before the first round; earlier, strangers
    could take the descriptors of what is built, looked up and imported.
    """
    leave: Callable[[], None] = lambda: None
    """Called at the end, after the last message."""
    external_clients: bool = False
    """The clients are started by others, not by fednet here."""
    over_network: bool = False
    """These connect over more than loopback: the server waits longer for them where the
    configuration leaves it to the server.
    """
    part: int = PART
    """Bytes of a payload's parts, but the last."""


def listen(config: Config, bind: str, keys: Path | None, insecure: bool) -> ZmqServer:
    """Binds the server's address. Raises ConfigError where that is not possible."""
    descriptors.keep_back()
    keyring: Keyring | None = None
    if config.security.curve:
        where = keys or (Path(config.security.keys) if config.security.keys else None)
        if where is None:
            raise ConfigError(
                "security.curve: true needs the server's keys: --keys DIR or security.keys (make "
                "them by: fednet keys server DIR)."
            )
        keyring = Keyring(where)
    elif keys is not None:  # the user takes the run for an encrypted one
        raise ConfigError(
            f"--keys {keys}: is given while security.curve is false; add --set security.curve=true."
        )
    check_bind(bind, config.security.curve, insecure)
    return ZmqServer(bind, keyring=keyring, max_each=most_connections(config.clients), later=True)


def listening(
    config: Config,
    directory: Path,
    transport: ZmqServer,
    note: Callable[[str], None] | None = None,
) -> Endpoint:
    """The endpoint of a bound address, which is written to server.json once clients can connect:
    one that finds it earlier is refused, and tries again some 0.15 s later. note: gets a sentence
    on how clients join; None where fednet starts them.
    """
    keyring = transport.keyring
    rest = transport.address.partition("://")[2]
    over_network = note is not None and not rest.startswith(LOOPBACK)
    described: JsonDict = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "public_key": keyring.pair.public if keyring is not None else None,
    }

    def announce(events: Events, incarnation: int) -> None:
        transport.on_refused = lambda reason, address: events.tell(
            "refused", {"what": "connection", "reason": reason, "address": address}
        )
        described["incarnation"] = incarnation
        if note is not None:
            if over_network and (text := wide_defaults(config)):
                note(f"{config.name}: clients connect over a network, so {text}")
            keys = " --keys FILE" if keyring is not None else ""
            note(
                f"{config.name}: listening at {transport.address}; clients join by: fednet-client "
                f"--id K --server {reached_at(transport.address, socket.gethostname())}{keys}"
            )

    def listen(experiment: Experiment) -> None:
        transport.listen()
        write_record(
            directory / "server.json", {"address": transport.address, **described}, mode=0o600
        )

    return Endpoint(
        transport,
        keyring,
        beat_seconds(config, over_network),
        announce=announce,
        listen=listen,
        external_clients=note is not None,
        over_network=over_network,
    )
