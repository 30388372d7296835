"""What the buffer asks of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from asyncbuf._plain.state import fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, Rows, WriteEvent

_HOOKS = {
    "may_draw",
    "check_write",
    "wrote",
    "written",
    "removed",
    "handed_over",
    "dropped",
    "leaving",
    "finished",
    "combine",
    "group_priority",
    "use_tables",
    "state_dict",
    "load_state_dict",
}


class Sampler(ABC):
    """Decides which rows a batch takes.

    The buffer calls every method on its event loop, in the order of the history, so a sampler needs no lock; it should
    be quick, because the loop waits for it. A draw depends on the sampler's state, the rows and the generator only.

    A sampler defines ``draw``, and those of the optional methods that it needs. What it does not define is never
    called, and costs nothing.

    Attributes:
        columns: leaf paths of items, such as ``("done",)`` or ``("obs/step",)``, whose values ``check_write`` and
            ``wrote`` get.
        trusted: whether draws are used without a look at their indices. Not inherited: a subclass says so itself.
        counts_draws: whether the answer of ``may_draw`` may change by draws alone. If not, it is asked for after
            writes, removals and priority updates only. A subclass that defines ``may_draw`` says so itself.
        combines_at_once: whether ``combine`` is quick and only puts tensors together. It is then called on the event
            loop as soon as the rows are there, with the gathered rows themselves; not if they must be collated first.
        hooks: which optional methods the class defines; found out when the class is made. A sampler around another one
            may have an attribute of its own.
    """

    columns: tuple[str, ...] = ()
    trusted: bool = False
    counts_draws: bool = True
    combines_at_once: bool = False
    hooks: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note which optional methods the class defines."""
        super().__init_subclass__(**kwargs)
        cls.hooks = frozenset(
            name for name in _HOOKS if any(name in vars(kind) for kind in cls.__mro__ if kind is not Sampler)
        )
        if "trusted" not in vars(cls):
            cls.trusted = False
        if "may_draw" in vars(cls) and "counts_draws" not in vars(cls):
            cls.counts_draws = True

    @abstractmethod
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Draw the rows of the next batch.

        Args:
            rows: what there is, at least one row.
            batch_size: number of rows wanted.
            generator: the only source of randomness.

        Returns:
            At most ``batch_size`` rows, in tensors that the sampler does not change or use afterwards.

        Raises:
            ValueError: such a batch cannot be drawn from these rows; nothing has changed. Not after ``may_draw`` of the
                sampler said yes.
        """

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Whether a batch can be drawn now. Consumers wait while it cannot; changes nothing.

        Asked before each draw, and with no rows at all, too. While a consumer waits, asked again after each write,
        removal, priority update and hand-over. After ``finish()``, a consumer that gets ``NotYet`` is told that no more
        batches will come.

        Returns:
            True, or ``NotYet`` with the reason in words and numbers.
        """
        return True

    def check_write(self, event: WriteEvent) -> None:
        """Items are about to be written. An error refuses them: nothing has happened then. Must change nothing."""

    def wrote(self, event: WriteEvent) -> None:
        """Items were written. Must not fail: what it raises ends the background work of the buffer."""

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        """The short form of ``wrote``, for a sampler that needs no more than the rows: int64 ``[items]``.

        A sampler that defines both is told by both. To refuse a write, define ``check_write``.

        Args:
            indices: the rows that were written, in the order of the items.
            rows: what there is to draw from now.
        """

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows have left the table: int64 ``[rows]``. Must not fail.

        Args:
            indices: the rows.
            rows: what there is to draw from now.
        """

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """A consumer has got the batch of a draw. Must not fail.

        Returns:
            Rows of the draw that leave the table now, int64 ``[rows]``; None if all stay. Those that were replaced
            since the draw are left out.
        """
        return None

    def dropped(self, draw: Draw) -> None:
        """The ticket of a draw was dropped (``skip``, ``flush``, ``empty``): nobody gets its batch. Must not fail."""

    def leaving(self) -> torch.Tensor | None:
        """Rows that the sampler has no use for any more: they leave the table now. Must not fail.

        Asked after each write, after rows were removed, and after tickets were dropped, until it says None.
        ``removed`` is told of the rows.

        Returns:
            The rows, int64 ``[rows]``; None if all stay.
        """
        return None

    def finished(self) -> None:
        """No more items will come: ``finish()`` was called. Must not fail.

        Consumers that wait are asked about again. Not part of the state, nor of a pickle: a buffer that is restored
        takes items again.
        """

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """Make one tree of a batch and what was joined to it (``Draw.joins``). Runs where transforms run.

        A sampler whose draws have joins must define it. This one, for ``super()``, puts the joins beside the fields.

        Args:
            draw: the draw.
            data: the batch, leaves ``[batch, *item]``, or shaped as ``Draw.shape`` says.
            joined: a tree for each join, leaves ``[*shape of its indices, *item]``.

        Returns:
            What the transforms get.
        """
        return {**data, **joined}

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Rows got new priorities: int64 ``[n]`` and float ``[n]``. Those that were replaced are left out already."""

    def group_priority(self, indices: Any, priority: Any) -> tuple[Any, Any]:
        """Make of the priorities of a batch those that ``update_priority`` gets, before stale rows are left out.

        For samplers whose draws have a shape, such as ``[slices, steps]``, and one priority for several rows.

        Args:
            indices: what the caller named: ``batch.indices``, in the shape of the draw; or rows of any other origin.
            priority: what the caller gave: a number, or numbers in any shape.

        Returns:
            Rows and as many priorities, or one number for all.

        Raises:
            TypeError, ValueError: they do not fit each other; nothing has changed.
        """
        return indices, priority

    def clear(self) -> None:
        """Every row is invalid now."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, beside rows and generator, as plain data in memory of its own.

        Raises:
            TypeError: the sampler has attributes, and does not say how they are saved.
        """
        if vars(self):
            raise TypeError(
                f"{type(self).__name__}: expected state_dict and load_state_dict, because it has the attributes "
                f"{sorted(vars(self))}; found none"
            )
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """
        fields(state, type(self).__name__)

    def verify(self, rows: Rows) -> None:
        """Refuse a state that was just loaded and does not go with the rows.

        Raises:
            CheckpointCorruptError: the next draw would be of rows that there are not.
        """

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse what can never be drawn.

        Asked when the buffer is made, ahead of everything else, with its batch size, if it has one; and for each other
        batch size that a call asks for.

        Raises:
            ValueError: no buffer of this capacity ever holds a batch of this size.
        """

    def use_tables(self, tables: Mapping[str, range]) -> None:
        """The rows of each table of the writer, for a sampler that tells them apart; empty if it has no tables.

        Called when the sampler becomes that of a buffer.

        Raises:
            ValueError: the sampler is made for other tables.
        """

    @property
    def unread(self) -> int | None:
        """Number of stored items that wait to be drawn, for a sampler that uses items up; None for any other.

        For limiters: it becomes ``counters.unread``.
        """
        return None

    @property
    def draw_unit(self) -> int:
        """What every batch size is a multiple of, such as the length of a slice; 1 for most samplers."""
        return 1

    @property
    def epoch(self) -> int | None:
        """Number of the pass that the next draw belongs to; None for samplers that have no passes."""
        return None

    def leaves_out(self, batch_size: int) -> bool:
        """Whether a draw of that size would leave out what is left of the pass, and begin the next one."""
        return False

    def end_epoch(self) -> None:
        """Leave out what is left of the pass, so that the next draw begins one; if none has begun, do nothing.

        For ``buffer.restart_epoch()``.

        Raises:
            TypeError: the sampler has passes and does not say how to end one.
        """
        raise TypeError(f"{type(self).__name__}: expected end_epoch(), because it has passes; found none")

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass. Prefetching stops there until a consumer asks for the next pass."""
        return False
