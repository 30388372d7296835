"""The arguments of a buffer: their defaults, and errors that say what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch

from asyncbuf._runtime.arguments import count, fits_memory, flag, instance_of, shown
from asyncbuf._table.deliveries import DEFAULT_WINDOW
from asyncbuf.limiter import Limiter, MinSize, Queue
from asyncbuf.limiter._keep_unread import KeepUnread
from asyncbuf.sampler import RandomSampler, Sampler
from asyncbuf.staleness import Staleness
from asyncbuf.storage import Storage
from asyncbuf.writer import RoundRobinWriter, Writer

# Far more than any use: a task belongs to each worker, and a batch to each ticket.
MOST_PREFETCH, MOST_WORKERS = 1_000_000, 10_000
INDEX_NBYTES = 8
OVERWRITES = ("oldest", "wait")
Transform: TypeAlias = Callable[..., Any]
Collate: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class BufferConfig:
    """What a buffer was made with: every argument checked, and defaults filled in.

    Attributes:
        storage: where items live.
        sampler: which rows a batch takes.
        writer: which rows new items take.
        limiter: when writes and draws may happen.
        overwrite: which items may make room for new ones.
        own_limiter: ``limiter`` as it was handed in, without what ``overwrite`` adds to it.
        batch_size: number of items of a batch; None if each call says its own.
        prefetch: how many batches are prepared ahead of those asked for.
        workers: how many batches are gathered and transformed at once.
        transforms: functions of the data of a batch, in order.
        collate_fn: makes batched data of what the storage gathered; None for that of the storage.
        device: where the tensors of a batch go in the end; None leaves them where they are.
        pin_memory: whether they go through page-locked memory.
        generator: randomness of all draws.
        staleness: how old items may be, in versions of the model; None if nobody counts versions.
        key_window: how many keys of writes are kept.
    """

    storage: Storage
    sampler: Sampler
    writer: Writer
    limiter: Limiter
    overwrite: str
    own_limiter: Limiter
    batch_size: int | None
    prefetch: int
    workers: int
    transforms: tuple[Transform, ...]
    collate_fn: Collate | None
    device: torch.device | None
    pin_memory: bool
    generator: torch.Generator
    staleness: Staleness | None
    key_window: int = DEFAULT_WINDOW

    @classmethod
    def checked(
        cls,
        storage: Storage,
        *,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        batch_size: int | None = None,
        prefetch: int = 0,
        workers: int = 1,
        min_size: int | None = None,
        limiter: Limiter | None = None,
        overwrite: str = "oldest",
        transform: Transform | Sequence[Transform] | None = None,
        collate_fn: Collate | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        staleness: Staleness | None = None,
        key_window: int = DEFAULT_WINDOW,
    ) -> Self:
        """Check the arguments of ``ReplayBuffer``, alone and against each other.

        Raises:
            TypeError: an argument is of another kind than expected.
            ValueError: an argument is out of range, or does not fit another one.
        """
        instance_of(storage, Storage, "storage", example=_storage_for(storage), arguments="capacity")
        sampler, writer, own_limiter = _sampler(sampler), _writer(writer), _limiter(limiter, min_size)
        config = cls(
            storage=storage,
            sampler=sampler,
            writer=writer,
            limiter=_waiting(overwrite, own_limiter, storage, sampler, writer),
            overwrite=overwrite,
            own_limiter=own_limiter,
            batch_size=None if batch_size is None else count(batch_size, "batch_size", 1, example=256),
            prefetch=count(prefetch, "prefetch", 0, most=MOST_PREFETCH, example=2),
            workers=count(workers, "workers", 1, most=MOST_WORKERS, example=2),
            transforms=_transforms(transform),
            collate_fn=_collate(collate_fn),
            device=_device(device),
            pin_memory=flag(pin_memory, "pin_memory"),
            generator=_generator(generator),
            staleness=_staleness(staleness),
            key_window=count(key_window, "key_window", 1, example=DEFAULT_WINDOW),
        )
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.prefetch and self.batch_size is None:
            raise ValueError(f"batch_size: expected one, because prefetch is {self.prefetch}; found None")
        self.limiter.check(self.storage.capacity)
        self.writer.check(self.storage.capacity)
        self._check_limiter()
        if self.batch_size is not None:
            fits_memory(self.batch_size, INDEX_NBYTES, "batch_size")
            self.sampler.check(self.storage.capacity, self.batch_size)

    def _check_limiter(self) -> None:
        limiter, batch_size = self.limiter, self.batch_size
        if batch_size is not None:
            limiter.check_batch(batch_size)
        elif limiter.needs_batch_size:
            raise ValueError(f"batch_size: expected one, because {limiter!r} counts batches; found None")
        if limiter.needs_versions and self.staleness is None:
            raise ValueError(
                f"staleness: expected one, such as Staleness(2), because {limiter!r} counts versions of the model; "
                "found None"
            )
        if limiter.needs_rows_to_leave and not lets_leave(self.sampler):
            raise ValueError(
                f"limiter: {limiter!r} lets writers wait until items leave; expected a sampler that uses items up, "
                f"such as ConsumingSampler(), found {type(self.sampler).__name__}, which lets none leave"
            )

    @property
    def collate(self) -> Collate | None:
        """What makes batched data of what the storage gathered; None where it is that already."""
        if self.collate_fn is not None:
            return self.collate_fn
        return self.storage.collate if self.storage.needs_collate else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that make such a buffer again, without the generator."""
        names = (
            "storage",
            "sampler",
            "writer",
            "overwrite",
            "batch_size",
            "prefetch",
            "workers",
            "collate_fn",
            "staleness",
            "key_window",
        )
        arguments = {name: getattr(self, name) for name in (*names, "device", "pin_memory")}
        return {**arguments, "limiter": self.own_limiter, "transform": list(self.transforms)}


def _storage_for(value: Any) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return f"TensorStorage({value if is_number else 'capacity'})"


def _sampler(value: Any) -> Sampler:
    if value is None:
        return RandomSampler()
    sampler: Sampler = instance_of(value, Sampler, "sampler", example="RandomSampler()")
    if "state_dict" in sampler.hooks and "load_state_dict" not in sampler.hooks:
        raise TypeError(f"{type(sampler).__name__}: expected load_state_dict beside its state_dict, found none")
    return sampler


def _writer(value: Any) -> Writer:
    if value is None:
        return RoundRobinWriter()
    writer: Writer = instance_of(value, Writer, "writer", example="RoundRobinWriter()")
    return writer


def _limiter(value: Any, min_size: int | None) -> Limiter:
    if value is None:
        return MinSize(1 if min_size is None else min_size)
    limiter: Limiter = instance_of(value, Limiter, "limiter", example="MinSize(1)", arguments="...")
    if min_size is not None:
        raise ValueError(
            f"limiter: expected either a limiter or min_size, which is short for MinSize({min_size}); found both"
        )
    return limiter


def lets_leave(sampler: Sampler) -> bool:
    """Whether a sampler lets items leave by itself."""
    return bool(sampler.hooks & {"handed_over", "leaving"})


def _waiting(overwrite: Any, limiter: Limiter, storage: Storage, sampler: Sampler, writer: Writer) -> Limiter:
    """The limiter, with what keeps items that nobody has read from being overwritten, if that is wanted."""
    if not isinstance(overwrite, str) or overwrite not in OVERWRITES:
        raise ValueError(f"overwrite: expected one of {list(OVERWRITES)}, found {shown(overwrite)}")
    if overwrite == "oldest":
        return limiter
    if type(writer) is not RoundRobinWriter:
        raise ValueError(
            f'overwrite: expected "oldest" with a {type(writer).__name__}, which chooses by itself what it overwrites, '
            'found "wait", which needs a RoundRobinWriter'
        )
    return limiter & (Queue(storage.capacity) if lets_leave(sampler) else KeepUnread())


def _staleness(value: Any) -> Staleness | None:
    if value is None:
        return None
    staleness: Staleness = instance_of(value, Staleness, "staleness", example="Staleness(2)", arguments="max_age")
    return staleness


def _generator(value: Any) -> torch.Generator:
    if value is None:
        generator = torch.Generator()
        generator.seed()
        return generator
    if isinstance(value, torch.Generator):
        return value
    is_seed = isinstance(value, int) and not isinstance(value, bool)
    kind = type(value)
    # With its module: numpy has a Generator, too.
    found = f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ == "Generator" else shown(value)
    seed = found if is_seed else "seed"
    raise TypeError(
        f"generator: expected a torch.Generator, found {found}: write torch.Generator().manual_seed({seed})"
    )


def _device(value: Any) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"device: expected the name of a device or a torch.device, found {shown(value)}")
    try:
        return torch.device(value)
    except RuntimeError as error:
        name = str(value).lower()
        # The names that other libraries use.
        right = f"cuda{name[3:]}" if name.startswith("gpu") else name if name.startswith(("cpu", "cuda")) else None
        instead = "" if right is None or right == value else f': write "{right}"'
        raise ValueError(
            f'device: expected one of torch, such as "cpu", "cuda", "cuda:1" or "mps"; found {shown(value)}{instead}'
        ) from error


def _collate(value: object) -> Collate | None:
    if value is None or callable(value):
        return value
    raise TypeError(f"collate_fn: expected a callable, found {shown(value)}")


def _transforms(value: object) -> tuple[Transform, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (_transform(value, "transform"),)
    return tuple(_transform(function, f"transform {i}") for i, function in enumerate(value))


def _transform(value: object, name: str) -> Transform:
    if callable(value):
        return value
    raise TypeError(f"{name}: expected a callable, found {shown(value)}{_no_transform(value)}")


def _no_transform(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # nobody will await it, and Python would complain of that
        return ": write the async function itself, without calling it"
    if isinstance(value, Mapping):
        return ": write a function that gets the whole data and returns it with the fields changed"
    if isinstance(value, set | frozenset | Iterator):
        return ": write a list of functions, in order"
    return ""
