"""Plain data in lines: it comes back as it was, no line is long, and what is forged is refused."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import CheckpointCorruptError, CheckpointError
from asyncbuf._disk import documents, manifest
from asyncbuf._disk.documents import MOST_LINE_BYTES, Document, joined
from asyncbuf._disk.manifest import MANIFEST, MANIFEST_BYTES
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import data_of, files_of, rendered

if TYPE_CHECKING:
    from pathlib import Path

KEYS = st.one_of(st.text(max_size=5), st.text("ab", min_size=30, max_size=90))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=30), st.dictionaries(KEYS, inner, max_size=8)),
    max_leaves=60,
)


def lines_of(value: Any) -> list[bytes]:
    lines: list[bytes] = []
    Document(value, lines.append).end()
    return lines


@settings(max_examples=150, deadline=None)
@given(value=VALUES)
def test_any_value_comes_back_however_short_the_lines_are(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_LINE_BYTES", 64)
        patch.setattr(documents, "_TEXT_CHARACTERS", 16)
        patch.setattr(documents, "_ITEMS", 4)
        lines = lines_of(value)
        assert repr(joined(lines)) == repr(value)


LARGE: dict[str, Any] = {
    "text": "x" * 3_000_000,
    "text of many bytes": "\U0001f600" * 300_000,
    "numbers": [i / 7 for i in range(200_000)],
    "large numbers": [2**8000 + i for i in range(600)],
    "texts": [str(i) * 40 for i in range(20_000)],
    "entries": {str(i): i for i in range(100_000)},
    "a long key": {"k" * 2_000_000: 1, "other": [{"m" * 40_000: "x"}]},
    "rows": [{"a": i, "b": [i, None]} for i in range(50_000)],
    "nested": {"a": [{"b": ["y" * 200_000, {"c": list(range(30_000))}]}]},
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_large_values_stand_in_short_lines(value: Any, tmp_path: Path) -> None:
    lines = lines_of(value)
    assert max(map(len, lines)) < MOST_LINE_BYTES / 2
    assert joined(lines) == value
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit({"part": writer.document("part/state.json", value)})
    assert (tmp_path / "c" / MANIFEST).stat().st_size < 10_000
    reader = CheckpointReader(tmp_path / "c")
    assert reader.document(reader.state["part"]) == value


def test_small_values_stay_in_the_manifest(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit({"part": writer.document("part.json", {"a": [1, 2]})})
    assert [file.name for file in files_of(tmp_path / "c")] == [MANIFEST]
    assert CheckpointReader(tmp_path / "c").state == {"part": {"a": [1, 2]}}


def test_many_small_values_and_many_files_leave_the_manifest_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with CheckpointWriter(tmp_path / "c") as writer:
        for number in range(700):
            writer.write(f"part/{number:05}.safetensors", {"x": torch.tensor([number])})
        writer.commit([writer.document(f"t/{i}.json", "z" * 1000) for i in range(2000)])
    assert (tmp_path / "c" / MANIFEST).stat().st_size < 10_000
    assert {file.name for file in data_of(tmp_path / "c").glob("*.json")} == {"state.json", "index.json"}
    reader = CheckpointReader(tmp_path / "c")
    assert reader.state == ["z" * 1000] * 2000
    assert [int(part["x"]) for part in reader.read_all("part")] == list(range(700))


def deep(levels: int) -> Any:
    value: Any = "x" * 100_000
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def test_deep_values_come_back_or_are_refused_before_the_commit(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit({"part": writer.document("part.json", deep(290))})
    reader = CheckpointReader(tmp_path / "c")
    assert reader.document(reader.state["part"]) == deep(290)
    with pytest.raises(CheckpointError), CheckpointWriter(tmp_path / "c") as writer:
        writer.commit(["a", writer.document("part.json", deep(340))])
    assert CheckpointReader(tmp_path / "c").state == reader.state


FORGED = {
    "none": [],
    "no JSON": [b"{"],
    "a line that is not there": [b'{"$$list": [3]}'],
    "a line that comes later": [b'{"$$list": [1]}', b"[]"],
    "a line twice": [b"[1]", b'{"$$list": [0, 0]}'],
    "a line that nobody wants": [b"1", b"2"],
    "a list of an object": [b"{}", b'{"$$list": [0]}'],
    "a text of a number": [b"1", b'{"$$text": [0]}'],
    "a line number that is none": [b'{"$$list": "x"}'],
    "a list as a line number": [b'{"$$list": [[]]}'],
    "a key twice": [b'{"a": 1}', b'{"a": 2}', b'{"$$object": [0, 1]}'],
    "a key twice in a line": [b'{"a": 1, "a": 2}'],
    "entries that are no pairs": [b"[1]", b'{"$$entries": [0]}'],
    "an entry with a key that is no text": [b"[[[], 1]]", b'{"$$entries": [0]}'],
    "NaN": [b"NaN"],
    "levels": [b"[" * 400 + b"]" * 400],
    "levels of lines": [b"[1]", *(b'[{"$$list": [%d]}]' % i for i in range(400)), b'{"$$list": [400]}'],
    "levels without end": [b"[" * 100_000],
}


@pytest.mark.parametrize("lines", FORGED.values(), ids=FORGED)
def test_forged_lines_are_refused(lines: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        joined(lines)
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit([writer.document("part.json", "x" * 100_000)])
    file = data_of(tmp_path / "c") / "part.json"
    forge_file(tmp_path / "c", file, b"".join(line + b"\n" for line in lines))
    reader = CheckpointReader(tmp_path / "c")
    with pytest.raises(CheckpointCorruptError, match=r"part\.json: expected"):
        reader.document(reader.state[0])


def forge_file(path: Path, file: Path, content: bytes) -> None:
    """Change a file, and the manifest with it."""
    file.write_bytes(content)
    body = json.loads((path / MANIFEST).read_bytes())["body"]
    entry = body["files"][str(file.relative_to(data_of(path)))]
    entry.update(bytes=len(content), blake3=blake3(content).hexdigest())
    (path / MANIFEST).write_bytes(rendered(body))


@pytest.mark.parametrize(
    "node", [{"$$file": "nowhere.json"}, {"$$file": 1}, {"$$file": "x.safetensors"}, {"$$file": "a.json", "b": 1}]
)
def test_files_that_are_none_are_refused(node: Any, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit([node])
    reader = CheckpointReader(tmp_path / "c")
    with pytest.raises(CheckpointCorruptError, match="expected"):
        reader.document(reader.state[0])


@pytest.mark.parametrize("content", [b"1" * 3_000_000, b"1", b""], ids=["a long line", "no end", "empty"])
def test_lines_that_do_not_end_are_refused(content: bytes, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit([writer.document("part.json", "x" * 100_000)])
    forge_file(tmp_path / "c", data_of(tmp_path / "c") / "part.json", content)
    reader = CheckpointReader(tmp_path / "c")
    with pytest.raises(CheckpointCorruptError, match=r"part\.json: expected"):
        reader.document(reader.state[0])


# -- manifests of version 1, which may be large -----------------------------------------------------------------------


def old_manifest(state: Any) -> bytes:
    body = {"data": "data-0123456789abcdef", "files": {}, "libraries": {}, "state": state}
    return rendered(body, version=1)


@pytest.mark.parametrize(
    "state",
    [
        {"a": [{}, [], {"b": [0.5, "x,", "{", "}", '"', "\\", None, True]}] * 30_000, "c": {}},
        [[[i, [str(i)]] for i in range(90_000)], "y" * 2_000_000, {"k{": {"l[": []}}],
    ],
    ids=["objects", "lists"],
)
def test_a_large_manifest_of_version_1_is_read_line_by_line(state: Any, tmp_path: Path) -> None:
    content = old_manifest(state)
    assert len(content) > MANIFEST_BYTES
    (tmp_path / MANIFEST).write_bytes(content)
    assert manifest.read(tmp_path).state == state
    for damaged in (content[:-1], content.replace(b'"', b"'", 1), content[:-300] + b" " + content[-300:]):
        (tmp_path / MANIFEST).write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match="expected"):
            manifest.read(tmp_path)
    twice = rendered({"data": "data-0123456789abcdef", "files": {}, "libraries": {}, "state": state}, version=2)
    (tmp_path / MANIFEST).write_bytes(twice)
    with pytest.raises(CheckpointCorruptError, match=f"at most {MANIFEST_BYTES} bytes"):
        manifest.read(tmp_path)


def test_a_forged_large_manifest_of_version_1_is_refused(tmp_path: Path) -> None:
    for text in (b'{\n "a": 1,\n "a": 2\n}', b"{\n [\n}", b"[\n]\n]", b"{\n 1\n}", b"[" + b"\n[" * 400):
        padded = text + b"\n" * (MANIFEST_BYTES + 1)
        tail = {"format": "asyncbuf.checkpoint", "sha256": hashlib.sha256(padded).hexdigest(), "version": 1}
        ending = json.dumps(tail, indent=1).encode()[2:] + b"\n"
        (tmp_path / MANIFEST).write_bytes(b'{\n "body": ' + padded.replace(b"\n", b"\n ") + b",\n" + ending)
        with pytest.raises(CheckpointCorruptError, match="expected"):
            manifest.read(tmp_path)


async def longest_stall(work: Any) -> float:
    """The longest time that the event loop stood still while a thread was at work, but for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        return await _longest_stall(work)
    finally:
        gc.enable()


async def _longest_stall(work: Any) -> float:
    stalls = [0.0]
    done = asyncio.create_task(asyncio.to_thread(work))
    while not done.done():
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        stalls.append(time.perf_counter() - begun - 0.001)
    await done
    return max(stalls)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read old", "write", "read"])
async def test_large_values_leave_the_event_loop_free(what: str, tmp_path: Path) -> None:
    value = {"a": [[i / 7, str(i)] for i in range(300_000)], "b": list(range(500_000))}

    def write() -> None:
        with CheckpointWriter(tmp_path / "c") as writer:
            writer.commit([writer.document("part.json", value)])

    def read() -> None:
        reader = CheckpointReader(tmp_path / "c")
        kept.append(reader.document(reader.state[0]))

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / MANIFEST).write_bytes(old_manifest(value))
    write()
    kept: list[Any] = []  # what is let go at once holds everybody up, too
    work = {"read old": lambda: kept.append(manifest.read(tmp_path / "old")), "write": write, "read": read}[what]
    assert min([await longest_stall(work) for _ in range(3)]) < 0.05
