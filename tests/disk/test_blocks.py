"""Large files are written in blocks, past the page cache where that is possible: the bytes are the same in any case."""

from __future__ import annotations

import contextlib
import errno
from io import FileIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3

from asyncbuf._disk import blocks, files
from asyncbuf._disk.blocks import BlockFile, BlockMemory
from asyncbuf._disk.stop import Stop, StoppedError
from tests.helpers import nothing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = files.BLOCK_BYTES
_MEMORY = blocks._MEMORY_BYTES
_SIZES = [0, 1, 100, _BLOCK, blocks.LARGE_BYTES - 1, blocks.LARGE_BYTES, blocks.LARGE_BYTES + 1]
_SIZES += [_MEMORY - 1, _MEMORY, _MEMORY + 1, _MEMORY + _BLOCK, 2 * _MEMORY + 12_345]


class Odd(FileIO):
    """A file of a system that takes blocks only in its own way."""

    refuses: int = 0
    most: int | None = None
    taken = 0

    def write(self, content: Any) -> int:
        """As the system does."""
        view = memoryview(content)
        if files._is_direct(self) and (self.refuses == self.taken or len(view) % _BLOCK):
            raise OSError(errno.EINVAL, "no such blocks")
        self.taken += 1
        return super().write(view if self.most is None else view[: self.most])


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory()


def content_of(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def pieces(content: np.ndarray[Any, Any], sizes: list[int]) -> Iterator[np.ndarray[Any, Any]]:
    start, number = 0, 0
    while start < len(content):
        stop = start + sizes[number % len(sizes)]
        yield content[start:stop]
        start, number = stop, number + 1


def written(file: FileIO, path: Path, content: np.ndarray[Any, Any], memory: BlockMemory, sizes: list[int]) -> str:
    with file, memory.lent(len(content)) as lent:
        made = BlockFile(file, path, lent, Stop(), nothing, contextlib.nullcontext())
        for piece in pieces(content, sizes):
            made.add(piece)
        return made.end()


@pytest.mark.parametrize("nbytes", _SIZES)
def test_the_bytes_are_those_that_were_added(nbytes: int, tmp_path: Path, memory: BlockMemory) -> None:
    content = content_of(nbytes)
    for number, sizes in enumerate([[1_000_003], [7, 4096 * 5, 3_000_000], [100_000_000]]):
        path = tmp_path / str(number)
        digest = written(files.create(path), path, content, memory, sizes)
        assert path.read_bytes() == content.tobytes()
        assert digest == blake3(content.tobytes()).hexdigest()


@pytest.mark.parametrize("before", [0, 1, 100, _BLOCK, 3 * _BLOCK + 5])
@pytest.mark.parametrize("offset", [0, 1, 100, _BLOCK - 100])
@pytest.mark.parametrize("nbytes", [blocks._LEAST_BYTES + 100, _MEMORY + 12_345])
def test_what_lies_as_it_will_in_the_file_is_written_from_there(
    before: int, offset: int, nbytes: int, tmp_path: Path, memory: BlockMemory
) -> None:
    whole = content_of(nbytes + 2 * _BLOCK)
    start = -whole.ctypes.data % _BLOCK + offset
    content, first = whole[start : start + nbytes], content_of(before)
    path = tmp_path / "file"
    with files.create(path) as file, memory.lent(_MEMORY) as lent:
        made = BlockFile(file, path, lent, Stop(), nothing, contextlib.nullcontext())
        for piece in (first, content, content[:1000], content):
            made.add(piece)
        digest = made.end()
    expected = b"".join(piece.tobytes() for piece in (first, content, content[:1000], content))
    assert path.read_bytes() == expected
    assert digest == blake3(expected).hexdigest()


@pytest.mark.parametrize("refuses", [0, 1])
@pytest.mark.parametrize("most", [None, 1_000_000, _BLOCK * 100])
def test_blocks_that_a_system_does_not_take_go_through_the_page_cache(
    refuses: int, most: int | None, tmp_path: Path, memory: BlockMemory
) -> None:
    content = content_of(2 * _MEMORY + 12_345)
    path = tmp_path / "file"
    file = Odd(path, "xb")
    file.refuses, file.most = refuses, most
    written(file, path, content, memory, [1_000_003])
    assert path.read_bytes() == content.tobytes()


def test_another_error_is_raised(tmp_path: Path, memory: BlockMemory) -> None:
    class Full(FileIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "file"
    with pytest.raises(OSError, match="full") as caught:
        written(Full(path, "xb"), path, content_of(_MEMORY), memory, [_MEMORY])
    assert caught.value.filename == str(path)


def test_a_system_without_it_writes_through_the_page_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: BlockMemory
) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(files, "_DIRECT", 0)
    content = content_of(_MEMORY + 1)
    written(files.create(path), path, content, memory, [_MEMORY])
    assert path.read_bytes() == content.tobytes()


def test_writing_ends_early(tmp_path: Path, memory: BlockMemory) -> None:
    path, stop = tmp_path / "file", Stop()
    with files.create(path) as file, memory.lent(3 * _MEMORY) as lent:
        made = BlockFile(file, path, lent, stop, nothing, contextlib.nullcontext())
        made.add(content_of(_MEMORY))
        stop.set()
        with pytest.raises(StoppedError):
            made.add(content_of(_MEMORY))


def test_memory_is_used_again(memory: BlockMemory) -> None:
    with memory.lent(_MEMORY) as first, memory.lent(_MEMORY) as second:
        assert not np.shares_memory(first, second)
    with memory.lent(2 * _MEMORY) as third:
        assert np.shares_memory(third, first) or np.shares_memory(third, second)
        assert third.ctypes.data % _BLOCK == 0
