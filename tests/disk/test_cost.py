"""What a file claims costs no more than what is really there; memory is used again only when nobody sees it."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from asyncbuf import CheckpointCorruptError, ReplayBuffer, TensorStorage
from asyncbuf._disk.reader import CheckpointReader, ReadAhead
from asyncbuf._plain.memory import check_memory
from asyncbuf._runtime.spare_memory import SpareMemory
from tests.disk.helpers import FILES, contents, data_of, forge, save

if TYPE_CHECKING:
    from pathlib import Path

BYTES = 400_000_000


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes cannot be told from zeros here")
def test_a_sparse_file_takes_no_memory(path: Path) -> None:
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (BYTES, BYTES)
    header += b" " * (-len(header) % 8)
    file = data_of(path) / FILES[1]
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + BYTES)
    digest = blake3()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    entry = {"bytes": file.stat().st_size, "blake3": digest.hexdigest()}
    forge(path, lambda body: body["files"].update({FILES[1]: entry}))
    reader = CheckpointReader(path)
    before = peak()
    for found in (reader.read(FILES[1]), ReadAhead(reader, [FILES[1]]).read(0)):
        assert found["x"].shape == (BYTES,)
        assert int(found["x"][::4096].sum()) == 0
    assert peak() - before < 100_000_000


def expanded(state: dict[str, Any]) -> None:
    state["generator"]["state"] = torch.ones(1, dtype=torch.uint8).expand(BYTES)


def in_a_chunk(state: dict[str, Any]) -> None:
    chunk = state["storage"]["chunks"][0]
    chunk["x"] = chunk["x"][:1].expand(BYTES)


def many_over_the_same(state: dict[str, Any]) -> None:
    memory = torch.zeros(1_000_000, dtype=torch.uint8)
    state["sampler"]["more"] = [memory[:] for _ in range(400)]


@pytest.mark.parametrize("forge_state", [expanded, in_a_chunk, many_over_the_same])
async def test_a_state_dict_takes_no_more_memory_than_it_has(forge_state: Any) -> None:
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4)
    await buffer.extend({"x": torch.arange(20)})
    state = await buffer.state_dict()
    forge_state(state)
    before = peak()
    with pytest.raises(CheckpointCorruptError, match="memory of their own"):
        await buffer.load_state_dict(state)
    with pytest.raises(CheckpointCorruptError, match="memory of their own"):
        (await buffer.snapshot()).load_state_dict(state)
    assert peak() - before < 100_000_000


def test_what_has_memory_of_its_own_passes() -> None:
    one = torch.arange(6.0).reshape(2, 3)
    whole = torch.zeros(10)
    loop: list[Any] = [one, one.t(), {"a": one}]
    loop.append(loop)
    check_memory([one, {"again": one}, torch.tensor(1), torch.empty(0).expand(0), whole[:5], whole[5:]], "x")
    with pytest.raises(CheckpointCorruptError, match="x: expected tensors with memory of their own"):
        check_memory(loop, "x")


def test_memory_is_used_again_once_nobody_sees_it() -> None:
    spare = SpareMemory(2)
    first = spare.take(100)
    place = first.ctypes.data
    views: list[Any] = [torch.from_numpy(first)[3:7].view(2, 2), first[5:], first.data]
    del first
    while views:
        assert spare.take(50).ctypes.data != place
        views.pop()
    assert spare.take(80).ctypes.data == place
    kept = [spare.take(200) for _ in range(5)]
    assert len({each.ctypes.data for each in kept}) == 5
    assert spare.take(0).nbytes == 0


def test_files_that_are_read_ahead_do_not_share_memory(path: Path) -> None:
    for number in range(2, 5):
        save(path, number)
        ahead = ReadAhead(CheckpointReader(path), list(FILES))
        found = [ahead.read(i) for i in range(len(FILES))]
        again = [ahead.read(i)["x"] for i in (2, 0, 0)]
        for tensors, expected in zip(found, contents(number).values(), strict=True):
            assert tensors["x"].equal(expected["x"])
        assert [int(tensor[0]) for tensor in again] == [number * 10 + i for i in (2, 0, 0)]
        assert not np.shares_memory(again[1].numpy(), again[2].numpy())
