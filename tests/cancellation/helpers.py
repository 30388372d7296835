"""What the modules of this folder share."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


MOMENTS = (0.0, 0.0001, 0.0005, 0.002)


def moment() -> float:
    return random.choice(MOMENTS)


def later(steps: int, call: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    if steps:
        loop.call_soon(later, steps - 1, call)
    else:
        call()
