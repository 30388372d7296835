"""How old the items of a batch may be, counted in versions of the model that made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncbuf._runtime.arguments import count, field_path, shown

if TYPE_CHECKING:
    from collections.abc import Callable


class Staleness:
    """Which version of the model made each item, and how old an item may get.

    ``await buffer.advance_version()`` says that the model has a new version. The age of an item is the current version
    less that of the item. ``batch.info["version"]`` has the version of each row, and ``batch.info["age"]`` its age at
    the hand-over: int64 ``[batch]``. With ``max_age``, no batch ever has an older item:

    - a write of items that are all too old writes nothing, and returns no rows;
    - when a version begins, stored items that are too old leave, and tickets with such rows that were drawn ahead are
      dropped and drawn anew from what is stored then; so is a batch on lease, when it comes back.

    So no sampler ever meets an item that is too old, and prefetching and a hard bound go together. ``stats()`` counts
    all of it.

    An item is of the version that ``extend(items, version=...)`` says, or of the field ``version_key``, or of the
    current version when it is written. A field with several versions, as of a rollout during which the model changed,
    counts by the lowest.

    Args:
        max_age: how old an item may be in a batch, from 0; None for as old as it gets.
        version_key: path of an integer field with the version of an item, of any shape; None for none.
        id_key: path of an integer field with one number for each item, for ``on_evict``.
        on_evict: called with the numbers of items that were too old, when they leave or were not written, as in
            ``lambda ids: [source.put_back(id) for id in ids]``. An error of it is logged.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        max_age: int | None = None,
        *,
        version_key: str | None = None,
        id_key: str | None = None,
        on_evict: Callable[[list[int]], object] | None = None,
    ) -> None:
        self.max_age: int | None = None if max_age is None else count(max_age, "max_age", 0, example=2)
        self.version_key = None if version_key is None else field_path(version_key, "version_key", example="version")
        self.id_key = None if id_key is None else field_path(id_key, "id_key", example="prompt")
        if on_evict is not None and not callable(on_evict):
            raise TypeError(f"on_evict: expected a function of numbers of items, found {shown(on_evict)}")
        if on_evict is not None and id_key is None:
            raise ValueError('id_key: expected the field that on_evict gets, such as "prompt", found None')
        self.on_evict = on_evict

    def __repr__(self) -> str:
        """As it was made, without the function."""
        keys = [f"{name}={value!r}" for name, value in (("version_key", self.version_key), ("id_key", self.id_key))]
        shown_keys = [text for text in keys if not text.endswith("None")]
        return f"Staleness({', '.join([str(self.max_age), *shown_keys])})"
