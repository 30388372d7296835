"""Items as rows of files: the storage for more than fits into memory."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from asyncbuf._runtime.arguments import absolute, count, flag
from asyncbuf.errors import AsyncBufError
from asyncbuf.rows import ScatteredRows
from asyncbuf.storage._mapped_directory import RowDirectory, read_rows
from asyncbuf.storage._mapped_rows import MappedRows
from asyncbuf.storage.base import Prepared, Runs
from asyncbuf.storage.tensor import TensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    import torch

    from asyncbuf._plain import tree
    from asyncbuf.batch import Draw
    from asyncbuf.rows import RowRange
    from asyncbuf.storage._frozen import Frozen
    from asyncbuf.storage._leaf import Field
    from asyncbuf.storage._row_memory import RowMemory

_RESIDENT_BYTES = 512 * 1024 * 1024
_LEAST_RESIDENT_BYTES = 1024 * 1024
# A disk may be waited for with every write: more than anybody would do on an event loop.
_IN_A_THREAD = 1 << 30
_FEW_RUNS = 8


class MemmapStorage(TensorStorage):
    """Rows of tensors, numpy arrays or numbers in files, which may be larger than memory.

    Otherwise as ``TensorStorage``: the structure of an item is taken from the first items written. Each field has a
    file that ``numpy.load(path, mmap_mode="r")`` opens, of the full capacity, which takes room on the disk only as rows
    fill. Rows are written and gathered in threads, since a disk may have to be waited for: use ``prefetch``.

    What belongs to whom:

    - While it is open, the storage has its directory to itself. Another one, in this process or in another, is refused.
    - Which rows hold items, and in which order, is known by the buffer and not by the directory. So the contents of a
      buffer come from a checkpoint. It holds copies of the rows, as that of any storage, so the directory need not
      be kept: ``MemmapStorage(capacity, directory, overwrite=True)``, and then ``await buffer.load(checkpoint)``.
    - A directory that was closed by ``close`` says so, and what it holds. ``MemmapStorage.read`` gives its rows as
      fixed data. One that was not, because the process was killed, is refused: its rows may be of any time.
    - Nobody ever writes into the files of another storage. What was read or frozen stays as it is, also when the
      directory is overwritten.

    ``close`` waits for the disk: call it after the buffer was closed, ``await asyncio.to_thread(storage.close)``.

    Args:
        capacity: number of rows.
        directory: where the files are. It is made if it is missing; there must be nothing else in it.
        overwrite: whether rows of an earlier storage in the directory are removed. Anything else is never removed.
        resident_bytes: how much of the files may count as memory of this process, about, in bytes, at least 1 MiB. The
            page cache of the system may have more of it, and gives it back when memory is short.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the capacity is not positive, or ``resident_bytes`` too small.
        AsyncBufError: another storage has the directory.
        FileExistsError: there is something in the directory.
        OSError: the directory cannot be made or written.
    """

    runs: Runs = Runs.THREAD
    trusted: ClassVar[bool] = True

    def __init__(
        self,
        capacity: int,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        resident_bytes: int = _RESIDENT_BYTES,
    ) -> None:
        super().__init__(capacity)
        self._resident_bytes = count(resident_bytes, "resident_bytes", _LEAST_RESIDENT_BYTES)
        path = absolute(directory, "directory")
        is_over = flag(overwrite, "overwrite")
        self._process = os.getpid()
        self._is_closed = False
        # Held by whoever changes files: writes and loads are in threads.
        self._lock = threading.RLock()
        self._replaced: list[MappedRows] = []
        self._directory = RowDirectory(path, capacity, overwrite=is_over)

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory.path

    @staticmethod
    def read(directory: str | os.PathLike[str]) -> Any:
        """The rows of a directory whose storage was closed, as fixed data that is read from the disk when it is used.

        They are in the order of the rows, from row 0 to the last one that was ever written. Those that were removed
        from the buffer are among them.

        Args:
            directory: the directory.

        Returns:
            Items in the structure in which they were written: a tree of tensors ``[rows, *item]``. Changes to them are
            seen by nobody else. The files may be removed meanwhile.

        Raises:
            AsyncBufError: a storage has the directory, or it was not closed cleanly.
            CheckpointCorruptError: the files are damaged.
            FileNotFoundError: there is no such directory, or it is not one of a ``MemmapStorage``.
            TypeError: ``directory`` is no path.
        """
        return read_rows(absolute(directory, "directory"))

    def prepare(self, items: Any) -> Prepared:
        """Check items whose leaves have shape ``[items, *item]`` and the structure of those before."""
        return _in_a_thread(super().prepare(items))

    def prepare_one(self, item: Any) -> Prepared:
        """Check one item, whose leaves have no leading axis."""
        return _in_a_thread(super().prepare_one(item))

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Copy prepared items into rows; the first ones decide which files there are.

        Raises:
            OSError: the disk is full, or fails. No row has changed if it is full.
            AsyncBufError: the storage was closed, or belongs to the process that this one was forked from.
        """
        with self._lock:
            self._will_change()
            rows = self._mapped
            if rows is None:
                _, spec, fields = prepared.payload
                rows = self._new_rows(spec, fields)
            try:
                _make_room(rows, runs)
            except BaseException:
                if rows is not self._rows:
                    rows.discard()
                raise
            self._make_live(rows)
            super().write(prepared, runs)

    @property
    def _mapped(self) -> MappedRows | None:
        rows = self._rows
        assert rows is None or isinstance(rows, MappedRows)
        return rows

    def _make_live(self, rows: MappedRows) -> None:
        rows.lasts = True
        self._rows = rows

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        """Let threads copy rows from the files, each a run of them. Threads wait for the disk, the event loop never."""
        self._check_open()
        return super().begin_gather(draw, inline=inline, parts=parts)

    def freeze(self) -> Frozen:
        """Takes no time. Rows that are overwritten before they are read go to a file without a name, not to memory."""
        self._check_open()
        return super().freeze()

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build new rows in new files beside the live ones, which are removed with the next write."""
        with self._lock:
            self._will_change()
        if self._mapped is not None:
            self._mapped.let_go()  # there will be two of them for a while
        return super().load_rows(meta, chunks)

    def _new_rows(self, spec: tree.Spec, fields: tuple[Field, ...]) -> MappedRows:
        rows = MappedRows(self._directory.new_folder(), self.capacity, spec, fields, self._resident_bytes)
        rows.slots.most = self._expected
        try:
            with self._lock:
                # Files that nobody vouches for must never look like none.
                self._directory.describe(rows, 0, is_clean=False)
        except BaseException:
            rows.discard()
            raise
        return rows

    def _replace(self, rows: RowMemory | None, count: int) -> None:
        # On the event loop, so the files that are not needed any more are removed later.
        if rows is not None and self._mapped is not None:
            self._replaced.append(self._mapped)
        super()._replace(rows, count)
        if rows is not None:
            self._make_live(rows)  # type: ignore[arg-type]

    # -- the directory ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise AsyncBufError(f"MemmapStorage: {self.directory}: it was closed; make another one")

    def _will_change(self) -> None:
        """Files are about to change: first say so. Then remove those that are not needed any more."""
        self._check_open()
        if self._process != os.getpid():
            raise AsyncBufError(
                f"MemmapStorage: {self.directory}: expected writes of the process that made it, found one that was "
                "forked from it: both would write into the same rows"
            )
        if self._directory.is_clean:
            self._directory.describe(self._mapped, self._filled, is_clean=False)
        while self._replaced:
            self._replaced.pop().discard()

    def flush(self) -> None:
        """Write everything to the disk, and have the directory say that it is clean, until the next write.

        Waits for the disk. May be called from a thread while the buffer is in use; a write waits for it.

        Raises:
            OSError: the disk fails. The directory is not clean then.
            AsyncBufError: the storage was closed, or belongs to the process that this one was forked from.
        """
        with self._lock:
            self._will_change()
            rows = self._mapped
            if rows is not None:
                rows.sync()
            self._directory.describe(rows, self._filled, is_clean=True)

    def close(self) -> None:
        """Flush, close the files, and leave the directory to others. Nothing can be written or gathered afterwards.

        What was frozen stays readable. Does nothing the second time. Waits for the disk.

        Raises:
            OSError: the disk fails. The files are closed all the same, and the directory is not clean.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                if self._process == os.getpid():
                    self.flush()
                    self._directory.sweep(self._mapped)
            finally:
                self._is_closed = True
                if self._mapped is not None:
                    self._mapped.close()
                self._rows = None
                self._filled = 0
                self._directory.release()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not picklable: two storages cannot have the same directory, and another one is not known here."""
        raise TypeError(
            f"MemmapStorage: {self.directory}: expected not to be pickled or copied, since a copy would need a "
            "directory of its own: save a checkpoint of the buffer, and load it into one whose storage has another one"
        )


def _in_a_thread(prepared: Prepared) -> Prepared:
    prepared.nbytes = max(prepared.nbytes, _IN_A_THREAD)
    return prepared


def _make_room(rows: MappedRows, runs: Sequence[RowRange]) -> None:
    """Have room for what is written, and the disk read what is overwritten: a page is read before it is changed."""
    if type(runs) is ScatteredRows:
        rows.reserve(int(runs.rows[-1]) + 1)
        rows.will_read(runs.rows)
        return
    rows.reserve(max((run.row + run.count for run in runs), default=0))
    for run in runs[:_FEW_RUNS]:
        rows.will_pass(run.row, run.row + run.count)
