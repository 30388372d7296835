"""A checkpoint of a training run on its way into buffers and objects: all of them take it, or none."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from asyncbuf._disk.manifest import is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._plain.codec import decode, join
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint._components import BUFFER, OBJECT, VALUE, state_of
from asyncbuf.checkpoint.snapshot import Snapshot
from asyncbuf.checkpoint.snapshotable import Snapshotable, is_snapshotable
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from asyncbuf.checkpoint._global_generators import GlobalGenerators
    from asyncbuf.checkpoint._snapshotter import Restore

VERSION = 2
FORMAT = "asyncbuf.run"
RNG = "rng"
# How long batches that hang may hold up a restore; they are put back as tickets then.
_SETTLE_SECONDS = 10.0
_WORDS = {
    BUFFER: "a buffer (any Snapshotable, such as a ReplayBuffer)",
    OBJECT: "an object with load_state_dict that is no buffer",
}

_logger = logging.getLogger("asyncbuf")


class RunPlan:
    """A checkpoint on its way into objects.

    Args:
        path: its directory.
        step: the step that it must be of.
        objects: where its parts go.
        partial: whether parts without an object are left out.
    """

    def __init__(self, path: Path, step: int, objects: dict[str, Any], *, partial: bool) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self._step = step
        self._objects = objects
        self._partial = partial
        self._generators: GlobalGenerators | None = None
        self._demands_generators = False
        self._targets: list[Target] = []
        self._buffers: list[tuple[Snapshotable, Snapshot]] = []
        self._restores: list[tuple[Snapshotable, Restore]] = []

    def add_generators(self, generators: GlobalGenerators, *, demanded: bool) -> None:
        """Set the global generators too, if they were saved, or because that is demanded."""
        self._generators, self._demands_generators = generators, demanded

    async def read(self, *, elastic: bool) -> None:
        """Read, check and decode everything, in a thread. Changes nothing that is live, and waits for no buffer.

        Args:
            elastic: whether buffers accept another prefetch depth or batch size.
        """
        await in_thread(self._read)
        for buffer, snapshot in self._buffers:
            self._restores.append((buffer, await buffer.prepare_restore(snapshot, elastic=elastic)))

    def _read(self) -> None:
        if not is_checkpoint(self.path):
            # Not CheckpointNotFoundError, upon which a program may well start afresh.
            raise CheckpointCorruptError(f"{self.path}: expected a checkpoint with a manifest, found none")
        reader = CheckpointReader(self.path)
        parts = parts_of_run(reader.state, self.path)
        if (found := reader.state.get("step")) != self._step:
            raise CheckpointMismatchError(f"{self.path}: expected the checkpoint of step {self._step}, found {found!r}")
        generators = parts.pop(RNG, None)
        self._match(parts)
        for name, part in parts.items():
            if part["kind"] == VALUE:
                self.values[name] = decode(joined(reader, name, part), name)
        for name, given in self._objects.items():
            if is_snapshotable(given):
                self._buffers.append((given, Snapshot.read(reader, parts[name]["state"], f"{name}/")))
            else:
                self._add(reader, name, given, parts[name])
        if generators is not None and self._generators is not None:
            self._add(reader, RNG, self._generators, generators)
        elif self._demands_generators:
            raise CheckpointMismatchError(f"{self.path}: expected global generators (rng), found none")

    def _match(self, parts: dict[str, Any]) -> None:
        saved = {name: part["kind"] for name, part in parts.items() if part["kind"] != VALUE}
        given = {name: BUFFER if is_snapshotable(part) else OBJECT for name, part in self._objects.items()}
        unknown = sorted(given.keys() - saved.keys())
        missing = [] if self._partial else sorted(saved.keys() - given.keys())
        if unknown or missing:
            raise CheckpointMismatchError(
                f"{self.path}: expected the objects {sorted(saved)}, found {sorted(given)} (not in the checkpoint: "
                f"{unknown}, no object given: {missing}; partial=True leaves parts out; plain values, which come back "
                f"in the result: {sorted(parts.keys() - saved.keys())})"
            )
        for name, kind in given.items():
            if saved[name] != kind:
                raise CheckpointMismatchError(
                    f"{self.path}: {name}: expected {_WORDS[saved[name]]}, found {_WORDS[kind]}"
                )

    def _add(self, reader: CheckpointReader, name: str, given: Any, part: dict[str, Any]) -> None:
        target = Target(name, given, joined(reader, name, part))
        target.loadable()
        self._targets.append(target)

    async def apply(self) -> None:
        """Make everything live."""
        if self._restores:
            prove(self._targets)
        restored: list[tuple[Snapshotable, Snapshot]] = []
        try:
            for buffer, restore in self._restores:
                before = await buffer.snapshot(_SETTLE_SECONDS) if len(self._restores) > 1 else None
                await restore.apply()
                if before is not None:
                    restored.append((buffer, before))
            # No await from here back to the step in which the last buffer took over.
            load(self._targets)
        except BaseException:
            for buffer, before in reversed(restored):
                await buffer.restore(before)
            raise


def parts_of_run(state: Any, path: Path) -> dict[str, dict[str, Any]]:
    """The parts of the checkpoint of a run, by name.

    Raises:
        CheckpointError: it is that of something else, of a version that is not known, or damaged.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format", sorted(state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointMismatchError(f"{path}: expected the checkpoint of a run ({FORMAT}), found {found!r}")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointVersionError(f"{path}: expected a version of {FORMAT} from 1 to {VERSION}, found {version!r}")
    parts = state.get("parts")
    if not isinstance(parts, dict) or not all(map(_is_part, parts.values())):
        raise CheckpointCorruptError(f"{path}: expected parts of a known kind, found something else")
    return dict(parts)


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"kind", "state"} and part["kind"] in (BUFFER, OBJECT, VALUE)


def joined(reader: CheckpointReader, name: str, part: dict[str, Any]) -> Any:
    """The plain data of an object or a value.

    Raises:
        CheckpointCorruptError: a file is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for group in reader.read_all(name):
        tensors.update(group)
    try:
        return join(reader.document(part["state"]), tensors)
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
    before = [Target(name, part, state_of(part, name)) for name, part, _ in targets]
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
            _logger.exception("%s did not take back the state that it had before", target.name)
    return notes
