"""Which rows the next items take."""

from asyncbuf.rows import Placement
from asyncbuf.writer.base import Writer
from asyncbuf.writer.immutable import ImmutableDatasetWriter
from asyncbuf.writer.max_value import MaxValueWriter
from asyncbuf.writer.reservoir import ReservoirWriter
from asyncbuf.writer.round_robin import RoundRobinWriter
from asyncbuf.writer.tables import TableWriter

__all__ = [
    "ImmutableDatasetWriter",
    "MaxValueWriter",
    "Placement",
    "ReservoirWriter",
    "RoundRobinWriter",
    "TableWriter",
    "Writer",
]
