"""Checkpoints on disk in which one thing was changed at random, with digests that say that all is well."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load as tensors_of
from safetensors.torch import save as content_of

from asyncbuf import CheckpointError
from asyncbuf._disk.manifest import MANIFEST
from asyncbuf.testing import difference
from tests.disk.helpers import body_of, data_of, rendered
from tests.helpers import some, within
from tests.snapshot.forged import KINDS, other_numbers, other_tensors, places, used
from tests.snapshot.test_forged_at_random import goes_on, told

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MUTATIONS = 25  # of each kind and seed
FIRST = 8  # of the first seed, which is no slow test
MOST_SECONDS = 5.0
MOST_BYTES = 100 * 1024 * 1024
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 7, 2**31, 2**61, 2**63 - 1, 2**63, 10**30, -(2**63), 0.5, 1e300, "x", "", [], {}),
    *(
        [[]],
        {"x": 1},
        {"$tuple": "abc"},
        {"$tensor": "x"},
        {"$type": "os.system", "value": 1},
        {"$$file": "state.json"},
    ),
    *(
        {"$$list": [0, 1]},
        {"$$text": [0]},
        {"$columns": 3},
        "x" * 5000,
        [[[[[]]]]],
        "../../x",
        "storage/00000.safetensors",
    ),
]


def changed_plain(root: Any, chance: random.Random) -> str:
    """Change one thing in plain data; in words, what."""
    found = list(places(root))
    if not found:
        return "nothing"
    path = chance.choice(found)
    parent = root
    for key in path[:-1]:
        parent = parent[key]
    key, value = path[-1], parent[path[-1]]
    kind = chance.choice(["odd", "odd", "delete", "swap", *(["number"] * 4 if type(value) is int else [])])
    if kind == "delete":
        del parent[key]
    elif kind == "swap":
        other = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = chance.choice(other_numbers(value) if kind == "number" else copy.deepcopy(ODD))
    return f"{kind} at {'/'.join(map(str, path))}"


def changed_tensors(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One tensor of a file is another one, is missing, or has another name."""
    tensors = tensors_of(content)
    if not tensors:
        return content, "no tensors"
    name = chance.choice(sorted(tensors))
    kind = chance.choice(["other", "other", "other", "delete", "name", "swap"])
    if kind == "delete":
        del tensors[name]
    elif kind == "name":
        tensors[chance.choice(["x", name + "/0", name[:-1], ""])] = tensors.pop(name)
    elif kind == "swap":
        other = chance.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        others = [each for each in other_tensors(tensors[name]) if not each.is_meta and not each.is_complex()]
        tensors[name] = chance.choice(others)
    return content_of({key: each.contiguous().clone() for key, each in tensors.items()}), f"{kind} {name}"


def changed_bytes(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Some bytes are other ones, are missing, or are there twice."""
    made = bytearray(content)
    kind = chance.choice(["flip", "flip", "cut", "more", "zero", "claim"])
    place = chance.randrange(len(made)) if made else 0
    if kind == "flip" and made:
        for _ in range(chance.choice([1, 1, 3])):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del made[place:]
    elif kind == "more":
        made[place:place] = made[: chance.randrange(1, 64)]
    elif kind == "zero":
        made[place : place + 16] = bytes(len(made[place : place + 16]))
    else:  # what a header claims
        for old in (b'"shape":[', b'"data_offsets":[', b"$$list", b"["):
            if old in made:
                made = bytearray(made.replace(old, old + chance.choice([b"9", b"99999999999", b"-"]), 1))
                break
    return bytes(made), kind


def changed_lines(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One thing in a file of lines of JSON is another one, or a line is missing, or elsewhere."""
    lines = content.splitlines()
    kind = chance.choice(["value", "value", "value", "delete", "swap"])
    number = chance.randrange(len(lines))
    if kind == "delete":
        del lines[number]
    elif kind == "swap":
        other = chance.randrange(len(lines))
        lines[number], lines[other] = lines[other], lines[number]
    else:
        value = [json.loads(lines[number])]
        kind = changed_plain(value, chance)
        lines[number] = json.dumps(value[0] if value else None).encode()
    return b"".join(line + b"\n" for line in lines), f"{kind} in line {number}"


def change(path: Path, chance: random.Random) -> str:
    """Change one thing in a checkpoint and make all digests right again; in words, what."""
    body = body_of(path)
    where = chance.choice(["state", "state", "files", "tensors", "tensors", "tensors", "bytes", "lines"])
    if where in ("state", "files"):
        what = changed_plain(body[where], chance)
        (path / MANIFEST).write_bytes(rendered(body))
        return f"{where}: {what}"
    ending = {"tensors": ".safetensors", "lines": ".json", "bytes": ""}[where]
    names = [name for name in body["files"] if name.endswith(ending)]
    if not names:
        return "nothing"
    name = chance.choice(sorted(names))
    file = data_of(path) / name
    ways: dict[str, Callable[[bytes, random.Random], tuple[bytes, str]]] = {
        "tensors": changed_tensors,
        "bytes": changed_bytes,
        "lines": changed_lines,
    }
    content, what = ways[where](file.read_bytes(), chance)
    file.write_bytes(content)
    body["files"][name].update(bytes=len(content), blake3=blake3(content).hexdigest())
    (path / MANIFEST).write_bytes(rendered(body))
    return f"{where} of {name}: {what}"


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


async def loads(buffer: Any, path: Path) -> bool:
    try:
        await within(buffer.load(path))
    except CheckpointError:
        return False
    return True


@contextlib.contextmanager
def small_documents(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plain data of a few hundred bytes has a file of its own, with several lines."""
    monkeypatch.setattr("asyncbuf._disk.documents._LINE_BYTES", 300)
    yield
    monkeypatch.undo()


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("seed", some(range(16), fast=[0]))
@pytest.mark.parametrize("kind", KINDS)
async def test_one_change_is_refused_or_taken_over_whole(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{kind}-{seed}")
    good = []
    with small_documents(monkeypatch):
        for removed in (0, 3):
            good.append(tmp_path / f"good{removed}")
            await (await used(kind, removed)).save(good[-1])
    buffer = await used(kind, chance.choice((0, 2)))
    async with buffer:
        await buffer.sample()
        most = None
        for number in range(MUTATIONS if seed else FIRST):
            before = await buffer.state_dict()
            path = tmp_path / str(number)
            shutil.copytree(chance.choice(good), path)
            what = f"{kind}, seed {seed}, change {number}: {change(path, chance)}"
            begun = time.perf_counter()
            with told(what):
                if await loads(buffer, path):
                    assert time.perf_counter() - begun < MOST_SECONDS
                    await goes_on(buffer, kind)
                    await buffer.load_state_dict(before)
                else:
                    assert time.perf_counter() - begun < MOST_SECONDS
                found = difference(await within(buffer.state_dict()), before)
                assert found is None, f"the live buffer has changed: {found}"
                most = peak() if most is None else most
                assert peak() - most < MOST_BYTES
            shutil.rmtree(path)
        await buffer.sample()


async def test_what_was_not_changed_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        path = tmp_path / kind
        with small_documents(monkeypatch):
            await (await used(kind, 3)).save(path)
        assert any(name.endswith(".json") for name in body_of(path)["files"]), "nothing is in lines"
        (path / MANIFEST).write_bytes(rendered(body_of(path)))
        buffer = await used(kind, 1)
        async with buffer:
            assert await loads(buffer, path)
            await goes_on(buffer, kind)


def test_there_is_something_to_change() -> None:
    content = content_of({"x": torch.arange(5)})
    made = [changed_tensors(content, random.Random(seed))[0] for seed in range(20)]
    assert len({*made}) > 5
    assert content not in [changed_bytes(content, random.Random(seed))[0] for seed in range(20)]
