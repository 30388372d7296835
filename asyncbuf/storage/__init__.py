"""Where items live."""

from asyncbuf.storage._fixed_data import Subset, split
from asyncbuf.storage._frozen import Chunk, Frozen
from asyncbuf.storage._leaf import Field
from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage
from asyncbuf.storage.compressed import CompressedStorage
from asyncbuf.storage.dataset import ColumnStorage, DatasetStorage
from asyncbuf.storage.list import ListStorage
from asyncbuf.storage.memmap import MemmapStorage
from asyncbuf.storage.ragged import RaggedStorage
from asyncbuf.storage.tensor import TensorStorage

__all__ = [
    "Chunk",
    "ColumnStorage",
    "CompressedStorage",
    "DatasetStorage",
    "Field",
    "Frozen",
    "GatherJobs",
    "ListStorage",
    "MemmapStorage",
    "Prepared",
    "RaggedStorage",
    "Runs",
    "Storage",
    "Subset",
    "TensorStorage",
    "split",
]
