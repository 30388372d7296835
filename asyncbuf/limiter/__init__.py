"""When writes and draws may happen."""

from asyncbuf.limiter.base import Limiter
from asyncbuf.limiter.min_size import MinSize

__all__ = ["Limiter", "MinSize"]
