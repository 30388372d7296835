"""The functions of a transform chain, one by one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf._runtime.reentry import Job

_MASK = (1 << 63) - 1


def mixed_seed(seed: int, number: int) -> int:
    """A seed of 63 bits from a seed and a number: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & _MASK


@dataclass(frozen=True, slots=True)
class Step:
    """One function of the chain.

    Attributes:
        function: takes the data, returns the data or an awaitable of it.
        name: what errors call it.
        index: position among the transforms, from which its generator is seeded; -1 for others.
        seeded: whether it accepts ``generator``.
        is_async: whether it is an async function, which must be called on the event loop.
        is_foreign: whether it is the user's, and may change what it gets.
    """

    function: Callable[..., Any]
    name: str
    index: int = -1
    seeded: bool = False
    is_async: bool = False
    is_foreign: bool = False

    @classmethod
    def of(cls, transform: Callable[..., Any], index: int) -> Step:
        """The step of a transform."""
        name = f"transform {index}, {getattr(transform, '__qualname__', None) or type(transform).__qualname__}"
        return cls(transform, name, index, _accepts_generator(transform), _is_async(transform), is_foreign=True)

    def __call__(self, data: Any, seed: int) -> Any:
        """What the function returns for a ticket with this seed. Errors say where they come from."""
        try:
            if not self.seeded:
                return self._checked(self.function(data))
            generator = torch.Generator().manual_seed(mixed_seed(seed, self.index))
            return self._checked(self.function(data, generator=generator))
        except StopIteration as error:
            # As in a coroutine (PEP 479): a future would refuse it, and those that wait would wait for ever.
            failure = RuntimeError(f"a function raised {error!r}")
            self._blame(failure)
            raise failure from error
        except Exception as error:
            self._blame(error)
            raise

    async def wait(self, result: Awaitable[Any]) -> Any:
        """What the function returned, once that is there."""
        try:
            return self._checked(await result)
        except Exception as error:
            self._blame(error)
            raise

    async def call(self, data: Any, seed: int) -> Any:
        """Call the function and await what it returns."""
        return await self.wait(self(data, seed))

    def _checked(self, data: Any) -> Any:
        if data is None:
            raise TypeError("expected the data of a batch, found None: is a return missing?")
        return data

    def _blame(self, error: Exception) -> None:
        note = f"raised in {self.name}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class Pending:
    """What a function returned that is still to be awaited. A coroutine that nobody awaits is closed.

    Args:
        step: the step after that function.
        awaitable: what it returned.
        job: within which it was called.
    """

    __slots__ = ("awaitable", "job", "step")

    def __init__(self, step: int, awaitable: Awaitable[Any], job: Job) -> None:
        self.step = step
        self.awaitable = awaitable
        self.job = job

    def __del__(self) -> None:
        """Close it: without a word if it was not begun, as nothing was lost then."""
        if inspect.iscoroutine(self.awaitable):
            self.awaitable.close()


def has(transform: Callable[..., Any], method: str) -> bool:
    """Whether a transform has such a method."""
    return callable(getattr(transform, method, None))


def is_stateful(transform: Callable[..., Any]) -> bool:
    """Whether its state may change. Every module has a ``state_dict``: one without parameters or buffers has none."""
    if isinstance(transform, torch.nn.Module):
        return bool(transform.state_dict())
    return has(transform, "state_dict")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepts_generator(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return "generator" in parameters
