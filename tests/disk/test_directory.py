"""A checkpoint directory is there whole or not at all, and no changed bit of it is ever taken for what was saved.

Run as a program (``python -m tests.disk.test_directory``), this module is the process whose children die.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)
from asyncbuf._disk import directory
from asyncbuf._disk.directory import (
    MANIFEST,
    MANIFEST_BYTES,
    CheckpointReader,
    CheckpointWriter,
    StoppedError,
    is_checkpoint,
    remove,
    sweep,
)
from asyncbuf._plain.codec import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
FILES = ("model.safetensors", "storage/00000.safetensors", "storage/00001.safetensors")


def contents(number: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"x": torch.full((5,), number * 10 + i)} for i, name in enumerate(FILES)}


def save(path: Path, number: int) -> None:
    with CheckpointWriter(path) as writer:
        for name, tensors in contents(number).items():
            writer.write(name, tensors)
        writer.commit({"number": number})


def load(path: Path) -> int:
    """Read all of it and return its number; whatever is not as it was saved raises."""
    reader = CheckpointReader(path)
    number = int(reader.state["number"])
    for name, tensors in contents(number).items():
        found = reader.read(name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    return number


def data_of(path: Path) -> Path:
    (folder,) = path.glob("data-*")
    return folder


def leftovers(path: Path) -> list[str]:
    """The files that lie in and beside a checkpoint and belong to none."""
    found = {str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if file.is_file()}
    for checkpoint in path.parent.iterdir():
        if is_checkpoint(checkpoint):
            data = json.loads((checkpoint / MANIFEST).read_bytes())["body"]["data"]
            found -= {f"{checkpoint.name}/{name}" for name in (MANIFEST, *(f"{data}/{file}" for file in FILES))}
    return sorted(found)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step-000001"
    save(path, 1)
    return path


# -- what comes back --------------------------------------------------------------------------------------------------

COMMON = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]
OTHERS = ["float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    dtype = DTYPES[name]
    tensor = torch.empty(shape, dtype=dtype)
    raw = tensor.reshape(-1)
    if dtype.is_complex:
        raw.copy_(torch.view_as_complex(torch.arange(2.0 * raw.numel()).reshape(-1, 2)))
    else:
        raw.view(torch.uint8).copy_(torch.arange(tensor.nbytes) % (2 if dtype is torch.bool else 251))
    return tensor


def written(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with CheckpointWriter(path) as writer:
        writer.write("x.safetensors", tensors)
        writer.commit(None)
    return CheckpointReader(path).read("x.safetensors")


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert found.device.type == "cpu"
    assert not found.requires_grad
    plain = expected.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    back = torch.view_as_real(found) if found.is_complex() else found
    assert bytes_of(back) == bytes_of(real)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", COMMON)
def test_dtype_comes_back(tmp_path: Path, name: str) -> None:
    tensors = {"two": of_dtype(name, 2, 3), "none": of_dtype(name, 0, 3), "0-dim": of_dtype(name)}
    found = written(tmp_path / "c", tensors)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        check_equal(found[key], tensor)


@pytest.mark.parametrize("name", OTHERS)
def test_rare_dtype_comes_back_or_is_refused(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(4, dtype=torch.uint8).view(DTYPES[name])
    try:
        found = written(tmp_path / "c", {"x": tensor})
    except CheckpointError:
        assert not is_checkpoint(tmp_path / "c")
        return
    assert found["x"].dtype is tensor.dtype
    assert torch.equal(found["x"].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::2],
        torch.ones(3).expand(2, 3),
        torch.arange(1000)[3:5],
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
        torch.ones(2, requires_grad=True) * 2,
        torch.empty(0),
    ],
    ids=["transposed", "strided", "expanded", "part", "conj", "neg", "non-leaf", "empty"],
)
def test_layout_comes_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    check_equal(written(tmp_path / "c", {"x": tensor})["x"], tensor)


def test_part_of_a_large_tensor_is_saved_alone(tmp_path: Path) -> None:
    written(tmp_path / "c", {"x": torch.zeros(1_000_000)[:2], "y": torch.zeros(1_000_000)[2:4]})
    assert (data_of(tmp_path / "c") / "x.safetensors").stat().st_size < 1_000


def test_parts_of_one_tensor_are_apart_afterwards(tmp_path: Path) -> None:
    whole = torch.arange(8)
    found = written(tmp_path / "c", {"a": whole[:4], "b": whole[4:], "c": whole[2:6]})
    found["a"].fill_(-1)
    assert found["c"].tolist() == [2, 3, 4, 5]


def test_tensors_that_share_memory_come_back(tmp_path: Path) -> None:
    tensor = torch.arange(4)
    found = written(tmp_path / "c", {"a": tensor, "b": tensor, "c": tensor.view(2, 2), "d": tensor.detach()})
    assert {key: value.tolist() for key, value in found.items()}["c"] == [[0, 1], [2, 3]]


def test_what_is_read_has_memory_of_its_own(path: Path) -> None:
    reader = CheckpointReader(path)
    first = reader.read(FILES[0])["x"]
    first.fill_(-1)
    assert load(path) == 1


@pytest.mark.parametrize("key", ["__metadata__", "__metadata__/", "__metadata__//", "a/b", "", "é", "0", "\n"])
def test_any_name_of_a_tensor_comes_back(tmp_path: Path, key: str) -> None:
    found = written(tmp_path / "c", {key: torch.tensor([1, 2]), "other": torch.tensor([3 + 1j])})
    assert found[key].tolist() == [1, 2]
    assert set(found) == {key, "other"}


def test_reserved_names_do_not_collide(tmp_path: Path) -> None:
    tensors = {"__metadata__" + "/" * i: torch.tensor(i, dtype=torch.complex128) for i in range(3)}
    found = written(tmp_path / "c", tensors)
    assert {key: complex(value) for key, value in found.items()} == {key: complex(v) for key, v in tensors.items()}


def test_file_can_be_opened_by_any_reader(path: Path) -> None:
    from safetensors.torch import load_file

    assert load_file(data_of(path) / FILES[1])["x"].tolist() == [11] * 5


def test_names_and_parts(path: Path) -> None:
    reader = CheckpointReader(path)
    assert reader.names("storage") == list(FILES[1:])
    assert [int(part["x"][0]) for part in reader.read_all("storage")] == [11, 12]
    assert reader.has("model.safetensors")
    assert not reader.has("model")
    with pytest.raises(CheckpointCorruptError, match=r"nothing.safetensors"):
        reader.read("nothing.safetensors")


def test_state_comes_back(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, None, True, "é", {"b": []}], "big": 10**100, "tiny": 5e-324, "minus": -0.0}
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.commit(state)
    assert repr(CheckpointReader(tmp_path / "c").state) == repr(state)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes_are_those_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "sub" / "c", 1)
        save(tmp_path / "sub" / "c", 2)
    finally:
        os.umask(before)
    for entry in (tmp_path / "sub").rglob("*"):
        assert stat.S_IMODE(entry.stat().st_mode) == (0o777 if entry.is_dir() else 0o666) & ~umask


# -- what is there already --------------------------------------------------------------------------------------------


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
        with pytest.raises(CheckpointError, match=f"{name}: expected a checkpoint or nothing"):
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
    stale = tmp_path / f".step-000002.tmp-{'0f' * 8}"
    (stale / "data-x").mkdir(parents=True)
    others = [".git", ".x.tmp-123", f"x.tmp-{'0f' * 8}", f".x.tmp-{'0F' * 8}"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f".file.tmp-{'0f' * 8}").write_text("")
    (tmp_path / f".link.tmp-{'0f' * 8}").symlink_to(path)
    sweep(tmp_path)
    assert not stale.exists()
    assert {*others, f".file.tmp-{'0f' * 8}", f".link.tmp-{'0f' * 8}", path.name} == set(os.listdir(tmp_path))
    assert load(path) == 1


# -- damage -----------------------------------------------------------------------------------------------------------


# -- several at once ---------------------------------------------------------------------------------------------------


def test_sweep_leaves_alone_what_is_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with CheckpointWriter(path) as writer:
        writer.write(FILES[0], contents(1)[FILES[0]])
        sweep(tmp_path)
        for name in FILES[1:]:
            writer.write(name, contents(1)[name])
        writer.commit({"number": 1})
    assert load(path) == 1
    sweep(tmp_path)
    assert leftovers(path) == []


@pytest.mark.parametrize("first_is_there", [False, True])
def test_the_save_that_commits_last_is_the_checkpoint(tmp_path: Path, first_is_there: bool) -> None:
    path = tmp_path / "run"
    if first_is_there:
        save(path, 0)
    with CheckpointWriter(path) as one, CheckpointWriter(path) as other:
        for number, writer in ((1, one), (2, other)):
            for name, tensors in contents(number).items():
                writer.write(name, tensors)
        other.commit({"number": 2})
        assert load(path) == 2
        one.commit({"number": 1})
        assert load(path) == 1
    assert load(path) == 1
    save(path, 3)
    assert load(path) == 3
    assert leftovers(path) == []


def test_a_reader_keeps_what_it_reads(path: Path) -> None:
    reader = CheckpointReader(path)
    save(path, 2)
    for name, tensors in contents(1).items():
        assert reader.read(name)["x"].equal(tensors["x"])
    assert load(path) == 2
    del reader
    save(path, 3)
    assert leftovers(path) == []


def test_a_checkpoint_that_is_read_is_not_removed(path: Path) -> None:
    reader = CheckpointReader(path)
    assert not remove(path)
    assert load(path) == 1
    del reader
    assert remove(path)
    assert not any(path.parent.iterdir())


def test_threads_that_save_and_load_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 0)
    errors: list[BaseException] = []

    def work(action: Callable[[int], object]) -> None:
        try:
            for number in range(60):
                action(number)
        except BaseException as error:
            errors.append(error)

    actions: list[Callable[[int], object]] = [lambda n: save(path, n)] * 3 + [lambda n: load(path)] * 3
    threads = [threading.Thread(target=work, args=(action,)) for action in (*actions, lambda n: sweep(tmp_path))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    save(path, 7)
    assert load(path) == 7
    assert leftovers(path) == []


@pytest.mark.timeout(170)  # processes that import torch
def test_processes_that_save_and_load_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = (
        "import sys; from pathlib import Path; from tests.disk.test_directory import load, save, sweep\n"
        "path = Path(sys.argv[1])\n"
        "for i in range(100): save(path, int(sys.argv[2])); sweep(path.parent); load(path)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(number)], cwd=ROOT, stderr=subprocess.PIPE)
        for number in range(3)
    ]
    outputs = [process.communicate(timeout=150)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert load(path) in range(3)
    save(path, 7)
    assert leftovers(path) == []


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


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


# -- manifests that were made, not damaged ----------------------------------------------------------------------------


def rendered(body: Any, **others: Any) -> bytes:
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    document = {"body": body, "format": "asyncbuf.checkpoint", "sha256": digest, "version": 1} | others
    return (json.dumps(document, indent=1) + "\n").encode()


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())["body"]
    return body


def forge(path: Path, change: Callable[[dict[str, Any]], object], **others: Any) -> None:
    body = body_of(path)
    change(body)
    (path / MANIFEST).write_bytes(rendered(body, **others))


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


@pytest.mark.parametrize("version", [2, 99, 0, -1, None, "1", 1.0, True, [1]], ids=repr)
def test_unknown_version_is_named(path: Path, version: Any) -> None:
    forge(path, lambda body: None, version=version)
    with pytest.raises(CheckpointVersionError, match="from 1 to 1, found") as caught:
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
    "no digest": lambda body: body["files"][FILES[0]].pop("sha256"),
    "digest as a number": lambda body: body["files"][FILES[0]].update(sha256=1),
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


# -- links and pickles ------------------------------------------------------------------------------------------------


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
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
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
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda body: body["files"].update({FILES[0]: entry}))
    with pytest.raises(CheckpointCorruptError, match="expected tensors"):
        load(path)


# -- crashes ----------------------------------------------------------------------------------------------------------

_CRASHED = 77
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}


def _changes_something(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return event in _EVENTS
    _, mode, flags = arguments
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) or (isinstance(mode, str) and mode[0] in "wxa")


def _fail_at(operation: int, *, crash: bool) -> None:
    """Let one operation on files not happen: the process ends there, or the operation fails as on a full disk."""
    lock = threading.Lock()
    left = operation

    def fail() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0 and crash:
                os._exit(_CRASHED)
            if left == 0:
                raise OSError(errno.ENOSPC, "no space left")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes_something(event, arguments):
            fail()

    os.fsync = lambda fd: fail()
    sys.addaudithook(hook)


def _in_child(action: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _saved(target: Path, operation: int, *, crash: bool) -> int:
    _fail_at(operation, crash=crash)
    try:
        save(target, 2)
    except OSError as error:
        return 1 if error.errno == errno.ENOSPC else 98
    return 0


def _die_everywhere(root: Path, *, crash: bool, over: bool) -> int:
    """Let a save die at each of its operations on files, one after the other; how many there are."""
    for operation in itertools.count(1):
        shutil.rmtree(root, ignore_errors=True)
        old = root / "step-000001"
        save(old, 1)
        new = old if over else root / "step-000002"
        code = _in_child(lambda new=new, n=operation: _saved(new, n, crash=crash))  # type: ignore[misc]
        where = f"{'crash' if crash else 'error'} at operation {operation}, {'over' if over else 'beside'}: exit {code}"
        assert code in ((0, _CRASHED) if crash else (0, 1)), where
        if over:
            assert load(old) in ((2,) if code == 0 else (1, 2)), where
        else:
            assert load(old) == 1, where
            assert not new.exists() or load(new) == 2, where
            assert new.exists() or code != 0, where
        if code == 1:
            assert not [name for name in leftovers(old) if f"{MANIFEST}." not in name], where
        sweep(root)
        save(new, 3)
        assert load(new) == 3, where
        assert not leftovers(new), where
        if code == 0 and operation > 1 and _untouched(root, operation):
            return operation - 1
    raise AssertionError


def _untouched(root: Path, operation: int) -> bool:
    """Whether a save has fewer operations than that, so that all of them had their turn."""
    target = root / "step-000009"
    code = _in_child(lambda: _saved(target, operation, crash=True))
    shutil.rmtree(target, ignore_errors=True)
    sweep(root)
    return code == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_crash_or_error_at_any_operation_leaves_whole_checkpoints(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "root")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    counts = [int(line) for line in process.stdout.split()]
    # Each file is made and synced, each directory made and synced, the manifest renamed: no operation was left out.
    assert len(counts) == 4
    assert min(counts) >= 4 * 2 + 3


def main() -> None:
    root = Path(sys.argv[1])
    os.fsync = lambda fd: None  # no power is lost here, and it takes most of the time
    for crash, over in itertools.product((True, False), (False, True)):
        print(_die_everywhere(root, crash=crash, over=over))


if __name__ == "__main__":
    main()


# -- savers, readers and removers at once -----------------------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_a_save_begins_leaves_no_half(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[bool] = []
    look = directory.is_checkpoint

    def looked(there: Path) -> bool:
        found = look(there)
        if found and not removed:
            removed.append(remove(there))  # between the look and the lock
        return found

    monkeypatch.setattr(directory, "is_checkpoint", looked)
    save(path, 2)
    assert removed == [True]
    assert load(path) == 2
    assert leftovers(path) == []


def test_a_checkpoint_that_is_being_replaced_is_not_removed(path: Path) -> None:
    with CheckpointWriter(path) as writer:
        assert not remove(path)
        for name, tensors in contents(2).items():
            writer.write(name, tensors)
        assert not remove(path)
        writer.commit({"number": 2})
    assert load(path) == 2
    assert remove(path)


def test_a_save_to_a_place_where_another_came_first_and_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-000001"
    moves: list[Path] = []
    rename = Path.rename

    def renamed(source: Path, target: Path) -> Path:
        if target == path and not moves:
            moves.append(source)
            monkeypatch.undo()
            save(path, 7)  # another one is there now, so that the rename fails
            monkeypatch.setattr(directory, "is_checkpoint", looked)
        return rename(source, target)

    def looked(there: Path) -> bool:
        if len(moves) == 1:
            moves.append(there)
            assert remove(there)
        return is_checkpoint(there)

    monkeypatch.setattr(Path, "rename", renamed)
    save(path, 2)
    assert len(moves) == 2
    assert load(path) == 2
    assert leftovers(path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_ends_takes_no_lock_with_it(path: Path) -> None:
    reader = CheckpointReader(path)
    child = os.fork()
    if child == 0:
        del reader
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not remove(path)
    del reader
    assert remove(path)
