"""The arguments of the checkpointer are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointError
from asyncbuf._disk.manifest import is_checkpoint
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import make_buffer
from tests.helpers import within

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_keep_is_checked(tmp_path: Path, keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep: expected"):
        Checkpointer(tmp_path, keep=keep)


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (True, TypeError), (1.5, TypeError), ("1", TypeError)])
async def test_step_is_checked(checkpointer: Checkpointer, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await checkpointer.save(step, n=1)
    await checkpointer.save(1, n=1)
    with pytest.raises(error):
        await checkpointer.restore(step)


async def test_step_may_be_of_numpy_or_torch(checkpointer: Checkpointer) -> None:
    assert (await checkpointer.save(np.int64(3), n=1)).name == "step-000003"  # type: ignore[arg-type]
    assert (await checkpointer.save(torch.tensor(4), n=1)).name == "step-000004"  # type: ignore[arg-type]
    restored = await checkpointer.restore(np.int64(4))  # type: ignore[arg-type]
    assert type(restored.step) is int


@pytest.mark.parametrize("name", ["a b", "", "../x", "a/b", "é", "a.b", "elastic", "partial"])
async def test_names_are_checked(checkpointer: Checkpointer, name: str) -> None:
    parts: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match="expected the name of a part"):
        await checkpointer.save(1, **parts)


async def test_same_buffer_twice_is_refused(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    for call in (checkpointer.save(1, a=buffer, b=buffer), checkpointer.restore(1, a=buffer, b=buffer)):
        with pytest.raises(ValueError, match="each buffer once, found the same as a and b"):
            await within(call)


async def test_plain_values_are_not_given_to_restore(checkpointer: Checkpointer) -> None:
    await checkpointer.save(1, extra={"a": 1})
    with pytest.raises(TypeError, match=r"extra: expected .* found dict; plain values come back in the result"):
        await checkpointer.restore(extra={})


async def test_something_else_in_its_place_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="step-000001: expected a checkpoint to replace, or nothing"):
        await Checkpointer(tmp_path).save(1, n=1)
    assert not is_checkpoint(tmp_path / "step-000001")


def test_repr(tmp_path: Path) -> None:
    assert repr(Checkpointer(tmp_path, keep=None, rng=True)) == f"<Checkpointer {tmp_path}, keep=None, rng=True>"
