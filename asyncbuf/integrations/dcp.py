"""Snapshots in checkpoints of ``torch.distributed.checkpoint`` (DCP).

Imported by those who use it, and by nothing else::

    import torch.distributed.checkpoint as dcp
    from asyncbuf.integrations.dcp import SnapshotLoadPlanner

    dcp.save({"model": model, "buffer": await buffer.snapshot()}, checkpoint_id=path)

    snapshot = Snapshot()
    dcp.load({"model": model, "buffer": snapshot}, checkpoint_id=path, planner=SnapshotLoadPlanner())
    await buffer.restore(snapshot)

DCP pickles its metadata and whatever is no tensor. Whoever can write such a checkpoint can therefore run code where it
is loaded, before anything of this package sees it. Checkpoints of this package, by ``save``, hold no pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncbuf.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan

_ROWS = {"meta", "chunks"}


class SnapshotLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint of which some entries are snapshots, whatever they hold.

    DCP loads in place: it looks for what the target has already, and a snapshot of other batches or of more rows has
    other entries. This planner makes the entries of snapshots from the metadata of the checkpoint first. All other
    entries are loaded as ever.

    Args:
        *names: under which names of the state dict, in its first level, there are snapshots or, as ``{}``, the state
            dicts of buffers are wanted; without any, where a ``Snapshot`` is to be loaded.
        allow_partial_load: whether other entries may be missing in the checkpoint.
    """

    def __init__(self, *names: str, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._names = names
        self._values: dict[tuple[str | int, ...], Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Ask for all that was saved of the snapshots.

        Raises:
            CheckpointMismatchError: there is no snapshot of a name in the checkpoint.
            KeyError: a name is not in the state dict.
        """
        assert metadata is not None
        names = self._names or tuple(name for name, value in state_dict.items() if _is_snapshot(value))
        for name in names:
            state_dict[name].clear()  # in place: it is handed to the snapshot in the end
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for name in names:
            paths = {key: path for key, path in (metadata.planner_data or {}).items() if path[0] == name}
            if not any(map(_is_of_rows, paths.values())):
                raise CheckpointMismatchError(f"{name}: expected a snapshot in the checkpoint, found none of this name")
            for key, path in paths.items():
                self.state_dict[key] = _room_for(metadata.state_dict_metadata[key])
                self.mappings[key] = path
                if isinstance(self.state_dict[key], torch.Tensor):
                    self._values[path] = self.state_dict[key]
            self._values[name, "scattered"] = True  # empty dicts and the order of keys are still missing

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Put the tensors into their places, where they are filled."""
        for path, value in self._values.items():
            _put(self.original_state_dict, path, value)
        self._values.clear()
        return super().finish_plan(new_plan)


def _is_snapshot(value: Any) -> bool:
    """Whether it is the state dict of a snapshot, be it empty."""
    rows = value.get("storage") if isinstance(value, dict) else None
    return isinstance(rows, dict) and rows.keys() == _ROWS


def _is_of_rows(path: tuple[str | int, ...]) -> bool:
    return path[1:3] == ("storage", "meta")


def _room_for(found: Any) -> Any:
    """Memory for a tensor of the checkpoint; None for what is none."""
    if not isinstance(found, TensorStorageMetadata):
        return None
    properties = found.properties
    return torch.empty(found.size, dtype=properties.dtype, requires_grad=properties.requires_grad)


def _put(target: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put a value to its place; dicts and lists on the way are made."""
    node: Any = target
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            node += [None] * (key + 1 - len(node))
        if following is None:
            node[key] = value
            return
        if (node.get(key) if isinstance(node, dict) else node[key]) is None:
            node[key] = [] if isinstance(following, int) else {}
        node = node[key]
