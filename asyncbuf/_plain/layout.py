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
    """Plain data in dicts and lists as they were: what was empty is there again, and keys have their order.

    Where the layout says something else than the data, the data stays as it is: whoever reads it refuses it or not.
    Dicts and lists that are given are not changed.

    Args:
        plain: what is left of it.
        layout: what ``layout_of`` returned; None if that is not known, and nothing is to be done.

    Raises:
        CheckpointCorruptError: it is no layout.
    """
    if layout is None:
        return plain
    if not isinstance(layout, str):
        raise CheckpointCorruptError(f"snapshot: expected a layout as text, found {summary(layout)}")
    try:
        found = _laid_out(plain, json.loads(layout))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"snapshot: expected a layout, found {error!r}") from error
    return found if isinstance(found, dict) else plain


def _laid_out(node: Any, layout: Any) -> Any:
    if isinstance(layout, dict) and (node is None or node is _MISSING or isinstance(node, dict)):
        return _dict_of(node, layout)
    if isinstance(layout, list) and (node is None or node is _MISSING or isinstance(node, list)):
        return _list_of(node, layout)
    return node


def _dict_of(node: dict[str, Any] | object, layout: dict[str, Any]) -> Any:
    there = node if isinstance(node, dict) else {}
    made = {key: _laid_out(there.get(key, _MISSING), inside) for key, inside in layout.items()}
    if there is not node and any(value is _MISSING for value in made.values()):
        return node  # it was not empty
    return {key: value for key, value in made.items() if value is not _MISSING} | {
        key: value for key, value in there.items() if key not in layout
    }


def _list_of(node: list[Any] | object, layout: list[Any]) -> Any:
    there = node if isinstance(node, list) else []
    left = [_MISSING] * (len(layout) - len(there))
    made = [_laid_out(value, inside) for value, inside in zip([*there, *left], layout, strict=False)]
    if any(value is _MISSING for value in made):
        return node  # it had more than what is empty
    return made + there[len(layout) :]
