"""Shields our work from the torch modes of whoever happens to run it.

Modes belong to a thread. All tasks of an event loop share one, so a task that awaits within ``torch.no_grad()`` sets
that mode for every other task until it goes on. A batch must not depend on that, nor on whether it is made on the event
loop or in a thread of ours: it is made in plain modes, those of a fresh thread. Gradients are on; inference mode,
autocast, a default device, and torch function and dispatch modes are off.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch._C import _get_function_stack_at as _function_mode
from torch._C import _is_any_autocast_enabled as _any_autocast
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C import _pop_torch_function_stack as _pop_function_mode
from torch._C import _push_on_torch_function_stack as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

if TYPE_CHECKING:
    from types import TracebackType

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", torch._C._get_privateuse1_backend_name())
# Of each thread: what torch.set_default_device keeps beside the function mode that does the work.
_default_device: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())

_are_gradients_on = torch.is_grad_enabled
is_inference_on = torch.is_inference_mode_enabled
dispatch_modes = _len_torch_dispatch_stack
function_modes = _len_torch_function_stack


def are_plain() -> bool:
    """Whether this thread has plain modes. Takes a fifth of a microsecond."""
    return _are_gradients_on() and not (function_modes() or dispatch_modes() or is_inference_on() or _any_autocast())


def disturb_us() -> bool:
    """Whether modes are on that would change what our own code computes.

    It records no gradients, and names the device of whatever it makes: the modes for those do not matter to it. Where
    nanoseconds count, ask ``is_inference_on()``, ``dispatch_modes()`` and ``function_modes()`` before.
    """
    return is_inference_on() or dispatch_modes() > 0 or (function_modes() > 0 and not _is_default_device_only())


def _is_default_device_only() -> bool:
    return function_modes() == 1 and type(_function_mode(0)) is DeviceContext


class Modes(NamedTuple):
    """The modes of a thread.

    Attributes:
        gradients: whether gradients are recorded.
        inference: whether inference mode is on.
        autocast: device types with autocast on, and the dtype of each.
        functions: torch function modes, from the innermost on; a default device is one of them.
        dispatch: torch dispatch modes, from the innermost on.
        device: what ``torch.set_default_device`` keeps beside its mode.
    """

    gradients: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    functions: tuple[Any, ...] = ()
    dispatch: tuple[Any, ...] = ()
    device: Any = None


PLAIN = Modes()


def _casts(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # this build of torch does not know such a device
        return False


_PLAIN_DTYPES = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}


def _take_off() -> Modes:
    """Make all modes plain except inference mode, and return those that were on."""
    if are_plain():
        return PLAIN
    # Function modes first: they would be asked about the calls that follow.
    functions = tuple([_pop_function_mode() for _ in range(function_modes())])
    dispatch = tuple([_pop_dispatch_mode() for _ in range(dispatch_modes())])
    device = getattr(_default_device, "device_context", None)
    _default_device.device_context = None
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES if _any_autocast() and _casts(kind)]
    for kind, dtype in casts:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, _PLAIN_DTYPES.get(kind, dtype))
    found = Modes(_are_gradients_on(), is_inference_on(), tuple(casts), functions, dispatch, device)
    torch._C._set_grad_enabled(True)
    return found


def _put_on(modes: Modes) -> None:
    """Go from plain modes to others, inference mode left out."""
    for kind, dtype in modes.autocast:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, dtype)
    torch._C._set_grad_enabled(modes.gradients)
    _default_device.device_context = modes.device
    for mode in reversed(modes.dispatch):
        _push_dispatch_mode(mode)
    for mode in reversed(modes.functions):
        _push_function_mode(mode)


class Swapped:
    """Other modes for as long as a block lasts. What the block sets itself ends with it.

    Args:
        modes: those of the block.

    Attributes:
        left: after the block, the modes that were on at its end.
    """

    __slots__ = ("_before", "_inference", "_modes", "left")

    def __init__(self, modes: Modes = PLAIN) -> None:
        self._modes = self.left = modes
        self._inference: Any = None

    def __enter__(self) -> Self:
        self._before = _take_off()
        # The guard remembers the state of inference mode, and puts that back whatever happens in between.
        self._inference = torch._C._InferenceMode(self._modes.inference)
        self._inference.__enter__()
        if self._modes is not PLAIN:
            _put_on(self._modes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left = _take_off()
        self._inference.__exit__(None, None, None)
        if self._before is not PLAIN:
            _put_on(self._before)


def left_on() -> bool:
    """Whether a function that began with plain modes has left one on that a call can leave on; quicker to ask."""
    return not _are_gradients_on() or function_modes() > 0


def make_plain() -> None:
    """Take off what a function has left on."""
    _take_off()
