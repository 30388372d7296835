"""Whoever looks into a checkpoint that somebody forged gets an answer, or an error of checkpoints that names it."""

from __future__ import annotations

import copy
import functools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import Checkpointer, CheckpointError
from asyncbuf._disk.manifest import MANIFEST
from asyncbuf.checkpoint import diff, inspect, list_checkpoints, verify
from tests.checkpoint.looks import list_ring, listed, make_chunks_small, numbered, ring
from tests.disk.helpers import body_of, forge, rendered
from tests.helpers import crossed
from tests.snapshot.forged import BackwardsWriter, places

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ODD: list[Any] = [None, True, -1, 0, 3, 2**31, 2**61, 2**63, 10**30, 0.5, "", "x", [], {}, [[]], {"x": 1}]
ODD += [{"$tensor": "0"}, {"$tensor": 1}, {"$type": "os.system", "value": 1}, {"$tuple": 3}, {"$dict": [[1]]}]
ODD += [{"$file": "x.json"}, {"$$file": "storage/00000.safetensors"}, {"$ndarray": {"$tensor": "0"}, "dtype": "<f8"}]
KINDS = ("tensors", "objects", "gaps", "run")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


async def saved(kind: str, path: Path) -> Path:
    writer = BackwardsWriter() if kind == "gaps" else None
    buffer = list_ring() if kind == "objects" else ring(writer=writer, prefetch=1)
    async with buffer:
        await buffer.extend(listed(20) if kind == "objects" else numbered(20))
        await buffer.sample()
        if kind != "gaps":
            await buffer.remove(buffer_rows(3))
        if kind == "run":
            value = {"a": [1, (2.5, b"x")], 3: float("nan"), "many": ["x"] * 600}
            return await Checkpointer(path).save(1, buffer=buffer, value=value)
        await buffer.save(path)
    return path


def buffer_rows(count: int) -> Any:
    return numbered(count)["x"]


def compare_with_itself(path: Path) -> object:
    return diff(path, path)


def check(call: Callable[[], object], path: Path, told: str) -> None:
    """See that it gives an answer, or the error of a checkpoint, with its path."""
    try:
        call()
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        caught.add_note(told)
        raise
    else:
        return
    assert str(path) in str(error), told


def mutate(body: dict[str, Any], chance: random.Random) -> str:
    where = chance.choice([place for place in places(body) if place[0] == "state" and len(place) > 1])
    parent: Any = body
    for key in where[:-1]:
        parent = parent[key]
    if chance.random() < 0.2:
        del parent[where[-1]]
        return f"without {where}"
    parent[where[-1]] = copy.deepcopy(chance.choice(ODD))
    return f"{parent[where[-1]]!r} at {where}"


@pytest.mark.parametrize(("kind", "seed"), crossed(KINDS, range(10), one_in=5))
async def test_forged_manifests(kind: str, seed: int, tmp_path: Path) -> None:
    path = await saved(kind, tmp_path / "a")
    sound = await saved(kind, tmp_path / "b")
    chance = random.Random(f"{kind} {seed}")
    before = body_of(path)
    calls: list[Callable[[], object]] = [
        functools.partial(inspect, path),
        functools.partial(diff, path, sound),
        functools.partial(diff, sound, path),
    ]
    for _ in range(25):
        body = copy.deepcopy(before)
        told = mutate(body, chance)
        (path / MANIFEST).write_bytes(rendered(body))
        assert verify(path).is_sound
        for call in calls:
            check(call, tmp_path, told)


@pytest.mark.parametrize("kind", KINDS)
async def test_forged_bodies(kind: str, tmp_path: Path) -> None:
    path = await saved(kind, tmp_path / "a")
    before = (path / MANIFEST).read_bytes()

    def changes() -> list[Any]:
        return [
            lambda body: body.update(libraries=[]),
            lambda body: body.update(libraries={"asyncbuf": [1], "torch": None}),
            lambda body: body.update(files={}),
            lambda body: body.update(data="../b"),
            lambda body: body.update(state=None),
            lambda body: body.update(state={}),
            lambda body: body["files"].update({"../x.safetensors": {"bytes": 1, "sha256": ""}}),
            lambda body: [entry.update(bytes=2**60) for entry in body["files"].values()],
        ]

    for change in changes():
        (path / MANIFEST).write_bytes(before)
        forge(path, change)
        for call in (inspect, verify, compare_with_itself):
            check(functools.partial(call, path), path, "")
    if kind == "run":
        assert len(list_checkpoints(path.parent)) == 1


async def test_more_rows_than_are_there(tmp_path: Path) -> None:
    for kind in ("tensors", "gaps", "objects"):
        path = await saved(kind, tmp_path / kind)
        forge(path, lambda body: body["state"]["buffer"]["writer"].update(size=2**61, cursor=2**61, write_count=2**61))
        forge(path, lambda body: body["state"]["buffer"]["config"].update(capacity=2**61))
        other = await saved(kind, tmp_path / f"other {kind}")
        check(functools.partial(diff, path, other), path, kind)
        assert json.dumps(inspect(path).path)
