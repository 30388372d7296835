"""Ways to make the bytes of an item fewer."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Codec(ABC):
    """Compresses and decompresses, in any thread.

    Args:
        level: how hard it tries.

    Attributes:
        name: what it is called in checkpoints.
        levels: the least and the most.
    """

    name: ClassVar[str]
    levels: ClassVar[tuple[int, int]]

    def __init__(self, level: int) -> None:
        self.level = level
        # What compresses has a state, and so each thread needs its own.
        self._mine = threading.local()

    def __reduce__(self) -> tuple[type[Codec], tuple[int]]:
        """Without what threads have."""
        return type(self), (self.level,)

    def encode(self, row: npt.NDArray[np.uint8]) -> bytes:
        """Bytes ``[nbytes]`` compressed, or as they are if that is not less."""
        found = self._compress(row)
        return found if len(found) < row.nbytes else row.tobytes()

    def decode(self, found: bytes, nbytes: int) -> bytes:
        """The way back, to so many bytes.

        Raises:
            ValueError: it is something else.
        """
        if len(found) == nbytes:
            return found
        plain = self._decompress(found, nbytes)
        if len(plain) != nbytes:
            raise ValueError(f"expected {nbytes} bytes when they are decompressed, found {len(plain)}")
        return plain

    @abstractmethod
    def _compress(self, row: npt.NDArray[np.uint8]) -> bytes: ...

    @abstractmethod
    def _decompress(self, found: bytes, nbytes: int) -> bytes:
        """At most about so many bytes, whatever was handed in."""


class Zlib(Codec):
    """That of the standard library."""

    name = "zlib"
    levels = (0, 9)

    def _compress(self, row: npt.NDArray[np.uint8]) -> bytes:
        return zlib.compress(row.data, self.level)

    def _decompress(self, found: bytes, nbytes: int) -> bytes:
        worker = zlib.decompressobj()
        try:
            plain = worker.decompress(found, nbytes + 1)
        except zlib.error as error:
            raise ValueError(f"expected bytes of zlib, found {error}") from error
        return plain if worker.eof else b""


class Zstd(Codec):
    """Zstandard, which is several times as fast."""

    name = "zstd"
    levels = (-7, 22)

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._zstd: Any = importlib.import_module("zstandard")

    def _compress(self, row: npt.NDArray[np.uint8]) -> bytes:
        worker = getattr(self._mine, "compressor", None)
        if worker is None:
            worker = self._mine.compressor = self._zstd.ZstdCompressor(level=self.level)
        found: bytes = worker.compress(row)
        return found

    def _decompress(self, found: bytes, nbytes: int) -> bytes:
        worker = getattr(self._mine, "decompressor", None)
        if worker is None:
            worker = self._mine.decompressor = self._zstd.ZstdDecompressor()
        try:
            if self._zstd.frame_content_size(found) != nbytes:  # memory is taken for what it says
                return b""
            plain: bytes = worker.decompress(found)
        except self._zstd.ZstdError as error:
            raise ValueError(f"expected bytes of zstd, found {error}") from error
        return plain


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Zstd, Zlib)}


def best() -> str:
    """The name of the best codec that is installed."""
    return Zlib.name if importlib.util.find_spec("zstandard") is None else Zstd.name
