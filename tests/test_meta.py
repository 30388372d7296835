"""What holds for the package as a whole."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import asyncbuf

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(asyncbuf.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500
TESTS = Path(__file__).parent
TEST_FILES = sorted(TESTS.rglob("*.py"))
MAX_TEST_LINES = 600

# Where a sleep is the work itself or the tick of a clock. No test sleeps so that something else may happen meanwhile.
SLEEPS = {
    "helpers.py: jitter": "what a call in a thread takes, from no seed",
    "helpers.py: until": "asks again and again for what has no event, up to a limit",
    "test_event_loop.py: test_four_workers_are_3_5_times_as_fast_as_one": "the work, counted by the second",
    "test_event_loop.py: lags": "the tick of which it measures how late it comes",
    "disk/test_documents.py: _longest_stall": "the same",
    "snapshot/test_among_writers.py: test_a_save_of_500_megabytes_stalls_nobody": "the same",
    "prefetch/test_ambient.py: Looking": "a transform that is not quick: the time is the work",
    "benchmarks/checkpoints.py: Lags": "the tick of a clock",
    "benchmarks/checkpoints.py: loop": "how long it is looked at without a save",
    "benchmarks/checkpoints.py: model": "the same",
    "benchmarks/suites.py: training": "the step of a training loop",
}


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


def test_no_test_file_is_long() -> None:
    lines = {path.relative_to(TESTS).as_posix(): len(path.read_text("utf-8").splitlines()) for path in TEST_FILES}
    assert not {name: count for name, count in lines.items() if count > MAX_TEST_LINES}


def test_no_test_sleeps_until_something_has_happened() -> None:
    found = {f"{path.relative_to(TESTS).as_posix()}: {name}" for path in TEST_FILES for name in sleepers(path)}
    assert found - set(SLEEPS) == set(), "wait for an event, or for turns() of the loop"
    assert set(SLEEPS) - found == set(), "no longer needed"


def sleepers(path: Path) -> Iterator[str]:
    """The functions and classes of a module in which something sleeps, unless it is for zero seconds."""
    for statement in ast.parse(path.read_text("utf-8")).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
                seconds = node.args[0] if node.args else None
                if not (isinstance(seconds, ast.Constant) and seconds.value == 0):
                    yield getattr(statement, "name", "")
