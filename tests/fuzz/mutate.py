"""Make inputs from others: bytes are changed, and, where an input is made of frames, fields of its
headers.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

BOUNDS = (0, 128, 256, 65536, 2**20, 2**31, 2**32, 2**40, 2**63)
NUMBERS = [n + d for n in BOUNDS for d in (-1, 0, 1)]
OTHERS = [None, True, False, 0.5, float("nan"), float("inf"), "", "x", "x" * 200, b"", b"x", [], {}]
VALUES = [*NUMBERS, *OTHERS, [[]], "train", "evaluate", "../.."]


# -- frames ----------------------------------------------------------------------------------------
def pack(frames: Sequence[bytes]) -> bytes:
    """Return the frames, each after its length of two bytes."""
    return b"".join(struct.pack("<H", len(f)) + f for f in frames)


def unpack(data: bytes) -> list[bytes]:
    """Return the frames. Any bytes are some."""
    frames, at = [], 0
    while at < len(data):
        n = int.from_bytes(data[at : at + 2], "little")
        frames.append(data[at + 2 : at + 2 + n])
        at += 2 + n
    return frames


# -- changes of `data`, of which some take a piece of another input --------------------------------
Change = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def a_byte(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        values = (0, 1, 0x7F, 0x80, 0xC1, 0xFF, draw.randrange(256))
        data[draw.randrange(len(data))] = draw.choice(values)


def a_bit(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def a_number(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    width = draw.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = draw.randrange(len(data) - width + 1)
        number = draw.choice(NUMBERS) % 2 ** (8 * width)
        data[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))


def _piece(draw: random.Random, data: Sequence[int]) -> slice:
    start = draw.randrange(len(data) + 1)
    return slice(start, min(len(data), start + draw.choice((1, 2, 4, 16, 64, 512, len(data)))))


def less(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_piece(draw, data)]


def again(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    piece = bytes(data[_piece(draw, data)])
    at = draw.randrange(len(data) + 1)
    data[at:at] = piece * draw.choice((1, 1, 2, 30))


def zeros(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """As a power cut leaves a block that was never written."""
    piece = _piece(draw, data)
    data[piece] = bytes(piece.stop - piece.start)


def anothers(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = draw.choice(others)
    data[_piece(draw, data)] = other[_piece(draw, other)]


def a_field(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A value somewhere in a header becomes another."""
    frames = unpack(bytes(data))
    headers = [i for i, f in enumerate(frames) if f[:1] and 0x80 <= f[0] <= 0x8F]
    if not headers:
        return a_byte(draw, data, others)
    i = draw.choice(headers)
    try:
        fields = msgpack.unpackb(frames[i], raw=False, strict_map_key=False)
        fields.pop("c", None)
        change(draw, fields)
        frames[i] = msgpack.packb(fields)
    # UnicodeEncodeError is a ValueError.
    except (ValueError, OverflowError, TypeError, msgpack.exceptions.UnpackException):
        return a_byte(draw, data, others)
    data[:] = pack(frames)


def change(draw: random.Random, tree: dict[Any, Any]) -> None:
    """Change one value of a tree of maps and lists."""
    where: Any = tree
    keys: list[Any] = list(tree)
    while keys:
        key = draw.choice(keys)
        inner = where[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
            where = inner
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            continue
        if draw.random() < 0.15:
            del where[key]
        elif isinstance(inner, int) and draw.random() < 0.5:
            where[key] = inner + draw.choice((-1, 1))
        else:
            where[key] = draw.choice(VALUES)
        return


def frames_moved(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Frames are left out, doubled, or put in another order; or another input's are put in."""
    frames = unpack(bytes(data))
    more = unpack(draw.choice(others))
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(frames) + 1)
        kind = draw.randrange(4)
        if kind == 0 and frames:
            del frames[min(at, len(frames) - 1)]
        elif kind == 1 and frames:
            frames.insert(at, draw.choice(frames))
        elif kind == 2 and more:
            frames.insert(at, draw.choice(more))
        elif len(frames) > 1:
            frames[at % len(frames)], frames[at - 1] = frames[at - 1], frames[at % len(frames)]
    data[:] = pack(frames)


BYTES: tuple[Change, ...] = (a_byte, a_bit, a_number, less, again, zeros, anothers)
FRAMES: tuple[Change, ...] = (*BYTES, a_field, a_field, a_field, frames_moved, frames_moved)


def mutated(draw: random.Random, data: bytes, others: Sequence[bytes], framed: bool) -> bytes:
    """Return `data` with one to a few changes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        draw.choice(FRAMES if framed else BYTES)(draw, out, others)
    return bytes(out[: max(len(data), 1 << 16)])
