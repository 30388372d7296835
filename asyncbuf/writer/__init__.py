"""Which rows the next items take."""

from asyncbuf.rows import Placement
from asyncbuf.writer.base import Writer
from asyncbuf.writer.round_robin import RoundRobinWriter

__all__ = ["Placement", "RoundRobinWriter", "Writer"]
