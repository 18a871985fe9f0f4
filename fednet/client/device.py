"""What a client process has at one device: scratch models, CUDA streams, and the data of the
clients that were last at work there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fednet.data.federation import Site
    from fednet.training.scratch import Scratch
    from fednet.training.setting import Setting

CACHED_BYTES = 96 << 20  # of clients' data that stay in memory, per process
CACHED_SHARE = 0.1  # of a GPU's memory, likewise: what `slots.SPARE` leaves


class Device:
    """load: a function from client id to that client's `Site`. scratch: makes a scratch model for a
    setting; each thread has one of each. Each call may come from any thread.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[int], Site],
        scratch: Callable[[torch.device, Setting], Scratch],
    ) -> None:
        self.device = torch.device(name)
        self._load, self._make = load, scratch
        self._sites: OrderedDict[int, Site] = OrderedDict()
        self._held = 0  # bytes
        self._lock = threading.Lock()
        self._own = threading.local()
        self._most = (
            int(torch.cuda.mem_get_info(self.device)[1] * CACHED_SHARE)
            if self.device.type == "cuda"
            else CACHED_BYTES
        )

    def site(self, client: int) -> Site:
        """The client's data on the device; the least recently used leave when there are too
        many.
        """
        with self._lock:
            if client in self._sites:
                self._sites.move_to_end(client)
                return self._sites[client]
            found = self._load(client)
            held = found.nbytes
            self.settle()
            self._sites[client] = found
            self._held += held
            while self._held > self._most and len(self._sites) > 1:
                _, old = self._sites.popitem(last=False)
                self._held -= old.nbytes
            return found

    def forget(self) -> None:
        """Lets go of the data that stay on the device for later."""
        with self._lock:
            self._sites.clear()
            self._held = 0

    def settle(self) -> None:
        """What was computed in this thread's stream is there for the others'."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def scratch(self, setting: Setting) -> Scratch:
        """This thread's, of that model."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = {}
        found: dict[Setting, Scratch] = self._own.scratch
        if setting not in found:
            found[setting] = self._make(self.device, setting)
        return found[setting]

    def stream(self) -> AbstractContextManager[object]:
        """The CUDA stream of the client that is at work in this thread; on the CPU a context that
        does nothing. Not one for each client hosted: what is freed in a stream is kept for that
        stream alone.
        """
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._own.stream)

    def warm(self, setting: Setting) -> None:
        """Builds the scratch model and imports what the first step would. A GPU's is built by its
        first task: that may wait for memory.
        """
        if self.device.type == "cpu":
            self.scratch(setting)
