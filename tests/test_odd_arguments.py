"""Every argument of every public call, with odd values: an error of the right kind that says what was expected."""

from __future__ import annotations

import asyncio
import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncbuf import (
    BufferFailedError,
    Checkpointer,
    CheckpointError,
    CompressedStorage,
    ConsumingSampler,
    Container,
    Freeze,
    GroupSampler,
    ImmutableDatasetWriter,
    ListStorage,
    MaxAhead,
    MaxBytes,
    MaxStaleness,
    MaxValueWriter,
    MemmapStorage,
    MinSize,
    MixtureSampler,
    NStep,
    PromptSource,
    Queue,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SchemaError,
    Snapshot,
    Staleness,
    StratifiedSampler,
    Subset,
    TableWriter,
    TensorStorage,
    TokenBudgetSampler,
    WeightedSampler,
    register_codec,
    register_container,
    register_type,
    split,
)
from asyncbuf.testing import assert_exact_resume, check_limiter, check_sampler, check_storage, check_writer
from tests.helpers import rows, seeded, within

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")
LOADED = torch.arange(20)
# Without their types, which would refuse most of this.
CODEC: Any = register_codec
CONTAINER: Any = register_container
ODD_CONTAINER: Any = Container("odd", tuple, list)  # type: ignore[arg-type]
NO_NUMBER: list[Any] = ["x", b"x", [], {}, object(), int, torch.arange(3), ...]
NO_FLAG: list[Any] = [*NO_NUMBER, None, 0, 1, 1.0, np.bool_(True)]
NO_TIME: list[Any] = [*NO_NUMBER, True, -1, -0.5, NAN, -float("inf"), 1j, torch.tensor(1.0)]
NO_COUNT: list[Any] = [*NO_NUMBER, None, True, -1, 0, 1.0, 1.5, NAN, float("inf"), np.float64(3)]
NO_FUNCTION: list[Any] = [*(each for each in NO_NUMBER if each is not int), 3]
NO_PRIORITY: list[Any] = ["x", {}, object(), True, 1j, [1.0] * 3, [NAN]]
RETURNS = NStep(3, 0.9)
NO_NAME: list[Any] = [*(each for each in NO_NUMBER if type(each) is not str), 3, None]
NO_KEY: list[Any] = [*(each for each in NO_NUMBER if type(each) is not str), True, 1.0, NAN, np.int64(3), 2**63]
NO_PATH: list[Any] = [None, 3, b"x", [], {}, object(), Path, 1.5]


class Case(NamedTuple):
    """One argument.

    Attributes:
        call: gets an open buffer, a directory and the odd value.
        odd: what is refused.
        name: of the argument, which the message begins with.
    """

    call: Callable[[ReplayBuffer, Path, Any], Any]
    odd: list[Any]
    name: str


async def frozen(buffer: ReplayBuffer, timeout: Any) -> None:
    async with buffer.frozen(timeout):
        pass


def row(number: int) -> dict[str, torch.Tensor]:
    return {name: leaf[0] for name, leaf in rows(1, number).items()}


def make(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(9), **options)


def versioned() -> ReplayBuffer:
    return make(staleness=Staleness(1))


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def load(data: Any = LOADED, **options: Any) -> ReplayBuffer:
    return ReplayBuffer.from_dataset(data, **{"batch_size": 4, **options})


async def resumed(buffer: ReplayBuffer, *, restore: str, **options: Any) -> None:
    snapshot = await buffer.snapshot()
    await getattr(buffer, restore)(snapshot, **options)


async def from_state(buffer: ReplayBuffer, elastic: Any) -> None:
    await buffer.load_state_dict(await buffer.state_dict(), elastic=elastic)


SUITES: dict[str, Any] = {
    "check_sampler": (check_sampler, RandomSampler),
    "check_writer": (check_writer, RoundRobinWriter),
    "check_limiter": (check_limiter, lambda: MinSize(1)),
    "check_storage": (check_storage, TensorStorage),
    "assert_exact_resume": (assert_exact_resume, make),
}


def suite(name: str, argument: str) -> Callable[..., Any]:
    run, factory = SUITES[name]
    return lambda b, p, v: run(factory, **{argument: v})


def with_factory(name: str, buffer: ReplayBuffer, path: Path, factory: Any) -> Any:
    return SUITES[name][0](factory)


SUITE_ARGUMENTS = {"capacity": NO_COUNT, "batch_size": NO_COUNT, "steps": NO_NUMBER, "seconds": NO_TIME}
# By call and argument, as the test below looks them up.
CASES: dict[str, Case] = {
    "ReplayBuffer.extend.priority": Case(
        lambda b, p, v: b.extend(rows(2), priority=v), [*NO_NUMBER, NAN, float("inf"), True, 1j], "priority"
    ),
    "ReplayBuffer.add.priority": Case(
        lambda b, p, v: b.add({name: each[0] for name, each in rows(1).items()}, priority=v),
        [*NO_NUMBER, NAN, float("inf"), True, 1j],
        "priority",
    ),
    "ReplayBuffer.extend.table": Case(lambda b, p, v: b.extend(rows(2), table=v), [*NO_NUMBER, 3], "table"),
    "ReplayBuffer.add.table": Case(
        lambda b, p, v: b.add({name: each[0] for name, each in rows(1).items()}, table=v), [*NO_NUMBER, 3], "table"
    ),
    "ReplayBuffer.extend.key": Case(lambda b, p, v: b.extend(rows(2), key=v), NO_KEY, "key"),
    "ReplayBuffer.add.key": Case(lambda b, p, v: b.add(row(1), key=v), NO_KEY, "key"),
    "ReplayBuffer.key_window": Case(lambda b, p, v: make(key_window=v), NO_COUNT, "key_window"),
    "ReplayBuffer.producer.name": Case(lambda b, p, v: b.producer(v), [*NO_NAME, ""], "producer"),
    "ReplayBuffer.durable.key": Case(lambda b, p, v: b.durable(key=v), [*NO_KEY, "never written"], "key"),
    "ReplayBuffer.durable.producer": Case(lambda b, p, v: b.durable(producer=v), [*NO_NAME[:-1], ""], "producer"),
    "ReplayBuffer.durable.number": Case(
        lambda b, p, v: b.durable(producer="p", number=v), [*NO_NUMBER, True, -1, 0, 1.0], "number"
    ),
    "ReplayBuffer.reserve.payload": Case(lambda b, p, v: b.reserve(v), [object(), lambda: 0, {1, 2}, int], "payload"),
    "ReplayBuffer.reserve.key": Case(lambda b, p, v: b.reserve(0, key=v), NO_KEY, "key"),
    "ReplayBuffer.reserve.items": Case(lambda b, p, v: b.reserve(0, items=v), NO_COUNT, "items"),
    "ReplayBuffer.reserve_group.items": Case(lambda b, p, v: b.reserve_group(0, 2, items=v), NO_COUNT, "items"),
    "ReplayBuffer.reserve_group.payload": Case(
        lambda b, p, v: b.reserve_group(v, 2), [object(), lambda: 0, {1, 2}, int], "payload"
    ),
    "ReplayBuffer.reserve_group.size": Case(lambda b, p, v: b.reserve_group(0, v), [*NO_COUNT, 10**9], "size"),
    "ReplayBuffer.reserve_group.key": Case(lambda b, p, v: b.reserve_group(0, 2, key=v), NO_KEY, "key"),
    "ReplayBuffer.reserve_group.least": Case(
        lambda b, p, v: b.reserve_group(0, 2, least=v), [*NO_NUMBER, True, 0, 3, 1.0], "least"
    ),
    "ReplayBuffer.reserve_group.deadline": Case(
        lambda b, p, v: b.reserve_group(0, 2, deadline=v), [*NO_TIME, 0], "deadline"
    ),
    "ReplayBuffer.batch_size": Case(lambda b, p, v: make(batch_size=v), [*NO_COUNT[:8], 0, -1, 10**13], "batch_size"),
    "ReplayBuffer.prefetch": Case(
        lambda b, p, v: make(batch_size=2, prefetch=v), [*NO_NUMBER, None, -1, 10**9], "prefetch"
    ),
    "ReplayBuffer.workers": Case(lambda b, p, v: make(workers=v), [*NO_COUNT, 10**9], "workers"),
    "ReplayBuffer.min_size": Case(lambda b, p, v: make(min_size=v), [*NO_NUMBER, True, 0, 10], "min_size"),
    "ReplayBuffer.limiter": Case(lambda b, p, v: make(limiter=v), [*NO_NUMBER, 3, MinSize], "limiter"),
    "ReplayBuffer.storage": Case(lambda b, p, v: ReplayBuffer(v), [*NO_NUMBER, None, 3, TensorStorage], "storage"),
    "ReplayBuffer.sampler": Case(lambda b, p, v: make(sampler=v), [*NO_NUMBER, 3, RandomSampler], "sampler"),
    "ReplayBuffer.writer": Case(lambda b, p, v: make(writer=v), [*NO_NUMBER, 3, RoundRobinWriter], "writer"),
    "ReplayBuffer.transform": Case(
        lambda b, p, v: make(transform=v), ["x", 3, {"x": 1}, [3], torch.ones(3)], "transform"
    ),
    "ReplayBuffer.collate_fn": Case(lambda b, p, v: make(collate_fn=v), ["x", 3, {}, torch.ones(3)], "collate_fn"),
    "ReplayBuffer.device": Case(
        lambda b, p, v: make(device=v), ["x", b"x", True, 1.5, [], torch.ones(3), "gpu"], "device"
    ),
    "ReplayBuffer.pin_memory": Case(lambda b, p, v: make(pin_memory=v), NO_FLAG, "pin_memory"),
    "ReplayBuffer.generator": Case(lambda b, p, v: make(generator=v), [*NO_NUMBER, 3, True], "generator"),
    "ReplayBuffer.from_dataset.data": Case(
        lambda b, p, v: load(v), ["x", b"x", {}, object(), int, ..., None, 3], "data"
    ),
    "ReplayBuffer.from_dataset.batch_size": Case(lambda b, p, v: load(batch_size=v), [*NO_COUNT, 10**13], "batch_size"),
    "ReplayBuffer.from_dataset.shuffle": Case(lambda b, p, v: load(shuffle=v), NO_FLAG, "shuffle"),
    "ReplayBuffer.from_dataset.drop_last": Case(lambda b, p, v: load(drop_last=v), NO_FLAG, "drop_last"),
    "ReplayBuffer.from_dataset.sampler": Case(lambda b, p, v: load(sampler=v), [*NO_NUMBER, RandomSampler], "sampler"),
    "ReplayBuffer.from_dataset.prefetch": Case(lambda b, p, v: load(prefetch=v), [*NO_NUMBER, None, -1], "prefetch"),
    "split.fractions": Case(lambda b, p, v: split(torch.arange(9), v), ["x", None, 3, {}, [], [NAN]], "fractions"),
    "split.seed": Case(lambda b, p, v: split(torch.arange(9), [1.0], seed=v), [*NO_NUMBER, None, -1, 2**63], "seed"),
    "Subset.indices": Case(lambda b, p, v: Subset(torch.arange(9), v), ["x", None, 3, {}, [], [9], [0.5]], "indices"),
    "MaxValueWriter.rank_key": Case(lambda b, p, v: MaxValueWriter(v), [*NO_PATH, 3], "rank_key"),
    "ReservoirWriter.seed": Case(lambda b, p, v: ReservoirWriter(v), [*NO_NUMBER, None, True, -1, 2**63], "seed"),
    "ImmutableDatasetWriter.items": Case(
        lambda b, p, v: ImmutableDatasetWriter(v), [*NO_NUMBER, None, True, -1], "items"
    ),
    "ReplayBuffer.aclose.timeout": Case(lambda b, p, v: b.aclose(v), NO_TIME, "timeout"),
    "ReplayBuffer.sample.batch_size": Case(
        lambda b, p, v: b.sample(v), [*NO_NUMBER, True, 0, -1, 1.0, NAN, np.int64(3), 10**13], "batch_size"
    ),
    "ReplayBuffer.lease.batch_size": Case(
        lambda b, p, v: b.lease(v).__aenter__(), [*NO_NUMBER, True, 0, -1, 1.0, NAN, np.int64(3)], "batch_size"
    ),
    "ReplayBuffer.lease.timeout": Case(lambda b, p, v: b.lease(timeout=v), NO_TIME, "timeout"),
    "ReplayBuffer.shard.rank": Case(lambda b, p, v: b.shard(v, 2), [*NO_NUMBER, None, True, -1, 2, 1.0], "rank"),
    "ReplayBuffer.shard.world": Case(lambda b, p, v: b.shard(0, v), NO_COUNT, "world"),
    "ReplayBuffer.staleness": Case(lambda b, p, v: make(staleness=v), [*NO_NUMBER, 2, Staleness], "staleness"),
    "ReplayBuffer.extend.version": Case(
        lambda b, p, v: versioned().extend(rows(2), version=v), [*NO_PRIORITY, 1.0, -1, [0, -1], 2**60], "version"
    ),
    "ReplayBuffer.add.version": Case(
        lambda b, p, v: versioned().add(row(1), version=v), [*NO_PRIORITY, 1.0, -1, [0, 1], 2**60], "version"
    ),
    "ReplayBuffer.advance_version.version": Case(
        lambda b, p, v: versioned().advance_version(v), [*NO_NUMBER, True, -1, 1.0, NAN, 2**60], "version"
    ),
    "ReplayBuffer.extend.items": Case(lambda b, p, v: b.extend(v), [*NO_NUMBER, None, 3, NAN, [{}]], ""),
    "ReplayBuffer.add.item": Case(lambda b, p, v: b.add(v), [*NO_NUMBER, None, 3, [], {}], ""),
    "ReplayBuffer.adder.returns": Case(
        lambda b, p, v: b.adder(v, end_key="x"), [*NO_NUMBER, None, 3, NStep], "returns"
    ),
    "ReplayBuffer.adder.end_key": Case(lambda b, p, v: b.adder(RETURNS, end_key=v), [3, [3], b"x", {}], "end_key"),
    "ReplayBuffer.adder.trajectory_key": Case(
        lambda b, p, v: b.adder(RETURNS, trajectory_key=v), [3, [3], b"x", {}], "trajectory_key"
    ),
    "ReplayBuffer.adder.table": Case(
        lambda b, p, v: b.adder(RETURNS, end_key="x", table=v), [3, [3], b"x", {}, "x"], "table"
    ),
    "ReplayBuffer.remove.batch_or_indices": Case(
        lambda b, p, v: b.remove(v),
        ["x", b"x", {}, object(), int, None, 1.5, True, [1.5], torch.ones(3) > 0, 99, -1],
        "",
    ),
    "ReplayBuffer.update_priority.batch_or_indices": Case(
        lambda b, p, v: b.update_priority(v, 1.0), ["x", {}, object(), None, 1.5, True, [1.5], 99, -1], "indices"
    ),
    "ReplayBuffer.update_priority.priority": Case(
        lambda b, p, v: b.update_priority([1, 2], v),
        ["x", {}, None, object(), True, 1j, [1.0] * 3, [NAN]],
        "priority",
    ),
    "ReplayBuffer.freeze.timeout": Case(lambda b, p, v: b.freeze(v), NO_TIME, "timeout"),
    "ReplayBuffer.freeze.hold": Case(lambda b, p, v: b.freeze(hold=v), [*NO_TIME, 0, 0.0], "hold"),
    "ReplayBuffer.frozen.timeout": Case(lambda b, p, v: frozen(b, v), NO_TIME, "timeout"),
    "ReplayBuffer.snapshot.timeout": Case(lambda b, p, v: b.snapshot(v), NO_TIME, "timeout"),
    "ReplayBuffer.state_dict.timeout": Case(lambda b, p, v: b.state_dict(v), NO_TIME, "timeout"),
    "ReplayBuffer.save.path": Case(lambda b, p, v: b.save(v), NO_PATH, "path"),
    "ReplayBuffer.save.base": Case(
        lambda b, p, v: b.save(p / "new", base=v), [each for each in NO_PATH if each is not None], "base"
    ),
    "ReplayBuffer.save.timeout": Case(lambda b, p, v: b.save(p, v), NO_TIME, "timeout"),
    "ReplayBuffer.restore.snapshot": Case(lambda b, p, v: b.restore(v), [*NO_NUMBER, None, 3, Path()], "snapshot"),
    "ReplayBuffer.restore.elastic": Case(lambda b, p, v: resumed(b, restore="restore", elastic=v), NO_FLAG, "elastic"),
    "ReplayBuffer.prepare_restore.snapshot": Case(
        lambda b, p, v: b.prepare_restore(v), [*NO_NUMBER, None, 3, Path()], "snapshot"
    ),
    "ReplayBuffer.prepare_restore.elastic": Case(
        lambda b, p, v: resumed(b, restore="prepare_restore", elastic=v), NO_FLAG, "elastic"
    ),
    "ReplayBuffer.load_state_dict.state_dict": Case(
        lambda b, p, v: b.load_state_dict(v), [*NO_NUMBER, None, 3, Path(), Snapshot()], ""
    ),
    "ReplayBuffer.load_state_dict.elastic": Case(lambda b, p, v: from_state(b, v), NO_FLAG, "elastic"),
    "ReplayBuffer.load.path": Case(lambda b, p, v: b.load(v), NO_PATH, "path"),
    "ReplayBuffer.load.elastic": Case(lambda b, p, v: b.load(p, elastic=v), NO_FLAG, "elastic"),
    "TensorStorage.capacity": Case(lambda b, p, v: TensorStorage(v), NO_COUNT, "capacity"),
    "TensorStorage.contiguous": Case(lambda b, p, v: TensorStorage(3, contiguous=v), NO_FLAG, "contiguous"),
    "RaggedStorage.capacity": Case(lambda b, p, v: RaggedStorage(v, ["x"]), NO_COUNT, "capacity"),
    "RaggedStorage.ragged": Case(
        lambda b, p, v: RaggedStorage(3, v), ["x", 3, None, [], {}, [3], {"a": "x"}, {3: ["x"]}, ["x", "x"]], "ragged"
    ),
    "RaggedStorage.layout": Case(
        lambda b, p, v: RaggedStorage(3, ["x"], layout=v), [*NO_NUMBER, None, 3, True, "flat"], "layout"
    ),
    "RaggedStorage.pad_value": Case(
        lambda b, p, v: RaggedStorage(3, ["x"], pad_value=v), ["x", None, [], {"y": 1}, {"x": "x"}], "pad_value"
    ),
    "RaggedStorage.max_length": Case(
        lambda b, p, v: RaggedStorage(3, ["x"], max_length=v), [*NO_NUMBER, True, 0, -1, 1.5], "max_length"
    ),
    "CompressedStorage.capacity": Case(lambda b, p, v: CompressedStorage(v), NO_COUNT, "capacity"),
    "CompressedStorage.codec": Case(lambda b, p, v: CompressedStorage(3, codec=v), [*NO_NUMBER, 3, "gzip"], "codec"),
    "CompressedStorage.level": Case(
        lambda b, p, v: CompressedStorage(3, codec="zlib", level=v), [*NO_NUMBER, None, True, 1.0, -1, 10], "level"
    ),
    "MemmapStorage.capacity": Case(lambda b, p, v: MemmapStorage(v, p / "rows"), NO_COUNT, "capacity"),
    "MemmapStorage.directory": Case(lambda b, p, v: MemmapStorage(3, v), NO_PATH, "directory"),
    "MemmapStorage.overwrite": Case(lambda b, p, v: MemmapStorage(3, p, overwrite=v), NO_FLAG, "overwrite"),
    "MemmapStorage.resident_bytes": Case(
        lambda b, p, v: MemmapStorage(3, p, resident_bytes=v), [*NO_COUNT, 1000], "resident_bytes"
    ),
    "MemmapStorage.read.directory": Case(lambda b, p, v: MemmapStorage.read(v), NO_PATH, "directory"),
    "ListStorage.capacity": Case(lambda b, p, v: ListStorage(v), NO_COUNT, "capacity"),
    "ReplayBuffer.overwrite": Case(
        lambda b, p, v: make(overwrite=v), [*NO_NUMBER, None, 3, True, "newest"], "overwrite"
    ),
    "ReplayBuffer.watch.task": Case(lambda b, p, v: b.watch(v), [*NO_NUMBER, None, 3, asyncio.Task], "task"),
    "ReplayBuffer.watch.role": Case(lambda b, p, v: b.watch(this_task(), v), [*NO_NUMBER, 3, True, "learner"], "role"),
    "ReplayBuffer.unwatch.task": Case(lambda b, p, v: b.unwatch(v), [*NO_NUMBER, None, 3, asyncio.Task], "task"),
    "Queue.size": Case(lambda b, p, v: Queue(v), NO_COUNT, "size"),
    "MaxBytes.limit": Case(lambda b, p, v: MaxBytes(v), NO_COUNT, "limit"),
    "MaxStaleness.max_age": Case(lambda b, p, v: MaxStaleness(v), [*NO_NUMBER, None, True, -1, 1.0], "max_age"),
    "MaxAhead.batches": Case(lambda b, p, v: MaxAhead(v), NO_COUNT, "batches"),
    "SampleToInsertRatio.samples_per_insert": Case(
        lambda b, p, v: SampleToInsertRatio(v, 1, 9.0), [*NO_NUMBER, None, True, 0, -1.0, NAN, 1j], "samples_per_insert"
    ),
    "SampleToInsertRatio.min_size": Case(lambda b, p, v: SampleToInsertRatio(1.0, v, 9.0), NO_COUNT, "min_size"),
    "SampleToInsertRatio.error_buffer": Case(
        lambda b, p, v: SampleToInsertRatio(1.0, 1, v),
        [*NO_NUMBER, None, True, 0.0, -1, NAN, (1.0,), (2.0, 1.0), ("x", 1.0), (0.0, NAN), (1, 2, 3)],
        "error_buffer",
    ),
    "MinSize.items": Case(lambda b, p, v: MinSize(v), NO_COUNT, "min_size"),
    "SamplerWithoutReplacement.drop_last": Case(
        lambda b, p, v: SamplerWithoutReplacement(drop_last=v), NO_FLAG, "drop_last"
    ),
    "SamplerWithoutReplacement.shuffle": Case(lambda b, p, v: SamplerWithoutReplacement(shuffle=v), NO_FLAG, "shuffle"),
    "ConsumingSampler.times": Case(lambda b, p, v: ConsumingSampler(v), [*NO_COUNT, 2**31], "times"),
    "ConsumingSampler.order": Case(lambda b, p, v: ConsumingSampler(order=v), [*NO_NUMBER, None, 3], "order"),
    "GroupSampler.group_key": Case(lambda b, p, v: GroupSampler(v, 2), [*NO_NUMBER[1:], None, 3], "group_key"),
    "GroupSampler.size": Case(lambda b, p, v: GroupSampler("x", v), [*NO_COUNT, 2**31], "size"),
    "GroupSampler.filter": Case(lambda b, p, v: GroupSampler("x", 2, filter=v, filter_keys="y"), NO_FUNCTION, "filter"),
    "GroupSampler.filter_keys": Case(
        lambda b, p, v: GroupSampler("x", 2, filter=lambda group: True, filter_keys=v),
        [*NO_NUMBER[1:], 3, ""],
        "filter_keys",
    ),
    "GroupSampler.on_drop": Case(lambda b, p, v: GroupSampler("x", 2, on_drop=v), NO_FUNCTION, "on_drop"),
    "TokenBudgetSampler.tokens": Case(lambda b, p, v: TokenBudgetSampler(v, "x"), [*NO_COUNT, 2**31], "tokens"),
    "TokenBudgetSampler.key": Case(lambda b, p, v: TokenBudgetSampler(9, v), [*NO_NUMBER[1:], None, 3, ""], "key"),
    "TokenBudgetSampler.look_ahead": Case(
        lambda b, p, v: TokenBudgetSampler(9, "x", look_ahead=v), [*NO_NUMBER, None, True, -1, 1.5], "look_ahead"
    ),
    "TokenBudgetSampler.ranks": Case(
        lambda b, p, v: TokenBudgetSampler(9, "x", ranks=v), [each for each in NO_COUNT if each is not None], "ranks"
    ),
    "PromptSource.dataset": Case(lambda b, p, v: PromptSource(v), [*NO_FUNCTION[:4], None, 3], "dataset"),
    "PromptSource.shuffle": Case(lambda b, p, v: PromptSource(["ab"], shuffle=v), NO_FLAG, "shuffle"),
    "PromptSource.weights": Case(
        lambda b, p, v: PromptSource(["a"], weights=v), [*NO_NUMBER, NAN, -1.0, 1j, True, [0.0]], "weights"
    ),
    "PromptSource.epochs": Case(
        lambda b, p, v: PromptSource(["a"], epochs=v), [each for each in NO_COUNT if each is not None], "epochs"
    ),
    "PromptSource.generator": Case(lambda b, p, v: PromptSource(["a"], generator=v), [*NO_NUMBER, 3], "generator"),
    "PromptSource.next.wait": Case(lambda b, p, v: PromptSource(["a"]).next(wait=v), NO_FLAG, "wait"),
    "PromptSource.done.id": Case(lambda b, p, v: PromptSource(["a"]).done(v), [*NO_NUMBER, None, -1, 1], "id"),
    "WeightedSampler.weight_key": Case(lambda b, p, v: WeightedSampler(v), [*NO_NUMBER[1:], 3], "weight_key"),
    "WeightedSampler.replacement": Case(lambda b, p, v: WeightedSampler(replacement=v), NO_FLAG, "replacement"),
    "StratifiedSampler.class_key": Case(lambda b, p, v: StratifiedSampler(v), [*NO_NUMBER[1:], None, 3], "class_key"),
    "StratifiedSampler.shares": Case(
        lambda b, p, v: StratifiedSampler("x", v), [*NO_NUMBER, 3, {"x": 1}, {0: NAN}, {0: 2}, {0: "x"}], "shares"
    ),
    "StratifiedSampler.when_empty": Case(
        lambda b, p, v: StratifiedSampler("x", when_empty=v), [*NO_NUMBER, None, 3], "when_empty"
    ),
    "MixtureSampler.samplers": Case(
        lambda b, p, v: MixtureSampler(v), [*NO_NUMBER, None, 3, {3: 1.0}, {"x": "x"}, {"x": RandomSampler}], "samplers"
    ),
    "MixtureSampler.fractions": Case(
        lambda b, p, v: MixtureSampler({"x": RandomSampler()}, v),
        [*(each for each in NO_NUMBER if not callable(each)), 3, {"x": NAN}, {"x": 2}, {"y": 1.0}],
        "fractions",
    ),
    "MixtureSampler.order": Case(lambda b, p, v: MixtureSampler({"x": 1.0}, order=v), [*NO_NUMBER, None], "order"),
    "MixtureSampler.when_empty": Case(
        lambda b, p, v: MixtureSampler({"x": 1.0}, when_empty=v), [*NO_NUMBER, None], "when_empty"
    ),
    "TableWriter.tables": Case(
        lambda b, p, v: TableWriter(v), [*NO_NUMBER, None, 3, {3: 1}, {"x": 0}, {"x": "x"}, {"x": 1.5}], "tables"
    ),
    "TableWriter.writers": Case(
        lambda b, p, v: TableWriter({"x": 3}, v),
        [*(each for each in NO_NUMBER if each != {}), 3, {"y": RoundRobinWriter()}, {"x": RoundRobinWriter}],
        "writers",
    ),
    "Checkpointer.directory": Case(lambda b, p, v: Checkpointer(v), NO_PATH, "directory"),
    "Checkpointer.keep": Case(lambda b, p, v: Checkpointer(p, keep=v), [*NO_NUMBER, True, 0, -1, 1.5], "keep"),
    "Checkpointer.rng": Case(lambda b, p, v: Checkpointer(p, rng=v), NO_FLAG, "rng"),
    "Checkpointer.path.step": Case(lambda b, p, v: Checkpointer(p).path(v), [*NO_NUMBER, None, True, -1, 1.0], "step"),
    "ReplayBuffer.save_soon.path": Case(lambda b, p, v: b.save_soon(v), NO_PATH, "path"),
    "ReplayBuffer.save_soon.timeout": Case(lambda b, p, v: b.save_soon(p, v), NO_TIME, "timeout"),
    "ReplayBuffer.save_soon.base": Case(
        lambda b, p, v: b.save_soon(p / "new", base=v), [each for each in NO_PATH if each is not None], "base"
    ),
    "Checkpointer.save_soon.step": Case(
        lambda b, p, v: Checkpointer(p).save_soon(v, b=b), [*NO_NUMBER, None, True, -1, 1.0, NAN], "step"
    ),
    "Checkpointer.save_soon.rng": Case(lambda b, p, v: Checkpointer(p).save_soon(1, rng=v), NO_NUMBER, "rng"),
    "Checkpointer.save_soon.timeout": Case(
        lambda b, p, v: Checkpointer(p).save_soon(1, timeout=v, b=b), NO_TIME, "timeout"
    ),
    "Checkpointer.save_soon.at_once": Case(
        lambda b, p, v: Checkpointer(p).save_soon(1, at_once=v, b=b), NO_FLAG, "at_once"
    ),
    "Checkpointer.save_soon.parts": Case(
        lambda b, p, v: Checkpointer(p).save_soon(1, x=v), [object(), {1, 2}, ...], "x"
    ),
    "Checkpointer.on_signal.signals": Case(
        lambda b, p, v: Checkpointer(p).on_signal(v), [["x"], [None], [1.5], [99_999], [0], 3, None, "x"], "signals"
    ),
    "Checkpointer.save.step": Case(
        lambda b, p, v: Checkpointer(p).save(v, b=b), [*NO_NUMBER, None, True, -1, 1.0, NAN], "step"
    ),
    "Checkpointer.save.rng": Case(lambda b, p, v: Checkpointer(p).save(1, rng=v), NO_NUMBER, "rng"),
    "Checkpointer.save.timeout": Case(lambda b, p, v: Checkpointer(p).save(1, timeout=v, b=b), NO_TIME, "timeout"),
    "Checkpointer.save.at_once": Case(lambda b, p, v: Checkpointer(p).save(1, at_once=v, b=b), NO_FLAG, "at_once"),
    "Checkpointer.save.parts": Case(lambda b, p, v: Checkpointer(p).save(1, x=v), [object(), {1, 2}, ...], "x"),
    "Checkpointer.restore.step": Case(
        lambda b, p, v: Checkpointer(p).restore(v, b=b), ["x", [], {}, True, -1, 1.0, NAN, torch.arange(3)], "step"
    ),
    "Checkpointer.restore.elastic": Case(lambda b, p, v: Checkpointer(p).restore(1, elastic=v), NO_FLAG, "elastic"),
    "Checkpointer.restore.partial": Case(lambda b, p, v: Checkpointer(p).restore(1, partial=v), NO_FLAG, "partial"),
    "Checkpointer.restore.rng": Case(lambda b, p, v: Checkpointer(p).restore(1, rng=v), NO_NUMBER, "rng"),
    "Checkpointer.restore.objects": Case(lambda b, p, v: Checkpointer(p).restore(1, x=v), [*NO_NUMBER, None, 3], "x"),
    "Snapshot.state": Case(lambda b, p, v: Snapshot(v), ["x", 3, [], torch.arange(3), object()], "state"),
    "Snapshot.save.path": Case(lambda b, p, v: Snapshot().save(v), NO_PATH, "path"),
    "Snapshot.load.path": Case(lambda b, p, v: Snapshot.load(v), NO_PATH, "path"),
    "Snapshot.open.path": Case(lambda b, p, v: Snapshot.open(v), NO_PATH, "path"),
    "Snapshot.load_state_dict.state_dict": Case(
        lambda b, p, v: Snapshot().load_state_dict(v), [*NO_NUMBER, None, 3], ""
    ),
    "Snapshot.from_state_dict.state_dict": Case(lambda b, p, v: Snapshot.from_state_dict(v), [*NO_NUMBER, None, 3], ""),
    "register_type.cls": Case(
        lambda b, p, v: register_type(v), ["x", 3, None, object(), torch.ones(3), int], "register_type"
    ),
    "register_type.name": Case(lambda b, p, v: register_type(Case, name=v), [None, 3, b"x", int], "name"),
    "register_codec.cls": Case(lambda b, p, v: CODEC(v, str, str), ["x", 3, None, object()], "register_codec"),
    "register_codec.encode": Case(lambda b, p, v: CODEC(Case, v, str), ["x", 3, None], "encode"),
    "register_codec.decode": Case(lambda b, p, v: CODEC(Case, str, v), ["x", 3, None], "decode"),
    "register_codec.name": Case(lambda b, p, v: CODEC(Case, str, str, name=v), [None, 3, b"x"], "name"),
    "register_codec.subclasses": Case(lambda b, p, v: CODEC(Case, str, str, subclasses=v), NO_FLAG, "subclasses"),
    "register_container.cls": Case(
        lambda b, p, v: CONTAINER(v, ODD_CONTAINER),
        ["x", 3, None],
        "register_container",
    ),
    "register_container.container": Case(lambda b, p, v: CONTAINER(Case, v), ["x", 3, None], "container"),
    **{
        f"{name}.{argument}": Case(suite(name, argument), odd, argument)
        for name in SUITES
        for argument, odd in {
            "capacity": NO_COUNT,
            "batch_size": NO_COUNT,
            "steps": NO_NUMBER,
            "seconds": NO_TIME,
        }.items()
        if argument in inspect.signature(SUITES[name][0]).parameters
    },
    **{
        f"{name}.factory": Case(functools.partial(with_factory, name), ["x", 3, None, torch.ones(3)], "")
        for name in SUITES
    },
}
ERRORS = (TypeError, ValueError, IndexError, CheckpointError, SchemaError)


@pytest.fixture
async def buffer() -> Any:
    async with ReplayBuffer(TensorStorage(20), batch_size=4, prefetch=1, generator=seeded()) as buffer:
        await buffer.extend(rows(20))
        yield buffer


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("what", CASES)
async def test_an_odd_argument_is_refused_in_words(what: str, buffer: ReplayBuffer, tmp_path: Path) -> None:
    case = CASES[what]
    for value in case.odd:
        with pytest.raises(ERRORS) as caught:
            await result(case.call(buffer, tmp_path, value))
        message = str(caught.value)
        assert "expected" in message, f"{value!r}: {message}"
        assert message.startswith(case.name), f"{value!r}: {message}"
        assert len(message) < 600
    await buffer.sample()  # nothing has happened to it
    assert len(buffer) == 20


async def result(made: Any) -> Any:
    return await within(made) if inspect.isawaitable(made) else made


def test_every_argument_is_in_the_table() -> None:
    """Of the buffer, the checkpointer and what registers: by their signatures."""
    missing = []
    storages = (TensorStorage, MemmapStorage, CompressedStorage, RaggedStorage, ListStorage)
    for owner in (ReplayBuffer, Checkpointer, *storages, SamplerWithoutReplacement):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            if owner not in (ReplayBuffer, Checkpointer) and name != "__init__":
                continue  # called by the buffer
            where = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
            where = {"ReplayBuffer.dumps": "ReplayBuffer.save", "ReplayBuffer.loads": "ReplayBuffer.load"}.get(
                where, where
            )
            missing += [
                f"{where}.{argument}" for argument in inspect.signature(method).parameters if argument != "self"
            ]
    for function in (register_type, register_codec, register_container):
        missing += [f"{function.__name__}.{argument}" for argument in inspect.signature(function).parameters]
    assert not set(missing) - CASES.keys()


async def test_a_time_without_limit(buffer: ReplayBuffer) -> None:
    times: list[Any] = [None, float("inf"), 10**12, 1e300, 5, np.float32(5), np.int64(5)]
    for timeout in times:
        assert isinstance(await within(buffer.snapshot(timeout)), Snapshot)
        handle = await within(buffer.freeze(timeout, hold=timeout))
        assert isinstance(handle, Freeze)
        handle.release()


async def test_another_call_is_named(buffer: ReplayBuffer, tmp_path: Path) -> None:
    snapshot = await buffer.snapshot()
    calls: list[tuple[Any, str]] = [
        (buffer.restore(snapshot.state_dict()), "write load_state_dict"),  # type: ignore[arg-type]
        (buffer.restore(tmp_path), r"write load\("),  # type: ignore[arg-type]
        (buffer.restore(str(tmp_path)), r"write load\("),  # type: ignore[arg-type]
        (buffer.restore(buffer.snapshot()), "write `await`"),  # type: ignore[arg-type]
        (buffer.restore(None), r"await buffer.snapshot\(\) takes one"),  # type: ignore[arg-type]
        (buffer.load_state_dict(snapshot), "write restore"),  # type: ignore[arg-type]
        (buffer.load_state_dict(tmp_path), "write load"),  # type: ignore[arg-type]
        (buffer.load_state_dict(buffer.state_dict()), "write `await`"),  # type: ignore[arg-type]
        (Checkpointer(tmp_path).save(buffer), r"write save\(step, name="),  # type: ignore[arg-type]
        (Checkpointer(tmp_path).restore(buffer), r"write save\(step, name="),  # type: ignore[arg-type]
        (Checkpointer(tmp_path).save("100"), r"for example save\(100"),  # type: ignore[arg-type]
        (check_sampler(RandomSampler()), "write lambda"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        with pytest.raises(TypeError, match=message):
            await within(call)


def test_a_buffer_that_was_open_when_its_loop_ended() -> None:
    made: list[ReplayBuffer] = []

    async def leave_open() -> None:
        buffer = await ReplayBuffer(TensorStorage(20), batch_size=4, prefetch=2, generator=seeded()).open()
        await buffer.extend(rows(20))
        await buffer.sample()
        made.append(buffer)

    async def go_on() -> None:
        (buffer,) = made
        for call in (buffer.sample(), buffer.sample(3), buffer.extend(rows(3)), buffer.add({}), anext(aiter(buffer))):
            with pytest.raises(BufferFailedError, match=r"async with buffer.*open\(\) lets it go on"):
                await within(call)
        await within(buffer.snapshot(5))
        await within(buffer.aclose(5))
        async with buffer:
            assert (await within(buffer.sample())).number == 1

    asyncio.run(leave_open())
    assert "closed" in repr(made[0])
    asyncio.run(go_on())
