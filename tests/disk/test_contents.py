"""What is written to a checkpoint directory comes back bit for bit."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointCorruptError, CheckpointError
from asyncbuf._disk.manifest import is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf._plain.codec import DTYPES
from tests.disk.helpers import FILES, data_of, load, save

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("length", range(1, 9))
def test_elements_lie_where_a_processor_takes_them(tmp_path: Path, name: str, length: int) -> None:
    """Torch ends the process where a complex number does not begin at a multiple of its size."""
    tensors = {"x" * length: of_dtype(name, 3, 5), "y": of_dtype("int64", length), "z": of_dtype("int32", length)}
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.write("x.safetensors", tensors)
        writer.commit(None)
    reader = CheckpointReader(tmp_path / "c")
    memory = np.empty(reader.nbytes("x.safetensors"), np.uint8)
    for found in (reader.read_over("x.safetensors", memory), reader.read("x.safetensors")):
        assert not any(tensor.data_ptr() % tensor.element_size() for tensor in found.values())
        for key, tensor in tensors.items():
            check_equal(found[key], tensor)


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
