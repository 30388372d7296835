"""Manifests that were made, not damaged: refused with our own errors."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import CheckpointCorruptError, CheckpointVersionError
from asyncbuf._disk.manifest import MANIFEST, MANIFEST_BYTES
from asyncbuf._disk.reader import CheckpointReader
from tests.disk.helpers import FILES, data_of, forge, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_forged_without_a_change_is_read(path: Path) -> None:
    forge(path, lambda body: None)
    assert load(path) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nothing",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a": NaN}',
        b"\x80\x04K\x01.",
    ],
    ids=["empty", "cut", "no JSON", "no text", "list", "null", "no format", "long number", "deep", "NaN", "pickle"],
)
def test_manifest_that_is_none(path: Path, content: bytes) -> None:
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"manifest.json: expected"):
        CheckpointReader(path)


def test_huge_manifest_is_not_read(path: Path) -> None:
    os.truncate(path / MANIFEST, MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointCorruptError, match=f"at most {MANIFEST_BYTES} bytes, found {MANIFEST_BYTES + 1}"):
        CheckpointReader(path)


def test_duplicate_keys_are_refused(path: Path) -> None:
    content = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(content.replace(b'"number": 1', b'"number": 1,\n "number": 1'))
    with pytest.raises(CheckpointCorruptError, match="duplicate key"):
        CheckpointReader(path)


@pytest.mark.parametrize("version", [3, 99, 0, -1, None, "1", 1.0, True, [1]], ids=repr)
def test_unknown_version_is_named(path: Path, version: Any) -> None:
    forge(path, lambda body: None, version=version)
    with pytest.raises(CheckpointVersionError, match="from 1 to 2, found") as caught:
        CheckpointReader(path)
    assert repr(version) in str(caught.value)


def test_newer_version_is_named_whatever_else_is_new(path: Path) -> None:
    (path / MANIFEST).write_text(json.dumps({"format": "asyncbuf.checkpoint", "version": 7, "contents": []}))
    with pytest.raises(CheckpointVersionError, match="found 7"):
        CheckpointReader(path)


def test_other_format_is_refused(path: Path) -> None:
    forge(path, lambda body: None, format="other")
    with pytest.raises(CheckpointCorruptError, match=r"asyncbuf\.checkpoint"):
        CheckpointReader(path)


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../x.safetensors", "a/../../x.safetensors", "..", "a/./b.safetensors", "//x.safetensors"),
        *(
            "x.pt",
            "x.pkl",
            "x.safetensors\n",
            "x\0.safetensors",
            "~.safetensors",
            "C:x.safetensors",
            "a\\b.safetensors",
        ),
    ],
)
def test_file_name_that_leads_elsewhere_is_refused(tmp_path: Path, path: Path, name: str) -> None:
    shutil.copy(data_of(path) / FILES[0], path / "x.safetensors")
    shutil.copy(data_of(path) / FILES[0], tmp_path / "x.safetensors")
    forge(path, lambda body: body["files"].update({name: body["files"][FILES[0]]}))
    with pytest.raises(CheckpointCorruptError, match="expected"):
        CheckpointReader(path)


def test_absolute_name_of_a_real_file_is_refused(tmp_path: Path, path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.copy(data_of(path) / FILES[0], outside)
    forge(path, lambda body: body["files"].update({str(outside): body["files"][FILES[0]]}))
    with pytest.raises(CheckpointCorruptError, match="expected"):
        CheckpointReader(path)


@pytest.mark.parametrize("data", ["..", ".", "", "/tmp", "data-", "data-xyz", "../step-000001", 3, None], ids=repr)
def test_data_folder_that_leads_elsewhere_is_refused(path: Path, data: Any) -> None:
    forge(path, lambda body: body.update(data=data))
    with pytest.raises(CheckpointCorruptError, match="expected"):
        CheckpointReader(path)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no state": lambda body: body.pop("state"),
    "more": lambda body: body.update(more=1),
    "files as a list": lambda body: body.update(files=[]),
    "no size": lambda body: body["files"][FILES[0]].pop("bytes"),
    "negative size": lambda body: body["files"][FILES[0]].update(bytes=-1),
    "size as a bool": lambda body: body["files"][FILES[0]].update(bytes=True),
    "no digest": lambda body: body["files"][FILES[0]].pop("blake3"),
    "two digests": lambda body: body["files"][FILES[0]].update(sha256="0" * 64),
    "digest as a number": lambda body: body["files"][FILES[0]].update(blake3=1),
    "unknown dtype": lambda body: body["files"][FILES[0]].update(dtypes={"x": "os.system"}),
    "dtypes as a list": lambda body: body["files"][FILES[0]].update(dtypes=["x"]),
    "no entry": lambda body: body["files"].update({FILES[0]: None}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_malformed_body_is_refused(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    forge(path, change)
    with pytest.raises(CheckpointCorruptError, match="expected"):
        CheckpointReader(path)


FOREIGN: dict[str, Callable[[dict[str, Any]], object]] = {
    "dtype as a list": lambda body: body["files"][FILES[0]].update(dtypes={"x": []}),
    "dtype of no pairs": lambda body: body["files"][FILES[0]].update(dtypes={"x": "complex64"}),
    "deep state": lambda body: body.update(state=deep(400)),
}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_malformed_body_is_refused_with_our_error(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    forge(path, change)
    with pytest.raises(CheckpointCorruptError, match="expected"):
        CheckpointReader(path).read(FILES[0])
