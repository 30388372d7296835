"""The sync forms of what is async: an error that says what to write, in place of one about missing methods.

Type checkers do not see these methods: they refuse a ``with`` or a ``for`` on a class that has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn


class NoSyncIteration:
    """Explains ``for`` over an object that is for ``async for``."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(f"a {type(self).__name__} is for `async for batch in ...`, found `for`")


class AsyncOnly(NoSyncIteration):
    """Explains ``with``, ``for`` and ``[...]`` on a buffer, whose batches are awaited."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"a {type(self).__name__} is opened with `async with`, found `with`")

        def __exit__(self, *_: Any) -> None:
            """Python looks for it before it enters."""

        def __getitem__(self, key: Any) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} cannot be indexed: `batch = await buffer.sample()` gets a batch, "
                '`batch["key"]` a field of it'
            )
