"""On random histories, what is joined to each row is what a plain model says."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Draw, FrameStack, Hindsight, JoinedSampler, NStep, Sampler
from asyncbuf._plain.codec import encode
from asyncbuf.testing import difference
from tests.helpers import seeded
from tests.sampler.trajectory_model import Model, Plan, Told, compared, history, tell

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from asyncbuf import Rows

STEPS = 24
# The slow run has more than ten thousand histories, both tests together.
FEW = range(150)
MANY = range(150, 5_300)
seeds = pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["few", "many"]
)


class Everything(Sampler):
    """Draws every valid row."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(rows.at(torch.arange(rows.size)))


class Played:
    """A history: the model, the item number of each row, and a sampler that is told."""

    def __init__(self, choose: random.Random, make: Callable[[Plan], JoinedSampler]) -> None:
        self.plan, self.model = Plan.chosen(choose), Model()
        self.choose, self.make = choose, functools.partial(make, self.plan)
        self.sampler = self.make()
        self.numbers: dict[int, int] = {}

    def steps(self) -> Any:
        """After each step, the draw of all rows, if there are any."""
        for told in history(self.plan, self.model, self.choose, STEPS):
            tell(self.sampler, told)
            self.note(told)
            if self.choose.random() < 0.1:
                self.resume(told.rows)
            if told.rows.size and self.choose.random() < 0.5:
                yield self.sampler.draw(told.rows, told.rows.size, seeded(told.rows.write_count))

    def note(self, told: Told) -> None:
        if told.event is not None:
            self.numbers |= dict(zip(told.event.rows.tolist(), told.event.numbers.tolist(), strict=True))

    def resume(self, rows: Rows) -> None:
        """Go on with another sampler that takes over the state."""
        state = self.sampler.state_dict()
        self.sampler = self.make()
        self.sampler.load_state_dict(state)
        self.sampler.verify(rows)
        assert difference(encode(self.sampler.state_dict()), encode(state)) is None

    def chain(self, row: int, steps: int) -> list[int]:
        """A row, and those that follow it in its trajectory; with negative steps, those before it."""
        places = {(item.trajectory, item.step): row for row, item in self.model.rows.items()}
        item = self.model.rows[row]
        found = []
        for ahead in range(0, steps, 1 if steps > 0 else -1):
            place = item.trajectory, item.step + ahead
            if place not in places:
                break
            found.append(places[place])
        return found


@seeds
def test_returns_and_frames_are_those_of_the_model(seeds: range) -> None:
    def check(choose: random.Random) -> None:
        n, k, gamma = choose.choice((1, 2, 3, 5)), choose.choice((1, 2, 4)), choose.choice((0.5, 0.9, 1.0))
        is_stored, pad = choose.random() < 0.3, choose.choice(("first", "zero"))

        def make(plan: Plan) -> JoinedSampler:
            returns = NStep(n, gamma, reward_key="number", next_keys=())
            frames = FrameStack(k, "obs", next_key="next_obs", is_next_stored=is_stored, pad=pad)
            key = "env" if plan.is_keyed else None
            return JoinedSampler(Everything(), returns, frames, end_key="done", trajectory_key=key)

        played = Played(choose, make)
        for draw in played.steps():
            for i, row in enumerate(draw.indices.tolist()):
                way = played.chain(row, n)
                last = way[-1]
                rewards = [gamma**j * played.numbers[step] for j, step in enumerate(way)]
                assert draw.info["return"][i].item() == pytest.approx(sum(rewards))
                assert draw.info["steps"][i].item() == len(way)
                item = played.model.rows[last]
                is_terminated = item.ends and played.numbers[last] % 2 == 0
                assert draw.info["discount"][i].item() == pytest.approx(0 if is_terminated else gamma ** len(way))
                assert draw.joins["n_step"][i].item() == last
                before = played.chain(row, -k)
                assert draw.joins["frames"][i].tolist() == [*[before[-1]] * (k - len(before)), *before[::-1]]
                following = played.chain(last, 2)[1:]
                ahead = [last] if is_stored or not following else following
                after = [*ahead, *played.chain(last, -k)][:k]
                assert draw.joins["next_frames"][i].tolist() == [*[after[-1]] * (k - len(after)), *after[::-1]]
                if not is_stored:
                    assert draw.info["has_next"][i].item() == bool(following)
                if pad == "zero":
                    for name, rows in (("frames", before), ("next_frames", after)):
                        assert draw.info[f"{name}_mask"][i].tolist() == [j >= k - len(rows) for j in range(k)]

    compared(seeds, check)


@seeds
def test_goals_are_those_of_the_model(seeds: range) -> None:
    def check(choose: random.Random) -> None:
        strategy, share = choose.choice(("future", "final", "episode")), choose.choice((0.5, 1.0))

        def make(plan: Plan) -> JoinedSampler:
            relabel = Hindsight(torch.minimum, strategy=strategy, share=share)
            key = "env" if plan.is_keyed else None
            return JoinedSampler(Everything(), relabel, end_key="done", trajectory_key=key)

        played = Played(choose, make)
        for draw in played.steps():
            relabelled = draw.info["relabelled"].tolist()
            assert share < 1 or all(relabelled)
            for row, source, is_new in zip(
                draw.indices.tolist(), draw.joins["hindsight"].tolist(), relabelled, strict=True
            ):
                ahead, before = played.chain(row, 10_000), played.chain(row, -10_000)
                allowed = {"future": ahead, "final": ahead[-1:], "episode": before + ahead}[strategy]
                assert source in (allowed if is_new else [row])
                spans = played.sampler._links.spans
                assert spans is not None
                here = torch.tensor([row]).numpy()
                assert spans.after(here).item() == len(ahead) - 1
                assert spans.before(here).item() == len(before) - 1
                for steps, wanted in ((len(ahead) - 1, ahead[-1]), (1 - len(before), before[-1])):
                    assert spans.moved(here, torch.tensor([steps]).numpy()).item() == wanted

    compared(seeds, check)
