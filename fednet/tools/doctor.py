"""Whether this machine is ready for a run, and a fingerprint of the bits it computes.

Each check is a function that returns findings; none raises for what it finds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
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
LEAST_DISK = 2e9  # bytes: a checkpoint, its successor and the spool of a round of a small model


@dataclass(frozen=True, slots=True)
class Finding:
    """verdict: ok; warn, a run may still do; bad, it will not."""

    verdict: Literal["ok", "warn", "bad"]
    what: str
    text: str


def main(args: argparse.Namespace) -> int:
    """Prints the findings. Exit status: 2 where one of them is bad."""
    worst = "ok"
    for found in examine(args):
        worst = found.verdict if found.verdict == "bad" or worst == "ok" else worst
        if not args.quiet or found.verdict == "bad":
            print(f"{found.verdict:<4}  {found.what:<12}  {found.text}", flush=True)
    return 2 if worst == "bad" else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    yield from versions()
    yield from kernels(args)
    yield from device(args.device)
    yield from cores()
    yield from fingerprints(args.device)
    yield from data(args)
    yield from disk(args.out)
    yield from clock(args.out)
    if args.server:
        from fednet.transport.zeromq.proxy import VARIABLE

        # Through a proxy the handshake tells both.
        answers = [] if os.environ.get(VARIABLE) else list(reachable(args.server))
        yield from answers
        if not answers or answers[-1].verdict == "ok":
            yield from admitted(args.server, args.keys)
    else:
        yield from port(5555)
    if args.keys:
        yield from keys(args.keys)


def versions() -> Iterator[Finding]:
    import fednet

    yield Finding(
        "ok" if sys.version_info >= (3, 10) else "bad",
        "python",
        f"{platform.python_version()} on {platform.platform()}",
    )
    yield Finding("ok", "fednet", fednet.__version__)
    for name in NEEDED:
        try:
            yield Finding("ok", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("bad", name, "is not installed; `pip install fednet` brings it.")


def kernels(args: argparse.Namespace) -> Iterator[Finding]:
    """Chooses those of `train.portable`, before any has run."""
    from fednet.config import load

    with contextlib.suppress(FednetError):  # what is wrong with a configuration, `data` says
        config = load(args.config, args.set, args.load)
        try:
            determinism.choose(config.train.portable)
        except ConfigError as wrong:
            yield Finding("bad", "bits", str(wrong))


def device(wanted: str) -> Iterator[Finding]:
    import torch

    try:
        placement.check(wanted)
    except ConfigError as wrong:
        yield Finding("bad", "device", str(wrong))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            yield Finding(
                "ok",
                f"cuda:{i}",
                f"{torch.cuda.get_device_name(i)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, "
                f"CUDA {torch.version.cuda}",
            )
    else:
        yield Finding(
            "ok", "device", f"cpu ({torch.backends.cpu.get_cpu_capability()}); torch sees no GPU"
        )


def cores() -> Iterator[Finding]:
    allowed, there = processors(), os.cpu_count()
    yield Finding("ok", "cores", f"{allowed} for this process, of {there} of the machine")


def fingerprints(wanted: str) -> Iterator[Finding]:
    import torch

    kinds = ["cpu", *(["cuda:0"] if torch.cuda.is_available() and wanted != "cpu" else [])]
    for kind in kinds:
        print_ = fingerprint(kind)
        again = fingerprint(kind)
        name = "cpu with train.portable" if kind == "cpu" and determinism.portable() else kind
        if print_ == again:
            yield Finding(
                "ok",
                "bits",
                f"{name} {print_[:16]}; machines that say the same compute the same bits",
            )
        else:
            yield Finding(
                "bad",
                "bits",
                f"{kind} computed twice gives {print_[:16]} and {again[:16]}; runs here cannot be "
                f"repeated.",
            )


def data(args: argparse.Namespace) -> Iterator[Finding]:
    """Whether the configured dataset is there, and whole enough to be read."""
    from fednet.config import load

    try:
        config = load(args.config, args.set, args.load)
        from fednet.data import load as read

        root = args.data or config.data.root
        if root is not None and not config.data.download and not Path(root).is_dir():
            flag = "--data" if args.data else "data.root"
            yield Finding("bad", "data", f"{flag} {root}: there is no such folder.")
            return
        if config.data.dataset == "site":
            yield Finding("ok", "data", "site: each client brings its own")
            return
        found = read(config.data, root, config.seed)
        sizes = f"{len(found.train[1])} training and {len(found.test[1])} test samples"
        yield Finding("ok", "data", f"{config.data.dataset}: {sizes}")
    except FednetError as wrong:
        yield Finding("bad", "data", str(wrong))


def disk(out: Path) -> Iterator[Finding]:
    folder = out.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding("bad", "disk", f"{folder} cannot be written to; choose another with --out.")
        return
    free = shutil.disk_usage(folder).free
    yield Finding(
        "ok" if free > LEAST_DISK else "warn", "disk", f"{free / 1e9:.1f} GB free at {folder}"
    )


def clock(out: Path) -> Iterator[Finding]:
    """The clock's year, and against a file system shared with other machines."""
    if time.gmtime().tm_year < 2024:
        yield Finding(
            "warn",
            "clock",
            f"says {time.strftime('%Y-%m-%d', time.gmtime())}; times in records will be wrong.",
        )
        return
    probe = out / f".fednet-doctor-{os.getpid()}"
    apart = 0.0
    if out.is_dir() and os.access(out, os.W_OK):
        probe.write_text("")
        apart = abs(probe.stat().st_mtime - time.time())
        probe.unlink()
    if apart > 2:
        yield Finding(
            "warn",
            "clock",
            f"is {apart:.0f} s apart from that of {out}; `status` of runs on it may mislead.",
        )
    else:
        yield Finding("ok", "clock", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def port(number: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            yield Finding("ok", "port", f"tcp://127.0.0.1:{number} is free")
        except OSError as wrong:
            yield Finding(
                "warn",
                "port",
                f"tcp://127.0.0.1:{number} is taken ({wrong.strerror}); --bind tcp://127.0.0.1:0 "
                f"takes a free one.",
            )


def reachable(server: str) -> Iterator[Finding]:
    try:
        address = urlsplit(server)
        host, number = address.hostname, address.port
    except ValueError:
        host = number = None
    if not host or not number:
        yield Finding(
            "bad", "server", f"--server {server}: expected an address such as tcp://127.0.0.1:5555."
        )
        return
    there = False
    try:
        start = time.monotonic()
        with socket.create_connection((host, number), timeout=ANSWER_S) as link:
            there = True
            link.settimeout(ANSWER_S)
            greeting = link.recv(1)  # ZMTP begins with 0xFF, sent without being asked
        took = 1000 * (time.monotonic() - start)
        if greeting == b"\xff":
            yield Finding("ok", "server", f"{server} answers in {took:.0f} ms")
        else:
            yield Finding("bad", "server", f"{server} is no fednet server: it does not speak ZMTP.")
    except TimeoutError:
        no = f"{server} did not answer within {ANSWER_S:g} s"
        busy = "took the connection and said nothing: its server is starting, or busy"
        yield Finding("bad", "server", f"{no}; it {busy}." if there else f"{no}.")
    except ConnectionRefusedError:
        yield Finding("bad", "server", f"nothing listens at {server}, or the way there is closed.")
    except OSError as wrong:
        yield Finding("bad", "server", f"{server} cannot be reached ({wrong.strerror or wrong}).")


def admitted(server: str, path: Path | None) -> Iterator[Finding]:
    """Whether a client would get in: the handshake, as a client makes it. path: its key file, if it
    has one.
    """
    from fednet.errors import ConfigError
    from fednet.transport import keys as keyfiles
    from fednet.transport.base import Opened
    from fednet.transport.zeromq.dealer import ZmqClient

    refused: list[str] = []
    try:
        pair = keyfiles.load(path) if path is not None and path.is_file() else None
        client = ZmqClient(
            server, keys=pair, on_refused=lambda reason, where: refused.append(reason)
        )
    except ConfigError as wrong:
        yield Finding("bad", "admission", str(wrong))
        return
    until, opened = time.monotonic() + HANDSHAKE_S, False
    while not (opened or refused) and time.monotonic() < until:
        opened = any(isinstance(event, Opened) for event in client.poll(0.1))
    client.close(0.0)
    if opened:
        yield Finding(
            "ok",
            "admission",
            f"{server} lets this key in"
            if pair is not None
            else f"{server} lets anybody in: it has no CURVE keys",
        )
    else:
        hint = "" if pair is not None else "; if it has CURVE keys, say --keys FILE"
        yield Finding(
            "bad",
            "admission",
            f"{server} does not let a client in from here: "
            f"{refused[0] if refused else 'no answer to the handshake'}{hint}.",
        )


def keys(path: Path) -> Iterator[Finding]:
    """Secret keys are the owner's alone, and keys."""
    from fednet.errors import ConfigError
    from fednet.transport.keys import load

    files = sorted(path.rglob("*.key")) if path.is_dir() else [path]
    if not path.exists() or not files:
        yield Finding("bad", "keys", f"{path}: no keys there; `fednet keys` makes them.")
        return
    for file in files:
        try:
            load(file)
        except ConfigError as wrong:
            yield Finding("bad", "keys", str(wrong))
            return
    yield Finding(
        "ok", "keys", f"{len(files)} secret key(s) at {path}, readable by their owner only"
    )
