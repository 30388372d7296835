"""How rows lie in memory.

A gather costs the more the more places in memory it reads, so the small fields of a row are packed side by side into
one padded record: one gather brings them all. A large field gains nothing from that and has a column of its own. Both
are numpy arrays of records, whose fields numpy finds by name.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncbuf._disk.files import NO_RESERVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncbuf.storage._leaf import Field

# Up to how many bytes a field is packed. Fields that are copied out of the gathered records gain less: beyond this size
# the second copy costs more than the second place in memory.
PACKED_FIELD_BYTES = 2048
PACKED_DENSE_BYTES = 512
# Memory that is filled in pages of 2 MB, where there are such, is filled several times as fast. As large as for numpy's
# own arrays.
_HUGE_BYTES = 4 * 1024 * 1024

Records = np.ndarray[Any, np.dtype[np.void]]


class Place(NamedTuple):
    """Where a field lies.

    Attributes:
        block: number of the block.
        name: its name in the records of the block.
    """

    block: int
    name: str


class Group(NamedTuple):
    """Fields of a packed record that lie one after the other and have the same size, so that one call copies them all.

    Attributes:
        block: number of the block.
        offset: bytes from the start of the record to the first field.
        nbytes: bytes of each field, at least 1.
        members: numbers of the fields, in order.
    """

    block: int
    offset: int
    nbytes: int
    members: tuple[int, ...]


class Layout(NamedTuple):
    """The blocks of a row, and where each field lies.

    Attributes:
        records: what one row of each block consists of.
        opaque: the same without fields. Numpy copies such rows sooner, because it has less to compare.
        places: one per field.
        groups: the fields that share a record, without those of no bytes.
    """

    records: tuple[np.dtype[np.void], ...]
    opaque: tuple[np.dtype[np.void], ...]
    places: tuple[Place, ...]
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(record.itemsize for record in self.records)

    def offset(self, number: int) -> int:
        """Bytes from the start of its record to a field."""
        place = self.places[number]
        members: Any = self.records[place.block].fields  # by literal strings, the stubs say
        offset: int = members[place.name][1]
        return offset


def plan(fields: Sequence[Field], most: int = PACKED_FIELD_BYTES) -> Layout:
    """Pack fields of at most ``most`` bytes into block 0; each of the others gets a block of its own."""
    small = [i for i, field in enumerate(fields) if field.nbytes <= most]
    large = [i for i in range(len(fields)) if i not in small]
    # Widest elements first: every field is then aligned to its element without a gap before it.
    small.sort(key=lambda i: (-fields[i].bits.itemsize, -fields[i].nbytes))
    blocks = ([small] if small else []) + [[i] for i in large]
    places = {i: Place(block, f"f{i}") for block, members in enumerate(blocks) for i in members}
    records = tuple(_record([(f"f{i}", fields[i]) for i in members]) for members in blocks)
    return Layout(
        records,
        tuple(np.dtype((np.void, record.itemsize)) if record.itemsize else record for record in records),
        tuple(places[i] for i in range(len(fields))),
        tuple(_groups(fields, small)) if len(small) > 1 else (),
    )


def _groups(fields: Sequence[Field], packed: Sequence[int]) -> Iterator[Group]:
    """Neighbours of the same size in block 0, which they fill without gaps."""
    offset = 0
    for nbytes, group in itertools.groupby(packed, key=lambda i: fields[i].nbytes):
        members = tuple(group)
        if nbytes:
            yield Group(0, offset, nbytes, members)
        offset += nbytes * len(members)


def _record(members: Sequence[tuple[str, Field]]) -> np.dtype[np.void]:
    offsets = np.cumsum([0, *(field.nbytes for _, field in members)]).tolist()
    # Tensors need strides of whole elements; more than that would only take memory.
    widest = max(field.bits.itemsize for _, field in members)
    size = -(-offsets[-1] // widest) * widest
    return np.dtype(
        {
            "names": [name for name, _ in members],
            "formats": [(field.bits, field.shape) for _, field in members],
            "offsets": offsets[:-1],
            "itemsize": size,
        }
    )


def allocate(capacity: int, record: np.dtype[np.void]) -> Records:
    """Zeroed records ``[capacity]``, whose pages become real memory only when they are written."""
    nbytes = capacity * record.itemsize
    if nbytes == 0:
        return np.zeros(capacity, record)
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):
        # So that a capacity beyond today's memory may be asked for before it is filled.
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, nbytes, **flags)
    if nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, record)
