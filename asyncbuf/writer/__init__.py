"""Which rows the next items take."""

from asyncbuf.writer.base import Placement, Writer
from asyncbuf.writer.round_robin import RoundRobinWriter

__all__ = ["Placement", "RoundRobinWriter", "Writer"]
