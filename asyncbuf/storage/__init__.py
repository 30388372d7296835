"""Where items live."""

from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage
from asyncbuf.storage.list import ListStorage
from asyncbuf.storage.tensor import TensorStorage

__all__ = ["GatherJobs", "ListStorage", "Prepared", "Runs", "Storage", "TensorStorage"]
