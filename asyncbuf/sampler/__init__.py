"""Which rows a batch takes."""

from asyncbuf.rows import Rows
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.consuming import ConsumingSampler
from asyncbuf.sampler.frame_stack import FrameStack
from asyncbuf.sampler.groups import GroupSampler
from asyncbuf.sampler.hindsight import Hindsight
from asyncbuf.sampler.joined import JoinedSampler
from asyncbuf.sampler.mixture import MixtureSampler
from asyncbuf.sampler.n_step import NStep
from asyncbuf.sampler.prioritized import PrioritizedSampler
from asyncbuf.sampler.prioritized_slices import PrioritizedSliceSampler
from asyncbuf.sampler.random import RandomSampler
from asyncbuf.sampler.slices import SliceSampler, SliceSamplerWithoutReplacement
from asyncbuf.sampler.stratified import StratifiedSampler
from asyncbuf.sampler.token_budget import TokenBudgetSampler
from asyncbuf.sampler.trajectories import TrajectorySampler
from asyncbuf.sampler.weighted import WeightedSampler
from asyncbuf.sampler.without_replacement import SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "FrameStack",
    "GroupSampler",
    "Hindsight",
    "JoinedSampler",
    "MixtureSampler",
    "NStep",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Rows",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StratifiedSampler",
    "TokenBudgetSampler",
    "TrajectorySampler",
    "WeightedSampler",
]
