"""What the contract suites share: rules that name what broke them, and ways to disturb what a part hands out."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf._runtime.arguments import count, factory, seconds
from asyncbuf.rows import NotYet
from asyncbuf.testing.compare import difference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf._table.table import Table
    from asyncbuf.rows import Answer


def check_arguments(**arguments: Any) -> None:
    """Check what a suite was called with: functions that make something, numbers of things, and seconds.

    Raises:
        TypeError, ValueError: an argument is of another kind, or out of range.
    """
    for name, value in arguments.items():
        if name.startswith("make") or name in ("factory", "items"):
            factory(value, name)
        elif name == "seconds":
            seconds(value, name, is_positive=True)
        else:
            count(value, name, 0 if name in ("steps", "hops") else 1)


class Contract:
    """The rules that one part is held to.

    Args:
        part: name of the class.

    Attributes:
        where: what is being done to the part, in words: seed, step and operation.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.where = "when it is new"

    def broken(self, rule: str, expected: object, found: object) -> AssertionError:
        """The error that names part, rule, step, what was expected and what was found."""
        return AssertionError(
            f"{self.part} breaks the rule {rule!r} ({self.where}): expected {expected}, found {found}"
        )

    def require(self, holds: bool, rule: str, expected: object, found: object) -> None:
        """See that a rule holds.

        Raises:
            AssertionError: it does not.
        """
        if not holds:
            raise self.broken(rule, expected, found)

    @contextlib.contextmanager
    def allowed(self, rule: str) -> Iterator[None]:
        """What is done in the block is allowed, so that an error of the part breaks the rule."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            raise self.broken(rule, "no error", repr(error)) from error

    def resume(self, table: Table, rows: tuple[Any, Any], parts: dict[str, Any], capacity: int) -> None:
        """Put a new table where another one was saved.

        Args:
            table: the table, with a part of its own.
            rows: what the storage gave out: its description, and the chunks.
            parts: the state of each part by name, as plain data.
            capacity: number of rows.
        """
        meta, chunks = rows
        table.storage.load_rows(meta, iter(chunks))()
        with self.allowed("load_state_dict and verify take what state_dict gave out"):
            for name, part in table.components():
                part.load_state_dict(revived(parts[name]))
            table.verify(capacity)

    @contextlib.contextmanager
    def kept(self, rule: str) -> Iterator[None]:
        """What is asserted in the block is part of a rule; errors break it, too."""
        try:
            with self.allowed(rule):
                yield
        except AssertionError as error:
            if str(error).startswith(f"{self.part} breaks"):
                raise
            raise AssertionError(f"{self.part} breaks the rule {rule!r} ({self.where}): {error}") from error

    def same(self, found: Any, expected: Any, rule: str, what: str = "") -> None:
        """See that two values are the same bit for bit; ``what`` stands before the words that say what differs."""
        if not _surely_same(found, expected):
            differs = difference(found, expected)
            self.require(differs is None, rule, "the same", f"{what}: {differs}" if what else differs)

    def state(self, part: Any) -> Any:
        """The state of a part as plain data in memory of its own."""
        with self.allowed("state_dict gives plain data"):
            return encode(part.state_dict(), "state_dict")

    @contextlib.contextmanager
    def unchanged(self, part: Any, rule: str) -> Iterator[None]:
        """What is done in the block does not change the state of a part."""
        before = self.state(part)
        yield
        self.same(self.state(part), before, rule)

    def answer(self, answer: Any, question: str) -> Answer:
        """What ``may_draw`` or ``may_write`` said, once it is found to be an answer."""
        rule = f"{question} answers True, or NotYet with a reason"
        is_reasoned = isinstance(answer, NotYet) and isinstance(answer.reason, str) and bool(answer.reason.strip())
        self.require(answer is True or is_reasoned, rule, "True or NotYet(reason)", repr(answer))
        return answer  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """What is done in the block leaves the global generators alone."""
        before = _global_generators()
        yield
        moved = [name for name, state in _global_generators().items() if state != before[name]]
        rule = "global generators are left alone"
        self.require(not moved, rule, "randomness from the generator that is handed in", f"{moved} moved on")


def _surely_same(found: Any, expected: Any) -> bool:
    """Whether plain data is the same beyond doubt: the common case, which need not be put into words."""
    kind = type(found)
    if kind is not type(expected):
        return False
    if kind is dict:
        return list(found) == list(expected) and all(map(_surely_same, found.values(), expected.values()))
    if kind is list or kind is tuple:
        return len(found) == len(expected) and all(map(_surely_same, found, expected))
    if kind is torch.Tensor:
        if any(tensor.requires_grad or not tensor.is_cpu for tensor in (found, expected)):
            return False
        bits = _bits_of(found)
        is_alike = found.dtype is expected.dtype and found.shape == expected.shape
        return is_alike and bits is not None and bits == _bits_of(expected)
    return kind in (int, str, bool, type(None)) and bool(found == expected)


def _bits_of(tensor: torch.Tensor) -> bytes | None:
    try:
        return tensor.numpy().tobytes()
    except (RuntimeError, TypeError):
        return None


def _global_generators() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": (kind, np.asarray(keys).tobytes(), rest),
        "random": random.getstate(),
    }


def revived(plain: Any) -> Any:
    """Plain data as a checkpoint brings it back, decoded: what ``load_state_dict`` gets."""
    document, tensors = split(plain)
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return decode(join(json.loads(json.dumps(document, allow_nan=False)), kept))


def is_picklable(part: Any) -> bool:
    """Whether ``pickle`` takes a part. Those that are local to a function, it does not."""
    try:
        pickle.dumps(part)
    except Exception:
        return False
    return True


def scramble(value: Any) -> None:
    """Overwrite all memory of a value: tensors, arrays, and the containers that hold them."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # an expanded one cannot be written to
            value.view(torch.bool).logical_not_() if value.dtype is torch.bool else value.detach().fill_(1)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and not value.dtype.hasobject:
            value.fill(1)
    elif type(value) is dict or type(value) is list:
        children = list(value.values() if isinstance(value, dict) else value)
        value.clear()
        for child in children:
            scramble(child)
    elif type(value) is tuple:
        for child in value:
            scramble(child)


def scramble_leaves(items: Any) -> None:
    """Overwrite the tensors and arrays of a tree, and leave its containers as they are."""
    leaves, _ = tree.flatten(items, batched=False)
    for leaf in leaves:
        scramble(leaf)


def malformed(state: Any) -> Iterator[tuple[str, Any]]:
    """States that are like a good one, and wrong: each with what is wrong, in words."""
    yield "None in place of the state", None
    yield "a list in place of the state", []
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        rest = {name: copy.deepcopy(other) for name, other in state.items() if name != key}
        yield f"no entry {key!r}", rest
        for what, strange in _strange(value):
            yield f"{what} as entry {key!r}", {**copy.deepcopy(rest), key: strange}


def _strange(value: Any) -> Iterator[tuple[str, Any]]:
    if value is not None:
        yield "None", None
    if not isinstance(value, str):
        yield "a text", "text"
    if isinstance(value, torch.Tensor):
        yield "a longer tensor", torch.zeros((*value.shape[:-1], *(size + 1 for size in value.shape[-1:])))
        yield "a tensor with another axis", torch.zeros((2, *value.shape), dtype=value.dtype)
    if isinstance(value, dict):
        for key in value:
            yield f"a dict without {key!r}", {name: child for name, child in value.items() if name != key}
    if isinstance(value, list | tuple) and value:
        yield "a list with a strange end", [*value[:-1], object]


def check_malformed(contract: Contract, part: Any, good: Any) -> None:
    """A state that does not fit is refused, or taken whole: an error leaves everything as it was.

    Args:
        contract: the rules.
        part: with a state of its own. If it accepts one of the malformed states, it gets its own back.
        good: plain data of the state that is made worse.
    """
    rule = "load_state_dict takes all of a state or nothing"
    before = contract.state(part)
    where = contract.where
    for what, state in malformed(revived(good)):
        contract.where = f"{where}, load_state_dict with {what}"
        try:
            part.load_state_dict(state)
        except Exception:
            with contract.allowed(rule):
                after = part.state_dict()
            contract.same(encode(after, "state_dict"), before, rule)
        else:
            with contract.allowed("load_state_dict refuses or takes over a state"):
                part.state_dict()
            with contract.allowed("load_state_dict takes back what state_dict gave out"):
                part.load_state_dict(revived(before))
    contract.where = where
    contract.same(contract.state(part), before, "load_state_dict takes back what state_dict gave out")
