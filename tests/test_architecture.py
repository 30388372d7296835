"""The house has floors: a module imports from those below it and from none above, and nothing goes in a circle."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

import asyncbuf

PACKAGE = Path(asyncbuf.__file__).parent

# The rooms on each floor, lowest first; a room is a module or a folder of the package. A module may import from lower
# floors and from its own room, and a room from others on its floor as long as there is no circle.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "_version"),
    ("_runtime",),
    ("_plain",),
    ("_disk", "integrations"),  # an integration tells _plain of foreign types, and nobody but the facade asks for it
    ("rows", "batch", "stats"),
    ("storage", "writer", "sampler", "limiter", "staleness"),
    ("_table",),
    ("_ingest", "_prefetch"),
    ("checkpoint",),
    ("protocols", "stream", "_config", "_from_dataset", "_prompt_weights", "prompts", "shard"),
    ("_assembly",),
    ("lease", "_watch_methods", "_version_methods", "_write_methods"),
    ("buffer",),
    ("testing",),
    ("_cli",),
    ("__init__",),
    ("__main__",),
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


class Import(NamedTuple):
    """One module that imports another one of the package."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}, imports {self.target}"

    @property
    def rooms(self) -> tuple[str, str]:
        return room_of(self.source), room_of(self.target)


def room_of(module: str) -> str:
    """The room of a module, whose name is that within the package: ``storage.base`` is in ``storage``."""
    return module.partition(".")[0]


@functools.cache
def modules() -> dict[str, Path]:
    """The modules of the package by name; a folder has the name of its ``__init__``, the package that of a room."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import of the package from itself: at the top, within functions and for type checkers alone."""
    return tuple(found for name, path in modules().items() for found in imports_of(name, path))


def imports_of(name: str, path: Path) -> list[Import]:
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = origin(node, name, path)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(name, target, node.lineno) for full in targets if (target := module_within(full))]
    return [each for each in found if each.target != each.source]


def origin(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The full name of what ``from ... import`` imports from, which may be relative."""
    if not node.level:
        return node.module or ""
    parts = ["asyncbuf", *name.split(".")][: None if path.name == "__init__.py" and name != "__init__" else -1]
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


def module_within(full: str) -> str | None:
    """The module of the package that is meant by a full name, which may be that of something in it."""
    package, *parts = full.split(".")
    if package != "asyncbuf":
        return None
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts) or "__init__"


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names along one circle, the first again at the end; none if there is no circle."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for target in sorted(edges.get(node, ())):
            if found := visit(target):
                return found
        path.pop()
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node))), [])


def graph(pairs: list[tuple[str, str]]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for source, target in pairs:
        if source != target:
            edges[source].add(target)
    return edges


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(name) for name in modules()}
    assert rooms <= set(FLOOR), f"without a floor: {sorted(rooms - set(FLOOR))}"
    assert len(FLOOR) == sum(map(len, FLOORS)), "a room is on two floors"


def test_nothing_is_imported_from_above() -> None:
    assert imports()
    upwards = [str(each) for each in imports() if FLOOR[each.rooms[0]] < FLOOR[each.rooms[1]]]
    assert not upwards


def test_integrations_are_the_business_of_the_facade_alone() -> None:
    pairs = {each.rooms for each in imports()}
    assert {source for source, target in pairs if target == "integrations" != source} <= {"__init__"}
    assert {target for source, target in pairs if source == "integrations"} <= {"integrations", "_plain", "errors"}


def test_no_circle_between_rooms() -> None:
    found = circle(graph([each.rooms for each in imports()]))
    assert not found, " -> ".join(found)


def test_no_circle_between_modules() -> None:
    found = circle(graph([(each.source, each.target) for each in imports()]))
    assert not found, " -> ".join(found)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
    ids=["line", "diamond", "circle"],
)
def test_a_circle_is_found(edges: dict[str, set[str]], expected: list[str]) -> None:
    assert circle(edges) == expected


# Each module is the first of the package that is imported; what belongs to others, as torch, is kept.
IMPORT_FIRST = """
import importlib, importlib.machinery, json, sys

compiled = {}
compile_source = importlib.machinery.SourceFileLoader.source_to_code

def compile_once(self, data, path):
    if path not in compiled:
        compiled[path] = compile_source(self, data, path)
    return compiled[path]

importlib.machinery.SourceFileLoader.source_to_code = compile_once
steps = []
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "asyncbuf"]:
        del sys.modules[loaded]
    importlib.import_module(name)
    steps.append(name)
    if name == "asyncbuf":
        imported = list({loaded.partition(".")[0] for loaded in sys.modules})
print(json.dumps([steps, imported]))
"""

OPTIONAL = {"gymnasium", "matplotlib", "rich", "tensordict", "torchrl", "uvloop"}


@pytest.mark.timeout(170)
@pytest.mark.parametrize("which", ["one-of-each-room", pytest.param("all", marks=pytest.mark.slow)])
def test_every_module_may_be_imported_first_and_leaves_optional_dependencies_alone(which: str) -> None:
    firsts = {room_of(name): name for name in modules()}.values() if which == "one-of-each-room" else modules()
    names = ["asyncbuf", *(f"asyncbuf.{name}" for name in firsts if name != "__init__")]
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_FIRST, *names], capture_output=True, text=True, timeout=150, check=False
    )
    assert process.returncode == 0, process.stderr
    steps, imported = json.loads(process.stdout)
    assert steps == names
    assert "asyncbuf" in imported
    assert not OPTIONAL & set(imported)
