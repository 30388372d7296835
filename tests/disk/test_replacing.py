"""A checkpoint directory is replaced whole, and nothing else is touched."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest
import torch

from asyncbuf import CheckpointError
from asyncbuf._disk.housekeeping import sweep
from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.stop import StoppedError
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import FILES, contents, leftovers, load, save

if TYPE_CHECKING:
    from pathlib import Path


def test_checkpoint_is_replaced(path: Path) -> None:
    save(path, 2)
    assert load(path) == 2
    assert not leftovers(path)


def test_replacing_leaves_no_file_of_before(path: Path) -> None:
    with CheckpointWriter(path) as writer:
        writer.commit(None)
    assert not CheckpointReader(path).has(FILES[0])
    assert sorted(file.name for file in path.rglob("*") if file.is_file()) == [MANIFEST]


def test_given_up_leaves_nothing(tmp_path: Path, path: Path) -> None:
    for target in (path, tmp_path / "new"):
        with pytest.raises(KeyError), CheckpointWriter(target) as writer:  # noqa: PT012
            writer.write("x.safetensors", {"x": torch.zeros(2)})
            raise KeyError
    assert load(path) == 1
    assert not leftovers(path)
    assert not (tmp_path / "new").exists()


def test_stopped_writer_raises_at_the_next_write(tmp_path: Path, path: Path) -> None:
    for target, last in itertools.product((path, tmp_path / "new"), ("write", "commit")):
        with pytest.raises(StoppedError), CheckpointWriter(target) as writer:  # noqa: PT012
            writer.write("x.safetensors", {"x": torch.zeros(2)})
            writer.stop()
            if last == "write":
                writer.write("y.safetensors", {"x": torch.zeros(2)})
            writer.commit(None)
    assert load(path) == 1
    assert not leftovers(path)
    assert not (tmp_path / "new").exists()


def test_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "dangling"):
        with pytest.raises(CheckpointError, match=f"{name}: expected a checkpoint to replace, or nothing"):
            save(tmp_path / name, 1)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "precious"


def test_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == 1


def test_empty_directory_is_used_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    crashed = CheckpointWriter(tmp_path / "c")
    crashed.__enter__()
    crashed.write("x.safetensors", {"x": torch.zeros(2)})
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == 1


def test_two_writers_of_one_checkpoint(path: Path) -> None:
    with CheckpointWriter(path) as first, CheckpointWriter(path) as second:
        for number, writer in ((2, first), (3, second)):
            for name, tensors in contents(number).items():
                writer.write(name, tensors)
        first.commit({"number": 2})
        try:
            second.commit({"number": 3})
        except CheckpointError:
            assert load(path) == 2
            return
    assert load(path) == 3


@pytest.mark.parametrize(
    "name", ["a b.safetensors", "../x.safetensors", "/x.safetensors", "x.bin", "", "a//b.safetensors"]
)
def test_name_that_a_reader_refuses_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises((ValueError, CheckpointError)), CheckpointWriter(tmp_path / "c") as writer:  # noqa: PT012
        writer.write(name.replace("/x", f"{tmp_path}/x") if name.startswith("/") else name, {"x": torch.zeros(2)})
        writer.commit(None)
    assert not is_checkpoint(tmp_path / "c")


def test_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), CheckpointWriter(tmp_path / "c") as writer:  # noqa: PT012
        writer.write("x.safetensors", {"x": torch.zeros(2)})
        writer.write("x.safetensors", {"x": torch.ones(2)})
    assert not (tmp_path / "c").exists()


def test_sweep_takes_what_interrupted_saves_left_and_nothing_else(tmp_path: Path, path: Path) -> None:
    empty, stale = (tmp_path / f".step-000002.tmp-{digit * 8}" for digit in ("0f", "1f"))
    empty.mkdir()
    (stale / f"data-{'1f' * 8}" / "storage").mkdir(parents=True)
    (stale / f"draft-{'1f' * 8}").write_text('{"format": "asyncbuf.checkpoint"}')
    unknown = tmp_path / f".step-000002.tmp-{'2f' * 8}"
    (unknown / "thesis").mkdir(parents=True)
    others = [".git", ".x.tmp-123", f"x.tmp-{'0f' * 8}", f".x.tmp-{'0F' * 8}"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f".file.tmp-{'0f' * 8}").write_text("")
    (tmp_path / f".link.tmp-{'0f' * 8}").symlink_to(path)
    sweep(tmp_path)
    assert not empty.exists()
    assert not stale.exists()
    assert {*others, unknown.name, f".file.tmp-{'0f' * 8}", f".link.tmp-{'0f' * 8}", path.name} == set(
        os.listdir(tmp_path)
    )
    assert load(path) == 1
