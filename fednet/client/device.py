"""What a client process keeps on one device: scratch models, and on a GPU its streams, and the data
of the clients that trained there last.
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
    from fednet.experiment.build import Experiment
    from fednet.training.scratch import Scratch
    from fednet.training.setting import Setting

CACHED_SHARE = 0.1  # of a GPU's memory for clients' data: what `slots.SPARE` leaves


class Device:
    """Holds a device's data, and a scratch model of each setting for each thread. Any thread may
    call it. load(client) returns a client's data.
    """

    def __init__(self, name: str, load: Callable[[int], Site]) -> None:
        self.device = torch.device(name)
        self._load = load
        self._sites: OrderedDict[int, Site] = OrderedDict()
        self._held = 0  # bytes
        self._lock = threading.Lock()
        self._own = threading.local()
        self._most = 0
        if self.device.type == "cuda":
            self._most = int(torch.cuda.mem_get_info(self.device)[1] * CACHED_SHARE)

    def site(self, client: int) -> Site:
        """Returns the client's data on the device. On a GPU they stay there; those that were not
        used for longest are dropped when there are too many. On the CPU it costs less to gather
        them for each task (1 ms for 500 images of 3 kB) than to have them in memory twice.
        """
        if self.device.type == "cpu":
            return self._load(client)
        with self._lock:
            if client in self._sites:
                self._sites.move_to_end(client)
                return self._sites[client]
            found = self._load(client)
            held = found.nbytes
            self.synchronize()
            self._sites[client] = found
            self._held += held
            while self._held > self._most and len(self._sites) > 1:
                _, old = self._sites.popitem(last=False)
                self._held -= old.nbytes
            return found

    def forget(self) -> None:
        """Drops the data that are kept for later tasks."""
        with self._lock:
            self._sites.clear()
            self._held = 0

    def synchronize(self) -> None:
        """Waits for what this thread's stream computes, so that other streams may use it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def scratch(self, experiment: Experiment, setting: Setting) -> Scratch:
        """Returns this thread's scratch model for a setting of the experiment."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = {}
        found: dict[Setting, Scratch] = self._own.scratch
        if setting not in found:
            found[setting] = experiment.scratch(self.device, setting)
        return found[setting]

    def stream(self) -> AbstractContextManager[object]:
        """Returns this thread's CUDA stream as a context; on the CPU a context that does nothing. A
        client has no stream of its own: what is freed in a stream is kept for that stream alone.
        """
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._own.stream)
