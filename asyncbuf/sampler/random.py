"""Uniform draws with replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncbuf.batch import Draw
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Rows


class RandomSampler(Sampler):
    """Draws each row uniformly from all valid rows, with replacement. Endless: it has no passes."""

    trusted: bool = True

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """``batch_size`` rows, each uniform over the valid ones."""
        indices = torch.randint(rows.size, (batch_size,), generator=generator, device=generator.device)
        if not indices.is_cpu:
            indices = indices.cpu()
        return Draw(indices if rows.valid is None else rows.at(indices))
