"""Where the prompts of a training run come from: each once per epoch, or by weights; none lost, none twice."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from asyncbuf._plain.counter_hash import CounterHash
from asyncbuf._plain.state import Seed, fields, int64s, same
from asyncbuf._prompt_weights import ids_of, numbers_of, saved_tree, tree_of
from asyncbuf._runtime.arguments import count, flag, shown
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._permutation import Permutation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from asyncbuf.sampler._sum_tree import SumTree


PromptT = TypeVar("PromptT")
PromptT_co = TypeVar("PromptT_co", covariant=True)

# A hash of 64 bits as a number from 0 to 1, which has 53 of them.
_BITS = 53
_COUNTS: tuple[str, ...] = ("handed_out", "done", "discarded", "put_back", "asked_again", "duplicates")


class PromptDataset(Protocol[PromptT_co]):
    """What prompts are taken from: a list, or anything with a length and numbered elements."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> PromptT_co:
        """The prompt of a number from 0 on."""
        ...


class PromptCounts(NamedTuple):
    """What became of prompts. At every moment ``handed_out == done + discarded + put_back + outstanding``.

    Attributes:
        handed_out: how many were handed out. After a restore, those that will be given again do not count.
        done: of those, how many were acknowledged.
        discarded: how many were given up.
        put_back: how many were put back, and are or were handed out again.
        outstanding: how many are under way.
        waiting: how many stand before the fresh ones.
        asked_again: how many were put back that had been acknowledged or discarded before.
        duplicates: how many calls were ignored, because the prompt was not under way.
    """

    handed_out: int
    done: int
    discarded: int
    put_back: int
    outstanding: int
    waiting: int
    asked_again: int
    duplicates: int


class PromptSource(Generic[PromptT]):
    """Hands out prompts with their ids, and knows which are under way, across crashes.

    An id is the number of a prompt in the data set. Whoever has dealt with a prompt says ``done(id)``. Prompts that
    were handed out and not done when a checkpoint was saved are given again first after it was restored, in order::

        source = PromptSource(prompts, epochs=2, generator=torch.Generator().manual_seed(0))
        async for id, prompt in source:
            await buffer.extend(await answers(prompt))
            source.done(id)

    Save it together with the buffer, as in ``checkpointer.save(step, buffer=buffer, prompts=source)``, and say ``done``
    in the same step in which the answers are in the buffer, as here: then a prompt is in exactly one of both in each
    checkpoint. Or ``hold(id)`` it in the step that reserves its answers, and say ``done`` much later.

    A checkpoint has ids and numbers, never the prompts; the data set must be the same.

    Without weights each epoch has every prompt once, in an order of its own. It is computed, not stored, whatever the
    size. With weights, each prompt is drawn with replacement, with a chance in proportion to its weight at that moment,
    and an epoch is as many draws as there are prompts: a prompt may come several times in one.

    The stream of prompts depends on the generator and on the order of the calls. All methods belong to the event loop.

    Args:
        dataset: a sequence of prompts; or anything with ``len(dataset)`` and ``dataset[id]``, which should be quick.
        shuffle: a new random order for each epoch; otherwise prompts come in the order of their ids.
        weights: float ``[prompts]``, not negative; see ``set_weights``. None for no weights at all.
        epochs: after how many epochs it ends; None for never. Not part of a checkpoint: a longer run may go on.
        generator: one number is drawn from it now, which decides all that is random; None takes a random one.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        dataset: PromptDataset[PromptT],
        *,
        shuffle: bool = True,
        weights: Any = None,
        epochs: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._dataset = dataset
        self._length = _length(dataset)
        self._shuffle = flag(shuffle, "shuffle")
        self._epochs = None if epochs is None else count(epochs, "epochs", 1, example=3)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, found {shown(generator)}")
        if weights is not None and not shuffle:
            raise ValueError(
                "shuffle: expected True, because prompts that have weights are drawn at random; found False"
            )
        self._tree = None if weights is None else tree_of(numbers_of(weights, "weights", self._length), "weights")
        if generator is None:
            self._seed = torch.Generator().seed() >> 1
        else:
            self._seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
        self._hash = CounterHash(self._seed)
        self._epoch = self._position = 0
        self._order: tuple[int, Permutation] | None = None  # of an epoch
        self._line: deque[int] = deque()
        self._in_line: Counter[int] = Counter()
        self._given = 0  # names each prompt that is handed out
        self._out: dict[int, int] = {}  # the ids of those under way
        self._names: dict[int, deque[int]] = {}  # and by id, how they are named
        self._held: Counter[int] = Counter()  # how many of these are in the checkpoint elsewhere
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._waiters: dict[asyncio.Future[None], None] = {}

    # -- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of prompts of the data set."""
        return self._length

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next fresh prompt belongs to; ``epochs`` at the end of all."""
        return self._epoch + (self._position == self._length)

    @property
    def position(self) -> int:
        """How many fresh prompts of that epoch were handed out."""
        return self._position % self._length

    @property
    def outstanding(self) -> list[int]:
        """The ids of the prompts that are under way, in the order in which they were handed out."""
        return list(self._out.values())

    @property
    def counts(self) -> PromptCounts:
        """What became of prompts so far."""
        return PromptCounts(**self._counts, outstanding=len(self._out), waiting=len(self._line))

    @property
    def weights(self) -> torch.Tensor | None:
        """The weights: float64 ``[prompts]``, a copy; None if it has none."""
        return None if self._tree is None else torch.from_numpy(self._tree.weights.copy())

    def __repr__(self) -> str:
        """The state in one line."""
        last = "" if self._epochs is None else f" of {self._epochs}"
        return (
            f"<PromptSource {self.position}/{self._length} of epoch {self.epoch}{last}, {len(self._out)} under way, "
            f"{len(self._line)} to be given again>"
        )

    # -- handing out --------------------------------------------------------------------------------------------------

    async def next(self, *, wait: bool = False) -> tuple[int, PromptT]:
        """The next prompt: one that was put back, or else a fresh one.

        A call that is cancelled has taken none.

        Args:
            wait: at the end, wait for as long as prompts are under way: one may be put back.

        Returns:
            Its id and the prompt.

        Raises:
            StopAsyncIteration: all epochs are over, and no prompt was put back. One may be later, unless ``wait``.
        """
        flag(wait, "wait")
        await asyncio.sleep(0)  # a loop of calls starves nobody
        while (found := self._upcoming()) is None:
            if not wait or not self._out:
                raise StopAsyncIteration
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
        prompt = self._dataset[found]  # what it raises leaves everything as it was
        self._take(found)
        return found, prompt

    def __aiter__(self) -> Self:
        """``async for id, prompt in source``: ends when ``next()`` would."""
        return self

    async def __anext__(self) -> tuple[int, PromptT]:
        """As ``next``."""
        return await self.next()

    async def until_done(self) -> AsyncIterator[tuple[int, PromptT]]:
        """``async for id, prompt in source.until_done()``: ends when every prompt is done or discarded.

        For several workers that share a source: none of them ends while another may put its prompt back. A prompt that
        nobody says ``done`` for keeps all of them waiting.
        """
        while True:
            try:
                found = await self.next(wait=True)
            except StopAsyncIteration:
                return
            yield found

    def _upcoming(self) -> int | None:
        """The id of the next prompt; None at the end."""
        if self._line:
            return self._line[0]
        if self._position == self._length:
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._epoch, self._position = self._epoch + 1, 0
        if self._epochs is not None and self._epoch >= self._epochs:
            return None  # of a checkpoint that came further
        if self._tree is not None:
            return self._drawn(self._tree)
        return self._ordered() if self._shuffle else self._position

    def _drawn(self, tree: SumTree) -> int:
        random = self._hash.at(self._epoch * self._length + self._position) >> (64 - _BITS)
        total = tree.total
        point = min(random / 2**_BITS * total, float(np.nextafter(total, 0.0)))
        return int(tree.find(np.array([point]))[0])

    def _ordered(self) -> int:
        if self._order is None or self._order[0] != self._epoch:
            self._order = self._epoch, Permutation(self._length, self._hash.at(self._epoch) >> 1)
        return int(self._order[1][self._position : self._position + 1])

    def _take(self, id: int) -> None:
        if self._line:
            self._line.popleft()
            self._in_line[id] -= 1
            if not self._in_line[id]:
                del self._in_line[id]
        else:
            self._position += 1
        self._out[self._given] = id
        self._names.setdefault(id, deque()).append(self._given)
        self._given += 1
        self._counts["handed_out"] += 1

    # -- what becomes of prompts --------------------------------------------------------------------------------------

    def done(self, id: int) -> bool:
        """A prompt was dealt with: it will not be given again.

        Args:
            id: its id. If it is under way several times, the one that was handed out first.

        Returns:
            Whether it was under way. If not, nothing happens, and ``counts.duplicates`` counts it.

        Raises:
            TypeError, ValueError: there is no prompt with this id.
        """
        return self._settled(self._checked(id), "done")

    def discard(self, id: int) -> bool:
        """A prompt is given up, such as one whose answers a filter refused: a fresh one takes its place.

        As ``done``, and counted apart.
        """
        return self._settled(self._checked(id), "discarded")

    def hold(self, id: int) -> bool:
        """A prompt that is under way is in the checkpoint elsewhere, as in a reservation of a buffer.

        After a restore it is under way still, and not given again, until it is done, discarded or put back. Call it
        right after ``await buffer.reserve(...)``, with no ``await`` between, and save both with one ``Checkpointer``.

        Returns:
            Whether it was under way, and not held.

        Raises:
            TypeError, ValueError: there is no prompt with this id.
        """
        id = self._checked(id)
        if self._held[id] >= len(self._names.get(id, ())):
            return False
        self._held[id] += 1
        return True

    def put_back(self, id: int) -> bool:
        """A prompt is to be handed out again, before all fresh ones and behind those that were put back before.

        One that is under way is not so any more. One that was done, such as one whose answers were evicted unused, is
        asked again. One that waits to be handed out again as it is, and is not under way, is no more than that.

        Args:
            id: its id.

        Returns:
            Whether it will come once more because of this call.

        Raises:
            TypeError, ValueError: there is no prompt with this id.
        """
        id = self._checked(id)
        if not self._settled(id, "put_back", is_known=self._in_line[id] > 0):
            if self._in_line[id]:
                return False
            self._counts["asked_again"] += 1
        self._line.append(id)
        self._in_line[id] += 1
        self._wake()
        return True

    def _checked(self, id: Any) -> int:
        if isinstance(id, np.integer | torch.Tensor) and not np.ndim(id) and np.asarray(id).dtype.kind in "iu":
            id = int(id)
        if count(id, "id", 0) >= self._length:
            raise ValueError(f"id: expected one of the {self._length} prompts, 0 to {self._length - 1}, found {id}")
        return int(id)

    def _settled(self, id: int, how: str, *, is_known: bool = True) -> bool:
        """Whether a prompt was under way, and is not any more."""
        names = self._names.get(id)
        if not names:
            self._counts["duplicates"] += is_known
            return False
        del self._out[names.popleft()]
        if not names:
            del self._names[id]
        self._held[id] -= self._held[id] > 0  # of several, those that are held come first
        if not self._held[id]:
            del self._held[id]
        self._counts[how] += 1
        if not self._out:
            self._wake()
        return True

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    # -- weights ------------------------------------------------------------------------------------------------------

    def set_weights(self, ids: Any, weights: Any) -> None:
        """Give prompts other weights, for the draws from now on. Those of weight 0 are not drawn.

        Args:
            ids: integers ``[n]``; of one that is named twice, the last weight counts.
            weights: float ``[n]``, or one number for all; finite and not negative.

        Raises:
            TypeError: it was made without weights, or these are no numbers.
            ValueError: one is out of range, or all weights would be 0. Nothing has changed.
        """
        tree = self._tree
        if tree is None:
            raise TypeError("set_weights: expected a source made with weights, as in PromptSource(..., weights=[...])")
        where = ids_of(ids, self._length)
        values = numbers_of(weights, "weights", len(where))
        if not len(where):
            return
        before = tree.weights.take(where)
        tree.set(where, values)
        if not 0 < tree.total < np.inf:
            total = tree.total
            tree.set(where, before)
            raise ValueError(f"weights: expected some whose sum is positive and finite, found {total}")

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, position and weights; the ids of prompts to be given again, and of those held; counters."""
        held, given = self._separated()
        again = [*given, *self._line]
        counts = {**self._counts, "handed_out": self._counts["handed_out"] - len(given)}
        return {
            "prompts": self._length,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "again": torch.tensor(again, dtype=torch.int64, device="cpu"),
            "held": torch.tensor(held, dtype=torch.int64, device="cpu"),
            "weights": self.weights,
            "counts": counts,
        }

    def _separated(self) -> tuple[list[int], list[int]]:
        """The ids of the prompts under way: those that are held, and those that are not."""
        left = Counter(self._held)
        held: list[int] = []
        given: list[int] = []
        for id in self._out.values():
            (held if left[id] else given).append(id)
            left[id] -= left[id] > 0
        return held, given

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was saved. Prompts that were under way then, and not held, are the next ones.

        Raises:
            CheckpointMismatchError: it is that of another data set, or of other settings.
            CheckpointCorruptError: it is no such state. Nothing has changed.
        """
        name = type(self).__name__
        is_weighted = isinstance(state, dict) and state.get("weights") is not None
        kinds: dict[str, type] = dict(prompts=int, shuffle=bool, seed=Seed, epoch=int, position=int, again=torch.Tensor)
        kinds |= dict(weights=torch.Tensor if is_weighted else type(None), counts=dict)
        kinds |= {"held": torch.Tensor} if isinstance(state, dict) and "held" in state else {}  # later than the others
        prompts, shuffle, seed, epoch, position, again, weights, counts, *more = fields(state, name, **kinds)
        same(prompts, self._length, f"{name}: number of prompts")
        same(shuffle, self._shuffle, f"{name}: shuffle")
        same(is_weighted, self._tree is not None, f"{name}: whether prompts have weights")
        ids = int64s(again, f"{name}: expected again")
        held = int64s(more[0], f"{name}: expected held") if more else ids[:0]
        known = np.concatenate([ids, held])
        if position > self._length or not ((known >= 0) & (known < self._length)).all():
            raise CheckpointCorruptError(f"{name}: expected a position and ids of {self._length} prompts, found others")
        tree = saved_tree(weights, self._length, name) if is_weighted else None
        counts = dict(zip(_COUNTS, fields(counts, f"{name}: counts", **dict.fromkeys(_COUNTS, int)), strict=True))
        if counts["handed_out"] != counts["done"] + counts["discarded"] + counts["put_back"] + len(held):
            raise CheckpointCorruptError(f"{name}: expected counts that make up handed_out, found {counts}")
        self._tree, self._seed, self._hash = tree, seed, CounterHash(seed)
        self._epoch, self._position, self._order = epoch, position, None
        self._line = deque(ids.tolist())
        self._in_line = Counter(self._line)
        self._out, self._names, self._counts = {}, {}, counts
        self._held = Counter(held.tolist())
        for given, id in enumerate(held.tolist(), self._given):
            self._out[given] = id
            self._names.setdefault(id, deque()).append(given)
        self._given += len(held)
        self._wake()


def _length(dataset: Any) -> int:
    if isinstance(dataset, str | bytes | dict) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset: expected a sequence of prompts, with a length and dataset[number], found {shown(dataset)}"
        )
    length = len(dataset)
    if not length:
        raise ValueError("dataset: expected at least one prompt, found none")
    return length
