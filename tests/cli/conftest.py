"""Fixtures of the tests of the command line."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test loses power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
