"""n-step returns made before items are written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from asyncbuf._plain.codec import decode, encode
from asyncbuf._plain.state import fields
from asyncbuf._plain.tree import Spec, flatten, unflatten
from asyncbuf._plain.treespec import spec_from_plain, spec_to_plain
from asyncbuf._table.versioned import REFUSED
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncbuf.rows import Int64Array, Placement
    from asyncbuf.sampler import NStep
    from asyncbuf.sampler._tracker import ItemKeys

_STEPS, _DISCOUNT = "steps", "discount"


class Writes(Protocol):
    """What the adder needs of the way of an item."""

    def check_writable(self) -> None:
        """Refuse items that the buffer does not take."""

    async def write(
        self,
        prepare: Callable[[Any], Any],
        items: Any,
        priority: Any = None,
        table: Any = None,
        *,
        written: Callable[[], None] | None = None,
    ) -> Placement:
        """Write items into a table; ``written`` is called in the step in which they are in the table."""
        ...


class _Waiting:
    """Items that wait for later ones. The leaves of a batch of items, by position.

    Args:
        spec: structure of an item.
        leaves: tensors ``[items, ...]``.
    """

    def __init__(self, spec: Spec, leaves: list[torch.Tensor]) -> None:
        self.spec = spec
        self.paths = spec.paths()
        self.leaves = leaves

    def __len__(self) -> int:
        return len(self.leaves[0])

    def column(self, path: str) -> torch.Tensor:
        """The values of a field."""
        try:
            return self.leaves[self.paths.index(path)]
        except ValueError:
            raise SchemaError(f"expected items with the field {path!r}, found {self.paths}") from None

    def taken(self, indices: torch.Tensor) -> _Waiting:
        """Some of the items, in memory of their own."""
        return _Waiting(self.spec, [leaf[indices] for leaf in self.leaves])

    def followed_by(self, more: _Waiting) -> _Waiting:
        """These items, and more of the same structure.

        Raises:
            SchemaError: the others have another structure.
        """
        if self.spec != more.spec:
            raise SchemaError(f"expected items of {self.spec}, as before; found {more.spec}")
        for path, old, new in zip(self.paths, self.leaves, more.leaves, strict=True):
            if old.shape[1:] != new.shape[1:] or old.dtype is not new.dtype:
                raise SchemaError(
                    f"{path}: expected {old.dtype} {list(old.shape[1:])}, as before; found {new.dtype} "
                    f"{list(new.shape[1:])}"
                )
        joined = [torch.cat([old, new]) for old, new in zip(self.leaves, more.leaves, strict=True)]
        return _Waiting(self.spec, joined)


class NStepAdder:
    """Writes items with n-step returns: made once, before they are stored, and not at each draw.

    ``buffer.adder(NStep(3, gamma=0.99), end_key=...)`` makes one. What it writes of an item is what ``NStep`` makes of
    a drawn one: ``reward`` is the sum of several rewards, ``next_obs`` and ``terminated`` are those of the last step,
    and two fields are added: ``steps``, int64, how many steps they are, and ``discount``, float32, by which the value
    of ``next_obs`` counts (0 after a terminated step). So any sampler draws n-step items, as fast as others.

    An item is written when the items are there that its return needs, or when its trajectory ends. Until then it waits
    here; ``flush`` writes it with those that are there. Items of a trajectory keep their order. Calls may overlap: each
    begins when those before it have written. With an error, or when a call is cancelled before its items are written,
    nothing has happened, and the call may be made again.

    The items that wait are the state of the adder: save it beside the buffer, as in
    ``await checkpointer.save(step, buffer=buffer, adder=adder)``.

    Args:
        returns: the number of steps, the discount and the fields.
        keys: the fields that tell trajectories apart, and where they end.
        prepare: of the buffer's storage.
        writes: the way of an item.
        turn: what each call awaits first.
        table: name of the table that they go into; None if the writer has no tables.
    """

    def __init__(
        self,
        returns: NStep,
        keys: ItemKeys,
        prepare: Callable[[Any], Any],
        writes: Writes,
        turn: Callable[[], Awaitable[None]],
        table: str | None = None,
    ) -> None:
        self._returns = returns
        self._keys = keys
        self._prepare = prepare
        self._writes = writes
        self._turn = turn
        self._table = table
        self._waiting: _Waiting | None = None
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        """Number of items that wait for later ones."""
        return 0 if self._waiting is None else len(self._waiting)

    async def extend(self, items: Any) -> torch.Tensor:
        """Take steps, of one environment or of several whose items are told apart by the ``trajectory_key``.

        Args:
            items: a tree whose leaves have shape ``[items, *item]``, which are copied.

        Returns:
            The rows that were written now: int64 ``[written]``, often of items that were taken before.

        Raises:
            SchemaError: the items lack a field, or differ in structure from those before.
            BufferClosedError, BufferFailedError: as of ``buffer.extend``.
        """
        await self._turn()
        return await self._take(_batch_of(items, is_one=False))

    async def add(self, item: Any) -> torch.Tensor:
        """Take one step, whose leaves have no leading axis; otherwise as ``extend``."""
        await self._turn()
        return await self._take(_batch_of(item, is_one=True))

    async def flush(self) -> torch.Tensor:
        """Write the items that wait, with the rewards that are there, as if their trajectories were cut off here.

        Later items of these trajectories begin anew.

        Returns:
            The rows that were written: int64 ``[written]``.
        """
        await self._turn()
        async with self._lock:
            if self._waiting is None:
                return torch.empty(0, dtype=torch.int64)
            return await self._write(self._waiting, ends_all=True)

    async def _take(self, items: _Waiting) -> torch.Tensor:
        self._writes.check_writable()
        self._prepare(self._made(items, *self._found(items, ends_all=True)[:2]))  # what is wrong is said at once
        async with self._lock:
            self._writes.check_writable()
            waiting = items if self._waiting is None else self._waiting.followed_by(items)
            return await self._write(waiting, ends_all=False)

    async def _write(self, waiting: _Waiting, *, ends_all: bool) -> torch.Tensor:
        firsts, way, rest = self._found(waiting, ends_all=ends_all)

        def written() -> None:
            self._waiting = waiting.taken(torch.from_numpy(rest)) if len(rest) else None

        if not len(firsts):
            written()
            return torch.empty(0, dtype=torch.int64)
        made = self._made(waiting, firsts, way)
        placement = await self._writes.write(self._prepare, made, table=self._table, written=written)
        if placement.note is REFUSED:
            written()
        return torch.from_numpy(placement.rows)

    def _found(self, waiting: _Waiting, *, ends_all: bool) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Items whose returns can be made, the steps of each, and the other items.

        Returns:
            int64 ``[made]``; int64 ``[n, made]``, where the last step of a trajectory is repeated; int64 ``[others]``.
        """
        count, n = len(waiting), self._returns.n
        columns = {path: _numbers(waiting.column(path)) for path in self._keys.columns}
        self._keys.check_columns(columns)
        keys, ends = self._keys.of_columns(columns)
        order = np.arange(count) if keys is None else keys.argsort(kind="stable")
        ends = np.zeros(count, np.bool_) if ends is None else ends[order]
        stops = ends.copy()
        stops[-1] = True
        if keys is not None:
            stops[:-1] |= keys[order[1:]] != keys[order[:-1]]
        # Where the trajectory of each ends, as far as it is here.
        last = np.flatnonzero(stops)[np.searchsorted(np.flatnonzero(stops), np.arange(count))]
        is_ready = ends[last] | (last - np.arange(count) >= n - 1) | ends_all
        way = np.minimum(np.arange(count) + np.arange(n)[:, None], last)
        back = np.argsort(order)  # from positions of items to those in order of trajectories
        firsts = np.flatnonzero(is_ready[back])
        return firsts, order[way[:, back[firsts]]], np.flatnonzero(~is_ready[back])

    def _made(self, items: _Waiting, firsts: Int64Array, way: Int64Array) -> Any:
        """Items with returns, as the storage takes them."""
        returns, lasts = self._returns, torch.from_numpy(way[-1])
        reward = items.column(returns.reward_key)
        rewards = _numbers(reward)
        ended = None if returns.terminated_key is None else _numbers(items.column(returns.terminated_key))[way[-1]]
        total, steps, discounts = returns.computed(way, rewards[way], ended)
        made = [leaf[torch.from_numpy(firsts)] for leaf in items.leaves]
        for path in returns.last_keys:
            found = [i for i, other in enumerate(items.paths) if other == path or other.startswith(f"{path}/")]
            if not found:
                raise SchemaError(f"expected items with the field {path!r}, found {items.paths}")
            for i in found:
                made[i] = items.leaves[i][lasts]
        kind = reward.dtype if reward.is_floating_point() else torch.float32
        made[items.paths.index(returns.reward_key)] = torch.from_numpy(total).to(kind)
        tree = unflatten(items.spec, made)
        if not hasattr(tree, "keys"):
            raise SchemaError(f"expected items that are dicts, found a {type(tree).__name__}")
        for key, value in ((_STEPS, steps), (_DISCOUNT, discounts)):
            if key in tree.keys():  # noqa: SIM118 (a TensorDict has no other way)
                raise SchemaError(f"{key}: expected items without this field, which the adder adds; found one")
            tree[key] = torch.from_numpy(value)
        return tree

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The items that wait, in memory of their own."""
        waiting = self._waiting
        if waiting is None:
            return {"structure": None, "items": []}
        return {"structure": spec_to_plain(waiting.spec), "items": [leaf.clone() for leaf in waiting.leaves]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the items that were saved.

        Raises:
            CheckpointError: the state does not fit; nothing has changed.
        """
        name = type(self).__name__
        if not isinstance(state, dict) or state.get("structure", 0) is None:
            plain = {key: value for key, value in state.items() if value is not None} if isinstance(state, dict) else 0
            if fields(plain, name, items=list) != [[]]:
                raise CheckpointCorruptError(f"{name}: expected no items without a structure, found some")
            self._waiting = None
            return
        structure, items = fields({**state, "structure": [state.get("structure")]}, name, structure=list, items=list)
        try:
            waiting = _Waiting(spec_from_plain(structure[0]), [decode(encode(leaf)) for leaf in items])
            sizes = {len(leaf) for leaf in waiting.leaves}
            if len(waiting.paths) != len(waiting.leaves) or len(sizes) != 1 or sizes == {0}:
                raise CheckpointCorruptError(f"{name}: expected items of {waiting.spec}, found {len(items)} fields")
            self._made(waiting, *self._found(waiting, ends_all=True)[:2])
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointCorruptError(f"{name}: expected the items that wait, found {error!r}") from error
        self._waiting = waiting


def _numbers(column: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a field as an array; float32 where numpy lacks the dtype."""
    if column.is_floating_point() and column.dtype not in (torch.float16, torch.float32, torch.float64):
        column = column.to(torch.float32)
    values: np.ndarray[Any, Any] = column.numpy()
    return values


def _batch_of(items: Any, *, is_one: bool) -> _Waiting:
    """Items as tensors in memory of their own."""
    leaves, spec = flatten(items, batched=not is_one)
    if not leaves:
        raise SchemaError("expected items with fields, found none")
    tensors = [_tensor(leaf, path) for leaf, path in zip(leaves, spec.paths(), strict=True)]
    if is_one:
        return _Waiting(spec, [tensor[None] for tensor in tensors])
    sizes: Sequence[Any] = [tensor.shape[0] if tensor.ndim else None for tensor in tensors]
    if None in sizes or len(set(sizes)) != 1 or not sizes[0]:
        raise SchemaError(
            f"expected as many items in each field, at least one; found {dict(zip(spec.paths(), sizes, strict=True))}"
        )
    return _Waiting(spec, tensors)


def _tensor(leaf: Any, path: str) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float32)
    try:
        return torch.from_numpy(np.array(leaf))
    except TypeError as error:
        raise SchemaError(f"{path}: expected a number, tensor or array, found a {type(leaf).__name__}") from error
