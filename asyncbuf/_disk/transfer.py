"""How many bytes of a checkpoint are on the disk already."""

from __future__ import annotations

import threading


class Transfer:
    """Counts bytes of a checkpoint while it is written, in any thread.

    Attributes:
        done: bytes of the files so far, those included that got a second name instead of being written again.
        linked: how many of them got a second name.
        total: how many bytes there will be; None as long as that is not known. Before the last file has been begun, it
            leaves out what only writing shows: headers, and what there is beside tensors.
    """

    def __init__(self) -> None:
        self.done: int = 0
        self.linked: int = 0
        self.total: int | None = None
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        """So many bytes more were written."""
        with self._lock:
            self.done += nbytes

    def used_again(self, nbytes: int) -> None:
        """A file of so many bytes got a second name."""
        with self._lock:
            self.done += nbytes
            self.linked += nbytes
