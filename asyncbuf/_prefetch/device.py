"""The last step of a batch: into page-locked memory, and onto a device."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from asyncbuf._prefetch.containers import ATOMS, holds_atoms_only, kind_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


_PACKAGE = __name__.partition(".")[0]


class DeviceTransfer:
    """Moves the tensors of a batch, wherever they are in it. Types of containers stay; what is no tensor is left alone.

    An object with ``pin_memory()`` or ``to(device)`` of its own moves itself, as in ``torch.utils.data.DataLoader``.

    With page-locked memory, copies to a CUDA device run on a stream of their own, so that they overlap with what the
    consumer computes. A batch counts as ready when its copy has arrived; the thread that made it waits for that. When
    it is handed over, the stream of the consumer is noted in its tensors (``record_stream``): their memory is not used
    for another copy before what was queued on that stream until they are dropped has run.

    Args:
        device: where tensors go; None leaves them.
        pin_memory: whether they are copied to page-locked memory first. Needs an accelerator; ignored, with a warning,
            where there is none, as in ``torch.utils.data.DataLoader``.
        streams: what makes and enters streams, with the names of ``torch.cuda``; that itself, for a CUDA device, if
            None.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: torch.device | str | None, pin_memory: bool, *, streams: Any = None) -> None:
        self._pins = pin_memory and (streams is not None or torch.accelerator.is_available())
        if pin_memory and not self._pins:
            message = "pin_memory: expected an accelerator, found none; memory is not pinned"
            warnings.warn(message, stacklevel=_level_of_user())
        self._target = None if device is None else torch.device(device)
        if self._target is not None:
            try:
                torch.empty(0, device=self._target)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                message = f"device: expected one that is there, found {self._target}: {error}"
                raise ValueError(message) from error
        is_cuda = self._target is not None and self._target.type == "cuda"
        self._streams = streams if streams is not None else torch.cuda if self._pins and is_cuda else None
        self._stream: Any = None

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self._pins or self._target is not None

    @property
    def waits(self) -> bool:
        """Whether making a batch ready may wait for a device."""
        return self._streams is not None

    def __call__(self, data: Any) -> Any:
        """The data where it is wanted. Blocks until it is there.

        Raises:
            TypeError: an object in it holds tensors and cannot be moved; the message says which.
        """
        if self._pins:
            data = _Walk(_pinned, _pinned_itself).over(data)
        target = self._target
        if target is None:
            return data
        if self._streams is None:
            return _Walk(lambda tensor: tensor.to(target), lambda value: _moved_itself(value, target)).over(data)
        if self._stream is None:
            self._stream = self._streams.Stream(target)
        with self._streams.stream(self._stream):
            walk = _Walk(
                lambda tensor: tensor.to(target, non_blocking=True),
                lambda value: _moved_itself(value, target, outside=self._outside),
            )
            moved = walk.over(data)
            arrived = self._stream.record_event()
        arrived.synchronize()
        return moved

    def _outside(self) -> AbstractContextManager[Any]:
        """The default stream. The consumer's stream cannot be noted in tensors that are hidden in an object."""
        streams: Any = self._streams
        return cast("AbstractContextManager[Any]", streams.stream(streams.default_stream(self._target)))

    def handed_over(self, data: Any) -> None:
        """A consumer gets the data, on the stream that is current here."""
        if self._streams is not None and self._target is not None:
            stream = self._streams.current_stream(self._target)
            for tensor in tensors_in(data):
                if tensor.device.type == self._target.type:
                    tensor.record_stream(stream)


def _level_of_user() -> int:
    """How far up the first frame outside this package is: the line that a warning should show."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


class _Walk:
    """Goes through a batch once. A tensor that stands in two places is moved once.

    Args:
        move: what to do with a tensor.
        itself: what an object that moves itself becomes; None for one that does not.
    """

    def __init__(self, move: Callable[[torch.Tensor], torch.Tensor], itself: Callable[[Any], Any]) -> None:
        self._move = move
        self._itself = itself
        self._moved: dict[int, Any] = {}
        self._alive: list[Any] = []  # what a container has made up just now: its id must not be used again

    def over(self, value: Any) -> Any:
        """The value with everything in it moved; the very value if nothing had to be."""
        if type(value) in ATOMS:
            return value
        moved = self._moved.get(id(value))
        if moved is None:
            moved = self._moved[id(value)] = self._made(value)
        return moved

    def _made(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._move(value)
        cls = type(value)
        if (cls is list or cls is tuple) and holds_atoms_only(value):
            return value
        if cls is not dict and cls is not list and cls is not tuple:
            moved = self._itself(value)
            if moved is not None:
                return moved
        kind = kind_of(value)
        if kind is None:
            return value
        parts = kind.parts(value)
        self._alive.append(parts)
        moved = [self.over(part) for part in parts]
        if all(before is after for before, after in zip(parts, moved, strict=True)):
            return value
        return kind.rebuild(value, parts, moved)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _pinned_itself(value: Any) -> Any:
    return value.pin_memory() if callable(getattr(type(value), "pin_memory", None)) else None


def _moved_itself(
    value: Any, target: torch.device, *, outside: Callable[[], AbstractContextManager[Any]] | None = None
) -> Any:
    """What an object with ``to(device)`` becomes; None for a container without, and for what holds no tensor.

    Args:
        value: the object.
        target: where it goes.
        outside: leaves the stream on which tensors are copied without waiting; None if there is none.

    Raises:
        TypeError: it holds tensors and has no ``to(device)``.
    """
    if isinstance(value, np.ndarray | type):
        return None
    is_container = kind_of(value) is not None
    method = _method_of(type(value))
    if not method.takes_device:
        if not is_container and (held := _held(value)):
            raise TypeError(
                f"device: expected tensors, containers and objects with to(device); found a {_name(value)} that holds "
                f"tensors in {held} and has none: give it to(device), or return a dict, list or dataclass of tensors"
            )
        return None
    if outside is None:
        moved = value.to(target)
    elif is_container:
        moved = value.to(target, non_blocking=True) if method.takes_non_blocking else value.to(target)
    else:
        with outside():
            moved = value.to(target)
    if moved is None:
        raise TypeError(f"device: expected {_name(value)}.to(device) to return what it moved, found None")
    return moved


def _held(value: Any) -> str | None:
    """An attribute of an object that holds tensors."""
    names = [*getattr(value, "__dict__", {}), *_slots(type(value))]
    return next((name for name in names if tensors_in(getattr(value, name, None))), None)


def _slots(cls: type) -> list[str]:
    slots = [vars(parent).get("__slots__", ()) for parent in cls.__mro__]
    return [name for names in slots for name in ((names,) if isinstance(names, str) else names)]


def _name(value: Any) -> str:
    return type(value).__qualname__


class _Method(NamedTuple):
    """What is known of the method ``to`` of a class.

    Attributes:
        takes_device: whether ``to(device)`` is meant. That of a date takes a time zone.
        takes_non_blocking: whether it accepts ``non_blocking``.
    """

    takes_device: bool
    takes_non_blocking: bool = False


_methods: weakref.WeakKeyDictionary[type, _Method] = weakref.WeakKeyDictionary()


def _method_of(cls: type) -> _Method:
    # Remembered, since looking at a signature takes 10 us.
    method = _methods.get(cls)
    if method is None:
        method = _methods[cls] = _looked_at(cls)
    return method


def _looked_at(cls: type) -> _Method:
    function = getattr(cls, "to", None)
    if not callable(function):
        return _Method(False)
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return _Method(True)  # it is not written in Python
    named = any(parameter.name == "non_blocking" for parameter in parameters)
    kinds = [parameter.kind for parameter in parameters]
    takes_device = parameters[:1] and (parameters[0].name == "device" or kinds[0] is inspect.Parameter.VAR_POSITIONAL)
    return _Method(bool(takes_device), named or inspect.Parameter.VAR_KEYWORD in kinds)
