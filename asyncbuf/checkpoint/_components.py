"""The parts of a training run, captured at one point in time."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf._plain.codec import encode, split
from asyncbuf.checkpoint._freeze import MutualWaitError, is_within_any
from asyncbuf.checkpoint.snapshot import Snapshot
from asyncbuf.checkpoint.snapshotable import Snapshotable, is_snapshotable

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncbuf._disk.directory import CheckpointWriter
    from asyncbuf.checkpoint._freeze import Freeze

# Bounds the memory that a save takes beside the copies, and how long a cancelled one goes on.
_FILE_BYTES = 64 * 1024 * 1024

BUFFER, OBJECT, VALUE = "buffer", "object", "value"


def is_stateful(part: Any) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is no class."""
    names = ("state_dict", "load_state_dict")
    return not inspect.isclass(part) and all(callable(getattr(part, name, None)) for name in names)


class Captured(NamedTuple):
    """A part at one point in time.

    Attributes:
        kind: whether it is a buffer, an object or a value.
        snapshot: the contents of a buffer.
        document: the contents of the others, in which tensors are named.
        tensors: those tensors, on their devices.
        copied: CUDA events after which the tensors are copies indeed.
    """

    kind: str
    snapshot: Snapshot | None
    document: Any
    tensors: dict[str, torch.Tensor]
    copied: list[torch.cuda.Event]

    def write(self, writer: CheckpointWriter, name: str) -> dict[str, Any]:
        """Write the files of the part: what the manifest says of it. Blocks."""
        if self.snapshot is not None:
            return {"kind": self.kind, "state": self.snapshot.write(writer, prefix=f"{name}/")}
        for event in self.copied:
            event.synchronize()
        for number, group in enumerate(_grouped(self.tensors)):
            host = {key: tensor.cpu() for key, tensor in group.items()}
            writer.write(f"{name}/{number:05}.safetensors", host)
        return {"kind": self.kind, "state": self.document}


async def capture(parts: dict[str, Any], timeout: float | None) -> dict[str, Captured]:
    """Take everything at one point in time.

    Args:
        parts: buffers, snapshots, objects and values by name.
        timeout: seconds for each buffer to wait for batches that are being prepared.

    Raises:
        CheckpointError: something cannot be saved; the message says where.
        TypeError: the ``state_dict`` of an object is async.
    """
    buffers = {name: part for name, part in parts.items() if is_snapshotable(part)}
    pending: dict[str, Awaitable[Snapshot]] = {}
    try:
        with ExitStack() as stack:
            freezes = await _all_frozen(buffers, timeout, stack)
            # The point in time: the buffers stand still, and nothing below waits.
            for name, freeze in freezes.items():
                pending[name] = freeze.capture()
            captured = {name: _captured(name, part) for name, part in parts.items() if name not in buffers}
    finally:
        # Batches are copied while their buffers go on. None of these copies is left behind by an error.
        snapshots = await asyncio.gather(*pending.values(), return_exceptions=True)
    for name, snapshot in zip(pending, snapshots, strict=True):
        if isinstance(snapshot, BaseException):
            raise snapshot
        captured[name] = _captured(name, snapshot)
    return captured


async def _all_frozen(buffers: dict[str, Snapshotable], timeout: float | None, stack: ExitStack) -> dict[str, Freeze]:
    """The freezes of all buffers by name. Those that are taken here end with the stack.

    Raises:
        AsyncBufError: the caller is within a freeze, and would wait for somebody who waits for the end of that.
    """
    is_within = is_within_any()
    while True:
        freezes: dict[str, Freeze] = {}
        try:
            # In an order that all saves have in common, whatever the names are: none waits for one that waits for it.
            for name, buffer in sorted(buffers.items(), key=lambda item: id(item[1])):
                held = buffer.current_freeze
                freezes[name] = held if held is not None else stack.enter_context(await buffer.freeze(timeout))
        except MutualWaitError:
            # Somebody holds the one, and waits for another that was taken here: let that go, and begin again behind it.
            if is_within:
                raise
            stack.close()
        else:
            return freezes


def _captured(name: str, part: Any) -> Captured:
    if isinstance(part, Snapshot):
        return Captured(BUFFER, part, None, {}, [])
    stateful = is_stateful(part)
    document, tensors = split(state_of(part, name) if stateful else encode(part, name))
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    copied: list[Any] = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Captured(OBJECT if stateful else VALUE, None, document, tensors, copied)


def state_of(part: Any, name: str) -> dict[str, Any]:
    """The state of an object as plain data, and what torch notes beside that of a module: versions of its classes."""
    state = part.state_dict()
    if inspect.isawaitable(state):
        if inspect.iscoroutine(state):
            state.close()
        raise TypeError(f"{name}: expected a state_dict that is not async, found that of {type(part).__name__}")
    return {"state": encode(state, name), "metadata": encode(getattr(state, "_metadata", None), f"{name}._metadata")}


def _grouped(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    groups: list[dict[str, torch.Tensor]] = []
    room = 0
    for key, tensor in tensors.items():
        room -= tensor.nbytes
        if room < 0 or not groups:
            groups.append({})
            room = _FILE_BYTES - tensor.nbytes
        groups[-1][key] = tensor
    return groups
