"""Which rows a batch takes."""

from asyncbuf.rows import Rows
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.random import RandomSampler
from asyncbuf.sampler.without_replacement import SamplerWithoutReplacement

__all__ = ["RandomSampler", "Rows", "Sampler", "SamplerWithoutReplacement"]
