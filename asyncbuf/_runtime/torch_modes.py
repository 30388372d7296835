"""The modes of torch that happen to be set where a batch is made.

They belong to a thread. A call of ``sample()`` may make batches for later calls, on the event loop or in a thread, and
a batch must not depend on which: so what is made on the event loop is made as in a fresh thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

_PLAIN = nullcontext()
_CPU = torch.device("cpu")


def outside_inference() -> AbstractContextManager[Any]:
    """Inference mode off: tensors that are made within may be saved for a backward pass."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _PLAIN


def plain_modes() -> AbstractContextManager[Any]:
    """Gradients on; inference mode, autocast and a default device off."""
    stack: ExitStack | None = None
    for mode in _set_aside():
        stack = stack or ExitStack()
        stack.enter_context(mode)
    return _PLAIN if stack is None else stack


def _set_aside() -> list[AbstractContextManager[Any]]:
    modes: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(mode=False))
    if not torch.is_grad_enabled():
        modes.append(torch.enable_grad())
    modes += [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if torch.get_default_device() != _CPU:
        modes.append(_CPU)
    return modes
