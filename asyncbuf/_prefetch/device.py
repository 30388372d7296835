"""Getting a batch to where it is wanted: into page-locked memory, and onto a device."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain import tree

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceTransfer:
    """The last step of a batch.

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
            warnings.warn("pin_memory: expected an accelerator, found none; memory is not pinned", stacklevel=4)
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
        """The data where it is wanted. Blocks until it is there."""
        if self._pins:
            data = _each_tensor(lambda tensor: tensor.pin_memory(), data)
        target = self._target
        if target is None:
            return data
        if self._streams is None:
            return _each_tensor(lambda tensor: tensor.to(target), data)
        if self._stream is None:
            self._stream = self._streams.Stream(target)
        with self._streams.stream(self._stream):
            moved = _each_tensor(lambda tensor: tensor.to(target, non_blocking=True), data)
            arrived = self._stream.record_event()
        arrived.synchronize()
        return moved

    def handed_over(self, data: Any) -> None:
        """A consumer gets the data, on the stream that is current here."""
        if self._streams is not None:
            stream = self._streams.current_stream(self._target)
            for leaf in tree.flatten(data, batched=False)[0]:
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(stream)


def _each_tensor(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    return tree.map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)
