"""What a function of the user may see of whoever calls it, and what it may leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import decimal
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncbuf._runtime.shield import shielded, shielded_wait, without_loop
from asyncbuf._runtime.torch_modes import PLAIN, Swapped, are_plain
from tests.helpers import turns, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# How threads and cancellations meet is a matter of the event loop.
pytestmark = pytest.mark.every_loop

variable = contextvars.ContextVar("variable", default="unset")


class Functions(TorchFunctionMode):
    """Makes everything twice as large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.mul(2) if func is torch.ones else made


class Operations(TorchDispatchMode):
    """Refuses everything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@contextlib.contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def variable_set() -> Any:
    token = variable.set("set")
    try:
        yield
    finally:
        variable.reset(token)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "device context": lambda: torch.device("meta"),
    "function mode": Functions,
    "dispatch mode": Operations,
    "fake tensors": FakeTensorMode,
}
STATES: dict[str, Callable[[], Any]] = {
    "context variable": variable_set,
    "numpy": lambda: np.errstate(all="raise"),
    "decimal": lambda: decimal.localcontext(decimal.Context(prec=2)),
    **MODES,
}


def function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def seen() -> list[Any]:
    """All that a function could see."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu"):
        cast = torch.ones(2, 2) @ torch.ones(2, 2)
    made = torch.ones(2, 2) @ weight
    return [
        variable.get(),
        sorted(np.geterr().items()),
        str(decimal.Decimal(1) / 3),
        type(made),
        made.tolist(),
        made.dtype,
        made.requires_grad,
        made.is_inference(),
        torch.get_default_device(),
        cast.dtype,
    ]


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a fresh thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


EXPECTED = in_thread(seen)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_function_sees_what_it_would_see_in_a_fresh_thread(state: Callable[[], Any]) -> None:
    with state():
        assert shielded(seen) == EXPECTED


def test_all_at_once() -> None:
    with contextlib.ExitStack() as stack:
        for state in STATES.values():
            stack.enter_context(state())
        assert shielded(seen) == EXPECTED
        assert shielded(lambda: shielded(seen)) == EXPECTED
    assert are_plain()
    assert seen() == EXPECTED


def set_everything() -> None:
    variable.set("set within")
    np.seterr(all="raise")
    decimal.getcontext().prec = 3
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    enter: list[Any] = [Functions(), Operations()]
    for mode in enter:
        mode.__enter__()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_what_a_function_sets_ends_with_it(state: Callable[[], Any], fails: bool) -> None:
    def function() -> None:
        set_everything()
        if fails:
            raise LookupError

    def before() -> list[Any]:
        # Without an operation, which some of the modes refuse.
        return [
            variable.get(),
            sorted(np.geterr().items()),
            decimal.getcontext().prec,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            list(map(type, function_modes())),
            torch._C._len_torch_dispatch_stack(),
        ]

    with state():
        expected = before()
        with pytest.raises(LookupError) if fails else contextlib.nullcontext():
            shielded(function)
        assert before() == expected
        assert shielded(seen) == EXPECTED
    assert seen() == EXPECTED


def test_a_thread_that_a_function_has_spoilt_does_not_spoil_the_next() -> None:
    def both() -> tuple[Any, bool]:
        shielded(set_everything)
        return shielded(seen), are_plain()

    assert in_thread(both) == (EXPECTED, True)


def test_modes_come_back_in_their_order() -> None:
    first, second = Functions(), Functions()
    with first, second, Swapped() as swapped:
        assert torch.ones(1).item() == 1
        with Functions():
            assert torch.ones(1).item() == 2
    assert swapped.left is PLAIN
    with first, second:
        with Swapped():
            pass
        assert function_modes() == [first, second]
        assert torch.ones(1).item() == 4


# -- awaited -----------------------------------------------------------------------------------------------------------


async def waited(function: Callable[..., Awaitable[Any]]) -> Any:
    return await shielded_wait(function)


async def test_an_awaitable_sees_neither_the_caller_nor_the_tasks_that_run_meanwhile() -> None:
    found = []

    async def look() -> str:
        for _ in range(3):
            found.append(seen())
            await asyncio.sleep(0)
        return "done"

    async def disturb() -> None:
        for state in STATES.values():
            with state():
                await asyncio.sleep(0)

    # One only: two tasks that enter modes by turns get in each other's way, whatever we do.
    other = asyncio.create_task(disturb())
    with variable_set():
        for _ in STATES:
            assert await waited(look) == "done"
    await other
    assert found == [EXPECTED] * 3 * len(STATES)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_the_modes_of_an_awaitable_hold_for_itself_alone(mode: Callable[[], Any]) -> None:
    async def within_mode() -> list[bool]:
        found = [are_plain()]
        variable.set("within")
        with mode():
            await asyncio.sleep(0)
            found.append(are_plain())
            await asyncio.sleep(0)
            assert variable.get() == "within"
        found.append(are_plain())
        return found

    task = asyncio.create_task(waited(within_mode))
    while not task.done():
        assert are_plain()
        assert variable.get() == "unset"
        await asyncio.sleep(0)
    assert await task == [True, False, True]


async def test_inference_mode_of_another_task_comes_back_around_each_step() -> None:
    async def within_inference() -> None:
        with torch.inference_mode(), torch.no_grad():
            for _ in range(4):
                await asyncio.sleep(0)
                assert torch.is_inference_mode_enabled()
                assert torch.ones(1).is_inference()

    async def plain() -> None:
        for _ in range(8):
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
            await asyncio.sleep(0)

    with torch.inference_mode():
        await asyncio.gather(waited(within_inference), waited(plain), waited(within_inference))
        assert torch.is_inference_mode_enabled()
    assert are_plain()


async def test_errors_and_cancellations_reach_an_awaitable() -> None:
    log = []

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("cancelled")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        return "ended"

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("from within")

    task = asyncio.create_task(waited(stubborn))
    await turns()
    task.cancel()
    assert await within(task) == "ended"
    assert log == ["cancelled"]
    with pytest.raises(LookupError, match="from within"):
        await waited(fails)


async def test_an_awaitable_that_is_given_up_is_closed_where_it_ran() -> None:
    found = []

    async def held() -> None:
        variable.set("within")
        try:
            await asyncio.Event().wait()
        finally:
            found.append((variable.get(), are_plain()))

    coroutine = waited(held)
    coroutine.send(None)
    with torch.no_grad():
        coroutine.close()
    assert found == [("within", True)]


async def test_a_failed_wait_leaves_no_cycle() -> None:
    class Thing:
        pass

    things = []

    async def fails() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        await asyncio.Event().wait()

    gc.collect()
    gc.disable()
    try:
        task = asyncio.create_task(waited(fails))
        await turns()
        task.cancel()
        await asyncio.wait([task])
        del task
        assert things[0]() is None
    finally:
        gc.enable()


async def test_a_function_finds_no_event_loop_on_the_event_loop() -> None:
    own = asyncio.new_event_loop()

    def look() -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return own.run_until_complete(asyncio.sleep(0, "from a loop of its own"))

    def fail() -> None:
        raise LookupError

    loop = asyncio.get_running_loop()
    try:
        assert without_loop(look) == "from a loop of its own"
        assert asyncio.get_running_loop() is loop
        with pytest.raises(LookupError):
            without_loop(fail)
        assert asyncio.get_running_loop() is loop
    finally:
        own.close()
