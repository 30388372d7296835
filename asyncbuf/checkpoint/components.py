"""The parts of a training run: captured at one point in time, and loaded all together or not at all."""

from __future__ import annotations

import inspect
import logging
import random
from collections import OrderedDict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf._plain.state import fields
from asyncbuf.buffer import ReplayBuffer
from asyncbuf.checkpoint.snapshot import Snapshot
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf._disk.directory import CheckpointReader, CheckpointWriter

# Bounds the memory that a save takes beside the copies, and how long a cancelled one goes on.
_FILE_BYTES = 64 * 1024 * 1024

BUFFER, OBJECT, VALUE = "buffer", "object", "value"

logger = logging.getLogger("asyncbuf")


def is_stateful(part: Any) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is no class."""
    names = ("state_dict", "load_state_dict")
    return not inspect.isclass(part) and all(callable(getattr(part, name, None)) for name in names)


# -- saving -----------------------------------------------------------------------------------------------------------


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
    buffers = {name: part for name, part in parts.items() if isinstance(part, ReplayBuffer)}
    async with AsyncExitStack() as stack:
        # In an order that all saves have in common, whatever the names are: none waits for one that waits for it.
        for buffer in sorted(buffers.values(), key=id):
            await stack.enter_async_context(buffer.frozen(timeout))
        snapshots = {name: await buffer.snapshot() for name, buffer in buffers.items()}
        # The point in time: the buffers stand still, and nothing below waits.
        return {name: _captured(name, snapshots.get(name, part)) for name, part in parts.items()}


def _captured(name: str, part: Any) -> Captured:
    if isinstance(part, Snapshot):
        return Captured(BUFFER, part, None, {}, [])
    stateful = is_stateful(part)
    document, tensors = split(_state_of(part, name) if stateful else encode(part, name))
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    copied: list[Any] = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Captured(OBJECT if stateful else VALUE, None, document, tensors, copied)


def _state_of(part: Any, name: str) -> dict[str, Any]:
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


# -- restoring --------------------------------------------------------------------------------------------------------


def joined(reader: CheckpointReader, name: str, part: dict[str, Any]) -> Any:
    """The plain data of an object or a value.

    Raises:
        CheckpointCorruptError: a file is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for group in reader.read_all(name):
        tensors.update(group)
    try:
        return join(part["state"], tensors)
    except (RecursionError, RuntimeError, TypeError) as error:
        raise CheckpointCorruptError(f"{name}: expected plain data, found {error!r}") from error


class Target(NamedTuple):
    """An object, and the state that it is to take.

    Attributes:
        name: of the part.
        part: the object.
        plain: state and metadata as plain data.
    """

    name: str
    part: Any
    plain: Any

    def loadable(self) -> Any:
        """What ``load_state_dict`` gets, in containers of its own.

        Raises:
            CheckpointCorruptError: it is not what was saved of an object.
        """
        if not isinstance(self.plain, dict) or self.plain.keys() != {"state", "metadata"}:
            raise CheckpointCorruptError(f"{self.name}: expected a state and its metadata, found something else")
        state, metadata = (decode(self.plain[key], self.name) for key in ("state", "metadata"))
        if metadata is None:
            return state
        with_metadata = cast("Any", OrderedDict(state))
        with_metadata._metadata = OrderedDict(metadata)
        return with_metadata


def load(targets: Sequence[Target]) -> list[Target]:
    """Load states into objects, all of them or none. Does not wait.

    Returns:
        The states before, for ``put_back``.

    Raises:
        CheckpointMismatchError: an object does not take its state.
    """
    before = [Target(name, part, _state_of(part, name)) for name, part, _ in targets]
    for position, target in enumerate(targets):
        try:
            target.part.load_state_dict(target.loadable())
        except BaseException as error:
            # The failed one too: it may have taken half.
            notes = _put_back(before[: position + 1])
            if not isinstance(error, Exception):
                raise
            message = f"{target.name}: expected a state that it takes, found {error}"
            raise CheckpointMismatchError("; ".join([message, *notes])) from error
    return before


def prove(targets: Sequence[Target]) -> None:
    """See that ``load`` would go well: load, and put back before anybody sees it.

    Raises:
        CheckpointMismatchError: an object does not take its state.
        CheckpointError: an object does not take back its own.
    """
    if notes := _put_back(load(targets)):
        raise CheckpointError("; ".join(notes))


def _put_back(before: Sequence[Target]) -> list[str]:
    notes = []
    for target in before:
        try:
            target.part.load_state_dict(target.loadable())
        except Exception as error:
            notes.append(f"{target.name}: expected that it takes back its own state, found {error!r}")
            logger.exception("%s did not take back the state that it had before", target.name)
    return notes


class GlobalGenerators:
    """The generators that belong to no object: of torch (CPU and CUDA), numpy and ``random``.

    Args:
        elastic: whether states of CUDA devices that are not here are left out.
    """

    def __init__(self, *, elastic: bool = False) -> None:
        self._elastic = elastic

    def state_dict(self) -> dict[str, Any]:
        """The states of all of them."""
        version, internal, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": np.random.get_state(legacy=False),
            "python": [version, np.array(internal), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all of them.

        Raises:
            CheckpointMismatchError: there were more CUDA devices than there are here.
            CheckpointCorruptError: it is not the state of these generators.
        """
        cpu, cuda, numpy, python = fields(state, "rng", torch=torch.Tensor, cuda=list, numpy=dict, python=list)
        here = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
        if len(cuda) > here and not self._elastic:
            raise CheckpointMismatchError(
                f"rng: expected at most {here} CUDA devices, as there are here; the checkpoint has {len(cuda)} "
                "(elastic=True leaves out the others)"
            )
        torch.set_rng_state(cpu)
        for device, saved in enumerate(cuda[:here]):
            torch.cuda.set_rng_state(saved, device)
        np.random.set_state(numpy)
        version, internal, gauss = python
        random.setstate((version, tuple(internal.tolist()), gauss))
