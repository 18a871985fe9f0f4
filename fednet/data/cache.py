"""What several processes of one machine should do once: fetching files, decoding a hundred thousand images.

Decoded images are kept as one safetensors file in the user's cache. It is mapped into memory when read, so all
processes share one copy of the pixels.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

log = logging.getLogger(__name__)


def home() -> Path:
    """The user's cache: $XDG_CACHE_HOME/fednet, or ~/.cache/fednet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fednet"


def once(facts: Iterable[object], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """make(), or what an earlier process made from the same `facts` (names, sizes and times of the files read).

    Where the cache cannot be written, the tensor is simply made again each time.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    name = hashlib.sha256("\n".join(str(f) for f in facts).encode()).hexdigest()[:32]
    file = home() / "images" / f"{name}.safetensors"
    try:
        with one_at_a_time(file.parent):
            if file.exists():
                return load_file(file)["x"]
            x = make()
            aside = file.with_suffix(f".{os.getpid()}.part")
            try:
                save_file({"x": x}, aside)
                aside.replace(file)
                return load_file(file)["x"]  # the file's pages, which the system may take back, for memory of its own
            except (OSError, SafetensorError) as full:  # safetensors wraps what the disk says
                aside.unlink(missing_ok=True)
                log.warning("decoded images are not kept in %s: %s", file.parent, full)
            return x
    except PermissionError as closed:
        log.warning("decoded images are not kept in %s: %s", file.parent, closed)
        return make()


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other process of this machine is inside for the same folder."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".fednet.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
