from __future__ import annotations

import importlib
from typing import Annotated

from fednet.errors import ConfigError, RemoteProtocolError, lacking
from fednet.registry import compressor
from fednet.wire.compressors.base import Lossless


@compressor("zstd")
class Zstd(Lossless):
    """Zstandard at `level` (3): lossless, on the bytes that the rest of the chain gives."""

    paper = "Collet and Kucherawy 2021, RFC 8878"

    def __init__(self, level: Annotated[int, "Level of compression, 1 to 19."] = 3) -> None:
        if level != int(level) or not 1 <= level <= 19:
            raise ConfigError(f"zstd({level}): expected a level from 1 to 19.")
        self.level = int(level)
        try:
            self.library = importlib.import_module("zstandard")
        except ImportError:
            raise ConfigError(lacking("zstd", "zstandard")) from None

    def bound(self, nbytes: int) -> int:
        # ZSTD_COMPRESSBOUND of zstd.h
        return nbytes + (nbytes >> 8) + max(0, (128 * 1024 - nbytes) >> 11)

    def encode(self, data: bytes) -> bytes:
        writer = self.library.ZstdCompressor(level=self.level, write_content_size=True)
        packed: bytes = writer.compress(data)
        return packed

    def decode(self, data: memoryview, most: int) -> bytes:
        zstandard = self.library
        try:
            # The declared size is what will be allocated, so it is checked before anything is.
            declared = zstandard.get_frame_parameters(data).content_size
            if declared > most:
                raise RemoteProtocolError(
                    f"zstd: the frame announces {declared} bytes, expected at most {most}."
                )
            raw: bytes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise RemoteProtocolError(f"zstd: {e}.") from e
        return raw
