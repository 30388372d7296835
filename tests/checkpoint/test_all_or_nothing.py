"""A restore or save that fails halfway leaves the run as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import CheckpointError, CheckpointMismatchError
from tests.checkpoint.helpers import Count, Fragile, Run, Untouched, items, make_buffer
from tests.helpers import check_same, take

if TYPE_CHECKING:
    from asyncbuf.checkpoint.checkpointer import Checkpointer


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_objects_before_the_one_that_fails_are_put_back(
    checkpointer: Checkpointer, error: type[BaseException]
) -> None:
    await checkpointer.save(0, a=Count(1), b=Count(2), c=Count(3))
    a, b, c = Count(10), Fragile(20, hates={2}, error=error), Count(30)
    with pytest.raises(CheckpointMismatchError if error is ValueError else error, match="not that one") as caught:
        await checkpointer.restore(a=a, b=b, c=c)
    if error is ValueError:
        assert str(caught.value).startswith("b: expected a state that it takes")
        assert isinstance(caught.value.__cause__, ValueError)
    assert (a.value, b.value, b.half, c.value, c.loads) == (10, 20, 20, 30, 0)


async def test_object_that_fails_beside_a_buffer_changes_nothing(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(0, **run.objects, count=Count(1))
    state = await Untouched.start()
    with pytest.raises(CheckpointMismatchError, match="count: expected a state that it takes"):
        await checkpointer.restore(**state.run.objects, count=Fragile(hates={1}))
    await state.check()


async def test_buffers_before_the_one_that_fails_are_put_back(checkpointer: Checkpointer) -> None:
    saved: dict[str, Any] = {"a": make_buffer(1), "b": make_buffer(2)}
    for buffer in saved.values():
        await buffer.extend(items(20, 0))
    await checkpointer.save(0, **saved, count=Count(1))
    a, b, count = make_buffer(3), make_buffer(4, prefetch=1), Count(5)
    twin = make_buffer(3)
    for buffer in (a, twin):
        await buffer.extend(items(11, 6))
    with pytest.raises(CheckpointMismatchError, match="depth"):
        await checkpointer.restore(a=a, b=b, count=count)
    assert count.value == 5
    async with a, twin:
        check_same(await take(a, 12), await take(twin, 12))


async def test_object_that_does_not_take_back_its_own_state_is_named(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    await checkpointer.save(0, a=Count(1), b=Count(2), buffer=buffer)
    a, b = Fragile(10, hates={10}), Count(20)
    with pytest.raises(CheckpointError, match="a: expected that it takes back its own state"):
        await checkpointer.restore(a=a, b=b, buffer=buffer)
    assert b.value == 20


async def test_failed_save_leaves_the_run_as_it_was(checkpointer: Checkpointer) -> None:
    class Broken(Count):
        def state_dict(self) -> dict[str, Any]:
            raise ArithmeticError("broken")

    class Async(Count):
        async def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    wrong: list[tuple[Any, type[Exception], str]] = [
        (Broken(), ArithmeticError, "broken"),
        (Async(), TypeError, "wrong: expected a state_dict that is not async, found that of Async"),
        ({"a": [1, object()]}, CheckpointError, r"wrong/a/1: expected"),
        (Count, CheckpointError, r"wrong: expected .* found builtins.type"),
        (Count({1, 2}), CheckpointError, r"wrong/value: expected .* found builtins.set"),  # type: ignore[arg-type]
    ]
    state = await Untouched.start()
    for part, error, message in wrong:
        with pytest.raises(error, match=message):
            await checkpointer.save(0, **state.run.objects, wrong=part)
    assert checkpointer.steps() == []
    await state.check()
