"""From a validated problem to kernel launches on CuPy's current stream."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import cupy
import numpy as np

from ..arrays import is_capturing
from ..problem import NormProblem
from . import config as choose
from .driver import Arguments, Launch, PerThread, load_together
from .module import kernel, prepare
from .streams import keep_until_done

# cudaDevAttr… ComputeCapabilityMajor, ComputeCapabilityMinor, MultiProcessorCount, MaxSharedMemoryPerBlockOptin,
# MemoryClockRate (kHz, of two transfers each), GlobalMemoryBusWidth (bits)
_DEVICE_ATTRIBUTES = (75, 76, 16, 97, 36, 37)

_WIDENING_THREADS = 256
_KEPT_WIDE = choose.KEPT_COUNTER_BYTES + choose.KEPT_EXCHANGE_BYTES  # where that begins
_KEPT_ZEROS = _KEPT_WIDE + choose.KEPT_WIDE_BYTES
_PIECE_COLUMNS = 512  # a multiple of these leaves addresses as aligned as they were
_PART_BYTES = 512  # what each part of a workspace is rounded up to, as CuPy's allocations are
_alloc, _malloc_async = cupy.cuda.alloc, cupy.cuda.malloc_async
_current_stream = cupy.cuda.get_current_stream


class Backward:
    """A backward problem on the current device, ready to run on any addresses.

    How far behind multiples of START_BYTES the addresses lie is known: `offsets` of x, dy and dx, `w_offsets` of w,
    `sums_offsets` of dw and db.
    """

    def __init__(
        self, problem: NormProblem, offsets: Sequence[int], w_offsets: Sequence[int], sums_offsets: Sequence[int]
    ) -> None:
        self.problem = problem
        self._pieces: list[tuple[Backward, int, int]] = []  # what does it all instead, each from a row and a column on
        self._has_work = problem.rows > 0 and (problem.want_dx or problem.want_dw or problem.want_db)
        if not self._has_work:
            return
        config, main, device = _chosen(choose.backward_config, _backward_main, problem, offsets, w_offsets)
        sums_aligned = not _off_16(sums_offsets)
        self._widen_w, w_dtype = _widening(problem, config.definitions)
        self._widened_bytes = problem.columns * problem.compute_dtype.itemsize if self._widen_w else 0
        few = choose.few_rows_blocks(config, problem, sums_aligned, device)
        if config.route == "wide":
            self._take_wide(config, main, w_dtype, sums_aligned)
        elif few:
            self._take_few_rows(few, _few_rows_launch(config, few), w_dtype)
        else:
            self._walk(config, main, device, w_dtype, sums_aligned)
            if self._workspace.is_too_large:
                self._pieces = [
                    (Backward(piece, offsets, w_offsets, sums_offsets), row, column)
                    for piece, row, column in _backward_pieces(problem)
                ]

    def _take_few_rows(self, few: choose.FewRows, main: Launch, w_dtype: Any) -> None:
        problem = self.problem
        self._workspace = _Workspace(0, beside=self._widened_bytes)
        self._launches = [main.over(few.row_blocks + few.column_blocks)]
        one = problem.compute_dtype.type(1)
        self._take_arguments(
            choose.FEW_ROWS_ARGUMENTS[problem.compute_dtype.name],
            problem.x_row_stride,
            problem.dy_row_stride,
            problem.out_row_stride,
            problem.rows,
            problem.columns,
            few.row_blocks,
            few.block_rows,
            few.log2_lanes,
            few.warps,
            float(one / problem.compute_dtype.type(problem.columns)),
            few.whole_threads,
            _code(w_dtype),
            _code(problem.parameter_dtype),
            few.column_threads,
            few.row_threads,
            few.column_blocks,
        )

    def _take_wide(self, config: choose.BackwardConfig, main: Launch, w_dtype: Any, sums_aligned: bool) -> None:
        problem = self.problem
        self._workspace = _Workspace(0, wide=choose.wide_exchange_bytes(), beside=self._widened_bytes)
        self._launches = [main.over(config.slabs, cooperative=True)]  # its blocks wait for each other
        one = problem.compute_dtype.type(1)
        self._take_arguments(
            choose.WIDE_ARGUMENTS,
            problem.rows,
            problem.x_row_stride,
            problem.dy_row_stride,
            problem.out_row_stride,
            problem.columns,
            config.slab_columns,
            -(-problem.rows // config.step_rows),
            float(one / problem.compute_dtype.type(problem.columns)),
            _code(w_dtype),
            _code(problem.parameter_dtype),
            sums_aligned,
            choose.reads_once(problem),
            config.lag,
        )

    def _walk(
        self, config: choose.BackwardConfig, main: Launch, device: choose.Device, w_dtype: Any, sums_aligned: bool
    ) -> None:
        problem = self.problem
        split = config.route == "split"
        at_once = _walkers_at_once(main, device, config.cluster, config.slabs if config.gang else 1)
        walkers, column_blocks, column_threads, row_parts = choose.grid(config, problem, at_once, device)

        grid = (config.slabs, walkers) if split else (walkers * config.slabs + column_blocks, 1)
        blocks = grid[0] * grid[1]

        # Column blocks need memory only where several share a slice's rows. A single partial row is the sum: dw and db
        # themselves, where these have its type and alignment. Else the direct and split kernels narrow it; the staged
        # kernel has no code for that, and holds a meeting of one.
        wants_sums = problem.want_dw or problem.want_db
        sums = wants_sums and not column_blocks
        apart = sums and (not sums_aligned or problem.narrows_sums)
        reduces = sums and (walkers > 1 or (apart and config.route == "staged"))
        itemsize = problem.compute_dtype.itemsize
        partials_bytes = walkers * choose.partial_row_stride(problem.columns) * itemsize if reduces or apart else 0
        sums_bytes = choose.slab_sums_bytes(config, problem) if split and problem.want_dx else 0
        parts_bytes = choose.column_parts_bytes(config, problem, column_blocks, column_threads, row_parts)
        # A single walker's sums need no meeting, where the counters would lie.
        paces = reduces or not wants_sums
        lead, step_counters = choose.pace(config, problem.rows, walkers) if paces else (0, 1)
        if config.route == "staged" and not (sums or lead):
            main = _staged_launch(config, config.unpaced_definitions)
        self._workspace = _Workspace(
            choose.meeting_bytes(blocks) if reduces else choose.STEP_COUNTERS_BYTES if parts_bytes or lead else 0,
            partials_bytes if problem.want_dw else 0,
            partials_bytes if problem.want_db else 0,
            sums_bytes or parts_bytes,
            exchange=choose.exchange_bytes(walkers * config.slabs) if config.gang else 0,
            beside=self._widened_bytes,
        )

        # The blocks of a gang wait for each other.
        self._launches = [main.over(*grid, cooperative=config.gang and walkers > 0)]
        if split and problem.want_dx:
            sums_walkers = choose.sums_walkers(config, problem, device)
            sweep = Launch(kernel("backward_split.cu", "backward_split_sums", config.definitions), config.threads)
            self._launches.insert(0, sweep.over(config.slabs, sums_walkers))

        # Of a column block, or of the final reduction.
        row_threads = (
            config.threads // column_threads
            if column_threads
            else choose.reduction_row_threads(config.threads, blocks, walkers, problem)
        )
        self._take_arguments(
            choose.BACKWARD_ARGUMENTS,
            problem.rows,
            problem.x_row_stride,
            problem.dy_row_stride,
            problem.out_row_stride,
            problem.columns,
            _code(w_dtype),
            config.group_threads,
            config.slab_columns,
            config.stages,
            choose.least_steps(config.groups, problem.rows, walkers),
            walkers,
            config.groups,
            _code(problem.parameter_dtype),
            row_threads,
            column_threads,
            column_blocks,
            row_parts,
            lead,
            step_counters,
            choose.reads_once(problem) and not column_blocks,  # these read what the walkers have read
        )

    def _take_arguments(self, layout: str, *fixed: Any) -> None:
        """Of the kernel's struct, what is behind the addresses of a call."""
        problem, widens_w = self.problem, self._widen_w is not None

        def make_arguments() -> tuple[Arguments, Arguments | None]:
            widening = (choose.WIDENING_ARGUMENTS, 2, problem.columns, _code(problem.w_dtype))
            return Arguments(layout, 8, *fixed), Arguments(*widening) if widens_w else None

        self._thread = _with_kept(make_arguments)

    def __call__(
        self, x: int, w: int, dy: int, mean: int, rstd: int, dresidual_out: int, dx: int, dw: int, db: int
    ) -> None:
        """Fill dx, dw and db, which are 0 where they are not wanted."""
        stream = _current_stream()
        if not self._has_work:
            for address in (dw, db):
                if address:  # the sum over no rows
                    size = self.problem.columns * self.problem.parameter_dtype.itemsize
                    cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)
            return
        if self._pieces:
            self._call_pieces(x, w, dy, mean, rstd, dx, dw, db)
            return
        spare = self._thread.spare
        own = spare.pop() if spare else self._thread.make()
        arguments, of_w, kept = own
        memory = self._workspace.take(stream, kept)  # held until the launches are out
        if memory is not None and memory.ptr != arguments.workspace:
            self._workspace.fill_in(arguments, memory.ptr)
        if of_w:
            widened = memory.ptr + self._workspace.beside
            of_w.fill(w, widened)
            self._widen_w(stream.ptr, of_w.address, 0)
            w = widened
        arguments.fill(x, dy, w, mean, rstd, dx, dw, db)
        for launch in self._launches:
            launch(stream.ptr, arguments.address, 0)
        spare.append(own)  # not where something was raised: then another is made

    def _call_pieces(self, x: int, w: int, dy: int, mean: int, rstd: int, dx: int, dw: int, db: int) -> None:
        problem = self.problem
        assert problem.dy_dtype is not None
        of_x, of_dy, of_dw = (d.itemsize for d in (problem.x_dtype, problem.dy_dtype, problem.parameter_dtype))
        for piece, row, column in self._pieces:
            statistics_at, sums_at = row * problem.compute_dtype.itemsize, column * of_dw
            piece(
                x + (row * problem.x_row_stride + column) * of_x,
                w,
                dy + (row * problem.dy_row_stride + column) * of_dy,
                mean and mean + statistics_at,
                rstd + statistics_at,
                0,
                dx + row * problem.out_row_stride * of_x if piece.problem.want_dx else 0,
                dw + sums_at if piece.problem.want_dw else 0,
                db + sums_at if piece.problem.want_db else 0,
            )


def _backward_pieces(problem: NormProblem) -> list[tuple[NormProblem, int, int]]:
    """What needs less workspace each and together does the same, and the row and the column that each begins with.

    First dx alone and, in which a row's sums have no part, dw and db; of dx then rows, of dw and db columns. None
    where there are too few of these.
    """
    dw_or_db = problem.want_dw or problem.want_db
    if problem.want_dx and dw_or_db:
        dx_alone = dataclasses.replace(problem, want_dw=False, want_db=False)
        return [(dx_alone, 0, 0), (dataclasses.replace(problem, want_dx=False), 0, 0)]
    if problem.want_dx:
        return [(half, row, 0) for half, row in _halves(problem)]
    half = problem.columns // 2 // _PIECE_COLUMNS * _PIECE_COLUMNS
    if not half:
        return []
    return [(dataclasses.replace(problem, columns=n), 0, at) for n, at in ((half, 0), (problem.columns - half, half))]


class Forward:
    """A forward problem on the current device, ready to run on any addresses.

    How far behind multiples of START_BYTES the addresses lie is known: `offsets` of x and y, `w_offsets` of w and b.
    """

    def __init__(self, problem: NormProblem, offsets: Sequence[int], w_offsets: Sequence[int]) -> None:
        self.problem = problem
        self._pieces: list[tuple[Forward, int]] = []  # what does it all instead, each from a row on
        if not problem.rows:
            return
        config, main, device = _chosen(choose.forward_config, _forward_main, problem, offsets, w_offsets)
        if config.step_rows:
            self._take_wide(config, main)
            return
        steps, walk_rows, drawn_steps, lead, step_counters, sums_bytes = 1, problem.rows, 0, 0, 1, 0
        if few := choose.forward_few_rows(config, problem, device):
            self._launches = [Launch(_kernel("forward_few_rows", few.definitions), few.threads).over(few.blocks)]
        elif config.slabs > 1:
            grid = config.slabs, choose.forward_split_walkers(config, problem, device)
            sums = Launch(kernel(config.file, "forward_split_sums", config.definitions), config.threads)
            self._launches = [sums.over(*grid), main.over(*grid)]
            sums_bytes = choose.slab_sums_bytes(config, problem)
        else:
            at_once = _walkers_at_once(main, device, config.cluster)
            walkers = choose.forward_walkers(config, problem.rows, at_once, device)
            steps, walk_rows, drawn_steps = choose.forward_steps(config, problem.rows, walkers)
            lead, step_counters = choose.pace(config, problem.rows, walkers)
            self._launches = [main.over(walkers * config.cluster)]
        self._workspace = _Workspace(choose.STEP_COUNTERS_BYTES if drawn_steps or lead else 0, sums_bytes)
        if self._workspace.is_too_large:
            self._pieces = [(Forward(half, offsets, w_offsets), row) for half, row in _halves(problem)]

        self._take_arguments(
            choose.FORWARD_ARGUMENTS,
            problem.rows,
            walk_rows,
            problem.x_row_stride,
            problem.out_row_stride,
            problem.eps,
            problem.columns,
            _code(problem.w_dtype),
            _code(problem.b_dtype),
            config.group_threads,
            config.slab_columns,
            config.stages,
            steps,
            config.groups,
            drawn_steps,
            lead,
            step_counters,
        )

    def _take_wide(self, config: choose.ForwardConfig, main: Launch) -> None:
        problem = self.problem
        self._workspace = _Workspace(0, wide=choose.wide_exchange_bytes())
        self._launches = [main.over(config.slabs, cooperative=True)]  # its blocks wait for each other
        self._take_arguments(
            choose.FORWARD_WIDE_ARGUMENTS,
            problem.rows,
            problem.x_row_stride,
            problem.out_row_stride,
            problem.eps,
            problem.columns,
            config.slab_columns,
            -(-problem.rows // config.step_rows),
            _code(problem.w_dtype),
            _code(problem.b_dtype),
            choose.forward_wide_reads_once(problem),
            config.lag,
        )

    def _take_arguments(self, layout: str, *fixed: Any) -> None:
        """Of the kernel's struct, what is behind the addresses of a call."""
        self._thread = _with_kept(lambda: (Arguments(layout, 6, *fixed),))

    def __call__(self, x: int, w: int, b: int, residual: int, y: int, *statistics: int) -> None:
        """Fill y, mean (LayerNorm) and rstd."""
        if not self.problem.rows:
            return
        mean, rstd = statistics if len(statistics) == 2 else (0, *statistics)
        if self._pieces:
            self._call_pieces(x, w, b, y, mean, rstd)
            return
        stream = _current_stream()
        spare = self._thread.spare
        own = spare.pop() if spare else self._thread.make()
        arguments, kept = own
        memory = self._workspace.take(stream, kept)
        if memory is not None and memory.ptr != arguments.workspace:
            self._workspace.fill_in(arguments, memory.ptr)
        arguments.fill(x, w, b, y, mean, rstd)
        for launch in self._launches:
            launch(stream.ptr, arguments.address, 0)
        spare.append(own)

    def _call_pieces(self, x: int, w: int, b: int, y: int, mean: int, rstd: int) -> None:
        problem, itemsize = self.problem, self.problem.x_dtype.itemsize
        for piece, row in self._pieces:
            statistics_at = row * problem.compute_dtype.itemsize
            x_row, y_row = x + row * problem.x_row_stride * itemsize, y + row * problem.out_row_stride * itemsize
            piece(x_row, w, b, 0, y_row, mean and mean + statistics_at, rstd + statistics_at)


def _halves(problem: NormProblem) -> list[tuple[NormProblem, int]]:
    """Of its rows, and the row that each begins with; none of a single row."""
    half = problem.rows // 2
    if not half:
        return []
    return [
        (dataclasses.replace(problem, rows=half), 0),
        (dataclasses.replace(problem, rows=problem.rows - half), half),
    ]


# For a stream: CuPy's object of it, bytes, memory of so many, and the object under which that was allocated, in whose
# order it may be given back.
_Entry = tuple[Any, int, Any, Any]


class _Kept(dict[int, _Entry]):
    """What is kept for each stream, by its pointer.

    When that is let go, or the thread ends, the stream lives on until its work is done (streams.py).
    """

    def make_room(self) -> None:
        """For one more stream."""
        while len(self) >= choose.KEPT_STREAMS:
            stream, _, memory, allocated_under = self.pop(next(iter(self)))
            keep_until_done(stream, allocated_under)
            del memory, stream, allocated_under  # in this order

    def __del__(self, interpreter_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not interpreter_ends():
            for stream, _, _, allocated_under in self.values():
                keep_until_done(stream, allocated_under)


class _KeptMemory(threading.local):
    """Of each thread: two may mean different streams by the same pointer, or race for one."""

    def __init__(self) -> None:
        self.on_device: defaultdict[int, _Kept] = defaultdict(_Kept)


_kept = _KeptMemory()


def _with_kept(make: Callable[[], tuple[Any, ...]]) -> PerThread:
    """What each thread makes for itself, and what it keeps on the current device."""
    device_id = cupy.cuda.runtime.getDevice()
    return PerThread(lambda: (*make(), _kept.on_device[device_id]))


class _Workspace:
    """Memory that the kernels of a call need: counters, and behind them parts of the given sizes.

    A last part, of `beside` bytes, is no argument of the main kernel; it lies `self.beside` bytes from the start.

    The counters are those of counters.cuh or a Meeting (reduction.cuh), which begins with them. What gangs exchange
    (gang.cuh) takes the place of the last of the sizes; `wide`, what all blocks exchange that share each row (wide.cuh)
    and have neither counters nor sizes, that of the counters. All these are zero at first.

    A stream's launches follow one another, so its calls use the same memory, which is kept from call to call, for
    KEPT_STREAMS streams. A graph, which may be launched on any stream, has its own, and so has a call that needs more
    than KEPT_BYTES.
    """

    def __init__(self, counter_bytes: int, *sizes: int, exchange: int = 0, wide: int = 0, beside: int = 0) -> None:
        counters, exchanged, of_wide, *parts = (
            -(-size // _PART_BYTES) * _PART_BYTES for size in (counter_bytes, exchange, wide, *sizes, beside)
        )
        fits = counters <= choose.KEPT_COUNTER_BYTES and exchanged <= choose.KEPT_EXCHANGE_BYTES
        fits = fits and of_wide <= choose.KEPT_WIDE_BYTES
        self._keeps = fits and _KEPT_ZEROS + sum(parts) <= choose.KEPT_BYTES
        # In kept memory nothing else ever lies where these do: it would look like what blocks write there.
        first = _KEPT_ZEROS if self._keeps else counters + exchanged + of_wide
        *starts, self.beside, end = accumulate(parts, initial=first)
        places = zip((*starts, 0), (*sizes, counter_bytes), strict=True)
        self._starts = [start if size else None for start, size in places]
        self._zeros = counter_bytes
        if exchange or wide:
            kept_at, place = (choose.KEPT_COUNTER_BYTES, -2) if exchange else (_KEPT_WIDE, -1)
            start = kept_at if self._keeps else counters
            self._starts[place], self._zeros = start, start + exchange + wide
        self._has_parts = bool(counter_bytes or exchange or wide or any(sizes))
        self._bytes = end if self._has_parts or beside else 0

    @property
    def is_too_large(self) -> bool:
        return self._bytes > choose.WORKSPACE_BYTES

    def take(self, stream: Any, kept: _Kept) -> Any:
        """The memory, to be held while it is launched on, or None where none is needed."""
        if not self._bytes:
            return None
        if is_capturing(stream):
            return self._new(_malloc_async, self._bytes, self._zeros, stream)
        entry = kept.get(stream.ptr)
        if entry is not None and entry[0] is stream and entry[1] >= self._bytes and self._keeps:
            return entry[2]
        return self._take_anew(stream, kept, entry)

    def _take_anew(self, stream: Any, kept: _Kept, entry: _Entry | None) -> Any:
        """Where the stream has no memory of this size yet, or another object, or such memory is not kept."""
        if entry is None:
            kept.make_room()
            entry = stream, 0, None, stream
        before, size, memory, allocated_under = entry
        keep_until_done(*(one for one in (before, allocated_under) if one is not stream))
        if self._keeps and size < self._bytes:
            size, memory = self._bytes, self._new(_alloc, self._bytes, _KEPT_ZEROS, stream)
            allocated_under = stream
        # Also without memory: the stream lives until its work is done.
        kept[stream.ptr] = stream, size, memory, allocated_under
        return memory if self._keeps else self._new(_alloc, self._bytes, self._zeros, stream)

    def fill_in(self, arguments: Arguments, base: int) -> None:
        """The addresses of the parts and, last, of the counters, if any; 0 for what has no size."""
        if self._has_parts:
            arguments.fill_workspace(*(0 if start is None else base + start for start in self._starts))
        arguments.workspace = base

    @staticmethod
    def _new(allocate: Any, size: int, zeros: int, stream: Any) -> Any:
        memory = allocate(size)
        if zeros:
            cupy.cuda.runtime.memsetAsync(memory.ptr, 0, zeros, stream.ptr)
        return memory


# --- small pieces -----------------------------------------------------------------------------------------------------


@functools.cache
def device_of(device_id: int) -> choose.Device:
    """What launch choices need to know about a CUDA device."""
    major, minor, multiprocessors, shared_bytes, memory_khz, bus_bits = (
        int(cupy.cuda.runtime.deviceGetAttribute(attribute, device_id)) for attribute in _DEVICE_ATTRIBUTES
    )
    memory_gbps = 2 * memory_khz * bus_bits // 8 // 10**6
    return choose.Device((major, minor), multiprocessors, shared_bytes, memory_gbps)


_Config = TypeVar("_Config", choose.BackwardConfig, choose.ForwardConfig)


def _chosen(
    choose_config: Callable[..., _Config],
    main_of: Callable[[_Config], Launch],
    problem: NormProblem,
    offsets: Sequence[int],
    w_offsets: Sequence[int],
) -> tuple[_Config, Launch, choose.Device]:
    """For the current device; whether that holds a cluster as is chosen is known only once the kernel is loaded."""
    alignment, odd = _alignment(problem, offsets, w_offsets), _odd_access(problem, offsets)
    configure = functools.partial(choose_config, problem, alignment, odd=odd, start=_start(offsets))
    device = device_of(cupy.cuda.runtime.getDevice())
    config = configure(device)
    main = main_of(config)
    while config.cluster > 1 and not main.clusters_at_once:
        device = device._replace(most_cluster=config.cluster // 2)
        config = configure(device)
        main = main_of(config)
    return config, main, device


def _backward_main(config: choose.BackwardConfig) -> Launch:
    """The kernel for many rows. Those that another M may take, without pace and of few rows, are made now, too."""
    if config.route == "staged":
        of_many = dict.fromkeys((config.definitions, config.unpaced_definitions))  # each once
        kernels = [("backward_staged", definitions) for definitions in of_many]
        if few := choose.few_rows_definitions(config):
            kernels.append(("backward_few_rows", few))
        _load(cupy.cuda.runtime.getDevice(), *kernels)
        return _staged_launch(config, config.definitions)
    name = "backward_split_apply" if config.route == "split" else f"backward_{config.route}"
    main = kernel(f"backward_{config.route}.cu", name, config.definitions)
    return Launch(main, _all_threads(config), shared_bytes=config.shared_bytes)


def _staged_launch(config: choose.BackwardConfig, definitions: tuple[str, ...]) -> Launch:
    staged = _kernel("backward_staged", definitions)
    shared_bytes = config.alone_shared_bytes if choose.DX_ALONE in definitions else config.shared_bytes
    return Launch(staged, config.threads, shared_bytes=shared_bytes, cluster=config.cluster)


def _few_rows_launch(config: choose.BackwardConfig, few: choose.FewRows) -> Launch:
    definitions = choose.few_rows_definitions(config)
    assert definitions is not None
    return Launch(_kernel("backward_few_rows", definitions), few.threads, shared_bytes=few.shared_bytes)


def _forward_main(config: choose.ForwardConfig) -> Launch:
    """The kernel for many rows. That for few, which another M may take, is made now, too."""
    if few := choose.forward_few_rows_definitions(config.definitions):
        staged = (config.kernel, config.definitions)
        _load(cupy.cuda.runtime.getDevice(), staged, ("forward_few_rows", few))
    main = kernel(config.file, config.kernel, config.definitions)
    return Launch(main, _all_threads(config), shared_bytes=config.shared_bytes, cluster=config.cluster)


def _all_threads(config: choose.BackwardConfig | choose.ForwardConfig) -> int:
    """With those that do not work on rows."""
    return config.threads + (choose.WIDE_OTHER_THREADS if config.step_rows else 0)


@functools.cache
def _load(device_id: int, *asked_for: tuple[str, tuple[str, ...]]) -> None:
    """Make kernels, by their names and definitions, at the same time."""
    prepare(device_id)
    load_together(*(functools.partial(_kernel, *one) for one in asked_for))


def _kernel(name: str, definitions: tuple[str, ...]) -> Any:
    """Of the file that has its name."""
    return kernel(f"{name}.cu", name, definitions)


def _widening(problem: NormProblem, definitions: tuple[str, ...]) -> tuple[Any, Any]:
    """The launch that converts w first, or None, and the type that w then has."""
    if not choose.converts_w(problem) or choose.ANY_W in definitions:
        return None, problem.w_dtype
    widen_w = kernel("widen_w.cu", "widen_w", choose.widening_definitions(problem.x_dtype.name))
    launch = Launch(widen_w, _WIDENING_THREADS).over(-(-problem.columns // _WIDENING_THREADS))
    return launch, problem.compute_dtype


def _walkers_at_once(main: Launch, device: choose.Device, cluster: int, gang_blocks: int = 1) -> int:
    """How many blocks, clusters, or gangs of so many blocks, the device holds at the same time."""
    if cluster == 1:
        return main.blocks_at_once(device.multiprocessors) // gang_blocks
    return choose.clusters_at_once(main.clusters_at_once, cluster, device)


def _alignment(problem: NormProblem, offsets: Sequence[int], w_offsets: Sequence[int]) -> int:
    """Every row of x, dy and the output starts at multiples of so many bytes, 16 or a lower power of two; not of 16
    where w or b does not: of rows in vectors these are read in vectors, too."""
    x_itemsize = problem.x_dtype.itemsize
    dy_itemsize = problem.dy_dtype.itemsize if problem.dy_dtype is not None else 0
    bits = problem.x_row_stride * x_itemsize | problem.out_row_stride * x_itemsize
    bits |= problem.dy_row_stride * dy_itemsize | (8 if _off_16(w_offsets) else 16)
    bits = functools.reduce(operator.or_, offsets, bits)
    return bits & -bits


def _off_16(offsets: Sequence[int]) -> bool:
    """Whether some address is no multiple of 16."""
    return any(offset % 16 for offset in offsets)


def _start(offsets: Sequence[int]) -> int:
    """Of what is read, from multiples of START_BYTES, all bits together."""
    return functools.reduce(operator.or_, offsets[:-1])


def _odd_access(problem: NormProblem, offsets: Sequence[int]) -> choose.Access:
    """By words where rows of one number all start at odd elements, or none do: of x and dy, and of the output."""
    itemsize = problem.x_dtype.itemsize
    backward = problem.direction == "backward"
    strides = (problem.x_row_stride, *([problem.dy_row_stride] if backward else ()), problem.out_row_stride)
    of_arrays = zip(offsets, strides, strict=True)
    *read, written = ((offset // itemsize % 2, problem.rows > 1 and stride % 2) for offset, stride in of_arrays)
    if len({*read}) > 1:
        return choose.ODD_BY_ELEMENT
    writes = problem.want_dx or not backward
    return choose.ODD_ACROSS_WORDS if writes and written != read[0] else choose.ODD_IN_WORDS


def _code(dtype: np.dtype[Any] | None) -> int:
    return choose.ELEMENT_CODES[None if dtype is None else dtype.name]
