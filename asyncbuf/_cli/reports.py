"""What the commands say, as lines and tables, and as what JSON can hold."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncbuf.checkpoint import (
        BufferInfo,
        CheckpointInfo,
        Difference,
        Leaf,
        LeafDifference,
        ListedCheckpoint,
        PartDifference,
        PartInfo,
        Pruned,
        Verification,
    )

# How many rows a table has unless all are asked for.
_MOST_ROWS = 20
_MOST_NUMBERS = 8
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_COMPUTED = ("is_sound", "is_same", "is_prepared", "own_nbytes")


class Table(NamedTuple):
    """Rows below each other.

    Attributes:
        title: what they are.
        header: names of the columns.
        rows: as many cells each.
        notes: what is to be said below.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


Report: TypeAlias = "Iterable[str | Table]"


def plain(result: Any) -> Any:
    """A result as dicts, lists and the like, with what its properties say."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in dataclasses.fields(result)]
        names += [name for name in _COMPUTED if hasattr(result, name)]
        return {name: plain(getattr(result, name)) for name in names}
    if isinstance(result, (list, tuple)):
        return [plain(each) for each in result]
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    return result


def _size(nbytes: float) -> str:
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = next((power for power in range(1, len(_UNITS)) if nbytes < 999.5 * 1000**power), len(_UNITS))
    return f"{nbytes / 1000**power:.3g} {_UNITS[power - 1]}"


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _time(created: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(created).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def _words(*pairs: tuple[str, Any]) -> list[tuple[str, ...]]:
    """Rows of what is known."""
    return [(name, str(value)) for name, value in pairs if value is not None]


def _some(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, everything: bool) -> Iterator[Table]:
    """A table, of which the end may be left out; none without rows."""
    if rows:
        shown = rows if everything else rows[:_MOST_ROWS]
        left = len(rows) - len(shown)
        yield Table(title, header, shown, (f"... {left} more (--all shows them)",) if left else ())


# -- inspect ----------------------------------------------------------------------------------------------------------


def of_info(info: CheckpointInfo, *, everything: bool) -> Iterator[str | Table]:
    """What a checkpoint holds."""
    yield info.path
    step = "a buffer" if info.step is None else f"step {info.step} of a run"
    libraries = ", ".join(f"{name} {version}" for name, version in info.libraries.items())
    yield f"{step}, saved {_age(info.age)} ago ({_time(info.created)})"
    yield f"by {libraries}; layout version {info.version}"
    yield f"{info.files} files, {_size(info.nbytes)}, {_shared(info.shared_nbytes)}"
    rows = [(part.name, part.kind, _size(part.nbytes), _size(part.shared_nbytes), _about(part)) for part in info.parts]
    yield Table("Parts", ("name", "kind", "size", "shared", "contents"), rows)
    for part in info.parts:
        if part.buffer is not None:
            yield from _buffer(part.name, part.buffer, everything=everything)
        elif len(part.leaves) > 1:
            yield from _some(part.name, ("leaf", "contents"), _leaf_rows(part.leaves), everything=everything)


def _shared(nbytes: int) -> str:
    return f"{_size(nbytes)} of them shared with other checkpoints" if nbytes else "none shared with other checkpoints"


def _about(part: PartInfo) -> str:
    if part.buffer is not None:
        rows = "?" if part.buffer.rows is None else part.buffer.rows
        return f"{rows} of {part.buffer.capacity} rows, {_number(len(part.buffer.queue), 'ticket', 'tickets')}"
    if len(part.leaves) == 1:
        return part.leaves[0].described
    return _number(len(part.leaves), "leaf", "leaves")


def _leaf_rows(leaves: Iterable[Leaf]) -> list[tuple[str, ...]]:
    return [(leaf.path, leaf.described) for leaf in leaves]


def _buffer(name: str, buffer: BufferInfo, *, everything: bool) -> Iterator[Table]:
    rows = _words(
        ("storage", buffer.storage),
        ("writer", _with_state(buffer.writer, "writer", buffer)),
        ("sampler", _with_state(buffer.sampler, "sampler", buffer)),
        ("limiter", buffer.limiter),
        ("capacity", buffer.capacity),
        ("rows", buffer.rows),
        ("items written", buffer.write_count),
        ("batch size", buffer.batch_size),
        ("prefetch", buffer.prefetch),
        ("batches drawn", buffer.drawn),
        ("batches delivered", buffer.delivered),
        ("batches dropped", buffer.dropped),
    )
    yield Table(name, ("setting", "value"), rows)
    yield from _some(f"{name}: an item", ("leaf", "contents"), _leaf_rows(buffer.fields), everything=everything)
    if everything:
        yield from _some(f"{name}: state", ("leaf", "contents"), _leaf_rows(buffer.state), everything=True)
    tickets = [
        (str(ticket.number), str(ticket.rows), ticket.stage, "-" if ticket.epoch is None else str(ticket.epoch))
        for ticket in buffer.queue
    ]
    yield from _some(f"{name}: queue", ("ticket", "rows", "made so far", "epoch"), tickets, everything=everything)


def _with_state(kind: str, part: str, buffer: BufferInfo) -> str:
    """A class, and the numbers that it goes on with."""
    known = [leaf for leaf in buffer.state if leaf.path.startswith(f"{part}/") and leaf.value is not None]
    shown = [f"{leaf.path.removeprefix(f'{part}/')}={leaf.value}" for leaf in known[:_MOST_NUMBERS]]
    shown += ["..."] if len(known) > _MOST_NUMBERS else []
    return f"{kind} ({', '.join(shown)})" if shown else kind


# -- verify -----------------------------------------------------------------------------------------------------------


def of_verification(found: Verification) -> Iterator[str]:
    """Whether a checkpoint is as it was written."""
    state = "sound" if found.is_sound else "DAMAGED"
    yield f"{found.path}: {state} ({found.files} files, {_size(found.nbytes)})"
    for problem in found.problems:
        yield f"  {problem}"


# -- diff -------------------------------------------------------------------------------------------------------------


def of_difference(found: Difference, *, everything: bool) -> Iterator[str | Table]:
    """In what two checkpoints differ."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    rows = [(part.name, part.kind, part.status, _differing(part)) for part in found.parts]
    yield Table("Parts", ("name", "kind", "", "in what"), rows)
    for part in found.parts:
        yield from _part_difference(part, everything=everything)


def _differing(part: PartDifference) -> str:
    words = [_number(len(part.settings), "setting", "settings")] if part.settings else []
    words += [_number(len(part.leaves), "leaf", "leaves")] if part.leaves else []
    rows = part.rows
    if rows is not None and not rows.is_same:
        changed = "others not to be compared" if rows.changed is None else f"{rows.changed} changed"
        words.append(f"rows (by {rows.by}): {rows.added} added, {rows.removed} removed, {changed}")
    return "; ".join(words)


def _part_difference(part: PartDifference, *, everything: bool) -> Iterator[Table]:
    settings = [(each.name, str(each.a), str(each.b)) for each in part.settings]
    yield from _some(f"{part.name}: settings", ("setting", "in A", "in B"), settings, everything=everything)
    fields = [] if part.rows is None else [(field.path, str(field.rows)) for field in part.rows.fields]
    yield from _some(f"{part.name}: rows changed", ("field", "rows"), fields, everything=everything)
    leaves = [(each.path, _described(each.a), _described(each.b), _elements(each)) for each in part.leaves]
    yield from _some(
        f"{part.name}: leaves", ("leaf", "in A", "in B", "elements that differ"), leaves, everything=everything
    )


def _described(leaf: Leaf | None) -> str:
    return "-" if leaf is None else leaf.described


def _elements(leaf: LeafDifference) -> str:
    return "" if leaf.changed is None else f"{leaf.changed} of {leaf.elements}"


# -- list and prune ---------------------------------------------------------------------------------------------------


def of_list(found: Sequence[ListedCheckpoint]) -> Iterator[str | Table]:
    """The checkpoints of a run."""
    if not found:
        yield "no steps of a Checkpointer, such as step-000100 (inspect shows a single checkpoint)"
        return
    rows = [
        (str(each.step), _age(each.age), *map(_size, (each.nbytes, each.own_nbytes, each.shared_nbytes)), _state(each))
        for each in found
    ]
    yield Table("Checkpoints", ("step", "age", "size", "own", "shared", "state"), rows)


def _state(each: ListedCheckpoint) -> str:
    return "ok" if each.problem is None else f"DAMAGED: {each.problem}"


def of_pruned(found: Pruned, *, dry_run: bool) -> Iterator[str]:
    """What was removed."""
    would = "would be removed" if dry_run else "removed"
    yield f"{would}: {_steps(found.removed)}, {_size(found.nbytes)}"
    yield f"kept: {_steps(found.kept)}"
    if found.busy:
        yield f"in use, and still there: {_steps(found.busy)}"
    for step, problem in found.failed:
        yield f"step {step} could not be removed: {problem}"


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
