"""A uniform sample of a stream: against a plain loop, and by chi-square."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    Placement,
    ReplayBuffer,
    ReservoirWriter,
    Rows,
    TensorStorage,
)
from asyncbuf._plain.counter_hash import CounterHash
from tests.sampler.chi_square import deviation

GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def write(writer: ReservoirWriter, count: int, capacity: int) -> Placement:
    placement = writer.place(count, capacity)
    writer.commit(placement, capacity)
    return placement


def test_the_hash_is_splitmix64() -> None:
    # The reference of Vigna, splitmix64.c, from the state 1234567.
    hashed = CounterHash(0)
    hashed._start = 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [hashed.at(n) for n in range(4)] == expected
    assert hashed.of(np.arange(4)).tolist() == expected
    for seed in (0, 1, 2**63 - 1):
        numbers = np.array([0, 1, 5, 2**40, 2**62])
        assert CounterHash(seed).of(numbers).tolist() == [CounterHash(seed).at(n) for n in numbers.tolist()]


def test_the_bits_of_the_hash_are_even() -> None:
    outputs = [CounterHash(seed).of(np.arange(10_000)) for seed in range(100)]
    bits = np.unpackbits(np.stack(outputs).view(np.uint8), bitorder="little").reshape(-1, 64)
    ones = bits.sum(0)
    assert (np.abs(ones - len(bits) / 2) < 5 * np.sqrt(len(bits)) / 2).all()
    neighbours = np.stack(outputs)[:, 0]  # first outputs of neighbouring seeds
    assert len(np.unique(neighbours)) == 100


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_against_algorithm_r(seed: int) -> None:
    choose = random.Random(seed)
    capacity = choose.choice([1, 2, 7, 50])
    writer, drawn = ReservoirWriter(seed), CounterHash(seed)
    model: dict[int, int] = {}
    stored: dict[int, int] = {}
    written = first = 0
    for _ in range(40):
        step = choose.random()
        if step < 0.1 and model:
            gone = choose.sample(sorted(model), choose.randrange(1, len(model) + 1))
            writer.removed(torch.tensor(gone), capacity)
            for row in gone:
                del model[row], stored[row]
        elif step < 0.15:
            writer.clear()
            model, stored, first = {}, {}, written
        else:
            count = choose.choice([1, 1, 2, 5, 40, 3 * capacity])
            placement = write(writer, count, capacity)
            rows, items = placement.rows.tolist(), placement.items.tolist()
            assert items == sorted(set(items))
            stored.update(zip(rows, [written + item for item in items], strict=True))
            for number in range(written, written + count):
                before = number - first
                row = before if before < capacity else drawn.at(number) % (before + 1)
                if row < capacity:
                    model[row] = number
            written += count
        assert stored == model
        assert writer.write_count == written
        if choose.random() < 0.2:
            other = ReservoirWriter(seed)
            other.load_state_dict(writer.state_dict())
            writer = other


def test_each_item_of_a_stream_is_kept_equally_often() -> None:
    """A million kept items: 1,000 streams of 20,000, of which 1,000 are kept each."""
    stream, capacity, bins = 20_000, 1000, 100
    counts = np.zeros(bins, np.int64)
    by_row = np.zeros((capacity, 10), np.int64)
    for seed in range(1000):
        writer, held = ReservoirWriter(seed), np.zeros(capacity, np.int64)
        for part in (1, 699, 5000, 14_300):
            first, placement = writer.write_count, write(writer, part, capacity)
            held[placement.rows] = first + placement.items
        counts += np.bincount(held * bins // stream, minlength=bins)
        by_row[np.arange(capacity), held * 10 // stream] += 1
    assert counts.sum() == 10**6
    # Without replacement, counts are more even than those of independent draws, by the share that is not kept.
    evened = counts.mean() + (counts - counts.mean()) / np.sqrt(1 - capacity / stream)
    assert abs(deviation(evened, bins - 1)) < 3
    # Of the items that a row ever held, and so with it of each row, each is the last one equally often.
    late = by_row[:, 1:]  # the first items take the rows of their numbers
    assert abs(deviation(late.sum(0), 8)) < 3


async def test_in_a_buffer() -> None:
    buffer = ReplayBuffer(TensorStorage(50), writer=ReservoirWriter(3), batch_size=8)
    for start in range(0, 1000, 100):
        await buffer.extend({"number": torch.arange(start, start + 100)})
    numbers = buffer._storage.gather(torch.arange(50))["number"]
    assert len(numbers.unique()) == len(buffer) == 50
    assert 300 < numbers.float().mean() < 700
    kept = [await buffer.add({"number": torch.tensor(number)}) for number in range(1000, 1400)]
    assert 5 < sum(row is not None for row in kept) < 35
    await buffer.empty()
    assert (await buffer.extend({"number": torch.arange(50)})).tolist() == list(range(50))


def test_other_seeds_keep_other_items() -> None:
    kept = [write(ReservoirWriter(seed), 10_000, 100).items.tolist() for seed in (0, 1, 2**62, 0)]
    assert kept[0] == kept[3]
    assert all(len(set(kept[0]) & set(other)) < 10 for other in kept[1:3])


@pytest.mark.parametrize(
    ("entry", "value"),
    [("first", 6), ("first", -1), ("write_count", -1), ("write_count", 2**62), ("seed", "x"), ("capacity", None)],
)
def test_forged_states_change_nothing(entry: str, value: Any) -> None:
    writer = ReservoirWriter()
    write(writer, 5, 3)
    before = writer.state_dict()
    with pytest.raises(CheckpointCorruptError, match="ReservoirWriter: expected"):
        writer.load_state_dict({**before, entry: value})
    assert writer.state_dict() == before


def test_states_of_other_writers_and_tables() -> None:
    writer = ReservoirWriter()
    with pytest.raises(CheckpointMismatchError, match=r"seed: expected 0.*has 1"):
        writer.load_state_dict(ReservoirWriter(1).state_dict())
    write(writer, 5, 8)
    for rows in (Rows(6, 8, 6), Rows(4, 8, 5), Rows(5, 9, 5)):
        with pytest.raises(CheckpointCorruptError, match="ReservoirWriter: expected"):
            writer.verify(rows)
    writer.verify(Rows(5, 8, 5))


def test_arguments() -> None:
    for odd in (None, "x", 1.0, True, torch.ones(1)):
        with pytest.raises(TypeError, match="seed: expected an int, found"):
            ReservoirWriter(odd)  # type: ignore[arg-type]
    for value in (-1, 2**63):
        with pytest.raises(ValueError, match="seed: expected at"):
            ReservoirWriter(value)
