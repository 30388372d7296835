"""From gathered rows to what a consumer gets: collate, transforms, pinning, device."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncbuf import tree
from asyncbuf.threads import Threads, finish

INLINE_SECONDS = 50e-6
_MASK = (1 << 63) - 1


def mixed_seed(seed: int, number: int) -> int:
    """A seed of 63 bits from a seed and a number: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & _MASK


@dataclass(frozen=True, slots=True)
class _Call:
    """One function of the chain.

    Attributes:
        function: takes the data, returns the data or an awaitable of it.
        index: position among the transforms, from which its generator is seeded; -1 for the chain's own functions.
        seeded: whether it accepts ``generator``.
    """

    function: Callable[..., Any]
    index: int
    seeded: bool

    def __call__(self, data: Any, seed: int) -> Any:
        if not self.seeded:
            return self.function(data)
        return self.function(data, generator=torch.Generator().manual_seed(mixed_seed(seed, self.index)))


class Step(NamedTuple):
    """Functions that run without an ``await`` between them.

    Attributes:
        calls: the functions, in order; an async one is alone.
        is_async: whether it is an async function.
        copies: whether the containers are copied first, so that a failed attempt leaves no key behind for the next.
    """

    calls: tuple[_Call, ...]
    is_async: bool
    copies: bool

    def run(self, data: Any, seed: int) -> Any:
        """Apply the functions; the result may be an awaitable after the last one."""
        if self.copies:
            data = tree.copy_containers(data)
        for call in self.calls:
            data = call(data, seed)
        return data


class Progress(NamedTuple):
    """How far a ticket has come.

    Attributes:
        step: the next step.
        data: what it starts from.
    """

    step: int
    data: Any


class Chain:
    """Everything that is done to gathered rows, in order.

    Args:
        collate: turns gathered rows into batched tensors; None where they are.
        transforms: sync or async functions of the data. One that accepts ``generator`` gets a ``torch.Generator``
            seeded from its ticket and its position. It should not change the tensors that it gets.
        device: where the tensors go in the end; None leaves them.
        pin_memory: whether they are copied to page-locked memory first. Needs an accelerator; ignored, with a warning,
            where there is none, as in ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: a transform is not callable.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any] | None,
        transforms: Sequence[Callable[..., Any]],
        *,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> None:
        for transform in transforms:
            if not callable(transform):
                raise TypeError(f"transform: expected a callable, found {transform!r}")
        self.transforms = tuple(transforms)
        # A transform whose state may change must see the batches in order, whatever the threads do.
        self.ordered = any(self.states())
        calls = [] if collate is None else [_Call(collate, -1, False)]
        calls += [_Call(transform, i, _accepts_generator(transform)) for i, transform in enumerate(transforms)]
        calls += _delivery(device, pin_memory)
        self.steps = _grouped(calls)
        self._seconds: float | None = None
        self._runs = 0

    def states(self) -> list[Any]:
        """The state of each transform; None for one that has no ``state_dict``."""
        return [_state_of(transform) for transform in self.transforms]

    @property
    def quick(self) -> bool:
        """Whether the chain runs so fast that a thread would cost more than it saves."""
        if not self.steps:
            return True
        if self.ordered or any(step.is_async for step in self.steps):
            return False
        return self._runs >= 3 and self._seconds is not None and self._seconds < INLINE_SECONDS

    def run_here(self, data: Any, seed: int) -> Any:
        """Run a quick chain on the event loop."""
        for step in self.steps:
            data = self._timed(step, data, seed)
        return data

    async def run(self, progress: Progress, seed: int, threads: Threads, keep: Callable[[Progress], None]) -> None:
        """Run what is left of the chain, sync functions in a thread.

        Args:
            progress: where to start.
            seed: the seed of the ticket.
            threads: where sync functions run.
            keep: is told how far the ticket has come, after each step, before anything else can happen.
        """
        while progress.step < len(self.steps):
            step, cancelled = self.steps[progress.step], None
            if step.is_async:
                data = await step.run(progress.data, seed)
            else:
                future = threads.transform(self._timed, step, progress.data, seed)
                cancelled = await finish(future)
                data = future.result()
            if isinstance(data, Awaitable):
                data = await data
            progress = Progress(progress.step + 1, data)
            keep(progress)
            if cancelled is not None:
                raise cancelled

    def _timed(self, step: Step, data: Any, seed: int) -> Any:
        start = time.perf_counter()
        result = step.run(data, seed)
        seconds = time.perf_counter() - start
        # The first run of a function is slow for reasons of its own.
        self._seconds = seconds if self._seconds is None or self._runs < 2 else 0.8 * self._seconds + 0.2 * seconds
        self._runs += 1
        return result


def _state_of(transform: Callable[..., Any]) -> Any:
    state_dict = getattr(transform, "state_dict", None)
    return state_dict() if callable(state_dict) else None


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepts_generator(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return "generator" in parameters


def _delivery(device: torch.device | str | None, pin_memory: bool) -> list[_Call]:
    calls = []
    if pin_memory and not torch.accelerator.is_available():
        warnings.warn("pin_memory: expected an accelerator, found none; memory is not pinned", stacklevel=4)
    elif pin_memory:
        calls.append(_Call(lambda data: _each_tensor(torch.Tensor.pin_memory, data), -1, False))
    if device is not None:
        target = torch.device(device)
        calls.append(_Call(lambda data: _each_tensor(lambda t: t.to(target, non_blocking=pin_memory), data), -1, False))
    return calls


def _each_tensor(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    return tree.map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def _grouped(calls: Sequence[_Call]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for call in calls:
        is_async = _is_async(call.function)
        if steps and not is_async and not steps[-1].is_async:
            steps[-1] = steps[-1]._replace(calls=(*steps[-1].calls, call))
        else:
            steps.append(Step((call,), is_async, copies=call.index >= 0))
    return tuple(steps)
