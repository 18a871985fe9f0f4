"""Compressors of a user's own that take or return what they cannot: told with file and line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fednet import loading
from fednet.errors import RemoteProtocolError
from fednet.loading import WrongPart
from fednet.wire import compress

FILE = """import numpy as np
import torch

import fednet
from fednet.wire.compressors.base import Feedback, Lossless, Select, Values


@fednet.compressor("tenths")
class Tenths(Values):
    def nbytes(self, n):
        return n

    def encode(self, x, rng):
        return np.round(10 * x).astype(np.int8).tobytes()

    def decode(self, data, n):
        return np.frombuffer(data, np.int8).astype(np.float32) / 10


@fednet.compressor("half")
class Half(Select):
    contracts = True

    def count(self, n):
        return n // 2

    def select(self, x):
        return np.sort(np.argsort(-np.abs(x))[: len(x) // 2])


@fednet.compressor("same")
class Same(Lossless):
    def bound(self, nbytes):
        return nbytes

    def encode(self, data):
        return bytes(data)

    def decode(self, data, nbytes):
        return bytes(data)


@fednet.compressor("nothing")
class Plain(Feedback):
    def wanted(self, x, memory):
        return x
"""
CHAIN = ["nothing", "half", "tenths", "same"]


def there_and_back(text, tmp_path):
    """What a chain of the file's parts makes of ten numbers, and where they are read again."""
    path = tmp_path / "parts.py"
    path.write_text(text)
    try:
        (known,) = loading.load_parts([path])
        chain = compress.parse(CHAIN)
        x = torch.tensor([3.0, 0, 1, 0, -2, 0, 0, -1, 5, 0])
        memory = compress.Memory({}, {}, "x")
        data, decoded = chain.send(x, np.random.default_rng(0), memory)
        assert len(data) == chain.nbytes(10)[0]
        return decoded.tolist()
    finally:
        loading._drop(known.module)


def test_compressors_that_keep_to_their_declarations_are_left_alone(tmp_path):
    assert there_and_back(FILE, tmp_path) == [3.0, 0, 1, 0, -2, 0, 0, -1, 5, 0]


@pytest.mark.parametrize(
    ("right", "wrong", "error", "said"),
    [
        (".tobytes()", "", WrongPart, r"encode of Tenths \(parts\.py, line 13\) .* bytes"),
        (".tobytes()", ".tobytes()[1:]", RemoteProtocolError, "expected"),
        ("return n\n", "return n / 1\n", WrongPart, "nbytes of Tenths .* float, expected a whole"),
        (
            "astype(np.float32) / 10",
            "tobytes()",
            WrongPart,
            "decode of Tenths .* an array",
        ),
        ("[: len(x) // 2]", "[: len(x) // 3]", RemoteProtocolError, "expected"),
        (
            "// 2])\n",
            "// 2])\n\n    def expand(self, head, numbers, n):\n        return numbers\n",
            RemoteProtocolError,
            r"of shape \(5,\), expected \(10,\)",
        ),
        ("return x\n", "return x.numpy()\n", WrongPart, "wanted of Plain .* expected a tensor"),
    ],
)
def test_what_a_compressor_returns_wrongly_is_an_error_that_names_it(
    right, wrong, error, said, tmp_path
):
    assert right in FILE
    with pytest.raises(error, match=said):
        there_and_back(FILE.replace(right, wrong, 1), tmp_path)
