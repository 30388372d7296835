"""What holds for the package as a whole."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import asyncbuf

PACKAGE = Path(asyncbuf.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500
OPTIONAL = {"gymnasium", "matplotlib", "rich", "tensordict", "torchrl", "uvloop"}


def test_version_is_that_of_the_installed_package() -> None:
    assert asyncbuf.__version__ == importlib.metadata.version("asyncbuf")


def test_public_names_are_sorted_out() -> None:
    assert len(asyncbuf.__all__) == len(set(asyncbuf.__all__))
    missing = [name for name in asyncbuf.__all__ if not hasattr(asyncbuf, name)]
    assert not missing


@pytest.mark.parametrize("name", asyncbuf.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(asyncbuf, name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return  # a constant or a type alias cannot carry one
    # From the object itself: getdoc() would find the one of a base class.
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc
    # Dataclasses and named tuples that have none are given their signature instead.
    assert not doc.startswith(f"{name}(")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_import_leaves_optional_dependencies_alone() -> None:
    # A process of its own: in this one the other tests may have imported them already.
    code = "import sys, asyncbuf; print(*{name.partition('.')[0] for name in sys.modules})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(process.stdout.split())
    assert "asyncbuf" in imported
    assert not imported & OPTIONAL
