"""Digests of files: BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), and SHA-256 in checkpoints of older versions.

BLAKE3 is as hard to forge as SHA-256, and takes a fifth of the time where both use what the processor has for them.
With SHA-256, hashing took more time than all else in a save, and that time was missing where the program trains.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

KIND = "blake3"


class Digest(Protocol):
    """Hashes what it is given, piece by piece."""

    def update(self, data: Buffer, /) -> object:
        """Add some bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of everything so far, in hex."""
        ...


_MAKERS: dict[str, Callable[[], Digest]] = {KIND: blake3, "sha256": hashlib.sha256}


def new(kind: str = KIND) -> Digest:
    """Nothing is hashed yet.

    Args:
        kind: the name of a digest in a manifest.
    """
    return _MAKERS[kind]()


def of_entry(entry: Mapping[str, Any]) -> tuple[str, str]:
    """The digest that a manifest says a file has: its kind, and the digest in hex.

    Raises:
        ValueError: it says none, or more than one.
    """
    found = [(kind, entry[kind]) for kind in _MAKERS if kind in entry]
    if len(found) != 1 or not isinstance(found[0][1], str):
        raise ValueError("expected one digest")
    return found[0]
