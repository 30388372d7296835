"""Snapshots on disk: plain values, directories, whole training runs; and looking into them.

What looks into checkpoints is imported when it is first asked for: a program that trains does without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncbuf.checkpoint._diff import Difference, LeafDifference, PartDifference, SettingDifference, diff
    from asyncbuf.checkpoint._diff_rows import FieldDifference, RowsDifference
    from asyncbuf.checkpoint._inspect import BufferInfo, CheckpointInfo, PartInfo, TicketInfo, inspect
    from asyncbuf.checkpoint._leaves import Leaf
    from asyncbuf.checkpoint._listing import ListedCheckpoint, Pruned, list_checkpoints, prune
    from asyncbuf.checkpoint._verify import Verification, verify

__all__ = [
    "BufferInfo",
    "CheckpointInfo",
    "Difference",
    "FieldDifference",
    "Leaf",
    "LeafDifference",
    "ListedCheckpoint",
    "PartDifference",
    "PartInfo",
    "Pruned",
    "RowsDifference",
    "SettingDifference",
    "TicketInfo",
    "Verification",
    "diff",
    "inspect",
    "list_checkpoints",
    "prune",
    "verify",
]

_MODULES = {
    "_diff": ("Difference", "LeafDifference", "PartDifference", "SettingDifference", "diff"),
    "_diff_rows": ("FieldDifference", "RowsDifference"),
    "_inspect": ("BufferInfo", "CheckpointInfo", "PartInfo", "TicketInfo", "inspect"),
    "_leaves": ("Leaf",),
    "_listing": ("ListedCheckpoint", "Pruned", "list_checkpoints", "prune"),
    "_verify": ("Verification", "verify"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
