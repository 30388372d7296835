"""Dicts and lists of plain data as text, so that they can be told from what keeps the leaves alone.

``torch.distributed.checkpoint`` is such a thing: empty dicts vanish in it, and keys come back in another order.
"""

from __future__ import annotations

import json
from typing import Any

from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError

_LEAF = 0
_MISSING = object()


def layout_of(plain: dict[str, Any]) -> str:
    """The dicts of plain data, and the lists that hold some, without their leaves."""
    return json.dumps(_layout(plain), separators=(",", ":"))


def _layout(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _layout(value) for key, value in node.items()}
    if isinstance(node, list) and any(isinstance(value, (dict, list)) for value in node):
        return [_layout(value) for value in node]
    return _LEAF


def laid_out(plain: dict[str, Any], layout: Any) -> dict[str, Any]:
    """Plain data in dicts and lists as they were. Those that are there stay as they are.

    Args:
        plain: what is left of it.
        layout: what ``layout_of`` returned; None if that is not known, and nothing is to be done.

    Raises:
        CheckpointCorruptError: they do not go together.
    """
    if layout is None:
        return plain
    if not isinstance(layout, str):
        raise CheckpointCorruptError(f"snapshot: expected a layout as text, found {summary(layout)}")
    try:
        parsed = json.loads(layout)
        if not isinstance(parsed, dict):
            raise CheckpointCorruptError(f"snapshot: expected the layout of a dict, found that of {summary(parsed)}")
        found: dict[str, Any] = _laid_out(plain, parsed)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"snapshot: expected a layout, found {error!r}") from error
    return found


def _laid_out(node: Any, layout: Any) -> Any:
    if not isinstance(layout, (dict, list)):
        if node is _MISSING or isinstance(node, dict):
            raise CheckpointCorruptError("snapshot: expected the values that its layout has, found one missing")
        return node
    if node is None or node is _MISSING:
        node = {} if isinstance(layout, dict) else []
    if type(node) is not type(layout) or len(node) > len(layout):
        raise CheckpointCorruptError(f"snapshot: expected what its layout has, found {summary(node)}")
    if isinstance(layout, list) or isinstance(node, list):
        left = [_MISSING] * (len(layout) - len(node))
        return [_laid_out(value, inside) for value, inside in zip([*node, *left], layout, strict=True)]
    if unknown := sorted(map(str, node.keys() - layout.keys())):
        raise CheckpointCorruptError(f"snapshot: expected the keys of its layout, found others: {unknown[:8]}")
    return {key: _laid_out(node.get(key, _MISSING), inside) for key, inside in layout.items()}
