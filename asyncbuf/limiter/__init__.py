"""When writes and draws may happen."""

from asyncbuf.limiter.base import Limiter
from asyncbuf.limiter.max_ahead import MaxAhead
from asyncbuf.limiter.max_bytes import MaxBytes
from asyncbuf.limiter.max_staleness import MaxStaleness
from asyncbuf.limiter.min_size import MinSize
from asyncbuf.limiter.queue import Queue
from asyncbuf.limiter.sample_to_insert_ratio import SampleToInsertRatio

__all__ = ["Limiter", "MaxAhead", "MaxBytes", "MaxStaleness", "MinSize", "Queue", "SampleToInsertRatio"]
