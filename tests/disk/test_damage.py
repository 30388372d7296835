"""No changed bit of a checkpoint directory is ever taken for what was saved."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from asyncbuf import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import FILES, data_of, files_of, load, save

if TYPE_CHECKING:
    from pathlib import Path


def test_any_flipped_bit_is_refused(path: Path) -> None:
    rng = random.Random(0)
    for file in files_of(path):
        content = file.read_bytes()
        for _ in range(200):
            position, bit = rng.randrange(len(content)), rng.randrange(8)
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match="expected"):
                load(path)
        file.write_bytes(content)
    assert load(path) == 1


def test_every_bit_of_a_small_manifest_is_guarded(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit({"number": 1})
    manifest = tmp_path / "c" / MANIFEST
    content = manifest.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        manifest.write_bytes(changed)
        with pytest.raises(CheckpointError, match="expected"):
            CheckpointReader(tmp_path / "c")


def test_truncated_is_refused(path: Path) -> None:
    for file in files_of(path):
        content = file.read_bytes()
        for length in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}:
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointCorruptError, match=rf"{file.name}: expected"):
                load(path)
        file.write_bytes(content)


def test_extra_bytes_are_refused(path: Path) -> None:
    for file in files_of(path):
        content = file.read_bytes()
        for extra in (b"\0", b"\n", b" ", content):
            file.write_bytes(content + extra)
            with pytest.raises(CheckpointCorruptError, match=rf"{file.name}: expected"):
                load(path)
        file.write_bytes(content)


def test_missing_file_is_refused_before_anything_is_read(path: Path) -> None:
    (data_of(path) / FILES[2]).unlink()
    with pytest.raises(CheckpointCorruptError, match=r"00001\.safetensors: expected a file of .* found none"):
        CheckpointReader(path)


def test_swapped_files_are_refused(path: Path) -> None:
    first, second = (data_of(path) / name for name in FILES[1:])
    assert first.stat().st_size == second.stat().st_size
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    with pytest.raises(CheckpointCorruptError, match="digest"):
        load(path)


def test_file_that_changes_after_it_was_looked_at_is_refused(path: Path) -> None:
    reader = CheckpointReader(path)
    file = data_of(path) / FILES[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError, match="expected"):
        reader.read(FILES[0])
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match="expected"):
        reader.read(FILES[0])


def test_file_of_another_checkpoint_is_refused(tmp_path: Path, path: Path) -> None:
    save(tmp_path / "other", 2)
    shutil.copy(data_of(tmp_path / "other") / FILES[0], data_of(path) / FILES[0])
    with pytest.raises(CheckpointCorruptError, match="digest"):
        load(path)


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "empty", "file", "file/below"):
        assert not is_checkpoint(tmp_path / name)
        with pytest.raises(CheckpointNotFoundError, match="expected a checkpoint"):
            CheckpointReader(tmp_path / name)
