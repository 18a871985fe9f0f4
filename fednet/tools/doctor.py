"""Whether this machine is ready for a run, and a fingerprint of the bits it computes.

A check returns in a line what it found. It raises ConfigError for what makes a run impossible, and
Doubt for what a run may still do with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fednet.capacity import processors
from fednet.errors import ConfigError, FednetError
from fednet.experiment import determinism, placement
from fednet.tools.fingerprint import fingerprint

NEEDED = (
    "torch",
    "torchvision",
    "pyzmq",
    "msgpack",
    "msgspec",
    "xxhash",
    "numpy",
    "pyyaml",
    "safetensors",
    "rich",
    "matplotlib",
    "jinja2",
)
HANDSHAKE_S = 5.0
ANSWER_S = 5.0
ZMTP_SIGNATURE = b"\xff\0\0\0\0\0\0\0\1\x7f"
LEAST_DISK = 2e9  # bytes: a checkpoint, its successor and the spool of a round of a small model


class Doubt(Exception):
    """A run may still do with what was found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. verdict: ok; warn, a run may still do; bad, it will not."""

    verdict: Literal["ok", "warn", "bad"]
    what: str
    text: str


def found(what: str, check: Callable[..., str], *given: object) -> Finding:
    """The finding of one check."""
    try:
        return Finding("ok", what, check(*given))
    except Doubt as doubt:
        return Finding("warn", what, str(doubt))
    except FednetError as wrong:
        return Finding("bad", what, str(wrong))


def main(args: argparse.Namespace) -> int:
    """Prints the findings. Exit status: 2 if one of them is bad."""
    status = 0
    for one in examine(args):
        if one.verdict == "bad":
            status = 2
        if not args.quiet or one.verdict == "bad":
            print(f"{one.verdict:<4}  {one.what:<12}  {one.text}", flush=True)
    return status


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    import torch

    import fednet

    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("ok", "fednet", fednet.__version__)
    for name in NEEDED:
        yield found(name, version, name)
    yield found("device", device, args.device)
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for number in cards:
        yield found(f"cuda:{number}", card, number)
    yield found("cores", cores)
    yield found("bits", bits, "cpu", args)
    if cards and args.device != "cpu":
        yield found("bits", bits, "cuda:0", args)
    yield found("data", data, args)
    yield found("disk", disk, args.out)
    yield found("clock", clock, args.out)
    if args.server:
        yield from server(args.server, args.keys)
    else:
        yield found("port", port, 5555)
    if args.keys:
        yield found("keys", keys, args.keys)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError("is not installed; `pip install fednet` brings it.") from None


def device(wanted: str) -> str:
    import torch

    placement.check(wanted)
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} GPU(s)"
    return f"cpu ({torch.backends.cpu.get_cpu_capability()}); torch sees no GPU"


def card(number: int) -> str:
    import torch

    free, total = (nbytes / 1e9 for nbytes in torch.cuda.mem_get_info(number))
    name = torch.cuda.get_device_name(number)
    return f"{name}, {free:.1f} of {total:.1f} GB free, CUDA {torch.version.cuda}"


def cores() -> str:
    return f"{processors()} for this process, of {os.cpu_count()} of the machine"


def bits(kind: str, args: argparse.Namespace) -> str:
    """The fingerprint of a device, with the kernels of the configuration's `train.portable`."""
    from fednet.config import load

    if kind == "cpu":  # first of all: kernels are chosen before any has run
        portable = False
        with contextlib.suppress(FednetError):  # `data` says what is wrong with a configuration
            portable = load(args.config, args.set, args.load).train.portable
        determinism.choose_kernels(portable)
    first, again = fingerprint(kind), fingerprint(kind)
    if first != again:
        raise ConfigError(
            f"{kind} computed twice gives {first[:16]} and {again[:16]}; runs here cannot be "
            f"repeated."
        )
    name = "cpu with train.portable" if kind == "cpu" and determinism.portable() else kind
    return f"{name} {first[:16]}; machines with the same fingerprint compute the same bits"


def data(args: argparse.Namespace) -> str:
    """Whether the configured dataset is there and can be read."""
    from fednet.config import load

    config = load(args.config, args.set, args.load)
    from fednet.data import load as read

    root = args.data or config.data.root
    if root is not None and not config.data.download and not Path(root).is_dir():
        flag = "--data" if args.data else "data.root"
        raise ConfigError(f"{flag} {root}: there is no such folder.")
    if config.data.dataset == "site":
        return "site: each client brings its own"
    whole = read(config.data, root, config.seed)
    sizes = f"{len(whole.train[1])} training and {len(whole.test[1])} test samples"
    return f"{config.data.dataset}: {sizes}"


def disk(out: Path) -> str:
    folder = out.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to; choose another with --out.")
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free at {folder}"
    if free <= LEAST_DISK:
        raise Doubt(text)
    return text


def clock(out: Path) -> str:
    """The clock's year, and against a file system shared with other machines."""
    now = time.gmtime()
    if now.tm_year < 2024:
        raise Doubt(f"says {time.strftime('%Y-%m-%d', now)}; times in records will be wrong.")
    if out.is_dir() and os.access(out, os.W_OK):
        probe = out / f".fednet-doctor-{os.getpid()}"
        probe.write_text("")
        apart = abs(probe.stat().st_mtime - time.time())
        probe.unlink()
        if apart > 2:
            raise Doubt(f"is {apart:.0f} s off that of {out}; `fednet status` there may mislead.")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", now)


def port(number: int) -> str:
    address = f"tcp://127.0.0.1:{number}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as wrong:
            free = "--bind tcp://127.0.0.1:0 takes a free one."
            raise Doubt(f"{address} is taken ({wrong.strerror}); {free}") from None
    return f"{address} is free"


def server(address: str, keys: Path | None) -> Iterator[Finding]:
    """Whether a server answers, and lets a client with these keys in."""
    from fednet.transport.zeromq.proxy import VARIABLE

    if not os.environ.get(VARIABLE):  # through a proxy the handshake tells both
        answer = found("server", reachable, address)
        yield answer
        if answer.verdict != "ok":
            return
    yield found("admission", admitted, address, keys)


def reachable(address: str) -> str:
    try:
        parts = urlsplit(address)
        host, number = parts.hostname, parts.port
    except ValueError:
        host = number = None
    if not host or not number:
        raise ConfigError(f"--server {address}: expected an address such as tcp://127.0.0.1:5555.")
    connected = False
    start = time.monotonic()
    try:
        with socket.create_connection((host, number), timeout=ANSWER_S) as link:
            connected = True
            link.settimeout(ANSWER_S)
            link.sendall(ZMTP_SIGNATURE)  # the server's kernel hands on no silent connection
            greeting = link.recv(1)  # the server's own signature begins with 0xFF, too
    except TimeoutError:
        busy = "; it accepted the connection but did not answer: its server is starting or busy"
        raise ConfigError(
            f"{address} did not answer within {ANSWER_S:g} s{busy if connected else ''}."
        ) from None
    except ConnectionRefusedError:
        raise ConfigError(f"nothing listens at {address}, or a firewall blocks it.") from None
    except OSError as wrong:
        raise ConfigError(f"{address} cannot be reached ({wrong.strerror or wrong}).") from None
    if greeting != b"\xff":
        raise ConfigError(f"{address} is no fednet server: it does not speak ZMTP.")
    return f"{address} answers in {1000 * (time.monotonic() - start):.0f} ms"


def admitted(address: str, path: Path | None) -> str:
    """Whether a client would get in: the handshake, as a client makes it. path: its key file, if it
    has one.
    """
    from fednet.transport import keys as keyfiles
    from fednet.transport.base import Opened
    from fednet.transport.zeromq.client import ZmqClient

    refused: list[str] = []
    pair = keyfiles.load(path) if path is not None and path.is_file() else None
    client = ZmqClient(address, keys=pair, on_refused=lambda reason, where: refused.append(reason))
    until, opened = time.monotonic() + HANDSHAKE_S, False
    while not (opened or refused) and time.monotonic() < until:
        opened = any(isinstance(event, Opened) for event in client.poll(0.1))
    client.close(0.0)
    if not opened:
        why = refused[0] if refused else "no answer to the handshake"
        hint = "" if pair is not None else "; if it has CURVE keys, give --keys FILE"
        raise ConfigError(f"{address} does not let a client in from here: {why}{hint}.")
    if pair is not None:
        return f"{address} accepts this key"
    return f"{address} accepts any client: it has no CURVE keys"


def keys(path: Path) -> str:
    """Whether secret keys are valid, and readable by their owner only."""
    from fednet.transport.keys import load

    files = sorted(path.rglob("*.key")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ConfigError(f"{path}: no keys there; `fednet keys` makes them.")
    for file in files:
        load(file)
    return f"{len(files)} secret key(s) at {path}, readable by their owner only"
