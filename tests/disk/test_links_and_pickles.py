"""Links, pipes and pickles in a checkpoint directory are never followed, waited for or opened."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from blake3 import blake3

from asyncbuf import CheckpointCorruptError
from asyncbuf._disk.manifest import MANIFEST
from tests.disk.helpers import FILES, data_of, files_of, forge, load

if TYPE_CHECKING:
    from collections.abc import Iterator


def moved_and_linked(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


@pytest.mark.parametrize("part", ["manifest", "data", "storage", "file"])
def test_link_inside_a_checkpoint_is_refused(tmp_path: Path, path: Path, part: str) -> None:
    data = data_of(path)
    place = {"manifest": path / MANIFEST, "data": data, "storage": data / "storage", "file": data / FILES[0]}[part]
    moved_and_linked(place, tmp_path / "elsewhere")
    with pytest.raises(CheckpointCorruptError, match="expected"):
        load(path)


def test_link_to_a_checkpoint_may_be_read(tmp_path: Path, path: Path) -> None:
    moved_and_linked(path, tmp_path / "elsewhere")
    assert load(path) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_refused_and_never_waited_for(path: Path) -> None:
    for file in files_of(path):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointCorruptError, match="expected"):
            load(path)
        file.unlink()
        file.write_bytes(content)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


_opened: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and not isinstance(arguments[0], int):
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that are opened during the test."""
    global _opened
    if not getattr(sys, "_asyncbuf_watches", False):
        sys.addaudithook(_watch)  # there is no way to remove one
        sys._asyncbuf_watches = True  # type: ignore[attr-defined]
    _opened = []
    yield _opened
    _opened = None


def test_planted_pickle_is_never_opened(path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    for name in ("state.pkl", "model.pt", "storage.pickle", "manifest.pkl"):
        for folder in (path, data_of(path), data_of(path) / "storage"):
            (folder / name).write_bytes(pickle.dumps(Bomb()))
    opened.clear()
    assert load(path) == 1
    assert any(name.endswith(FILES[0]) for name in opened)
    # Directories are opened to lock them.
    assert not [name for name in opened if not name.endswith((".safetensors", MANIFEST)) and not Path(name).is_dir()]
    assert not Path("exploded").exists()


def test_pickle_in_place_of_tensors_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    content = pickle.dumps(Bomb())
    (data_of(path) / FILES[0]).write_bytes(content)
    entry = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    forge(path, lambda body: body["files"].update({FILES[0]: entry}))
    with pytest.raises(CheckpointCorruptError, match="expected tensors"):
        load(path)
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "header", [b"{}", b"[]", b"nonsense", b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}']
)
def test_tensors_that_are_none_are_refused(path: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + b"\0" * 4
    (data_of(path) / FILES[0]).write_bytes(content)
    entry = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    forge(path, lambda body: body["files"].update({FILES[0]: entry}))
    with pytest.raises(CheckpointCorruptError, match="expected tensors"):
        load(path)
