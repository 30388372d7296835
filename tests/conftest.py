"""Every async test on both event loops, none may hang, and none may leave a task or a thread behind."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.helpers import TransformClock

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

    import pytest_timeout

# Threads that their makers keep on purpose: anyio stops its idle workers from a callback of the loop's last
# task and does not wait for them, and a timeout may be watched from a thread.
_KEPT_THREADS = ("AnyIO worker thread", "pytest_timeout")

# An executor that was told to stop without waiting has threads that are done but not yet gone.
_THREAD_GRACE_SECONDS = 10.0

# A task that was cancelled needs one turn of the loop to end, and each task that awaits it one more.
_TASK_GRACE_TURNS = 5

# So many cases show on one event loop each what they would show on both.
_MANY_CASES = 4

# The part of its time limit that an async test may use before its loop is stopped.
_SOFT_LIMIT = 0.9
_limit_key = pytest.StashKey[float]()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test once for each event loop."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if uvloop is not None:
        factories["uvloop"] = uvloop.new_event_loop
    elif os.environ.get("CI"):
        # With one loop missing the run would be green and have checked half.
        raise pytest.UsageError('uvloop is missing: install ".[test]"')
    return factories


@pytest.hookimpl(tryfirst=True)  # before the tests that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that has many cases, each case is fast on one of the event loops and slow on the other.

    Of a test marked ``loops_in_turn`` also if there are few, and of one marked ``every_loop`` never.
    """
    if uvloop is None:
        return
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "asyncio" in marks and not marks & {"slow", "every_loop"}:
            test, _, case = item.nodeid.partition("[")
            cases.setdefault(test, {}).setdefault(case.partition("-")[2], []).append(item)
    for of_test in cases.values():
        for number, (one, other) in enumerate(of_test.values()):
            if len(of_test) >= _MANY_CASES or one.get_closest_marker("loops_in_turn") is not None:
                # Zeros and ones that repeat nothing, so that no value of a parameter always meets the same loop.
                (one, other)[number.bit_count() % 2].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What costs little here would cost much in each of thousands of tests."""
    # What is there by now stays: the collector, which tests of leaks call, need not look at it again and again.
    gc.collect()
    gc.freeze()
    # torch has dozens of loggers that pass nothing on. pytest would go to each of them three times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _no_leaked_thread() -> Iterator[None]:
    """Fail a test that leaves a thread: any of the package's own, or one that would hold up the exit."""
    before = set(threading.enumerate())
    yield
    leaked = [thread for thread in threading.enumerate() if thread not in before and _is_leak(thread)]
    deadline = time.monotonic() + _THREAD_GRACE_SECONDS
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in leaked if thread.is_alive()]
    if names:
        pytest.fail(f"threads leaked: {', '.join(names)}", pytrace=False)


def _is_leak(thread: threading.Thread) -> bool:
    if thread.name.startswith(_KEPT_THREADS):
        return False
    return thread.name.startswith("asyncbuf") or not thread.daemon


@pytest.fixture(autouse=True)
def _no_leaked_task(request: pytest.FixtureRequest, _no_leaked_thread: None) -> None:
    """Watch the tasks of an async test, from before its other fixtures are made until after they are gone.

    It asks for the thread fixture so that threads are counted last: the loop's default executor keeps its
    threads until the loop closes, which is after the tasks were counted. A synchronous test has no loop, so
    the part that needs one is asked for only here.
    """
    marker = request.node.get_closest_marker("asyncio")
    if marker is None:
        return
    if marker.kwargs.get("loop_scope", "function") != "function":
        pytest.fail("an event loop that several tests share is not watched for leaked tasks", pytrace=False)
    request.getfixturevalue("_task_guard")


@pytest.fixture
async def _task_guard(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    # Tasks of fixtures with a wider scope are there before the test and may be there after it.
    before = asyncio.all_tasks()
    if limit := request.node.stash.get(_limit_key, None):
        # Never cancelled: it goes with the loop, whose closing can hang as well.
        asyncio.get_running_loop().call_later(limit * _SOFT_LIMIT, _stop_hanging_loop, limit)
    yield
    allowed = before | {asyncio.current_task()}
    for _ in range(_TASK_GRACE_TURNS):
        if asyncio.all_tasks() <= allowed:
            return
        await asyncio.sleep(0)
    if leaked := asyncio.all_tasks() - allowed:
        pytest.fail(f"tasks leaked:\n{_stacks(leaked)}", pytrace=False)


@pytest.fixture
def transform_clock(monkeypatch: pytest.MonkeyPatch) -> TransformClock:
    """Transforms take no time, except what a test adds to this clock."""
    clock = TransformClock()
    monkeypatch.setattr("asyncbuf._prefetch.transforms.time", clock)
    return clock


@pytest.fixture
def transforms_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sync transform is ever so quick that it leaves its thread."""
    monkeypatch.setattr("asyncbuf._prefetch.pace.INLINE_SECONDS", -1.0)


@pytest.fixture
def last_fifth_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a snapshot all the time it needs once it has stopped waiting for batches.

    It waits for them during the first four fifths of its timeout, and has to end in the last one. With a timeout that
    is short, so that the test is, a busy machine may need longer than that.
    """
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: timeout(None if delay is None else delay + 20.0))


def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    """Note the time limit of a test for its task guard; the timer itself is left to the plugin."""
    item.stash[_limit_key] = settings.timeout


def _stop_hanging_loop(limit: float) -> None:
    """Fail a hanging async test alone, and show where its tasks wait.

    The plugin's own two ways fit no event loop: an exception that a signal handler raises is lost in an idle uvloop,
    which then waits for ever, and its timer thread ends the whole run. That thread stays as the last resort, for
    code that blocks. Cancelling would not do either: what hangs may be a task that ignores that.
    """
    sys.stderr.write(f"still running near the limit of {limit} s:\n{_stacks(asyncio.all_tasks())}\n")
    asyncio.get_running_loop().stop()


def _stacks(tasks: Iterable[asyncio.Task[object]]) -> str:
    text = io.StringIO()
    for task in tasks:
        task.print_stack(file=text)
    return text.getvalue()
