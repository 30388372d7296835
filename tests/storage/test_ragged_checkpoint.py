"""Checkpoints of sequences: chunks that stay the same are not written again, forged ones are refused."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    RaggedStorage,
    ReplayBuffer,
    RowRange,
)
from asyncbuf.storage import _ragged_frozen
from asyncbuf.testing import assert_same_batch
from tests.helpers import seeded
from tests.storage.ragged_items import GROUPS, RAGGED, grouped_list, ragged_item, ragged_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ITEMS = 40


def storage_of(items: int = ITEMS, **options: Any) -> RaggedStorage:
    storage = RaggedStorage(ITEMS, RAGGED, **options)
    storage.write(storage.prepare(ragged_list(items)), [RowRange(0, 0, items)])
    return storage


def identities(storage: RaggedStorage) -> list[str | None]:
    return [chunk.identity for chunk in storage.freeze().chunks()]


def test_only_chunks_that_were_written_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ragged_frozen, "CHUNK_BYTES", 400)
    storage = storage_of()
    first = identities(storage)
    assert len(first) == 3  # of 16 rows each, which are not cut any more
    assert identities(storage) == first
    storage.write(storage.prepare_one(ragged_item(99)), [RowRange(20, 0, 1)])
    second = identities(storage)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    storage.release(torch.tensor([39]))
    assert [one == other for one, other in zip(second, identities(storage), strict=True)] == [True, True, False]


def test_sequences_that_only_move_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of()
    before = identities(storage)
    arena = storage._memory.arenas[0]  # type: ignore[union-attr]
    arena._open()
    arena._move(0)
    assert identities(storage) == before
    assert torch.equal(
        storage.gather(torch.arange(ITEMS))["tokens"], storage_of().gather(torch.arange(ITEMS))["tokens"]
    )


def test_what_was_loaded_keeps_its_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ragged_frozen, "CHUNK_BYTES", 400)
    frozen = storage_of().freeze()
    storage = RaggedStorage(ITEMS, RAGGED)
    storage.load_rows(frozen.meta, (chunk.tensors for chunk in frozen.chunks()))()
    storage.loaded_chunks(["a", "b", None])
    found = identities(storage)
    assert found[:2] == ["a", "b"]
    assert found[2] not in (None, "a", "b")
    storage.write(storage.prepare_one(ragged_item(99)), [RowRange(0, 0, 1)])
    assert identities(storage)[1:] == found[1:]


def test_nbytes_are_those_of_all_chunks() -> None:
    frozen = storage_of().freeze()
    found = sum(tensor.nbytes for chunk in frozen.chunks() for tensor in chunk.tensors.values())
    assert frozen.nbytes == found  # type: ignore[attr-defined]


def lengths(chunk: dict[str, Any], change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {**chunk, "lengths": change(chunk["lengths"].clone())}


def negative(lengths: torch.Tensor) -> torch.Tensor:
    lengths[0], lengths[1] = -3, lengths[0] + lengths[1] + 3
    return lengths


def overflowing(lengths: torch.Tensor) -> torch.Tensor:
    lengths[:2] = 2**62
    lengths[2] = -(2**63)
    return lengths


FORGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "negative": lambda chunk: lengths(chunk, negative),
    "overflow": lambda chunk: lengths(chunk, overflowing),
    "huge": lambda chunk: lengths(chunk, lambda found: found * 2**40),
    "sum": lambda chunk: lengths(chunk, lambda found: found + 1),
    "int32": lambda chunk: lengths(chunk, lambda found: found.int()),
    "float": lambda chunk: lengths(chunk, lambda found: found.double()),
    "axis": lambda chunk: lengths(chunk, lambda found: found[:, None]),
    "no axis": lambda chunk: lengths(chunk, lambda found: found[0]),
    "fewer lengths": lambda chunk: lengths(chunk, lambda found: found[:-1]),
    "no rows": lambda chunk: {name: tensor[:0] for name, tensor in chunk.items()},
    "dtype": lambda chunk: {**chunk, "tokens": chunk["tokens"].int()},
    "fewer tokens": lambda chunk: {**chunk, "tokens": chunk["tokens"][:-1]},
    "more marks": lambda chunk: {**chunk, "deep/marks": chunk["deep/marks"].repeat(2, 1)},
    "shape": lambda chunk: {**chunk, "deep/marks": chunk["deep/marks"][:, :1]},
    "single token": lambda chunk: {**chunk, "tokens": chunk["tokens"][0]},
    "missing": lambda chunk: {name: tensor for name, tensor in chunk.items() if name != "tokens"},
    "more": lambda chunk: {**chunk, "else": chunk["tokens"]},
    "rows": lambda chunk: {**chunk, "number": chunk["number"][:-1]},
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_chunks_are_refused(what: str) -> None:
    state = storage_of().state_dict()
    state["chunks"][-1] = FORGED[what](state["chunks"][-1])
    storage = storage_of(20)
    before = pickle.dumps(storage.state_dict()["chunks"][0]["tokens"].tolist())
    with pytest.raises(CheckpointCorruptError, match="expected"):
        storage.load_state_dict(state)
    assert pickle.dumps(storage.state_dict()["chunks"][0]["tokens"].tolist()) == before


def forged_metas() -> list[tuple[str, Any]]:
    meta = storage_of().state_dict()["meta"]
    found: list[tuple[str, Any]] = [("text", "x"), ("number", 3), ("empty", {})]
    for key in meta:
        found.append((f"no {key}", {name: value for name, value in meta.items() if name != key}))
        strange: list[Any] = [None, [], {}, 3, "x", [{}], [None]]
        found.extend((f"{key} {value!r}", {**meta, key: value}) for value in strange)
    wrong: list[tuple[str, Any]] = [
        ("path", "else"),
        ("path", 3),
        ("dtype", "int4"),
        ("shape", [-1]),
        ("shape", ["x"]),
        ("name", 3),
    ]
    for name, value in wrong:
        worse = copy.deepcopy(meta)
        worse["sequences"][0][name] = value
        found.append((f"sequence with {name} {value}", worse))
    for change in ([], ["lengths"], ["number", "number", "lengths"]):
        worse = copy.deepcopy(meta)
        fields = {field["name"]: field for field in worse["rows"]["fields"]}
        worse["rows"]["fields"] = [fields[name] for name in change]
        found.append((f"fields {change}", worse))
    return found


def test_forged_descriptions_are_refused() -> None:
    chunks = storage_of().state_dict()["chunks"]
    storage = storage_of(20)
    before = storage.gather(torch.arange(20))["tokens"]
    for what, meta in forged_metas():
        with pytest.raises(CheckpointError, match="expected"):
            storage.load_state_dict({"meta": meta, "chunks": chunks, "what": what})
    assert torch.equal(storage.gather(torch.arange(20))["tokens"], before)


def test_what_does_not_go_with_the_storage_is_a_mismatch() -> None:
    state = storage_of().state_dict()
    others = {
        "at most 10 rows": RaggedStorage(10, RAGGED),
        "expected the sequences": RaggedStorage(ITEMS, ["tokens"]),
        "at most 3 tokens": RaggedStorage(ITEMS, RAGGED, max_length=3),
        "pad_value of deep/marks": RaggedStorage(ITEMS, RAGGED, pad_value=-100),
    }
    for words, storage in others.items():
        with pytest.raises(CheckpointMismatchError, match=words):
            storage.load_state_dict(state)
    other = RaggedStorage(ITEMS, ["tokens"])
    other.write(other.prepare([{"tokens": [1.5]}]), [RowRange(0, 0, 1)])
    floats = other.state_dict()
    storage = RaggedStorage(ITEMS, ["tokens"])
    storage.write(storage.prepare([{"tokens": [1]}]), [RowRange(0, 0, 1)])
    with pytest.raises(CheckpointMismatchError, match=r"expected items of .*int64.*found items of .*float32"):
        storage.load_state_dict(floats)


@pytest.mark.parametrize("layout", ["padded", "packed", "jagged"])
async def test_a_checkpoint_and_batches_in_it_come_back(layout: str, tmp_path: Path) -> None:
    """Of two groups, one of them jagged tensors that may be added up before and afterwards."""

    def make() -> ReplayBuffer:
        storage = RaggedStorage(ITEMS, GROUPS, layout=layout)
        return ReplayBuffer(storage, batch_size=4, prefetch=3, generator=seeded())

    async with make() as buffer, make() as other:
        await buffer.extend(grouped_list(ITEMS))
        await buffer.sample()
        await buffer.save(tmp_path / "saved")
        await buffer.extend(grouped_list(7, 100))
        await buffer.save(tmp_path / "again")
        rest = [await buffer.sample() for _ in range(6)]
        await other.load(tmp_path / "again")
        for batch in rest:
            found = await other.sample()
            assert_same_batch(found, batch)
            if layout == "jagged":
                added = found["deep"]["marks"].sum(-1) + found["deep"]["halves"]
                assert added.offsets() is found["deep"]["halves"].offsets()
        assert set(rest[0].data) >= {"prompt_lengths", "answer_lengths"}
        assert ("prompt_offsets" in rest[0]) == (layout == "packed")


def test_a_copy_goes_on_by_itself() -> None:
    storage = storage_of()
    for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage)), copy.copy(storage)):
        other.write(other.prepare_one(ragged_item(99)), [RowRange(1, 0, 1)])
        assert other.gather(torch.tensor([1]))["number"].tolist() == [99]
        assert storage.gather(torch.tensor([1]))["number"].tolist() == [1]
        assert not set(identities(other)) & set(identities(storage))
