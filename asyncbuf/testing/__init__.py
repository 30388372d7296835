"""For tests of your own parts and buffers: contract suites, exact resume, and comparison bit for bit."""

from asyncbuf.testing.compare import assert_same_batch, difference
from asyncbuf.testing.limiters import check_limiter
from asyncbuf.testing.resume import WAYS, Factory, Feed, Resumable, assert_exact_resume
from asyncbuf.testing.samplers import check_sampler, numbered_items
from asyncbuf.testing.storages import check_storage, varied_items
from asyncbuf.testing.writers import check_writer

__all__ = [
    "WAYS",
    "Factory",
    "Feed",
    "Resumable",
    "assert_exact_resume",
    "assert_same_batch",
    "check_limiter",
    "check_sampler",
    "check_storage",
    "check_writer",
    "difference",
    "numbered_items",
    "varied_items",
]
