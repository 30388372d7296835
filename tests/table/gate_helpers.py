"""What the tests of the gate share."""

from __future__ import annotations

import asyncio

# A coroutine that is woken may need a turn to go on, and one more for whoever waits for it.
_TURNS = 6


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
