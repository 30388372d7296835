"""On random histories, the slices that can be drawn are those of a plain model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import PrioritizedSliceSampler, SliceSamplerWithoutReplacement, TrajectorySampler
from asyncbuf._plain.codec import encode
from asyncbuf.sampler._slicer import Slicer
from asyncbuf.testing import difference
from tests.helpers import seeded
from tests.sampler.trajectory_model import Model, Plan, Told, compared, history, tell

if TYPE_CHECKING:
    import random

    from asyncbuf.rows import Rows
    from tests.sampler.trajectory_model import Slice

STEPS = 24
# A thousand histories in the default run, and more than ten thousand in the other one, all kinds together.
FEW = range(200)
MANY = range(200, 2_400)
seeds = pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["few", "many"]
)


class Part:
    """A slicer, with the methods of a sampler."""

    def __init__(self, plan: Plan, choose: random.Random, *, disjoint: bool) -> None:
        self.strict = choose.random() < 0.5
        self.burn_in = choose.choice((0, 0, 1, 2)) if self.strict or not disjoint else 0
        self.length = choose.choice((1, 2, 3, 5)) + self.burn_in
        self.disjoint = disjoint
        self.arguments: dict[str, Any] = {
            "slice_len": self.length - self.burn_in,
            "num_slices": None,
            "end_key": None if plan.is_keyed and not plan.end_chance else choose.choice(("done", ("cut", "done"))),
            "trajectory_key": "env" if plan.is_keyed else None,
            "strict_length": self.strict,
            "burn_in": self.burn_in,
            "disjoint": disjoint,
        }
        self.slicer = Slicer(**self.arguments)
        self.check_write, self.wrote, self.clear = self.slicer.check_write, self.slicer.wrote, self.slicer.clear

    def removed(self, indices: Any, rows: Rows) -> None:
        self.slicer.removed(indices.numpy())

    def found(self) -> set[Slice]:
        """All slices, without padding; each once."""
        firsts = self.slicer.starts.rows
        if not len(firsts):
            return set()
        draw = self.slicer.slices(firsts)
        assert draw.shape == (len(firsts), self.length)
        rows = draw.indices.reshape(draw.shape)
        if self.strict:
            found = [tuple(line) for line in rows.tolist()]
        else:
            mask = draw.info["mask"]
            assert mask.sum(1).tolist() == draw.info["lengths"].tolist()
            found = [tuple(line[there].tolist()) for line, there in zip(rows, mask, strict=True)]
            padded = [set(line[len(one) - 1 :].tolist()) for line, one in zip(rows, found, strict=True)]
            assert padded == [{one[-1]} for one in found]
        assert len(set(found)) == len(found)
        return set(found)

    def expected(self, model: Model) -> set[Slice]:
        block = self.length - self.burn_in if self.disjoint else 0
        return model.slices(self.length, strict=self.strict, block=block)

    def resume(self, rows: Rows) -> None:
        """Go on with another slicer that takes over the state."""
        state = self.slicer.state_dict()
        slicer = Slicer(**self.arguments)
        slicer.take_over(slicer.parsed(state, "slicer"))
        slicer.verify(rows, "slicer")
        assert difference(encode(slicer.state_dict()), encode(state)) is None
        self.slicer = slicer
        self.check_write, self.wrote, self.clear = slicer.check_write, slicer.wrote, slicer.clear


@seeds
@pytest.mark.parametrize("disjoint", [False, True])
def test_slices_are_those_of_the_model(seeds: range, disjoint: bool) -> None:
    def check(choose: random.Random) -> None:
        plan, model = Plan.chosen(choose), Model()
        part = Part(plan, choose, disjoint=disjoint)
        for told in history(plan, model, choose, STEPS):
            tell(part, told)
            if choose.random() < 0.5:
                continue
            assert part.found() == part.expected(model)
            firsts = part.slicer.starts.rows
            if len(firsts):
                begins = [model.rows[row].step == 0 for row in firsts.tolist()]
                assert part.slicer.slices(firsts).info["is_start"].tolist() == begins
            if choose.random() < 0.1:
                part.resume(told.rows)

    compared(seeds, check)


@seeds
def test_prioritized_slices_are_those_of_the_model(seeds: range) -> None:
    def check(choose: random.Random) -> None:
        plan, model = Plan.chosen(choose), Model()
        length, strict = choose.choice((1, 2, 4)), choose.random() < 0.5
        key = "env" if plan.is_keyed else None
        arguments: dict[str, Any] = {"slice_len": length, "trajectory_key": key, "strict_length": strict}
        sampler = PrioritizedSliceSampler(end_key="done", **arguments)
        for told in history(plan, model, choose, STEPS):
            tell(sampler, told)
            expected = {rows[0] for rows in model.slices(length, strict=strict)}
            assert bool(sampler.may_draw(told.rows, length)) == bool(expected)
            if expected and choose.random() < 0.5:
                draw = sampler.draw(told.rows, 1500 * length, seeded())
                assert set(draw.indices[::length].tolist()) == expected
            if expected and choose.random() < 0.2:
                which = torch.tensor(choose.sample(sorted(model.rows), 1 + len(model.rows) // 3))
                sampler.update_priority(which, torch.ones(len(which)), told.rows)

    compared(seeds, check)


@seeds
def test_passes_have_slices_of_the_model_and_no_item_twice(seeds: range) -> None:
    def check(choose: random.Random) -> None:
        plan, model = Plan.chosen(choose), Model()
        length, strict = choose.choice((1, 2, 4)), choose.random() < 0.5
        key = "env" if plan.is_keyed else None
        sampler = SliceSamplerWithoutReplacement(
            slice_len=length, end_key="done", trajectory_key=key, strict_length=strict, drop_last=choose.random() < 0.3
        )
        generator, epoch, seen = seeded(), -1, set[Any]()
        for told in history(plan, model, choose, STEPS):
            tell(sampler, told)
            expected = model.slices(length, strict=strict, block=length)
            for _ in range(choose.choice((0, 1, 3))):
                if not sampler.may_draw(told.rows, 2 * length):
                    break
                draw = sampler.draw(told.rows, 2 * length, generator)
                if draw.epoch != epoch:
                    epoch, seen = draw.epoch or 0, set()
                assert draw.shape is not None
                for i, line in enumerate(draw.indices.reshape(draw.shape).tolist()):
                    rows = tuple(line if strict else line[: draw.info["lengths"][i]])
                    assert rows in expected
                    items = {model.rows[row] for row in rows}
                    assert not items & seen
                    seen |= items

    compared(seeds, check)


@seeds
def test_whole_trajectories_are_those_of_the_model(seeds: range) -> None:
    def check(choose: random.Random) -> None:
        plan, model = Plan.chosen(choose), Model()
        longest = choose.choice((1, 2, 4, 9))
        key = "env" if plan.is_keyed else None
        sampler = TrajectorySampler(longest, end_key="done", trajectory_key=key, padded=choose.random() < 0.5)
        for told in history(plan, model, choose, STEPS):
            tell(sampler, told)
            if choose.random() < 0.5:
                continue
            expected = model.whole(longest)
            assert bool(sampler.may_draw(told.rows, longest)) == bool(expected)
            if expected:
                assert drawn(sampler, told, longest) == expected
            if choose.random() < 0.1:
                state = sampler.state_dict()
                sampler = TrajectorySampler(longest, end_key="done", trajectory_key=key, padded=bool(state["padded"]))
                sampler.load_state_dict(state)
                sampler.verify(told.rows)
                assert difference(encode(sampler.state_dict()), encode(state)) is None

    compared(seeds, check)


def drawn(sampler: TrajectorySampler, told: Told, longest: int) -> set[Slice]:
    """Trajectories of a batch that is large enough to have all of them."""
    draw = sampler.draw(told.rows, 400 * longest, seeded())
    lengths = draw.lengths if draw.shape is None else draw.info["lengths"]
    assert lengths is not None
    rows = draw.indices if draw.shape is None else draw.indices.reshape(draw.shape)[draw.info["mask"]]
    return {tuple(part.tolist()) for part in np.split(rows.numpy(), lengths.numpy().cumsum()[:-1])}
