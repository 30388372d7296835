"""Passes: every row once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import CheckpointCorruptError, Rows, SamplerWithoutReplacement
from asyncbuf.sampler._permutation import LATEST_KIND, OLD_KIND, Permutation
from tests.sampler.chi_square import assert_independent

if TYPE_CHECKING:
    from asyncbuf import Draw


def rows_of(size: int) -> Rows:
    return Rows(size, 10**6, size)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_pass(sampler: SamplerWithoutReplacement, size: int, batch_size: int, generator: torch.Generator) -> list[Draw]:
    draws = [sampler.draw(rows_of(size), batch_size, generator)]
    while not draws[-1].last:
        draws.append(sampler.draw(rows_of(size), batch_size, generator))
    return draws


def drawn(draws: list[Draw]) -> list[int]:
    return torch.cat([draw.indices for draw in draws]).tolist()


@pytest.mark.parametrize(
    ("size", "batch_size"),
    [(1, 1), (7, 1), (7, 3), (6, 3), (7, 7), (3, 7), (2**16, 5000), (2**16 + 1, 5000), (2**16 + 9999, 2**15)],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_once_per_pass(size: int, batch_size: int, shuffle: bool) -> None:
    sampler, generator = SamplerWithoutReplacement(shuffle=shuffle), seeded()
    for epoch in range(3):
        assert sampler.between_epochs
        assert sampler.epoch == epoch
        draws = one_pass(sampler, size, batch_size, generator)
        indices = drawn(draws)
        assert sorted(indices) == list(range(size))
        if not shuffle:
            assert indices == list(range(size))
        lengths = [len(draw.indices) for draw in draws]
        assert lengths[:-1] == [batch_size] * ((size - 1) // batch_size)
        assert [draw.epoch for draw in draws] == [epoch] * len(draws)
        assert all(draw.indices.dtype is torch.int64 for draw in draws)
        assert not any(draw.info for draw in draws)


@pytest.mark.parametrize(("size", "batch_size"), [(7, 3), (6, 3), (7, 7), (2**16 + 9999, 2**13)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_drop_last_leaves_out_what_fills_no_batch(size: int, batch_size: int, shuffle: bool) -> None:
    sampler, generator = SamplerWithoutReplacement(drop_last=True, shuffle=shuffle), seeded()
    for epoch in range(3):
        draws = one_pass(sampler, size, batch_size, generator)
        indices = drawn(draws)
        assert [len(draw.indices) for draw in draws] == [batch_size] * (size // batch_size)
        assert len(set(indices)) == len(indices)
        assert {draw.epoch for draw in draws} == {epoch}
        if not shuffle:
            assert indices == list(range(len(indices)))


def test_what_drop_last_leaves_out_is_not_always_the_same() -> None:
    sampler, generator = SamplerWithoutReplacement(drop_last=True), seeded()
    left_out = [frozenset(range(10)) - set(drawn(one_pass(sampler, 10, 4, generator))) for _ in range(20)]
    assert len(set(left_out)) > 5


def test_only_the_end_of_a_pass_is_last() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded()
    flags = [sampler.draw(rows_of(6), 2, generator).last for _ in range(6)]
    assert flags == [False, False, True] * 2


def test_between_epochs_until_the_pass_is_begun_and_after_its_end() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded()
    seen = [(sampler.between_epochs, sampler.epoch)]
    for _ in range(6):
        sampler.draw(rows_of(5), 2, generator)
        seen.append((sampler.between_epochs, sampler.epoch))
    assert seen == [(True, 0), (False, 0), (False, 0), (True, 1), (False, 1), (False, 1), (True, 2)]


def test_items_that_come_later_join_at_the_next_pass() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded()
    first = [sampler.draw(rows_of(4), 2, generator), sampler.draw(rows_of(100), 2, generator)]
    assert sorted(drawn(first)) == [0, 1, 2, 3]
    assert first[-1].last
    assert sorted(drawn(one_pass(sampler, 100, 9, generator))) == list(range(100))


def test_clear_in_a_pass_ends_it() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded()
    sampler.draw(rows_of(10), 4, generator)
    sampler.clear()
    assert sampler.between_epochs
    assert sampler.epoch == 1
    draws = one_pass(sampler, 3, 2, generator)
    assert sorted(drawn(draws)) == [0, 1, 2]
    assert {draw.epoch for draw in draws} == {1}


def test_clear_between_passes_changes_nothing() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded()
    sampler.clear()
    assert (sampler.epoch, sampler.between_epochs) == (0, True)
    one_pass(sampler, 3, 2, generator)
    sampler.clear()
    sampler.clear()
    assert (sampler.epoch, sampler.between_epochs) == (1, True)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What to do, one after the other: draw this many rows, grow by this many, clear and start with this many."""
    steps = st.tuples(st.sampled_from(["draw", "draw", "draw", "grow", "clear"]), st.integers(1, 8))
    return draw(st.lists(steps, max_size=25))


@given(programs(), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_passes_against_a_list_of_rows(program: list[tuple[str, int]], shuffle: bool, drop_last: bool) -> None:
    sampler, generator = SamplerWithoutReplacement(shuffle=shuffle, drop_last=drop_last), seeded()
    size, epoch = 5, 0
    left: list[int] = []  # of the pass that has begun
    for step, number in program:
        if step == "grow":
            size += number
        elif step == "clear":
            sampler.clear()
            size, epoch, left = number, epoch + bool(left), []
        else:
            before = generator.get_state()
            if left and drop_last and len(left) < number <= size:
                epoch, left = epoch + 1, []  # what does not fill the batch is left out
            if drop_last and (size if len(left) < number else len(left)) < number:
                with pytest.raises(ValueError, match=f"expected at most {size}, the rows .*; found {number}"):
                    sampler.draw(rows_of(size), number, generator)
                assert torch.equal(generator.get_state(), before)
            else:
                # Only the order of a new pass is random, and only if it is shuffled.
                begins = not left
                left = left or list(range(size))
                found = sampler.draw(rows_of(size), number, generator)
                assert torch.equal(generator.get_state(), before) != (begins and shuffle)
                assert len(found.indices) == min(number, len(left))
                if not shuffle:
                    assert found.indices.tolist() == left[: len(found.indices)]
                for index in found.indices.tolist():
                    left.remove(index)
                assert found.epoch == epoch
                if found.last:
                    assert len(left) < (number if drop_last else 1)
                    epoch, left = epoch + 1, []
        assert sampler.epoch == epoch
        assert sampler.between_epochs == (not left)


def test_batch_that_the_rest_of_the_pass_cannot_fill() -> None:
    sampler, generator = SamplerWithoutReplacement(drop_last=True, shuffle=False), seeded()
    sampler.draw(rows_of(10), 4, generator)
    # The six rows that are left do not fill it: they are left out, and it begins the next pass.
    found = sampler.draw(rows_of(10), 7, generator)
    assert (found.indices.tolist(), found.epoch, found.last) == ([0, 1, 2, 3, 4, 5, 6], 1, True)
    assert (sampler.epoch, sampler.between_epochs) == (2, True)
    with pytest.raises(ValueError, match="expected at most 10, the rows of a pass, because of drop_last; found 11"):
        sampler.draw(rows_of(10), 11, generator)


def test_pass_that_fills_no_batch() -> None:
    sampler, generator = SamplerWithoutReplacement(drop_last=True), seeded(3)
    with pytest.raises(ValueError, match="expected at most 6, the rows of a pass, because of drop_last; found 7"):
        sampler.draw(rows_of(6), 7, generator)
    assert (sampler.epoch, sampler.between_epochs) == (0, True)
    expected = SamplerWithoutReplacement(drop_last=True).draw(rows_of(7), 7, seeded(3))
    assert torch.equal(sampler.draw(rows_of(7), 7, generator).indices, expected.indices)


@pytest.mark.parametrize("size", [500, 2**16 + 500])
def test_same_seed_same_stream(size: int) -> None:
    def stream(seed: int) -> list[list[int]]:
        sampler, generator = SamplerWithoutReplacement(), seeded(seed)
        return [drawn(one_pass(sampler, size, 300, generator)) for _ in range(2)]

    expected = stream(1)
    torch.manual_seed(0)
    assert stream(1) == expected
    orders = [*expected, *stream(2), list(range(size))]
    for one, other in itertools.combinations(orders, 2):
        assert sum(map(int.__eq__, one, other)) < 10


def test_order_of_a_pass_does_not_depend_on_the_batch_size() -> None:
    by_size = [drawn(one_pass(SamplerWithoutReplacement(), 2**16 + 50, size, seeded(4))) for size in (1000, 8192, 77)]
    assert by_size[0] == by_size[1] == by_size[2]


def test_every_position_is_uniform_over_passes() -> None:
    sampler, generator = SamplerWithoutReplacement(), seeded(5)
    orders = torch.tensor([drawn(one_pass(sampler, 8, 3, generator)) for _ in range(1000)])
    assert_independent(torch.arange(8).expand(1000, 8).reshape(-1), orders.reshape(-1), 8)


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    one_pass(SamplerWithoutReplacement(), 100, 9, seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_done_to_the_indices_of_a_batch_does_not_show() -> None:
    for shuffle in (True, False):
        sampler, generator = SamplerWithoutReplacement(shuffle=shuffle), seeded()
        seen = []
        for _ in range(5):
            indices = sampler.draw(rows_of(10), 2, generator).indices
            seen += indices.tolist()
            # A view would bring the whole order along wherever the batch is kept or sent.
            assert indices.untyped_storage().nbytes() == 16
            indices.fill_(0)
        assert sorted(seen) == list(range(10))


def test_check() -> None:
    SamplerWithoutReplacement().check(capacity=5, batch_size=6)
    SamplerWithoutReplacement(drop_last=True).check(capacity=5, batch_size=5)
    with pytest.raises(ValueError, match="batch size: expected at most the capacity 5, because of drop_last; found 6"):
        SamplerWithoutReplacement(drop_last=True).check(capacity=5, batch_size=6)


def test_a_pass_that_an_earlier_version_began_goes_on_as_there() -> None:
    size, generator = 100_000, seeded()
    state = SamplerWithoutReplacement().state_dict() | {"length": size, "position": 1_000, "seed": 7}
    del state["order"]
    sampler = SamplerWithoutReplacement()
    sampler.load_state_dict(state)
    whole = Permutation(size, 7, OLD_KIND)[0:size]
    assert torch.equal(sampler.draw(rows_of(size), 500, generator).indices, whole[1_000:1_500])
    again = SamplerWithoutReplacement()
    again.load_state_dict(sampler.state_dict())
    assert drawn(one_pass(again, size, 30_000, generator)) == whole[1_500:].tolist()
    again.draw(rows_of(size), 500, generator)
    assert again.state_dict()["order"] == LATEST_KIND


@pytest.mark.parametrize("order", [0, 3, True, "2"])
def test_an_order_of_no_known_kind(order: object) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"SamplerWithoutReplacement: expected .*order"):
        SamplerWithoutReplacement().load_state_dict(SamplerWithoutReplacement().state_dict() | {"order": order})
