"""Numbers drawn at random, none of them twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncbuf._plain.integers import first_of_each

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array


def distinct(limit: int, count: int, generator: torch.Generator) -> Int64Array:
    """So many different numbers from 0 to ``limit - 1``, every choice and order of them equally likely.

    Args:
        limit: at least ``count``.
        count: how many. The time that a call takes depends on this alone.
        generator: the only source of randomness.

    Returns:
        int64 ``[count]``.
    """
    if 2 * count >= limit:
        order: Int64Array = torch.randperm(limit, generator=generator, device=generator.device).cpu().numpy()
        return order[:count]
    found = np.empty(0, np.int64)
    while len(found) < count:
        # Who draws one by one and leaves out what came before draws each of the others with the same chance.
        more = torch.randint(limit, (count - len(found),), generator=generator, device=generator.device)
        found = first_of_each(np.concatenate([found, more.cpu().numpy()]))
    return found
