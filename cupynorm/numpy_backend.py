"""The norms on NumPy arrays: the float64 specification, and the blocked path that runs.

`reference_forward` and `reference_backward` are the formulas in float64 over whole arrays. Tests on every device
compare with them.

`forward` and `backward` walk the rows in blocks that stay in cache, so that memory is read once and written
once. A chunk is a run of consecutive blocks; worker threads claim chunks, since NumPy's loops release the GIL.

What orders the sums. A row's own sums are dot products over that row alone, in segments of fixed length that are
added up in float64: a row gets the same bits whatever rows come with it. Sums over rows (dw, db) go through three
levels: products of FOLD rows in the arithmetic's dtype, those in float64 over the block and the chunk, and the
chunks in order. Blocks and chunks follow from the shape alone, so neither the number of threads nor their timing
changes a bit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np

from .problem import Norm, NormProblem

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from .problem import BackwardOperands, ForwardOperands

Array = Any  # numpy.ndarray; also cupy.ndarray in the two reference functions

# A block of 2**18 elements takes a dozen NumPy calls of 20 to 60 us. Smaller blocks fit a smaller cache, but lose
# more to the calls themselves and to handing the GIL from worker to worker: on 2 cores, 4096 rows of 1024 columns
# take 1.3 times as long with 2**16 (asv_bench/cpu_peers.py). Small problems still get 16 blocks to share out.
LARGEST_BLOCK, SMALLEST_BLOCK = 2**18, 2**15
MOST_CHUNKS = 64
FOLD = 16  # rows added up in the arithmetic's dtype before float64 takes over
# BLAS's dot product keeps few running sums, as many as the processor's registers suggest, and their error grows with
# the row: with AVX2, float32 and all elements equal, 2.5e-6 over 8192 and 8e-8 over 512. Long ones it also splits over
# threads of its own, which would compete with the workers.
DOT_SEGMENT = 512
PARTIALS_LIMIT, TEMPORARIES_LIMIT = 30 * 2**20, 60 * 2**20  # bytes


# --- the specification ------------------------------------------------------------------------------------


def reference_forward(
    norm: Norm, x: Array, w: Array | None, b: Array | None, eps: float
) -> tuple[Array, Array | None, Array]:
    """(y, mean, rstd) in float64; mean is None for RMSNorm."""
    x = x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True) if norm == "layernorm" else None
    centred = x if mean is None else x - mean
    rstd = 1.0 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    y = centred * rstd
    if w is not None:
        y = y * w.astype(np.float64)
    if b is not None:
        y = y + b.astype(np.float64)
    return y, None if mean is None else mean[..., 0], rstd[..., 0]


def reference_backward(
    norm: Norm, x: Array, w: Array | None, dy: Array, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array]:
    """(dx, dw, db) in float64, for the mean and rstd that are given (mean is not read for RMSNorm)."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    column = (*x.shape[:-1], 1)
    rstd = rstd.astype(np.float64).reshape(column)
    centred = x if mean is None or norm == "rmsnorm" else x - mean.astype(np.float64).reshape(column)
    x_hat = centred * rstd
    g = dy if w is None else dy * w.astype(np.float64)
    c1 = (g * x_hat).mean(axis=-1, keepdims=True)
    c2 = g.mean(axis=-1, keepdims=True) if norm == "layernorm" else 0.0
    dx = (g - x_hat * c1 - c2) * rstd
    columns = x.shape[-1]
    return dx, (dy * x_hat).reshape(-1, columns).sum(axis=0), dy.reshape(-1, columns).sum(axis=0)


# --- the path that runs -----------------------------------------------------------------------------------


def backward(problem: NormProblem, operands: BackwardOperands) -> None:
    """Fill operands.dx, dw and db, those that are not None."""
    x, dy, dx = _rows(problem, operands.x), _rows(problem, operands.dy), _rows(problem, operands.dx)
    mean, rstd = _column(problem, operands.mean), _column(problem, operands.rstd)
    dtype, columns = problem.compute_dtype, problem.columns
    w = _parameter(problem, operands.w)
    tiling = _tiling(problem, partial_rows=problem.want_dw + problem.want_db)
    dw_partials = np.zeros((len(tiling.chunks), columns)) if problem.want_dw else None
    db_partials = np.zeros((len(tiling.chunks), columns)) if problem.want_db else None
    needs_x_hat = problem.want_dx or problem.want_dw

    def work(claimed: Iterator[int]) -> None:
        x_hat_room = tiling.room(dtype) if needs_x_hat else None
        dy_room = tiling.room(dtype) if problem.dy_dtype != dtype else None
        g_room = tiling.room(dtype) if problem.want_dx and problem.x_dtype != dtype else None
        fold = _Fold(tiling.block_rows, columns, dtype)
        for chunk in claimed:
            for block in tiling.blocks(chunk):
                dy_block = _in_dtype(dy[block], dy_room)
                if db_partials is not None:
                    fold.add_rows(db_partials[chunk], dy_block)
                if x_hat_room is None:
                    continue
                x_hat = x_hat_room[: len(dy_block)]
                x_block = _in_dtype(x[block], x_hat)
                if mean is not None:
                    x_block = np.subtract(x_block, mean[block], out=x_hat)
                np.multiply(x_block, rstd[block], out=x_hat)
                target = x_hat if dx is None else dx[block] if g_room is None else g_room[: len(dy_block)]
                product = np.multiply(dy_block, x_hat, out=target)
                if dw_partials is not None:
                    fold.add_rows(dw_partials[chunk], product)
                if dx is None:
                    continue
                # dx = (g − (x̂·c1 + c2))·rstd: the correction is small, so adding it up first rounds less.
                correction = np.multiply(x_hat, _row_means(product, w).astype(dtype), out=x_hat)
                if mean is not None:
                    np.add(correction, _row_means(dy_block, w).astype(dtype), out=correction)
                g = np.multiply(dy_block, w, out=target)
                np.subtract(g, correction, out=g)
                np.multiply(g, rstd[block], out=g)
                if g_room is not None:
                    np.copyto(dx[block], g, casting="unsafe")

    _in_parallel(work, tiling, rooms=3)
    with np.errstate(all="ignore"):
        for output, partials in ((operands.dw, dw_partials), (operands.db, db_partials)):
            if output is not None and partials is not None:
                np.copyto(output, partials.sum(axis=0), casting="unsafe")


def forward(problem: NormProblem, operands: ForwardOperands) -> None:
    """Fill operands.y, mean (LayerNorm) and rstd."""
    x, y = _rows(problem, operands.x), _rows(problem, operands.y)
    mean, rstd = _column(problem, operands.mean), _column(problem, operands.rstd)
    dtype, columns = problem.compute_dtype, problem.columns
    ones = np.ones(columns, dtype)
    w = None if operands.w is None else _parameter(problem, operands.w)
    b = None if operands.b is None else _parameter(problem, operands.b)
    tiling = _tiling(problem)

    def work(claimed: Iterator[int]) -> None:
        room = tiling.room(dtype)
        y_room = tiling.room(dtype) if problem.x_dtype != dtype else None
        for chunk in claimed:
            for block in tiling.blocks(chunk):
                centred = room[: block.stop - block.start]
                x_block = _in_dtype(x[block], centred)
                if mean is not None:
                    # The first mean carries a rounding of its own size; what is left after subtracting it does not.
                    first = _row_means(x_block, ones).astype(dtype)
                    np.subtract(x_block, first, out=centred)
                    rest = _row_means(centred, ones).astype(dtype)
                    np.subtract(centred, rest, out=centred)
                    np.add(first, rest, out=mean[block])
                    x_block = centred
                rstd[block] = 1.0 / np.sqrt(_row_means(x_block, x_block) + problem.eps)
                target = y[block] if y_room is None else y_room[: len(centred)]
                np.multiply(x_block, rstd[block], out=target)
                if w is not None:
                    np.multiply(target, w, out=target)
                if b is not None:
                    np.add(target, b, out=target)
                if y_room is not None:
                    np.copyto(y[block], target, casting="unsafe")

    _in_parallel(work, tiling, rooms=2)


# --- pieces of the arithmetic -----------------------------------------------------------------------------


def _rows(problem: NormProblem, array: Array) -> Array:
    """A (rows, columns) view; None stays None."""
    return None if array is None else array.reshape(problem.rows, problem.columns)


def _column(problem: NormProblem, statistic: Array) -> Array:
    """A (rows, 1) view of mean or rstd; None stays None."""
    return None if statistic is None else statistic.reshape(problem.rows, 1)


def _parameter(problem: NormProblem, parameter: Array | None) -> Array:
    """w or b in the dtype of the arithmetic; ones in place of None."""
    if parameter is None:
        return np.ones(problem.columns, problem.compute_dtype)
    with np.errstate(all="ignore"):
        return parameter.astype(problem.compute_dtype, copy=False)


def _in_dtype(block: Array, room: Array | None) -> Array:
    """The block itself where it has the dtype of the arithmetic (or no room is kept for it), else a copy in room."""
    if room is None or block.dtype == room.dtype:
        return block
    room = room[: len(block)]
    np.copyto(room, block, casting="unsafe")
    return room


def _row_means(a: Array, b: Array) -> Array:
    """Σ_columns a·b / columns in float64, shape (rows, 1); b is a block like a, or one row.

    Stacked one-row products, and not one matrix product: matmul then takes BLAS's dot segment by segment, while the
    order of the sums in a matrix-vector product depends on how many rows there are.
    """
    rows, columns = a.shape
    count, tail = divmod(columns, DOT_SEGMENT)
    sums = np.zeros((rows, 1))
    if count:
        whole = columns - tail
        in_rows = a[:, :whole].reshape(rows, count, 1, DOT_SEGMENT)
        in_columns = b[..., :whole].reshape(-1, count, DOT_SEGMENT, 1)
        parts = np.matmul(in_rows, in_columns).reshape(rows, count).astype(np.float64)
        np.add.reduce(parts, axis=1, keepdims=True, out=sums)
    if tail:
        sums += np.matmul(a[:, None, columns - tail :], b[..., columns - tail :, None])[..., 0]
    return np.divide(sums, columns, out=sums)


class _Fold:
    """Sums over the rows of a block, with the scratch memory that they need."""

    def __init__(self, block_rows: int, columns: int, dtype: np.dtype[Any]) -> None:
        self.narrow = np.empty((block_rows // FOLD + 1, columns), dtype)
        self.wide = np.empty(self.narrow.shape, np.float64)

    @staticmethod
    def bytes_per_block(block_rows: int, columns: int, itemsize: int) -> int:
        return (block_rows // FOLD + 1) * columns * (itemsize + 8)

    def add_rows(self, total: Array, block: Array) -> None:
        """Add the sum of the block's rows to the float64 row `total`."""
        rows, columns = block.shape
        folded, tail = divmod(rows, FOLD)
        if folded:
            np.add.reduce(block[: rows - tail].reshape(FOLD, folded, columns), axis=0, out=self.narrow[:folded])
        if tail:
            np.add.reduce(block[rows - tail :], axis=0, out=self.narrow[folded])
            folded += 1
        # Converting first and adding afterwards: a reduction that converts would go through NumPy's small buffers.
        wide = self.wide[:folded]
        np.copyto(wide, self.narrow[:folded])
        np.add(total, np.add.reduce(wide, axis=0), out=total)


# --- blocks, chunks, workers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiling:
    """How the rows of a problem fall into blocks and chunks: a function of the shape alone."""

    columns: int
    block_rows: int
    chunks: tuple[slice, ...]  # of rows
    partials_bytes: int

    def blocks(self, chunk: int) -> Iterator[slice]:
        rows = self.chunks[chunk]
        for start in range(rows.start, rows.stop, self.block_rows):
            yield slice(start, min(start + self.block_rows, rows.stop))

    def room(self, dtype: np.dtype[Any]) -> Array:
        return np.empty((self.block_rows, self.columns), dtype)

    def workers(self, rooms: int) -> int:
        """As many as have a chunk to claim and fit into the memory allowed."""
        itemsize = 8
        block = self.block_rows * self.columns * itemsize
        scratch = rooms * block + _Fold.bytes_per_block(self.block_rows, self.columns, itemsize)
        return max(1, min(threads(), len(self.chunks), (TEMPORARIES_LIMIT - self.partials_bytes) // scratch))


def _tiling(problem: NormProblem, partial_rows: int = 0) -> _Tiling:
    rows, columns = problem.rows, problem.columns
    elements = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, rows * columns // 16))
    block_rows = max(1, min(rows, elements // columns))
    blocks = -(-rows // block_rows)
    partial_bytes = partial_rows * columns * 8
    most = max(1, min(MOST_CHUNKS, PARTIALS_LIMIT // partial_bytes)) if partial_rows else MOST_CHUNKS
    chunks = min(blocks, most)
    edges = [min(rows, blocks * chunk // chunks * block_rows) for chunk in range(chunks + 1)] if chunks else [0]
    return _Tiling(
        columns=columns,
        block_rows=block_rows,
        chunks=tuple(slice(start, stop) for start, stop in pairwise(edges)),
        partials_bytes=chunks * partial_bytes,
    )


def threads() -> int:
    """CUPYNORM_NUM_THREADS where it is set, else the number of cores that the process may use."""
    setting = os.environ.get("CUPYNORM_NUM_THREADS", "")
    if setting:
        if not setting.isdecimal() or len(setting) > 9 or int(setting) < 1:
            got = setting if len(setting) < 40 else f"{setting[:40]}..."
            raise ValueError(f"CUPYNORM_NUM_THREADS: got {got!r}; a whole number from 1 to 999999999 is needed")
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=4)
def _pool(size: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # which refuses while the interpreter ends

    return ThreadPoolExecutor(size, thread_name_prefix="cupynorm")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has none of the threads


def _in_parallel(work: Callable[[Iterator[int]], None], tiling: _Tiling, rooms: int) -> None:
    """Run `work` in the calling thread and in as many others as pay; each claims chunks until none is left."""
    unclaimed = deque(range(len(tiling.chunks)))

    def claimed() -> Iterator[int]:
        while True:
            try:
                yield unclaimed.popleft()
            except IndexError:
                return

    def run() -> None:
        with np.errstate(all="ignore"):
            # NumPy copies a broadcast operand through a buffer when several of its rows fit in there. With rows
            # this long the copy costs as much as the arithmetic, so the buffer is made too small for it.
            buffer_size = np.setbufsize(16) if tiling.columns >= 512 else None
            try:
                work(claimed())
            except BaseException:
                unclaimed.clear()  # the others need do no more
                raise
            finally:
                if buffer_size is not None:
                    np.setbufsize(buffer_size)

    others = tiling.workers(rooms) - 1
    most_others = max(others, threads() - 1)  # one pool, whatever a call takes of it
    helpers = _Helpers(run)
    try:
        for _ in range(others):
            try:
                _pool(most_others).submit(helpers.help)
            except RuntimeError:  # no more threads can be started, or the interpreter is ending: those there are do it
                break
        run()
    finally:
        unclaimed.clear()  # interrupted, it may not have begun
        helpers.dismiss()
    helpers.raise_what_they_raised()


class _Helpers:
    """Threads that work for a call. None of them touches its arrays any more once it has dismissed them."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work  # None: nothing is left to do
        self._changed = Condition()
        self._busy = 0
        self._raised: list[BaseException] = []

    def help(self) -> None:
        with self._changed:
            work = self._work
            if work is None:
                return
            self._busy += 1
        try:
            work()
        except BaseException as error:
            self._raised.append(error)
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def dismiss(self) -> None:
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._work = None
                    self._changed.wait_for(lambda: not self._busy)
                break
            except BaseException as error:  # however often it is interrupted: not before they have stopped
                # Interrupted where it has just given back its lock, a condition says that it has none.
                cause = error.__context__ if isinstance(error, RuntimeError) else None
                interrupted = interrupted or cause or error
        if interrupted is not None:
            raise interrupted

    def raise_what_they_raised(self) -> None:
        if self._raised:
            error = self._raised[0]
            self._raised.clear()
            try:
                raise error
            finally:
                del self, error  # else its traceback would refer to what refers to it, and keep the arrays
