"""Fixtures of the snapshot tests."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
def last_fifth_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a snapshot all the time it needs once it has stopped waiting for batches.

    It waits for them during the first four fifths of its timeout, and has to end in the last one. With a timeout that
    is short, so that the test is, a busy machine may need longer than that.
    """
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: timeout(None if delay is None else delay + 20.0))
