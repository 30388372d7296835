"""When functions are quick enough for the event loop."""

from __future__ import annotations

import pytest

from asyncbuf._prefetch.pace import INLINE_SECONDS, Pace


def after(*runs: tuple[float, float]) -> bool:
    pace = Pace()
    for seconds, at_work in runs:
        pace.note(seconds, at_work)
    return pace.is_quick


QUICK = (50e-6, 50e-6)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], False),
        ([QUICK] * 2, False),
        ([QUICK] * 3, True),
        ([(1.0, 1.0), QUICK, QUICK], True),
        ([QUICK] * 3 + [(0.1, 0.1)], False),
        ([QUICK] * 3 + [(0.01, 0.01)] + [QUICK] * 30, True),
        ([(2 * INLINE_SECONDS, 2 * INLINE_SECONDS)] * 9, False),
        ([(90e-6, 45e-6)] * 9, False),
        ([(90e-6, 85e-6)] * 9, True),
        ([(8e-6, 4e-6)] * 9, True),
        ([(50e-6, 51e-6)] * 9, True),
        ([(90e-6, 45e-6)] + [QUICK] * 2, True),
        ([QUICK] * 3 + [(90e-6, 45e-6)], False),
    ],
    ids=[
        "never run",
        "too few",
        "quick",
        "first run does not count",
        "slow for once",
        "slow long ago",
        "slow",
        "waits",
        "waits little",
        "waits for microseconds",
        "clocks differ",
        "waited at first",
        "begins to wait",
    ],
)
def test_pace(runs: list[tuple[float, float]], expected: bool) -> None:
    assert after(*runs) is expected
