"""From gathered rows to what a consumer gets: collate, transforms, pinning, device."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf._plain import tree
from asyncbuf._prefetch.device import DeviceTransfer
from asyncbuf._runtime.threads import Threads, finish
from asyncbuf._runtime.torch_modes import plain_modes

if TYPE_CHECKING:
    from asyncbuf.batch import Draw

INLINE_SECONDS = 200e-6
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
        name: what errors call it.
        index: position among the transforms, from which its generator is seeded; -1 for others.
        seeded: whether it accepts ``generator``.
        is_async: whether it is an async function, which must be called on the event loop.
        is_foreign: whether it is the user's, and might change the containers that it gets.
    """

    function: Callable[..., Any]
    name: str
    index: int = -1
    seeded: bool = False
    is_async: bool = False
    is_foreign: bool = False

    def __call__(self, data: Any, seed: int) -> Any:
        if not self.seeded:
            return self.function(data)
        return self.function(data, generator=torch.Generator().manual_seed(mixed_seed(seed, self.index)))

    def checked(self, data: Any) -> Any:
        """What it returned, unless that is nothing.

        Raises:
            TypeError: it is None.
        """
        if data is None:
            raise TypeError("expected the data of a batch, found None: is a return missing?")
        return data

    def blame(self, error: BaseException) -> None:
        """Say in an error that it came from here."""
        note = f"raised in {self.name}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class Partial(NamedTuple):
    """How far a ticket has come.

    Attributes:
        step: the next function.
        data: what it gets.
    """

    step: int
    data: Any


class Gathered(NamedTuple):
    """The rows of a draw with joins, before they are put together.

    Attributes:
        draw: the draw.
        data: a tree whose leaves have shape ``[batch, *item]``.
        joined: for each join a tree whose leaves have shape ``[*shape of its indices, *item]``.
    """

    draw: Draw
    data: Any
    joined: Mapping[str, Any]


class TransformChain:
    """Everything that is done to gathered rows, in order.

    Args:
        collate: turns gathered rows into batched tensors; None where they are.
        transforms: sync or async functions of the data. One that accepts ``generator`` gets a ``torch.Generator``
            seeded from its ticket and its position. It should not change the tensors that it gets.
        foreign_collate: whether ``collate`` is the user's.
        device: where the tensors go in the end; None leaves them.
        pin_memory: whether they are copied to page-locked memory first.

    Raises:
        TypeError: a transform is not callable, or has ``state_dict`` without ``load_state_dict``.
        ValueError: there is no such device.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any] | None,
        transforms: Sequence[Callable[..., Any]],
        *,
        foreign_collate: bool = False,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> None:
        for transform in transforms:
            if not callable(transform):
                raise TypeError(f"transform: expected a callable, found {transform!r}")
            if _has(transform, "state_dict") and not _has(transform, "load_state_dict"):
                raise TypeError(f"transform: expected load_state_dict beside state_dict, found none in {transform!r}")
        self.transforms = tuple(transforms)
        # A transform whose state may change must see the batches in order, whatever the threads do.
        self.ordered = any(map(_is_stateful, transforms))
        calls = [] if collate is None else [_Call(collate, "collate_fn", is_foreign=foreign_collate)]
        for i, function in enumerate(transforms):
            name = f"transform {i}, {getattr(function, '__qualname__', None) or type(function).__qualname__}"
            takes_generator, is_async = _accepts_generator(function), _is_async(function)
            calls.append(_Call(function, name, i, takes_generator, is_async, is_foreign=True))
        self._delivery = DeviceTransfer(device, pin_memory)
        if self._delivery.is_needed:
            calls.append(_Call(self._delivery, "device"))
        self.delivers = self._delivery.is_needed
        self.handed_over = self._delivery.handed_over if self._delivery.waits else None
        self.steps = tuple(calls)
        # Functions that are quick are not worth a thread, unless they do not finish what they began.
        waits = self._delivery.waits or any(step.is_async for step in self.steps)
        self._may_be_quick = not self.ordered and not waits
        self._seconds = 0.0
        self._runs = 0

    @property
    def with_state(self) -> list[int]:
        """Which transforms have a ``state_dict``. They are not asked for it: they may be at work."""
        return [i for i, transform in enumerate(self.transforms) if _has(transform, "state_dict")]

    def states(self) -> list[Any]:
        """The state of each transform; None for one that has no ``state_dict``."""
        return [getattr(t, "state_dict")() if _has(t, "state_dict") else None for t in self.transforms]  # noqa: B009

    @property
    def quick(self) -> bool:
        """Whether the chain runs so fast that a thread would cost more than it saves."""
        return not self.steps or (self._may_be_quick and self._runs >= 3 and self._seconds < INLINE_SECONDS)

    def run_here(self, data: Any, seed: int) -> Partial:
        """Run a quick chain on the event loop. If it turns out not to be quick, it has not come to the end."""
        if not self.steps:
            return Partial(0, data)
        with plain_modes():
            progress = self._run_sync(Partial(0, data), seed)
        if isinstance(progress.data, Awaitable):
            _discard(progress.data)
            return Partial(0, data)
        return progress

    async def run(self, progress: Partial, seed: int, threads: Threads, keep: Callable[[Partial], None]) -> None:
        """Run what is left of the chain, sync functions in a thread.

        Args:
            progress: where to start.
            seed: the seed of the ticket.
            threads: where sync functions run.
            keep: is told how far the ticket has come, before anything else can happen.
        """
        while progress.step < len(self.steps):
            cancelled = None
            call = self.steps[progress.step]
            if call.is_async:
                progress = Partial(progress.step + 1, await _awaited(call, call(self._prepared(progress), seed)))
            else:
                future = threads.transform(self._run_sync, progress, seed)
                cancelled = await finish(future)
                progress = future.result()
                if isinstance(progress.data, Awaitable) and cancelled is None:
                    call = self.steps[progress.step - 1]
                    progress = Partial(progress.step, await _awaited(call, progress.data))
            if isinstance(progress.data, Awaitable):
                _discard(progress.data)
            else:
                keep(progress)
            try:
                if cancelled is not None:
                    raise cancelled
            finally:
                del cancelled

    def _run_sync(self, progress: Partial, seed: int) -> Partial:
        """Run functions up to the next async one, or to one that returns an awaitable."""
        start = time.perf_counter()
        step, data = progress.step, self._prepared(progress)
        while step < len(self.steps) and not self.steps[step].is_async:
            call = self.steps[step]
            try:
                data = call.checked(call(data, seed))
            except Exception as error:
                call.blame(error)
                raise
            step += 1
            if isinstance(data, Awaitable):
                self._may_be_quick = False
                break
        seconds = time.perf_counter() - start
        # The first run of a function is slow for reasons of its own.
        self._seconds = seconds if self._runs < 2 else 0.8 * self._seconds + 0.2 * seconds
        self._runs += 1
        return Partial(step, data)

    def _prepared(self, progress: Partial) -> Any:
        """The data in containers that may be changed: a second try must find the ones of the first as they were."""
        return tree.copy_containers(progress.data) if self.steps[progress.step].is_foreign else progress.data


async def _awaited(call: _Call, result: Awaitable[Any]) -> Any:
    try:
        return call.checked(await result)
    except Exception as error:
        call.blame(error)
        raise


def _discard(data: Any) -> None:
    if inspect.iscoroutine(data):
        data.close()


def _has(transform: Callable[..., Any], method: str) -> bool:
    return callable(getattr(transform, method, None))


def _is_stateful(transform: Callable[..., Any]) -> bool:
    """Whether its state may change. Every module has a ``state_dict``: one without parameters or buffers has none."""
    if isinstance(transform, torch.nn.Module):
        return bool(transform.state_dict())
    return _has(transform, "state_dict")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepts_generator(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return "generator" in parameters
