"""From gathered rows to what a consumer gets."""

from __future__ import annotations

import asyncio
import functools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from asyncbuf import ListStorage, ReplayBuffer, TensorStorage
from asyncbuf._prefetch.transforms import Partial, TransformChain, mixed_seed
from asyncbuf._runtime.threads import Threads
from tests.helpers import SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(2)
    yield made
    await made.close()


async def run(chain: TransformChain, data: Any, threads: Threads, seed: int = 0) -> Any:
    """The whole chain, as a worker does it."""
    kept = [Partial(0, data)]
    await chain.run(kept[0], seed, threads, kept.append)
    steps = [progress.step for progress in kept]
    assert steps == sorted(set(steps))
    assert steps[-1] == len(chain.steps)
    return kept[-1].data


async def add_one(data: Any) -> Any:
    await asyncio.sleep(0)
    return data + 1


def double(data: Any) -> Any:
    return data * 2


class AsyncObject:
    async def __call__(self, data: Any) -> Any:
        return await add_one(data)

    async def method(self, data: Any) -> Any:
        return await add_one(data)


class Stateful:
    def __init__(self, **state: int) -> None:
        self.state = state

    def __call__(self, data: Any) -> Any:
        return data

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


# -- steps -------------------------------------------------------------------------------------------------------------


async def test_sync_functions_that_follow_each_other_share_a_hop(threads: Threads) -> None:
    chain = TransformChain(torch.stack, [double, add_one, double, double, add_one, add_one, double], device="cpu")
    kept: list[Partial] = []
    await chain.run(Partial(0, [torch.ones(1)]), 0, threads, kept.append)
    # After stack and double, add_one, two doubles, each add_one, and the last double with the move to the device.
    assert [progress.step for progress in kept] == [2, 3, 5, 6, 7, 9]


def test_empty_chain() -> None:
    chain = TransformChain(None, [])
    assert chain.steps == ()
    assert chain.quick
    assert not chain.ordered
    data = object()
    assert chain.run_here(data, 0) == Partial(0, data)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([double], 6),
        ([double, double], 12),
        ([add_one], 4),
        ([double, add_one], 7),
        ([add_one, double], 8),
        ([double, add_one, double, add_one, add_one, double], 32),
    ],
)
async def test_functions_are_applied_in_order(
    transforms: list[Callable[[Any], Any]], expected: int, threads: Threads
) -> None:
    assert await run(TransformChain(None, transforms), 3, threads) == expected


async def test_collate_comes_first_and_the_device_last(threads: Threads) -> None:
    seen: list[Any] = []

    def note(data: Any) -> Any:
        seen.append(data)
        return data

    chain = TransformChain(lambda items: {"x": torch.stack(items)}, [note], device="meta")
    result = await run(chain, [torch.zeros(2), torch.ones(2)], threads)
    assert seen[0]["x"].device.type == "cpu"
    assert seen[0]["x"].tolist() == [[0, 0], [1, 1]]
    assert result["x"].device.type == "meta"


@pytest.mark.parametrize(
    "transform",
    [add_one, AsyncObject(), AsyncObject().method, functools.partial(add_one), functools.partial(AsyncObject().method)],
    ids=["function", "object", "method", "partial", "partial of method"],
)
async def test_async_functions_run_on_the_loop(transform: Callable[[Any], Any], threads: Threads) -> None:
    chain = TransformChain(None, [transform])
    assert [step.is_async for step in chain.steps] == [True]
    assert not chain.quick
    assert await run(chain, 1, threads) == 2


async def test_where_functions_run(threads: Threads) -> None:
    where: list[str] = []

    def sync(data: Any) -> Any:
        where.append(threading.current_thread().name)
        return data

    async def on_loop(data: Any) -> Any:
        return sync(data)

    await run(TransformChain(None, [sync, on_loop]), 1, threads)
    assert where[0].startswith("asyncbuf-transform")
    assert where[1] == threading.current_thread().name
    TransformChain(None, [sync]).run_here(1, 0)
    assert where[2] == threading.current_thread().name


class Later:
    """Awaitable, but neither a coroutine nor a future."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self.data + 1


AWAITABLES: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "coroutine": lambda data: add_one(data),
    "object": Later,
    "partial": functools.partial(AsyncObject()),
}


@pytest.mark.parametrize("transform", AWAITABLES.values(), ids=AWAITABLES)
async def test_sync_function_that_returns_an_awaitable(transform: Callable[[Any], Any], threads: Threads) -> None:
    assert await run(TransformChain(None, [transform]), 1, threads) == 2
    assert await run(TransformChain(None, [transform, add_one]), 1, threads) == 3
    assert await run(TransformChain(None, [double, transform]), 1, threads) == 3


async def test_awaitable_is_awaited_before_the_next_function(threads: Threads) -> None:
    assert await run(TransformChain(None, [Later, double, Later, Later, double]), 1, threads) == 12


async def test_awaitable_is_awaited_before_the_move_to_the_device(threads: Threads) -> None:
    assert (await run(TransformChain(None, [Later], device="meta"), torch.zeros(2), threads)).device.type == "meta"


async def test_awaitable_is_awaited_for_every_batch() -> None:
    # Such a function returns at once, which must not be taken for having done its work at once.
    async with ReplayBuffer(TensorStorage(1), batch_size=1, transform=Later) as buffer:
        await buffer.extend(torch.tensor([5]))
        batches = [await buffer.sample() for _ in range(10)]
    assert [type(batch.data) for batch in batches] == [torch.Tensor] * 10
    assert all(batch.data.tolist() == [6] for batch in batches)


async def test_progress_is_kept_after_each_step(threads: Threads) -> None:
    kept: list[Partial] = []
    await TransformChain(None, [double, add_one, double]).run(Partial(0, 3), 0, threads, kept.append)
    assert kept == [Partial(1, 6), Partial(2, 7), Partial(3, 14)]


async def test_chain_goes_on_from_its_progress(threads: Threads) -> None:
    kept: list[Partial] = []
    chain = TransformChain(None, [double, add_one, double])
    await chain.run(Partial(2, 7), 0, threads, kept.append)
    await chain.run(Partial(3, 14), 0, threads, kept.append)
    assert kept == [Partial(3, 14)]


@pytest.mark.parametrize("is_async", [False, True])
async def test_error_is_raised_and_what_was_done_is_kept(is_async: bool, threads: Threads) -> None:
    def fail(data: Any) -> Any:
        raise LookupError(data)

    async def fail_later(data: Any) -> Any:
        raise LookupError(data)

    kept: list[Partial] = []
    chain = TransformChain(None, [add_one, fail_later if is_async else fail])
    with pytest.raises(LookupError, match="2"):
        await chain.run(Partial(0, 1), 0, threads, kept.append)
    assert kept == [Partial(1, 2)]


async def test_result_of_a_thread_is_kept_when_the_wait_is_cancelled(threads: Threads) -> None:
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(data: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(SECONDS)
        return data + 1

    kept: list[Partial] = []
    task = asyncio.create_task(TransformChain(None, [slow, add_one]).run(Partial(0, 1), 0, threads, kept.append))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kept == [Partial(1, 2)]


# -- a second try ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate", [None, lambda data: data], ids=["no collate", "collate"])
async def test_second_try_finds_the_containers_as_they_were(
    collate: Callable[[Any], Any] | None, threads: Threads
) -> None:
    tries: list[list[str]] = []

    def fail_once(data: Any) -> Any:
        tries.append([*data, *data["inner"]])
        del data["x"]
        data["new"] = data["inner"].pop("y")
        if len(tries) == 1:
            raise LookupError
        return data

    chain = TransformChain(collate, [fail_once], foreign_collate=collate is not None)
    data: dict[str, Any] = {"x": torch.zeros(1), "inner": {"y": torch.ones(1)}}
    with pytest.raises(LookupError):
        await run(chain, data, threads)
    assert list(await run(chain, data, threads)) == ["inner", "new"]
    assert tries == [["x", "inner", "y"]] * 2


async def test_second_try_of_a_later_step(threads: Threads) -> None:
    tries: list[list[str]] = []

    def fail_once(data: Any) -> Any:
        tries.append(list(data))
        data.clear()
        if len(tries) == 1:
            raise LookupError
        return data

    async def same(data: Any) -> Any:
        return data

    kept = [Partial(0, {"x": 1})]
    chain = TransformChain(None, [same, fail_once])
    with pytest.raises(LookupError):
        await chain.run(kept[-1], 0, threads, kept.append)
    await chain.run(kept[-1], 0, threads, kept.append)
    assert tries == [["x"], ["x"]]


# -- randomness --------------------------------------------------------------------------------------------------------


def draw(data: Any, generator: torch.Generator) -> Any:
    return [*data, torch.rand(4, generator=generator).tolist()]


async def draw_later(data: Any, *, generator: torch.Generator) -> Any:
    return draw(data, generator)


class DrawObject:
    def __call__(self, data: Any, generator: torch.Generator | None = None) -> Any:
        assert generator is not None
        return draw(data, generator)


DRAWS: list[Callable[..., Any]] = [draw, draw_later, DrawObject(), functools.partial(draw)]


@pytest.mark.parametrize("transform", DRAWS, ids=["function", "async", "object", "partial"])
async def test_same_ticket_same_numbers(transform: Callable[..., Any], threads: Threads) -> None:
    chain = TransformChain(None, [transform])
    first = await run(chain, [], threads, seed=12)
    torch.manual_seed(0)
    assert await run(chain, [], threads, seed=12) == first
    assert await run(TransformChain(None, [transform]), [], threads, seed=12) == first
    assert await run(chain, [], threads, seed=13) != first


async def test_different_transforms_different_numbers(threads: Threads) -> None:
    numbers = await run(TransformChain(None, [draw, draw, draw_later, draw]), [], threads, seed=12)
    assert len({tuple(drawn) for drawn in numbers}) == 4


async def test_numbers_depend_on_the_position_among_the_transforms_only(threads: Threads) -> None:
    alone = await run(TransformChain(None, [draw]), [], threads, seed=12)
    collated = await run(TransformChain(list, [draw, lambda data: data], device="cpu"), [], threads, seed=12)
    assert collated == alone
    second = await run(TransformChain(None, [lambda data: data, draw]), [], threads, seed=12)
    assert second != alone
    later = await run(TransformChain(None, [add_nothing, draw]), [], threads, seed=12)
    assert later == second


async def add_nothing(data: Any) -> Any:
    return data


def test_numbers_are_the_same_here_and_in_a_thread() -> None:
    chain = TransformChain(None, [draw])
    threads = Threads(1)

    async def both() -> tuple[Any, Any]:
        in_thread = await run(chain, [], threads, seed=5)
        await threads.close()
        return in_thread, chain.run_here([], 5).data

    in_thread, here = asyncio.run(both())
    assert in_thread == here


async def test_global_generator_is_left_alone(threads: Threads) -> None:
    before = torch.get_rng_state()
    await run(TransformChain(None, DRAWS), [], threads)
    assert torch.equal(torch.get_rng_state(), before)


async def test_functions_without_a_generator_get_none(threads: Threads) -> None:
    # max() has no signature to look at; **others is no wish for a generator.
    def others(data: Any, **others: Any) -> Any:
        return [data, others]

    assert await run(TransformChain(None, [max, others]), [3, 5], threads) == [5, {}]


def test_mixed_seeds() -> None:
    # The first outputs of splitmix64 from state 0 are known (Vigna's reference implementation); 63 bits of them are.
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mixed_seed(0, number) for number in range(3)] == [value & (2**63 - 1) for value in reference]
    seeds = {mixed_seed(seed, number) for seed in (0, 1, 2**63, 2**64 - 1) for number in range(-1, 2000)}
    assert len(seeds) == 4 * 2001
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- what the buffer asks ----------------------------------------------------------------------------------------------


async def test_quick_after_a_few_quick_runs(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [iter([0.0, 1.0, 2.0, 2.00001, 3.0, 3.00001, 4.0, 4.1]) for _ in range(2)]
    time = SimpleNamespace(perf_counter=lambda: next(clocks[0]), thread_time=lambda: next(clocks[1]))
    monkeypatch.setattr("asyncbuf._prefetch.transforms.time", time)
    chain = TransformChain(None, [double])
    quick = [chain.quick]
    for _ in range(4):
        await run(chain, 1, threads)
        quick.append(chain.quick)
    # The first run is slow for reasons of its own; the last one shows that it is not quick after all.
    assert quick == [False, False, False, True, False]


async def test_slow_or_async_chains_are_not_quick(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = TransformChain(None, [add_one, double])
    stateful = TransformChain(None, [Stateful(count=1)])
    for _ in range(5):
        await run(chain, 1, threads)
        await run(stateful, 1, threads)
    assert not chain.quick
    assert not stateful.quick
    clocks = [iter(range(100)) for _ in range(2)]
    time = SimpleNamespace(perf_counter=lambda: next(clocks[0]), thread_time=lambda: next(clocks[1]))
    monkeypatch.setattr("asyncbuf._prefetch.transforms.time", time)
    slow = TransformChain(None, [double])
    for _ in range(5):
        await run(slow, 1, threads)
    assert not slow.quick


@pytest.mark.parametrize(
    ("transforms", "ordered"),
    [
        ([], False),
        ([double], False),
        ([Stateful()], True),
        ([Stateful(count=1)], True),
        ([double, Stateful(count=1)], True),
        ([torch.nn.Identity()], False),
        ([torch.nn.Linear(1, 1)], True),
    ],
    ids=["none", "function", "empty state", "state", "one of two", "empty module", "module"],
)
def test_order_matters_to_a_transform_with_a_state(transforms: list[Callable[..., Any]], ordered: bool) -> None:
    assert TransformChain(None, transforms).ordered is ordered


def test_a_state_that_could_not_be_restored_is_refused() -> None:
    class Half:
        def __call__(self, data: Any) -> Any:
            return data

        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(TypeError, match=r"expected load_state_dict beside state_dict, found none in .*Half"):
        TransformChain(None, [Half()])


@pytest.mark.parametrize("device", ["cuda:77", "xpu"])
def test_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ValueError, match=f"device: expected one that is there, found {device}"):
        TransformChain(None, [], device=device)


@pytest.mark.parametrize("wrong", [3, None, "double", [double]], ids=str)
def test_not_callable(wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        TransformChain(None, [double, wrong])
    assert str(caught.value) == f"transform: expected a callable, found {wrong!r}"


# -- device ------------------------------------------------------------------------------------------------------------


class Date:
    """Has a method ``to`` that means something else."""

    def to(self, time_zone: Any) -> None:
        raise AssertionError


async def test_device_moves_every_tensor_and_nothing_else(threads: Threads) -> None:
    date = Date()
    data = {
        "x": torch.zeros(2),
        "nested": [(torch.ones(3), "text"), date],
        "td": TensorDict({"y": torch.zeros(2, 3)}, batch_size=[2]),
    }
    moved = await run(TransformChain(None, [], device=torch.device("meta")), data, threads)
    assert moved["x"].device.type == "meta"
    assert moved["nested"][0][0].device.type == "meta"
    assert moved["nested"][0][1] == "text"
    assert moved["nested"][1] is date
    assert moved["td"]["y"].device.type == "meta"
    assert moved["td"].batch_size == torch.Size([2])


async def test_device_where_it_is_already_copies_nothing(threads: Threads) -> None:
    data = torch.zeros(2)
    assert (await run(TransformChain(None, [], device="cpu"), data, threads)) is data
    assert TransformChain(None, []).steps == ()


def test_unknown_device() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        TransformChain(None, [], device="nowhere")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pin_memory_without_an_accelerator() -> None:
    with pytest.warns(UserWarning, match="pin_memory: expected an accelerator, found none") as caught:
        ReplayBuffer(ListStorage(1), pin_memory=True)
    # The line that is shown is that of the user, who can change it.
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="memory is not pinned"):
        chain = TransformChain(None, [], pin_memory=True)
    assert chain.steps == ()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
async def test_pin_memory_and_device(threads: Threads) -> None:
    pinned = await run(TransformChain(None, [], pin_memory=True), {"x": torch.arange(4)}, threads)
    assert pinned["x"].is_pinned()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    moved = await run(TransformChain(None, [], pin_memory=True, device=device), {"x": torch.arange(4)}, threads)
    assert moved["x"].device.type == device.type
    torch.accelerator.synchronize()
    assert moved["x"].tolist() == [0, 1, 2, 3]
