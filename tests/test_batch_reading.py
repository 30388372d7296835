"""A batch tells what it holds: its ``repr``, and errors that say what to write."""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from asyncbuf import Batch, Draw
from asyncbuf.batch import Ticket, batch_of

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = {"obs": torch.ones(4, 3), "reward": torch.ones(4)}


def make(data: Any = None, draw: Draw | None = None) -> Batch:
    return batch_of(DATA if data is None else data, 12, draw or Draw(torch.arange(4), epoch=0), 0, 40)


# -- in one line ------------------------------------------------------------------------------------------------------


def test_repr_of_a_batch() -> None:
    assert repr(make()) == "Batch(12, {obs: float32 [4, 3], reward: float32 [4]}, epoch=0)"
    draw = Draw(torch.arange(4), {"weight": torch.ones(4)}, 3, True, lengths=torch.tensor([1, 3]))
    assert repr(make(torch.ones(4), draw)) == (
        "Batch(12, float32 [4], info={weight: float32 [4]}, epoch=3, last=True, lengths=int64 [2])"
    )


def test_repr_of_a_draw_and_a_ticket() -> None:
    assert repr(Draw(torch.arange(4))) == "Draw(int64 [4])"
    draw = Draw(torch.arange(6), {"weight": torch.ones(6)}, 3, True, (2, 3), torch.ones(2), {"next": torch.ones(6)})
    assert repr(draw) == (
        "Draw(int64 [6], info={weight: float32 [6]}, epoch=3, last=True, shape=(2, 3), lengths=float32 [2], "
        "joins={next: float32 [6]})"
    )
    assert repr(Ticket(7, Draw(torch.arange(4)), 5, 40)) == "Ticket(7, Draw(int64 [4]), seed=5, write_count=40)"


@pytest.mark.parametrize(
    "data",
    [
        {f"key {i}": torch.ones(4) for i in range(2000)},
        tuple(torch.ones(4) for _ in range(2000)),
        [{"text": "x" * 1000}] * 1000,
        torch.ones(1000, 1000),
    ],
    ids=["keys", "tuple", "items", "tensor"],
)
def test_repr_is_short_and_quick(data: Any) -> None:
    info = {f"weight {i}": torch.ones(4) for i in range(200)}
    batch = make(data, Draw(torch.arange(4), info, 10**9, True, lengths=torch.ones(4)))
    seconds, text = [], ""
    for _ in range(20):
        start = time.perf_counter()
        text = repr(batch)
        seconds.append(time.perf_counter() - start)
    assert len(text) <= 500
    assert "\n" not in text
    assert min(seconds) < 1e-3  # some 50 us; a tensor of a thousand rows takes longer to print


# -- what to write instead --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "kind", "message"),
    [
        (lambda batch: batch.obs, AttributeError, 'write batch["obs"]'),
        (lambda batch: batch.items(), AttributeError, "write batch.data.items"),
        (lambda batch: batch.to("cpu"), AttributeError, "ReplayBuffer(..., device=...)"),
        (lambda batch: batch.shape, AttributeError, "len(batch)"),
        (lambda batch: batch.observation, AttributeError, "{obs: float32 [4, 3], reward: float32 [4]}"),
        (lambda batch: batch["observation"], KeyError, "expected one of the keys obs, reward; found observation"),
        (lambda batch: batch["indices"], KeyError, "batch.indices is an attribute"),
        (lambda batch: batch[0], KeyError, "expected one of the keys obs, reward; found 0"),
        (lambda batch: list(batch), TypeError, "iterate over batch.data"),
        (lambda batch: batch[object()], KeyError, "found object"),
    ],
)
def test_errors_say_what_to_write(read: Callable[[Any], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        read(make())
    assert message in str(caught.value)


def test_errors_of_data_without_keys() -> None:
    with pytest.raises(TypeError, match=r'expected data with keys for batch\["obs"\], found \(float32 \[4\],\)'):
        make((torch.ones(4),))["obs"]
    with pytest.raises(IndexError):
        make((torch.ones(4),))[1]
    with pytest.raises(TypeError, match="unhashable"):
        make()[[1]]


def test_errors_of_a_tensor_dict() -> None:
    batch = make(TensorDict({"obs": torch.ones(4, 2)}, batch_size=4))
    assert batch["obs"].shape == (4, 2)
    with pytest.raises(KeyError, match="keys obs; found action"):
        batch["action"]
    with pytest.raises(AttributeError, match="obs"):
        batch.obs  # type: ignore[attr-defined]  # noqa: B018


def test_attributes_can_be_asked_for() -> None:
    batch: Any = make()
    assert not hasattr(batch, "observation")
    assert getattr(batch, "observation", 5) == 5
    assert not hasattr(batch, "__array__")
    # One that is being made has nothing yet; copy and pickle ask such ones for their methods.
    empty = object.__new__(Batch)
    assert not hasattr(empty, "__setstate__")
    assert not hasattr(empty, "_data")


@pytest.mark.parametrize(
    "change", [lambda b: setattr(b, "data", 1), lambda b: delattr(b, "data")], ids=["set", "delete"]
)
def test_a_batch_is_read_only(change: Callable[[Any], object]) -> None:
    with pytest.raises(AttributeError, match=r"dataclasses\.replace"):
        change(make())
    with pytest.raises(AttributeError):
        make().other = 1  # type: ignore[attr-defined]


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_pickle_takes_about_the_bytes_of_the_batch() -> None:
    block = torch.ones(256, 100)
    data = {f"field_{i}": block[:, i * 10 : i * 10 + 10] for i in range(10)}
    batch = make(data, Draw(torch.arange(100_000)[:256], {"weight": torch.ones(100_000)[:256]}))
    size = sum(tensor.nbytes for tensor in (*data.values(), batch.indices, batch.info["weight"]))
    content = pickle.dumps(batch)
    assert len(content) < 1.2 * size
    found = pickle.loads(content)
    assert all(torch.equal(found[key], data[key]) for key in data)
    # The batch that was pickled still views the same memory.
    assert batch["field_0"].data_ptr() == block.data_ptr()


def test_a_missing_key_of_info_is_explained() -> None:
    batch = make({"x": torch.ones(4)}, Draw(torch.arange(4)))
    with pytest.raises(KeyError, match="PrioritizedSampler has"):
        _ = batch.info["weights"]
    assert batch.info.get("weights") is None
    assert "weights" not in batch.info
