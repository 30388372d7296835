"""A replay buffer and prefetching sampler for asyncio training loops on PyTorch."""

from asyncbuf import integrations as integrations
from asyncbuf._plain.registry import Container, register_codec, register_container, register_type
from asyncbuf._version import __version__
from asyncbuf.batch import Batch, Draw
from asyncbuf.buffer import ReplayBuffer
from asyncbuf.checkpoint._freeze import Freeze, FreezeState
from asyncbuf.checkpoint.checkpointer import Checkpointer, RestoredCheckpoint
from asyncbuf.checkpoint.saving import SaveHandle, SaveProgress, SaveStage
from asyncbuf.checkpoint.snapshot import Snapshot
from asyncbuf.checkpoint.stopping import StopSignal
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
    ReadOnlyError,
    SchemaError,
    SupersededError,
    WrongLoopError,
)
from asyncbuf.limiter import Limiter, MinSize
from asyncbuf.protocols import Replay, Snapshotable
from asyncbuf.rows import Counters, NotYet, RowRange, WriteEvent
from asyncbuf.sampler import (
    ConsumingSampler,
    MixtureSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Rows,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StratifiedSampler,
    TrajectorySampler,
    WeightedSampler,
)
from asyncbuf.stats import BufferStats
from asyncbuf.storage import GatherJobs, ListStorage, Prepared, Runs, Storage, TensorStorage
from asyncbuf.stream import BatchStream
from asyncbuf.writer import (
    ImmutableDatasetWriter,
    MaxValueWriter,
    Placement,
    ReservoirWriter,
    RoundRobinWriter,
    TableWriter,
    Writer,
)

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
    "ConsumingSampler",
    "Container",
    "Counters",
    "Draw",
    "Freeze",
    "FreezeState",
    "GatherJobs",
    "ImmutableDatasetWriter",
    "Limiter",
    "ListStorage",
    "MaxValueWriter",
    "MinSize",
    "MixtureSampler",
    "NotYet",
    "Placement",
    "PrefetchError",
    "Prepared",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReadOnlyError",
    "Replay",
    "ReplayBuffer",
    "ReservoirWriter",
    "RestoredCheckpoint",
    "RoundRobinWriter",
    "RowRange",
    "Rows",
    "Runs",
    "Sampler",
    "SamplerWithoutReplacement",
    "SaveHandle",
    "SaveProgress",
    "SaveStage",
    "SchemaError",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Snapshot",
    "Snapshotable",
    "StopSignal",
    "Storage",
    "StratifiedSampler",
    "SupersededError",
    "TableWriter",
    "TensorStorage",
    "TrajectorySampler",
    "WeightedSampler",
    "WriteEvent",
    "Writer",
    "WrongLoopError",
    "__version__",
    "register_codec",
    "register_container",
    "register_type",
]
