"""Where items live."""

from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage
from asyncbuf.storage.list import ListStorage
from asyncbuf.storage.tensor import TensorStorage

__all__ = ["ListStorage", "Prepared", "Run", "Storage", "TensorStorage"]
