"""What the server keeps for every client, on disk: one file a row, named after its content."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from fednet.algorithms.state import PerClient, State
from fednet.descriptors import reaching
from fednet.errors import StateError
from fednet.files import clear_asides, digest, list_folder, write_aside
from fednet.tensors import Layout, Tensors

ROW_NAME = re.compile(r"[0-9a-f]{32}")


class RowStore:
    """Keeps the rows of a `PerClient` on disk, a file each: parameters, buffers and counters as
    they are in memory. A row's name is its digest, so that a row of a checkpoint is never
    overwritten by another; `prune` deletes those that no checkpoint names.
    """

    def __init__(self, root: Path, fsync: bool = False) -> None:
        self.root = root
        self._fsync = fsync
        root.mkdir(parents=True, exist_ok=True)
        clear_asides(root)
        self._names = {path.stem for path in list_folder(root, "*.row")}

    def check(self, rows: PerClient) -> None:
        """Raises StateError if a row of a checkpoint is missing or not of its size. Its bytes are
        compared with its name when it is read.
        """
        for name in rows.names.values():
            self._find(name, rows.layout)

    def _path(self, name: str) -> Path:
        return self.root / f"{name}.row"

    def _find(self, name: object, layout: Layout) -> Path:
        """Returns the row's file. A damaged checkpoint must not name a file in another folder."""
        if not isinstance(name, str) or not ROW_NAME.fullmatch(name):
            raise StateError(f"{name!r} is not the name of a row.")
        path = self._path(name)
        size = path.stat().st_size if path.exists() else -1
        if size != layout.nbytes:
            raise StateError(
                f"{path}: {'is missing' if size < 0 else f'holds {size} bytes'}; a row has "
                f"{layout.nbytes}. Put it back, or start the run again under another name."
            )
        return path

    def write(self, row: Tensors) -> str:
        """Writes a row and returns its name."""
        parts = (p.to("cpu").contiguous() for p in (row.vector, row.buffers, row.counters))
        segments = [p.numpy().data.cast("B") for p in parts if p.numel()]
        name = digest(segments).hex()
        self._names.add(name)
        write_aside(self._path(name), segments, fsync=self._fsync)
        return name

    def read(self, name: str, layout: Layout) -> Tensors:
        """Returns the row, mapped from its file. Raises StateError if it is not what was written,
        or the name is not one that `write` returned.
        """
        path = self._find(name, layout)
        p, b, _ = layout.sizes
        raw: np.ndarray = np.zeros(0, dtype=np.uint8)
        if layout.nbytes:
            raw = reaching(lambda: np.memmap(path, dtype=np.uint8, mode="c"))
        if digest([raw.data]).hex() != name:
            raise StateError(
                f"{path}: not the row that was written there; put it back, or start the run again "
                f"under another name."
            )
        floats = torch.from_numpy(raw[: 4 * (p + b)].view(np.float32))
        counters = torch.from_numpy(
            np.frombuffer(raw[4 * (p + b) :].tobytes(), dtype=np.int64).copy()
        )
        return Tensors(layout, floats[:p], floats[p:], counters)

    def prune(self, keep: set[str]) -> None:
        for name in self._names - keep:
            self._path(name).unlink(missing_ok=True)
        self._names &= keep


def on_disk(state: State, rows: RowStore) -> State:
    """Returns a server's state, with what it keeps for every client in files of `rows`."""
    changed = {}
    for name, value in vars(state).items():
        if isinstance(value, PerClient) and value.store is None:
            kept = PerClient(value.layout, None, rows)
            for client, row in value.items():
                kept = kept.put(client, row)
            changed[name] = kept
    return state.replace(**changed) if changed else state
