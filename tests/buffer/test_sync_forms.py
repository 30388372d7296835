"""``with`` for ``async with``, ``for`` for ``async for``: the error says what to write."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest

from asyncbuf import RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage


def make(sampler: Any = None) -> Any:
    return ReplayBuffer(TensorStorage(100), batch_size=4, sampler=sampler or RandomSampler())


def test_with() -> None:
    with pytest.raises(TypeError, match="a ReplayBuffer is opened with `async with`, found `with`"), make():
        pytest.fail("entered")
    with pytest.raises(TypeError, match="opened with `async with`"), contextlib.ExitStack() as stack:
        stack.enter_context(make())


def test_for() -> None:
    with pytest.raises(TypeError, match=r"a ReplayBuffer is for `async for batch in ...`, found `for`"):
        list(make())
    with pytest.raises(TypeError, match=r"a BatchStream is for `async for batch in ...`, found `for`"):
        list(make(SamplerWithoutReplacement()).epoch())
    with pytest.raises(TypeError, match="`async for batch"):
        list(aiter(make()))


def test_index() -> None:
    for key in (0, "obs", slice(3)):
        with pytest.raises(TypeError, match=r"`batch = await buffer.sample\(\)` gets a batch"):
            make()[key]


def test_nothing_else_takes_a_buffer_for_something_sync() -> None:
    buffer = make()
    assert not inspect.isawaitable(buffer)
    assert not hasattr(buffer, "__next__")
    assert len(buffer) == 0
