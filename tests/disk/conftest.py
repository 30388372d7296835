"""Fixtures of the directory tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.disk.helpers import save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step-000001"
    save(path, 1)
    return path
