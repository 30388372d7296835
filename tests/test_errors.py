"""Every error: what it is, and that it survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import asyncbuf
from asyncbuf import AsyncBufError, PrefetchError, SchemaError, WrongLoopError, errors

CLASSES = [
    value for _, value in sorted(vars(errors).items()) if inspect.isclass(value) and issubclass(value, AsyncBufError)
]


class MyPrefetchError(PrefetchError):
    pass


def make(cls: type[Exception]) -> Exception:
    return cls("what went wrong", 7, [1, 2]) if issubclass(cls, PrefetchError) else cls("what went wrong")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_base_class_and_public_name(cls: type[Exception]) -> None:
    assert issubclass(cls, AsyncBufError)
    assert getattr(asyncbuf, cls.__name__) is cls
    assert cls.__name__ in asyncbuf.__all__


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [*CLASSES, MyPrefetchError], ids=lambda cls: cls.__name__)
def test_pickling(cls: type[Exception], protocol: int) -> None:
    error = make(cls)
    for found in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(found) is cls
        assert str(found) == "what went wrong"
        if isinstance(found, PrefetchError):
            assert (found.number, found.indices) == (7, (1, 2))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_notes_are_pickled_too(cls: type[Exception]) -> None:
    error = make(cls)
    error.add_note("seen by worker 3")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen by worker 3"]


def test_prefetch_error_keeps_plain_numbers() -> None:
    indices = torch.tensor([3, 4]).tolist()
    error = PrefetchError("message", 5, indices)
    indices.append(6)
    assert error.indices == (3, 4)
    assert str(error) == "message"


def test_errors_that_are_also_built_in_ones() -> None:
    assert issubclass(SchemaError, ValueError)
    assert issubclass(WrongLoopError, RuntimeError)
