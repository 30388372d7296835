"""Checkpoints that are damaged: refused, and nothing changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ReplayBuffer
from tests.checkpoint.helpers import Count, Run, Untouched, disturb, drawn, items, make_buffer, saved_twice

if TYPE_CHECKING:
    from asyncbuf.checkpoint.checkpointer import Checkpointer


async def test_damage_anywhere_is_refused_and_nothing_changes(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    disturb()
    expected = drawn()
    disturb()
    files = [file for file in checkpointer.path(10).rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} >= {"model", "optimizer", "extra", "rng", "storage", "prefetch"}
    rng = random.Random(0)
    for file in files:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        for damage in (bytes(flipped), content[:-1], None):
            file.unlink() if damage is None else file.write_bytes(damage)
            for step in (None, 10):
                with pytest.raises(CheckpointError, match="expected") as caught:
                    await checkpointer.restore(step, **state.run.objects)
                assert not isinstance(caught.value, CheckpointNotFoundError)
                assert ("restore(step=...) takes an older one, of [5]" in str(caught.value)) == (step is None)
        file.write_bytes(content)
    assert drawn() == expected
    await state.check()
    await checkpointer.restore(**Run(7).objects)


async def test_an_older_one_is_restored_if_it_is_asked_for(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    (checkpointer.path(10) / "manifest.json").unlink()
    run = Run(1)
    with pytest.raises(CheckpointCorruptError, match=r"with a manifest, found none.*older one, of \[5\]"):
        await checkpointer.restore(**run.objects)
    assert (await checkpointer.restore(5, **run.objects)).step == 5


async def test_damage_of_a_later_buffer_changes_no_earlier_one(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, count = make_buffer(1), make_buffer(2), Count(1)
    for buffer in (a, b):
        await buffer.extend(items(20, 0))
    await checkpointer.save(0, a=a, b=b, count=count)
    (file,) = checkpointer.path(0).glob("data-*/b/storage/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    c, d, other = make_buffer(3), make_buffer(4), Count(2)
    restored: list[ReplayBuffer] = []
    restore = ReplayBuffer.restore

    async def noted(self: ReplayBuffer, *arguments: Any, **options: Any) -> None:
        restored.append(self)
        await restore(self, *arguments, **options)

    monkeypatch.setattr(ReplayBuffer, "restore", noted)
    for b_first in (False, True):
        objects: dict[str, Any] = {"b": d, "a": c} if b_first else {"a": c, "b": d}
        with pytest.raises(CheckpointCorruptError, match="digest"):
            await checkpointer.restore(**objects, count=other)
        assert (len(c), len(d), other.value) == (0, 0, 2)
        assert c not in restored  # it was not even tried
