"""Snapshots that were changed: refused with the place named, and nothing has changed."""

from __future__ import annotations

import asyncio
import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointVersionError,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from tests.resume_helpers import items_of, noisy, take, unchanged
from tests.snapshot.helpers import State, buffer_with, filled, queue_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def at(*keys: Any) -> Callable[[State], Any]:
    """The container at a place in a state dict."""
    return lambda state: functools.reduce(lambda node, key: node[key], keys, state)


def put(value: Any, *keys: Any) -> Callable[[State], None]:
    """Write something there."""
    return lambda state: at(*keys[:-1])(state).__setitem__(keys[-1], value)


def drop(*keys: Any) -> Callable[[State], None]:
    """Remove what is there."""
    return lambda state: at(*keys[:-1])(state).__delitem__(keys[-1])


ENTRY = ("prefetch", "queue", 0)
CONTENT = (*ENTRY, "content")
MALFORMED: dict[str, tuple[Callable[[State], Any], type[CheckpointError], str]] = {
    "payload is a list": (put([], "prefetch"), CheckpointCorruptError, "prefetch.*dict.*list"),
    "payload is None": (put(None, "prefetch"), CheckpointCorruptError, "prefetch.*dict.*None"),
    "version 3": (put(3, "prefetch", "version"), CheckpointVersionError, "version from 1 to 2.*3"),
    "version True": (put(True, "prefetch", "version"), CheckpointVersionError, "version.*True"),
    "version text": (put("1", "prefetch", "version"), CheckpointVersionError, "version.*'1'"),
    "no version": (drop("prefetch", "version"), CheckpointVersionError, "version.*None"),
    "capacity bool": (put(True, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*True"),
    "capacity negative": (put(-1, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*-1"),
    "capacity text": (put("2", "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*'2'"),
    "capacity float": (put(2.0, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*2.0"),
    "no capacity": (drop("prefetch", "capacity"), CheckpointCorruptError, "capacity.*None"),
    "waiting negative": (put(-1, "prefetch", "waiting"), CheckpointCorruptError, "waiting.*-1"),
    "no waiting": (drop("prefetch", "waiting"), CheckpointCorruptError, "waiting.*None"),
    "next negative": (put(-1, "prefetch", "next"), CheckpointCorruptError, "next.*-1"),
    "no next": (drop("prefetch", "next"), CheckpointCorruptError, "next.*None"),
    "queue is a dict": (put({}, "prefetch", "queue"), CheckpointCorruptError, "queue.*list.*dict"),
    "queue is None": (put(None, "prefetch", "queue"), CheckpointCorruptError, "queue.*list.*None"),
    "no queue": (drop("prefetch", "queue"), CheckpointCorruptError, "queue.*list"),
    "queue too long": (
        lambda state: queue_of(state).append(copy.deepcopy(queue_of(state)[0])),
        CheckpointCorruptError,
        "at most 2.*3",
    ),
    "entry is a list": (put([], *ENTRY), CheckpointCorruptError, "queue.*list"),
    "entry is None": (put(None, *ENTRY), CheckpointCorruptError, "queue.*None"),
    **{
        f"entry without {key}": (drop(*ENTRY, key), CheckpointCorruptError, key)
        for key in ("number", "seed", "batch_size", "main", "epoch", "last", "step", "content")
    },
    "entry with more": (put(1, *ENTRY, "more"), CheckpointCorruptError, "more"),
    "number text": (put("1", *ENTRY, "number"), CheckpointCorruptError, "number.*'1'"),
    "number bool": (put(True, *ENTRY, "number"), CheckpointCorruptError, "number.*True"),
    "number beyond the next": (put(10**6, *ENTRY, "number"), CheckpointCorruptError, "number.*1000000"),
    "seed too large": (put(2**64, *ENTRY, "seed"), CheckpointCorruptError, "seed"),
    "main a number": (put(1, *ENTRY, "main"), CheckpointCorruptError, "main.*bool"),
    "epoch text": (put("0", *ENTRY, "epoch"), CheckpointCorruptError, "epoch.*'0'"),
    "epoch negative": (put(-1, *ENTRY, "epoch"), CheckpointCorruptError, "epoch.*-1"),
    "step too large": (put(9, *ENTRY, "step"), CheckpointError, "steps"),
    "step below -1": (put(-2, *ENTRY, "step"), CheckpointCorruptError, "step.*-2"),
    "content is None": (put(None, *CONTENT), CheckpointCorruptError, "content"),
    "content without data": (drop(*CONTENT, "data"), CheckpointCorruptError, "content"),
    "content of no type": (put({"$type": "os.system", "value": 1}, *CONTENT, "data"), CheckpointCorruptError, "os.sys"),
    "indices float": (put(torch.zeros(3), *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices a list": (put([0, 1, 2], *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices with two axes": (put(torch.zeros(3, 1).long(), *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices out of range": (
        put(torch.tensor([0, 1, 999]), *CONTENT, "indices"),
        CheckpointCorruptError,
        "indices|rows",
    ),
    "indices negative": (put(torch.tensor([0, 1, -1]), *CONTENT, "indices"), CheckpointCorruptError, "indices|rows"),
    "info a list": (put([1], *CONTENT, "info"), CheckpointCorruptError, "info"),
    "format": (put("else", "format"), CheckpointCorruptError, "format.*'else'"),
    "no format": (drop("format"), CheckpointCorruptError, "format.*None"),
    "format version": (put(99, "version"), CheckpointVersionError, "99"),
    "no config": (drop("config"), CheckpointCorruptError, "None"),
    "less config": (drop("config", "capacity"), CheckpointCorruptError, "kinds|capacity"),
    "no writer": (drop("writer"), CheckpointCorruptError, "writer|RoundRobin"),
    "no sampler": (drop("sampler"), CheckpointCorruptError, "Sampler|sampler"),
    "no generator": (drop("generator"), CheckpointCorruptError, "generator"),
    "generator cut": (
        put(torch.zeros(7, dtype=torch.uint8), "generator", "state"),
        CheckpointCorruptError,
        "generator",
    ),
    "cursor text": (put("3", "writer", "cursor"), CheckpointCorruptError, "cursor.*'3'"),
    "cursor beyond size": (put(21, "writer", "cursor"), CheckpointCorruptError, "cursor.*21"),
    "more rows than written": (put(99, "writer", "size"), CheckpointCorruptError, "size|rows"),
    "fewer writes than rows": (put(5, "writer", "write_count"), CheckpointCorruptError, "write_count"),
    "rows of nothing": (put({"meta": None, "chunks": []}, "storage"), CheckpointCorruptError, "storage|rows"),
    "position beyond the pass": (put(99, "sampler", "position"), CheckpointCorruptError, "position.*99"),
    "pass beyond the rows": (put(99, "sampler", "length"), CheckpointCorruptError, "length|rows|99"),
    "no storage": (drop("storage"), CheckpointCorruptError, "storage"),
    "no chunks": (put([], "storage", "chunks"), CheckpointCorruptError, "20 rows.*0"),
    "chunks too often": (
        lambda s: s["storage"]["chunks"].append(s["storage"]["chunks"][0]),
        CheckpointCorruptError,
        "row",
    ),
    "field missing": (drop("storage", "chunks", 0, "wide"), CheckpointCorruptError, "wide"),
    "field of another dtype": (
        lambda state: put(rows_of(state, "number").float(), "storage", "chunks", 0, "number")(state),
        CheckpointCorruptError,
        "number.*float32",
    ),
    "rows negative": (put(-1, "storage", "meta", "rows"), CheckpointCorruptError, "-1"),
    "meta text": (put("rows", "storage", "meta"), CheckpointCorruptError, "storage"),
    "chunk of numbers": (put(1, "storage", "chunks", 0, "number"), CheckpointCorruptError, "expe"),
    "chunk without rows": (put(torch.tensor(1), "storage", "chunks", 0, "number"), CheckpointCorruptError, "expe"),
    "meta on its head": (put([{}], "storage", "meta", "fields"), CheckpointCorruptError, "storage"),
}


@pytest.fixture(scope="module")
def good_state() -> State:
    async def main() -> State:
        async with await filled(sampler=SamplerWithoutReplacement()) as source:
            await source.sample()
            return await source.state_dict()

    return asyncio.run(main())


@pytest.mark.parametrize("what", MALFORMED)
async def test_malformed_is_refused_and_changes_nothing(what: str, good_state: State) -> None:
    mutate, error, message = MALFORMED[what]
    state = copy.deepcopy(good_state)
    mutate(state)
    async with await filled(12, sampler=SamplerWithoutReplacement(), seed=9) as target:
        await target.sample()
        async with unchanged(target):
            with pytest.raises(error, match=message):
                await target.load_state_dict(state)
        await check_goes_on(target)


async def test_the_state_that_was_mutated_loads(good_state: State) -> None:
    async with await filled(12, sampler=SamplerWithoutReplacement(), seed=9) as target:
        await target.load_state_dict(copy.deepcopy(good_state))
        assert len(target) == 20
        await check_goes_on(target)


async def check_goes_on(buffer: ReplayBuffer) -> None:
    await take(buffer, 3)
    await buffer.extend(items_of(2))


async def test_bytes_that_changed_on_disk_are_refused(tmp_path: Path) -> None:
    async with await filled(transform=noisy) as source:
        await source.sample()
        await source.save(tmp_path / "it")
    files = [path for path in (tmp_path / "it").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert len(files) >= 4  # manifest, rows, two batches
    async with await filled(12, transform=noisy, seed=9) as target:
        await target.sample()
        for path in files:
            content = path.read_bytes()
            for wrong in (_flipped(content), content[:-1], b"", None):
                path.unlink() if wrong is None else path.write_bytes(wrong)
                async with unchanged(target):
                    with pytest.raises(CheckpointError):
                        await target.load(tmp_path / "it")
                path.write_bytes(content)
        await target.load(tmp_path / "it")
        assert len(target) == 20


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**31], [2**64], [True], ["3"], [1.5], [-1], "3"], ids=str)
async def test_a_shape_that_cannot_be_is_refused_by_an_empty_buffer(shape: Any, good_state: State) -> None:
    state = copy.deepcopy(good_state)
    state["storage"]["meta"]["fields"][0]["shape"] = shape
    target = buffer_with(sampler=SamplerWithoutReplacement())
    with pytest.raises(CheckpointError, match="expected"):
        await target.load_state_dict(state)
    assert len(target) == 0
    await target.load_state_dict(good_state)
