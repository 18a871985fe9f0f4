"""What crosses as the payload of a message: bytes, or, between a server and clients in one process,
the tensors themselves.

Whoever sends, receives, checks, stores or decodes a payload asks a `Body`, which has the same
methods either way. Its values are not copied: a broadcast is encoded once and all sends share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from fednet.files import Buffer, Digest
from fednet.tensors import Tensors
from fednet.wire.messages import Field

SMALL_BYTES = 64 << 10  # payloads up to here are bytes within a process too: they are logged


class Body:
    """A payload: values one behind the other, never written to. A value is bytes, or Tensors, which
    become bytes only if these are asked for. Its length is that of its bytes.

    From the codec comes a Body with one value a field, from a network one with one value.
    """

    def __init__(self, values: Sequence[Buffer | Tensors] = ()) -> None:
        self.values = values
        self.size = 0
        segments: list[memoryview] = []
        has_tensors = False
        for value in values:
            if isinstance(value, Tensors):
                self.size += value.layout.nbytes
                has_tensors = True
            else:
                view = memoryview(value)
                self.size += view.nbytes
                if view.nbytes:
                    segments.append(view.cast("B"))
        if not has_tensors:
            self.segments = segments
        # Whether it need not be made into bytes for a receiver in this process. One that came so
        # has no digest: to compute it, its tensors would have to be made into bytes.
        self.by_reference = has_tensors and self.size > SMALL_BYTES

    def __len__(self) -> int:
        return self.size

    @cached_property
    def segments(self) -> list[memoryview]:
        """Its bytes, in pieces, none of which is empty."""
        found: list[memoryview] = []
        for value in self.values:
            if isinstance(value, Tensors):
                found += map(tensor_bytes, (value.vector, value.buffers, value.counters))
            elif len(value):
                found.append(memoryview(value).cast("B"))
        return list(filter(len, found))

    def to_bytes(self) -> memoryview:
        """Its bytes: a view where they lie in one segment, else a copy."""
        if len(self.segments) == 1:
            return self.segments[0]
        return memoryview(b"".join(self.segments))

    def __bytes__(self) -> bytes:
        return b"".join(self.segments)

    def slice(self, start: int, end: int) -> Body:
        """Its bytes [start, end): a view where they lie in one segment, else a copy."""
        found = []
        at = 0
        for s in self.segments:
            if at < end and start < at + len(s):
                found.append(s[max(0, start - at) : end - at])
            at += len(s)
        return Body(found if len(found) == 1 else [b"".join(found)])

    def parts(self, size: int) -> int:
        """How many parts of `size` bytes it has; the last may be shorter."""
        return math.ceil(self.size / size)

    def digest(self) -> bytes:
        """Of its bytes, however they are cut into segments."""
        found = Digest()
        for segment in self.segments:
            found.update(segment)
        return found.digest()

    def split(self, form: Sequence[Field], count: int) -> tuple[Body, Body]:
        """Returns the body of the first `count` fields of its form, and that of the others."""
        if self.by_reference:
            return Body(self.values[:count]), Body(self.values[count:])
        whole = self.to_bytes()
        at = sum([field.size for field in form[:count]])
        return Body([whole[:at]]), Body([whole[at:]])

    def own(self) -> Body:
        """Returns it so that nobody else writes to it: what can be written to is copied, since it
        may be another's memory.
        """
        if self.by_reference:
            return self
        for segment in self.segments:
            if not segment.readonly:
                return Body([bytearray(self.to_bytes())])
        return self

    def copy(self) -> Body:
        """Returns it in memory of its own: a method may keep what it returned, and change it before
        the payload is sent or used.
        """
        values: list[Buffer | Tensors] = []
        for value in self.values:
            if isinstance(value, Tensors):
                values.append(value.clone())
            elif memoryview(value).readonly:  # bytes, which nobody can change
                values.append(value)
            else:
                values.append(bytes(value))
        return Body(values)


NOTHING = Body()  # of a message without a payload


def tensor_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it is contiguous on the CPU."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().cpu().contiguous().view(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return flat.numpy().data.cast("B")
