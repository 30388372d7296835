"""A batch, and the indices of one, know how many items had been written when they were drawn."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from types import MappingProxyType

import pytest
import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf import Batch, Draw
from asyncbuf.batch import batch_of, drawn_rows

ROWS = [4, 1, 2, 0, 3, 5]


def make(draw: Draw | None = None, write_count: int = 40) -> Batch:
    draw = draw or Draw(torch.tensor(ROWS), {"weight": torch.ones(6)}, 2, True)
    return batch_of({"obs": torch.ones(6, 2)}, number=9, draw=draw, seed=0, write_count=write_count)


def test_batch_of_a_draw() -> None:
    draw = Draw(torch.tensor(ROWS), {"weight": torch.ones(6)}, 2, True, lengths=torch.tensor([2, 4]))
    batch = make(draw)
    assert batch.indices is draw.indices
    assert batch.info is draw.info
    assert batch.lengths is draw.lengths
    assert (batch.number, batch.epoch, batch.last, batch.write_count, len(batch)) == (9, 2, True, 40, 6)
    bare = make(Draw(torch.tensor([1])))
    assert (bare.info, bare.epoch, bare.last, bare.lengths) == ({}, None, False, None)


def test_shape_of_a_draw() -> None:
    batch = make(Draw(torch.tensor(ROWS), shape=(2, 3)))
    assert batch.indices.tolist() == [[4, 1, 2], [0, 3, 5]]
    assert batch.indices is batch.indices
    assert len(batch) == 6
    assert drawn_rows(batch.indices)[1] == 40
    assert dataclasses.replace(batch, data=None).indices.shape == (2, 3)


# -- the date of a draw -----------------------------------------------------------------------------------------------


def test_indices_know_their_draw() -> None:
    batch = make()
    for what in (batch, batch.indices):
        rows, write_count = drawn_rows(what)
        assert rows.tolist() == ROWS
        assert write_count == 40


def test_what_is_computed_from_indices_has_no_date() -> None:
    rows = make().indices
    computed = [rows[:3], rows[rows > 2], rows.clone(), rows.detach(), rows.view(2, 3), rows.to(torch.int32), rows + 0]
    for other in [*computed, torch.cat([rows, rows]), rows.numpy(), rows.tolist()]:
        assert drawn_rows(other)[1] is None


def test_rows_of_another_origin_have_no_date() -> None:
    assert drawn_rows(torch.arange(3))[1] is None
    assert drawn_rows(7) == (7, None)
    made_by_hand = Batch(None, torch.arange(3), {}, 0)
    assert drawn_rows(made_by_hand)[1] is None
    assert drawn_rows(made_by_hand.indices)[1] is None


def test_sampler_that_draws_the_same_tensor_again() -> None:
    rows = torch.tensor(ROWS)
    first, second = make(Draw(rows), 40), make(Draw(rows), 50)
    late, early = second.indices, first.indices
    assert [drawn_rows(one)[1] for one in (early, late, first, second)] == [40, 50, 40, 50]
    assert early.data_ptr() == late.data_ptr()


def test_date_survives_what_keeps_the_tensor() -> None:
    rows = make().indices
    for same in (rows.to("cpu"), rows.long(), copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert drawn_rows(same)[1] == 40
        assert same.tolist() == ROWS


def test_indices_can_be_saved_and_loaded_safely() -> None:
    file = io.BytesIO()
    torch.save({"indices": make().indices}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["indices"].tolist() == ROWS


def test_batch_can_be_saved_and_loaded_safely() -> None:
    file = io.BytesIO()
    torch.save(make(), file)
    file.seek(0)
    with torch.serialization.safe_globals([Batch]):
        found = torch.load(file, weights_only=True)
    assert (type(found), found.write_count, drawn_rows(found.indices)[1]) == (Batch, 40, 40)


# -- as a value -------------------------------------------------------------------------------------------------------


def lengths_of(batch: Batch) -> list[int] | None:
    return None if batch.lengths is None else batch.lengths.tolist()


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 4])], ids=["rows", "groups"])
def test_copies_keep_everything(lengths: torch.Tensor | None) -> None:
    info = MappingProxyType({"weight": torch.ones(6)})
    batch = make(Draw(torch.tensor(ROWS), info, 2, True, lengths=lengths))
    copies = [
        copy.copy(batch),
        copy.deepcopy(batch),
        dataclasses.replace(batch),
        batch.__replace__(),
        pickle.loads(pickle.dumps(batch)),
        torch_pytree.tree_map(lambda leaf: leaf + 0, batch),
    ]
    for found in copies:
        assert type(found) is Batch
        assert torch.equal(found["obs"], batch["obs"])
        assert found.indices.tolist() == ROWS
        assert found.info["weight"].tolist() == [1] * 6
        assert (found.number, found.epoch, found.last, found.write_count) == (9, 2, True, 40)
        assert lengths_of(found) == lengths_of(batch)
        assert drawn_rows(found.indices)[1] == 40
    assert copies[0].data is batch.data
    assert copies[1]["obs"] is not batch["obs"]


def test_replace_and_as_dict() -> None:
    batch = make()
    assert dataclasses.replace(batch, data={"obs": 1})["obs"] == 1
    assert set(dataclasses.asdict(batch)) == set(Batch.__match_args__)
    assert [field.name for field in dataclasses.fields(Batch)] == list(Batch.__match_args__)
    assert dataclasses.is_dataclass(batch)


def test_pytree_of_ragged_groups() -> None:
    batch = make(Draw(torch.tensor(ROWS), lengths=torch.tensor([2, 4])))
    leaves, spec = torch_pytree.tree_flatten(batch)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    spec = torch_pytree.treespec_loads(torch_pytree.treespec_dumps(spec))
    assert lengths_of(torch_pytree.tree_unflatten(leaves, spec)) == [2, 4]
    # Leaves may become anything, as with every pytree.
    shapes = torch_pytree.tree_map(lambda leaf: leaf.shape, batch)
    assert shapes["obs"] == (6, 2)
    assert shapes.indices == (6,)


def test_matching() -> None:
    match make():
        case Batch(data={"obs": obs}, write_count=40):
            assert obs.shape == (6, 2)
        case _:
            pytest.fail("expected a match")


def test_type_argument_changes_nothing() -> None:
    batch: Batch[dict[str, torch.Tensor]] = Batch[dict[str, torch.Tensor]](
        {"obs": torch.ones(2)}, torch.arange(2), {}, 0
    )
    assert type(batch) is Batch
