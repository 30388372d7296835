"""What the documentation shows works: Python blocks compile, and those marked as runnable run, in order.

A block is runnable if ``<!-- runnable -->`` stands in the line before it. The runnable blocks of a page make one
module, and its functions ``test_...`` are called.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from asyncbuf import Placement, ReplayBuffer, RowRange, Rows, TensorStorage, WriteEvent, checkpoint
from asyncbuf.testing import assert_exact_resume, check_sampler, check_storage, check_writer
from tests.helpers import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^(?P<mark><!-- runnable -->\n)?```python[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)#:]+)(#[^)]*)?\)")


class Block(NamedTuple):
    """A Python block of a page."""

    page: Path
    line: int
    code: str
    is_runnable: bool

    def compiled(self) -> CodeType:
        """With the line numbers of the page; ``await`` may stand outside of functions."""
        code = "\n" * (self.line - 1) + self.code
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled: CodeType = compile(code, str(self.page), "exec", flags=flags, dont_inherit=True)
        return compiled


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["code"], found["mark"] is not None)
        for found in _BLOCK.finditer(text)
    ]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[Path, ModuleType]]:
    """A module for each page, importable while the tests run, so that what is in it can be pickled."""
    made = {page: ModuleType(f"docs_of_{page.stem.replace('-', '_')}") for page in PAGES}
    for module in made.values():
        sys.modules[module.__name__] = module
    yield made
    for module in made.values():
        del sys.modules[module.__name__]


def run(block: Block, module: ModuleType) -> None:
    code = block.compiled()
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, vars(module))
        return
    asyncio.run(eval(code, vars(module)))


def names(page: Path) -> list[str]:
    """The tests that a page has."""
    code = "\n".join(block.code for block in blocks(page) if block.is_runnable)
    return re.findall(r"^async def (test_\w+|use_it)\(\)", code, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_blocks_compile_and_those_that_are_runnable_run(page: Path, modules: dict[Path, ModuleType]) -> None:
    for block in blocks(page):
        block.compiled()
        if block.is_runnable:
            run(block, modules[page])


def loaded(page: Path, name: str, modules: dict[Path, ModuleType]) -> ModuleType:
    """The module of a page, run if it lacks a name."""
    if not hasattr(modules[page], name):
        test_blocks_compile_and_those_that_are_runnable_run(page, modules)
    return modules[page]


# How thorough the suites of asyncbuf.testing are that the pages call, where a page does not say it.
SHORT: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (check_sampler, {"seeds": range(3), "steps": 24}),
    (check_storage, {"seeds": range(2), "steps": 24}),
    (check_writer, {"seeds": range(3), "steps": 24}),
    (assert_exact_resume, {"at": [0, 3], "hops": 1}),
]


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in PAGES for name in names(page)])
@pytest.mark.parametrize("suites", ["short", pytest.param("as-they-are", marks=pytest.mark.slow)])
def test_examples_of_tests_pass(
    page: Path, name: str, suites: str, modules: dict[Path, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = loaded(page, name, modules)
    if suites == "short":
        for suite, settings in SHORT:
            assert suite.__kwdefaults__ is not None
            for setting, value in settings.items():
                monkeypatch.setitem(suite.__kwdefaults__, setting, value)
    asyncio.run(getattr(module, name)())


def test_the_sampler_that_uses_each_item_once_keeps_them_oldest_first(modules: dict[Path, ModuleType]) -> None:
    module = loaded(ROOT / "docs" / "extending.md", "OnceSampler", modules)

    async def numbers() -> list[int]:
        buffer = ReplayBuffer(TensorStorage(24), sampler=module.OnceSampler(), batch_size=4, prefetch=3)
        async with buffer:
            await buffer.extend(module.transitions(24, 0))
            first = await buffer.sample()
            await until(lambda: buffer.stats().queued == 3)
            assert await buffer.flush() == 3
            await buffer.finish()
            return torch.cat([first.info["number"], *[batch.info["number"] async for batch in buffer]]).tolist()

    assert asyncio.run(numbers()) == list(range(24))


def test_a_new_item_in_a_row_of_a_dropped_ticket_stays_drawn(modules: dict[Path, ModuleType]) -> None:
    module = loaded(ROOT / "docs" / "extending.md", "OnceSampler", modules)
    sampler, table, generator = module.OnceSampler(), Rows(4, 4, 4), torch.Generator()
    placement = Placement(4, (RowRange(0, 0, 4),))
    sampler.wrote(WriteEvent(placement, 0, table))
    old = sampler.draw(table, 4, generator)
    sampler.wrote(WriteEvent(placement, 4, table))
    sampler.draw(table, 4, generator)
    sampler.dropped(old)
    assert not sampler.may_draw(table, 1)


def test_there_is_something_to_run() -> None:
    runnable = {page.name for page in PAGES for block in blocks(page) if block.is_runnable}
    assert runnable >= {"extending.md", "checkpoint-format.md"}
    assert "test_once_sampler" in names(ROOT / "docs" / "extending.md")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [found["target"] for found in _LINK.finditer(prose)]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_program_of_the_page_on_saving_goes_on_as_it_would_have(
    modules: dict[Path, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [page] = [page for page in PAGES if page.name == "saving.md"]
    program = loaded(page, "Collector", modules)
    assert asyncio.run(program.main(str(tmp_path / "one"))) == 0
    monkeypatch.setattr(program, "STEPS", 60)
    asyncio.run(program.main(str(tmp_path / "other")))
    monkeypatch.setattr(program, "STEPS", 100)
    asyncio.run(program.main(str(tmp_path / "other")))
    found = checkpoint.diff(tmp_path / "one" / "step-000100", tmp_path / "other" / "step-000100")
    assert found.is_same, found
