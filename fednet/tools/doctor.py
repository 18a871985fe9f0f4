"""Whether this machine is ready for a run, and a fingerprint of the bits it computes.

A check returns in a line what it found, and raises an error of fednet for what makes a run
impossible.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.errors import ConfigError, FednetError
from fednet.experiment import determinism, placement
from fednet.seeds import rng

if TYPE_CHECKING:
    import torch

HANDSHAKE_S = 5.0


def main(args: argparse.Namespace) -> int:
    """Prints what each check found. Exit status: 2 if something makes a run impossible."""
    status = 0
    for what, check in checks(args):
        try:
            verdict = "ok"
            text = check()
        except FednetError as wrong:
            verdict = "bad"
            text = str(wrong)
            status = 2
        if not args.quiet or verdict == "bad":
            print(f"{verdict:<4}  {what:<12}  {text}", flush=True)
    return status


def checks(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the checks, with their names."""
    import torch

    import fednet

    system = f"Python {platform.python_version()} on {platform.platform()}"
    yield "versions", lambda: f"fednet {fednet.__version__}, torch {torch.__version__}, {system}"
    yield "device", partial(device, args.device)
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for number in cards:
        yield f"cuda:{number}", partial(card, number)
    here = len(os.sched_getaffinity(0))
    yield "cores", lambda: f"{here} for this process, of {os.cpu_count()} of the machine"
    yield "bits", partial(bits, "cpu", args)
    if cards and args.device != "cpu":
        yield "bits", partial(bits, "cuda:0", args)
    yield "data", partial(data, args)
    yield "disk", partial(disk, args.out)
    if args.server:
        yield "server", partial(server, args.server, args.keys)
    if args.keys:
        yield "keys", partial(keys, args.keys)


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


def bits(kind: str, args: argparse.Namespace) -> str:
    """The fingerprint of a device, with the kernels of the configuration's `train.portable`."""
    from fednet.config import load

    if kind == "cpu":  # first of all: kernels are chosen before any has run
        portable = False
        with contextlib.suppress(FednetError):  # `data` says what is wrong with a configuration
            portable = load(args.config, args.set, args.load).train.portable
        determinism.choose_kernels(portable)
    first = fingerprint(kind)
    again = fingerprint(kind)
    if first != again:
        raise ConfigError(
            f"{kind} computed twice gives {first[:16]} and {again[:16]}; runs here cannot be "
            f"repeated."
        )
    name = "cpu with train.portable" if kind == "cpu" and determinism.is_portable() else kind
    return f"{name} {first[:16]}; machines with the same fingerprint compute the same bits"


def data(args: argparse.Namespace) -> str:
    """Whether the configured dataset is there and can be read."""
    from fednet.config import load
    from fednet.data.loading import load as read

    config = load(args.config, args.set, args.load)
    if config.data.dataset == "site":
        return "site: each client brings its own"
    whole = read(config.data, args.data or config.data.root, config.seed)
    sizes = f"{len(whole.train[1])} training and {len(whole.test[1])} test samples"
    return f"{config.data.dataset}: {sizes}"


def disk(out: Path) -> str:
    folder = out.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to; choose another with --out.")
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free at {folder}"


def server(address: str, path: Path | None) -> str:
    """Whether a server would let a client in: the handshake, as a client makes it. path: its key
    file, if it has one.
    """
    from fednet.transport import keys as keyfiles
    from fednet.transport.base import Opened
    from fednet.transport.zeromq.client import ZmqClient

    refused: list[str] = []
    pair = keyfiles.load(path) if path is not None and path.is_file() else None
    client = ZmqClient(address, keys=pair, on_refused=lambda reason, where: refused.append(reason))
    until = time.monotonic() + HANDSHAKE_S
    opened = False
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


def fingerprint(device: str = "cpu") -> str:
    """SHA-256 over the bytes of a fixed matrix product, convolution, normalisation, five SGD
    steps and the square roots that adaptive optimizers take, in float32. Two machines whose
    fingerprints agree compute the same bits for the operations that training is made of; where they
    differ, runs placed across them cannot be bit-identical.
    """
    import torch
    from torch.nn import functional as F

    draw = rng(0, "doctor")

    def drawn_tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype("float32")).to(device)

    with determinism.plain_mode():
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        whole = hashlib.sha256()

        def take(x: torch.Tensor) -> None:
            whole.update(x.detach().to("cpu").contiguous().view(-1).numpy().tobytes())

        take(drawn_tensor(173, 259) @ drawn_tensor(259, 131))
        images = drawn_tensor(16, 3, 20, 20)
        target = torch.arange(16, device=device) % 10
        kernel = drawn_tensor(8, 3, 5, 5) * 0.1
        bias = drawn_tensor(8)
        head = drawn_tensor(8 * 8 * 8, 10) * 0.05
        weights = [w.requires_grad_() for w in (kernel, bias, head)]
        step = torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-4)
        for _ in range(5):
            step.zero_grad()
            hidden = F.max_pool2d(torch.relu(F.conv2d(images, kernel, bias)), 2)
            hidden = F.group_norm(hidden, 2)
            loss = F.cross_entropy(hidden.flatten(1) @ head, target)
            loss.backward()
            step.step()
            take(loss.reshape(1))
        for w in weights:
            take(w)
        take(images.abs().sqrt())
        return whole.hexdigest()
