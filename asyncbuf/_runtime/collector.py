"""Python's cyclic garbage collector, kept from stopping everything while very many objects are handled."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_blocks = 0
_was_enabled = False


@contextmanager
def collections_paused(*, keeps_objects: bool = False) -> Iterator[None]:
    """No automatic collection in the block, in no thread: one looks at each element of each list that is new.

    The collector runs while it holds the interpreter's lock. Over millions of objects, or a list of them, that takes
    hundreds of milliseconds, and it does it again whenever a quarter more have been made. What it would collect is
    collected afterwards.

    Args:
        keeps_objects: whether very many objects are made that will live on. They count as old at the end, so that the
            next collection of new ones does not look at them.
    """
    _enter()
    try:
        yield
    finally:
        _leave(keeps_objects)


def _enter() -> None:
    global _blocks, _was_enabled
    with _lock:
        if _blocks == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _blocks += 1


def _leave(keeps_objects: bool) -> None:
    global _blocks
    with _lock:
        if keeps_objects and _was_enabled:
            count_as_old()
        _blocks -= 1
        if _blocks == 0 and _was_enabled:
            gc.enable()


def count_as_old() -> None:
    """Let all objects that are there count as old, without a look at any: what is new is looked at most often.

    Does nothing where somebody froze objects: they would not stay so.
    """
    if gc.get_freeze_count() == 0:
        # Each moves whole lists of objects.
        gc.freeze()
        gc.unfreeze()
