"""A replay buffer and prefetching sampler for asyncio training loops on PyTorch."""

from asyncbuf.batch import Batch, Draw
from asyncbuf.buffer import ReplayBuffer
from asyncbuf.checkpoint.checkpointer import Checkpointer, RestoredCheckpoint
from asyncbuf.checkpoint.codec import register_codec, register_type
from asyncbuf.errors import (
    AsyncBufError,
    BufferClosedError,
    BufferFailedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    PrefetchError,
    SchemaError,
    WrongLoopError,
)
from asyncbuf.sampler import RandomSampler, Rows, Sampler, SamplerWithoutReplacement
from asyncbuf.snapshot import Snapshot
from asyncbuf.stats import BufferStats
from asyncbuf.storage import ListStorage, Prepared, Run, Storage, TensorStorage
from asyncbuf.stream import BatchStream
from asyncbuf.tree import Container, register_container
from asyncbuf.writer import Placement, RoundRobinWriter, Writer

__version__ = "0.1.0"

__all__ = [
    "AsyncBufError",
    "Batch",
    "BatchStream",
    "BufferClosedError",
    "BufferFailedError",
    "BufferStats",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointVersionError",
    "Checkpointer",
    "Container",
    "Draw",
    "ListStorage",
    "Placement",
    "PrefetchError",
    "Prepared",
    "RandomSampler",
    "ReplayBuffer",
    "RestoredCheckpoint",
    "RoundRobinWriter",
    "Rows",
    "Run",
    "Sampler",
    "SamplerWithoutReplacement",
    "SchemaError",
    "Snapshot",
    "Storage",
    "TensorStorage",
    "Writer",
    "WrongLoopError",
    "register_codec",
    "register_container",
    "register_type",
]
