"""`Tensors` by client, in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from fednet.tensors.layout import Layout
from fednet.tensors.values import Tensors


class Rows(Protocol):
    """Where rows lie that memory does not hold (`experiment.store.RowStore`)."""

    def write(self, row: Tensors) -> str:
        """Keeps a row; returns the name that `read` takes."""
        ...

    def read(self, name: str, layout: Layout) -> Tensors:
        """The row of that name. Raises StateError where it is gone, or of another layout."""
        ...


class PerClient(Mapping[int, Tensors]):
    """One `Tensors` for each client, such as FedVARP's y_i; a missing row reads as zeros of `like`.

    A value: `put` returns a new mapping and leaves this one as it was. With a `store` (see the
    engine), rows lie on disk, one file a row, and memory holds none of them.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Mapping[int, Tensors | str] | None = None,
        store: Rows | None = None,
    ) -> None:
        self.layout = layout
        self.rows: Mapping[int, Tensors | str] = rows or {}
        self.store = store

    @property
    def names(self) -> dict[int, str]:
        """By client: where the store has its row. Empty without a store."""
        return {c: row for c, row in self.rows.items() if isinstance(row, str)}

    def __getitem__(self, client: int) -> Tensors:
        row = self.rows.get(client)
        if row is None:
            return Tensors.zeros(self.layout)
        if isinstance(row, Tensors):
            return row
        assert self.store is not None
        return self.store.read(row, self.layout)

    def known(self, client: int) -> Tensors | None:
        """The client's row, None where there is none yet."""
        return self[client] if client in self.rows else None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, client: int, row: Tensors) -> PerClient:
        """The mapping with this row in the place of the client's."""
        kept = row if self.store is None else self.store.write(row)
        return PerClient(self.layout, {**self.rows, client: kept}, self.store)
