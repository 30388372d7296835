"""The parts of a training run, captured at one point in time."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf._plain.codec import encode, split
from asyncbuf._plain.copies import LateCopies
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint._freeze import MutualWaitError, is_within_any
from asyncbuf.checkpoint.snapshot import Snapshot
from asyncbuf.checkpoint.snapshotable import Snapshotable, is_snapshotable

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncbuf._disk.writer import CheckpointWriter
    from asyncbuf.checkpoint._freeze import Freeze

# Bounds the memory that a save takes beside the copies, and how long a cancelled one goes on.
_FILE_BYTES = 64 * 1024 * 1024

_logger = logging.getLogger("asyncbuf")

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

    @property
    def nbytes(self) -> int | None:
        """How many bytes its tensors have; None if only reading them would tell."""
        if self.snapshot is not None:
            return self.snapshot.nbytes
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, writer: CheckpointWriter, name: str) -> dict[str, Any]:
        """Write the files of the part, and let go of its tensors: what the manifest says of it. Blocks."""
        if self.snapshot is not None:
            return {"kind": self.kind, "state": self.snapshot.write(writer, prefix=f"{name}/")}
        for event in self.copied:
            event.synchronize()
        groups = _grouped(self.tensors)
        # Each is freed as soon as it is written, and in this thread: to give back much memory takes long.
        self.tensors.clear()
        for number in range(len(groups)):
            group = groups[number]
            groups[number] = {}
            host = {key: group.pop(key).cpu() for key in list(group)}
            writer.write(f"{name}/{number:05}.safetensors", host)
        return {"kind": self.kind, "state": writer.document(f"{name}/state.json", self.document)}


async def capture(parts: dict[str, Any], timeout: float | None, *, at_once: bool = False) -> dict[str, Captured]:
    """Take everything at one point in time.

    Args:
        parts: buffers, snapshots, objects and values by name.
        timeout: seconds for each buffer to wait for batches that are being prepared.
        at_once: whether large tensors are copied in the very step, and not in a thread while buffers stand still.

    Raises:
        CheckpointError: something cannot be saved; the message says where.
        TypeError: the ``state_dict`` of an object is async.
    """
    buffers = {name: part for name, part in parts.items() if is_snapshotable(part)}
    others = {name: part for name, part in parts.items() if name not in buffers}
    moment = _Moment()
    try:
        with ExitStack() as stack:
            freezes = await _all_frozen(buffers, timeout, stack)
            if not at_once:
                moment.take(freezes, others)
                # Whoever waits for these buffers to go on changes nothing meanwhile. Others might.
                at_once = not await moment.is_copied_unchanged()
            if at_once:
                moment.take(freezes, others)
                moment.late.make()
    finally:
        # Batches are copied while their buffers go on. None of these copies is left behind by an error.
        snapshots = await moment.snapshots()
    for name, snapshot in snapshots.items():
        if isinstance(snapshot, BaseException):
            raise snapshot
        moment.captured[name] = _captured(name, snapshot, moment.late)
    return moment.captured


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


class _Moment:
    """A point in time of everything.

    Attributes:
        captured: the parts that are no buffers.
        late: the copies of their tensors that are still to be made.
    """

    def __init__(self) -> None:
        self.captured: dict[str, Captured] = {}
        self.late = LateCopies()
        self._pending: dict[str, Awaitable[Snapshot]] = {}

    def take(self, freezes: dict[str, Freeze], others: dict[str, Any]) -> None:
        """It is now: nothing in this waits.

        Args:
            freezes: those of the buffers, which stand still.
            others: the other parts.
        """
        self.late = LateCopies()
        for name, freeze in freezes.items():
            self._pending[name] = freeze.capture()
        self.captured = {name: _captured(name, part, self.late) for name, part in others.items()}

    async def is_copied_unchanged(self) -> bool:
        """Let a thread copy what is late: whether nobody changed it until it was copied."""
        if self.late:
            await in_thread(self.late.make, on_cancel=self.late.stop)
        if self.late.are_sound:
            return True
        await self.snapshots()
        self._pending.clear()
        _logger.info("another task changed what was being copied for a checkpoint: it is captured again, in one step")
        return False

    async def snapshots(self) -> dict[str, Snapshot | BaseException]:
        """Those of the buffers, once they are complete, or the errors."""
        found = await asyncio.gather(*self._pending.values(), return_exceptions=True)
        return dict(zip(self._pending, found, strict=True))


def _captured(name: str, part: Any, late: LateCopies) -> Captured:
    if isinstance(part, Snapshot):
        return Captured(BUFFER, part, None, {}, [])
    stateful = is_stateful(part)
    document, tensors = split(state_of(part, name, late) if stateful else encode(part, name, late))
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    copied: list[Any] = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Captured(OBJECT if stateful else VALUE, None, document, tensors, copied)


def state_of(part: Any, name: str, late: LateCopies | None = None) -> dict[str, Any]:
    """The state of an object as plain data, and what torch notes beside that of a module: versions of its classes."""
    state = part.state_dict()
    if inspect.isawaitable(state):
        if inspect.iscoroutine(state):
            state.close()
        raise TypeError(f"{name}: expected a state_dict that is not async, found that of {type(part).__name__}")
    return {
        "state": encode(state, name, late),
        "metadata": encode(getattr(state, "_metadata", None), f"{name}._metadata"),
    }


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
