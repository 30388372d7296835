"""Which rows a batch takes."""

from asyncbuf.rows import Rows
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.prioritized import PrioritizedSampler
from asyncbuf.sampler.random import RandomSampler
from asyncbuf.sampler.without_replacement import SamplerWithoutReplacement

__all__ = ["PrioritizedSampler", "RandomSampler", "Rows", "Sampler", "SamplerWithoutReplacement"]
