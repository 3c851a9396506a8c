"""From a validated problem to kernel launches on CuPy's current stream."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from itertools import accumulate
from typing import Any

import cupy
import numpy as np

from ..arrays import is_capturing
from ..problem import NormProblem
from . import config as choose
from .driver import Arguments, Launch, PerThread
from .module import kernel

# cudaDevAttr… ComputeCapabilityMajor, ComputeCapabilityMinor, MultiProcessorCount, MaxSharedMemoryPerBlockOptin
_DEVICE_ATTRIBUTES = (75, 76, 16, 97)

_PART_BYTES = 512  # what each part of a workspace is rounded up to, as CuPy's allocations are
_alloc, _malloc_async = cupy.cuda.alloc, cupy.cuda.malloc_async
_current_stream = cupy.cuda.get_current_stream


class Backward:
    """A backward problem on the current device, ready to run on any addresses.

    `offset` has the bits in which the addresses of x, w, dy and dx differ from multiples of 16, `sums_offset` those of
    dw and db.
    """

    def __init__(self, problem: NormProblem, offset: int, sums_offset: int) -> None:
        self.problem = problem
        self._has_work = problem.rows > 0 and (problem.want_dx or problem.want_dw or problem.want_db)
        if not self._has_work:
            return
        device_id = cupy.cuda.runtime.getDevice()
        device = device_of(device_id)
        config = choose.backward_config(problem, _is_aligned(problem, offset), device)
        split = config.route == "split"
        main = _backward_launch(config, "backward_split_apply" if split else f"backward_{config.route}")
        walkers = choose.partial_rows(config, problem, _walkers_at_once(main, config.cluster, device))

        grid = (config.slabs, walkers) if split else (walkers * config.cluster, 1)
        blocks = grid[0] * grid[1]

        # A single partial row is the sum.
        one_row = walkers == 1 and sums_offset == 0 and problem.parameter_dtype == problem.compute_dtype
        reduces = (problem.want_dw or problem.want_db) and not one_row
        self._meeting_bytes = choose.meeting_bytes(blocks) if reduces else 0
        itemsize = problem.compute_dtype.itemsize
        partials_bytes = walkers * choose.partial_row_stride(problem.columns) * itemsize if reduces else 0
        self._workspace = _Workspace(
            partials_bytes if problem.want_dw else 0,
            partials_bytes if problem.want_db else 0,
            problem.rows * config.slabs * 2 * itemsize if split and problem.want_dx else 0,
        )

        launches = [main.over(*grid)]
        if split and problem.want_dx:
            sums_walkers = choose.sums_walkers(config, problem, device)
            launches.insert(0, _backward_launch(config, "backward_split_sums").over(config.slabs, sums_walkers))

        def make_arguments() -> tuple[Arguments, _Meetings]:
            arguments = Arguments(
                choose.BACKWARD_ARGUMENTS,
                problem.rows,
                problem.x_row_stride,
                problem.dy_row_stride,
                problem.out_row_stride,
                problem.columns,
                _code(problem.w_dtype),
                _code(problem.parameter_dtype),
                config.group_threads,
                config.slab_columns,
                config.stages,
                choose.least_steps(config, problem.rows, walkers),
                walkers,
                choose.reduction_row_threads(config.threads, blocks, walkers, problem),
                config.groups,
            )
            return arguments, _meetings.of_device[device_id]

        self._launches = launches
        self._thread = PerThread(make_arguments)

    def __call__(
        self, x: int, w: int, dy: int, mean: int, rstd: int, dresidual_out: int, dx: int, dw: int, db: int
    ) -> None:
        """Fill dx, dw and db; those that are 0 are not written, nor reduced."""
        stream = _current_stream()
        if not self._has_work:
            for address in (dw, db):
                if address:  # the sum over no rows
                    size = self.problem.columns * self.problem.parameter_dtype.itemsize
                    cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)
            return
        arguments, meetings = self._thread.own
        capturing = is_capturing(stream)
        memory = self._workspace.allocate(capturing)
        dw_partials, db_partials, sums = self._workspace.parts(memory)
        if self._meeting_bytes:
            meeting = self._meeting(stream, capturing, meetings)
            arguments.fill(x, dy, w, mean, rstd, dx, dw_partials, db_partials, sums, dw, db, meeting.ptr)
        else:
            arguments.fill(x, dy, w, mean, rstd, dx, dw, db, sums, 0, 0, 0)
        for launch in self._launches:
            launch(stream.ptr, arguments.address, 0)

    def _meeting(self, stream: Any, capturing: bool, meetings: _Meetings) -> Any:
        """Memory for struct Meeting of reduction.cuh, ready for the stream's next launch.

        Launches on one stream follow one another, and leave it as the next one wants it. A graph, which may be launched
        on any stream, has one of its own, cleared on each launch.
        """
        if not capturing:
            size, memory = meetings.get(stream.ptr, (0, None))
            if size >= self._meeting_bytes:
                return memory
        memory = (_malloc_async if capturing else _alloc)(self._meeting_bytes)
        cupy.cuda.runtime.memsetAsync(memory.ptr, 0, self._meeting_bytes, stream.ptr)
        if not capturing:
            meetings[stream.ptr] = self._meeting_bytes, memory
        return memory


class Forward:
    """A forward problem on the current device, ready to run on any addresses.

    `offset` has the bits in which the addresses of x, w, b and y differ from multiples of 16.
    """

    def __init__(self, problem: NormProblem, offset: int) -> None:
        self.problem = problem
        if not problem.rows:
            return
        device = device_of(cupy.cuda.runtime.getDevice())
        config = choose.forward_config(problem, _is_aligned(problem, offset), device)
        main = Launch(
            kernel(config.file, config.kernel, config.definitions),
            config.threads,
            shared_bytes=config.shared_bytes,
            cluster=config.cluster,
        )
        walkers = min(_walkers_at_once(main, config.cluster, device), -(-problem.rows // config.groups))

        def make_arguments() -> Arguments:
            return Arguments(
                choose.FORWARD_ARGUMENTS,
                problem.rows,
                problem.x_row_stride,
                problem.out_row_stride,
                problem.eps,
                problem.columns,
                _code(problem.w_dtype),
                _code(problem.b_dtype),
                config.group_threads,
                config.slab_columns,
                config.stages,
                choose.least_steps(config, problem.rows, walkers),
                config.groups,
            )

        self._launch = main.over(walkers * config.cluster)
        self._thread = PerThread(make_arguments)

    def __call__(self, x: int, w: int, b: int, residual: int, y: int, *statistics: int) -> None:
        """Fill y, mean (LayerNorm) and rstd."""
        if not self.problem.rows:
            return
        mean, rstd = statistics if len(statistics) == 2 else (0, *statistics)
        arguments = self._thread.own
        arguments.fill(x, w, b, y, mean, rstd)
        self._launch(_current_stream().ptr, arguments.address, 0)


_Meetings = dict[int, tuple[int, Any]]  # of each stream, by its pointer: bytes, memory


class _ThreadMeetings(threading.local):
    """Of each thread, because two may use a stream by the same pointer."""

    def __init__(self) -> None:
        self.of_device: defaultdict[int, _Meetings] = defaultdict(dict)


_meetings = _ThreadMeetings()


class _Workspace:
    """Memory that a call needs until its last kernel is done: one allocation, in parts of the given sizes."""

    def __init__(self, *sizes: int) -> None:
        whole = [-(-size // _PART_BYTES) * _PART_BYTES for size in sizes]
        self._bytes = sum(whole)
        starts = accumulate(whole, initial=0)
        self._starts = [start if size else None for start, size in zip(starts, sizes, strict=False)]

    def allocate(self, capturing: bool) -> Any:
        """The memory, or None where none is needed.

        CuPy's pool may hand it to others as soon as it is let go: what they do comes later on this stream. Not so while
        the stream is captured into a graph, to which the memory must belong then.
        """
        if not self._bytes:
            return None
        return (_malloc_async if capturing else _alloc)(self._bytes)

    def parts(self, memory: Any) -> list[int]:
        """The address of each part, 0 for one of no size."""
        if memory is None:
            return [0] * len(self._starts)
        base = memory.ptr
        return [0 if start is None else base + start for start in self._starts]


# --- small pieces -----------------------------------------------------------------------------------------------------


@functools.cache
def device_of(device_id: int) -> choose.Device:
    """What launch choices need to know about a CUDA device."""
    major, minor, multiprocessors, shared_bytes = (
        int(cupy.cuda.runtime.deviceGetAttribute(attribute, device_id)) for attribute in _DEVICE_ATTRIBUTES
    )
    return choose.Device((major, minor), multiprocessors, shared_bytes)


def _backward_launch(config: choose.BackwardConfig, name: str) -> Launch:
    return Launch(
        kernel(f"backward_{config.route}.cu", name, config.definitions),
        config.threads,
        shared_bytes=0 if name == "backward_split_sums" else config.shared_bytes,
        cluster=config.cluster,
    )


def _walkers_at_once(main: Launch, cluster: int, device: choose.Device) -> int:
    """How many blocks, or clusters, the device holds at the same time."""
    if cluster == 1:
        return main.blocks_at_once(device.multiprocessors)
    return choose.clusters_at_once(main.clusters_at_once(), cluster, device)


def _is_aligned(problem: NormProblem, offset: int) -> bool:
    """Whether every row of x, dy and the output, and w and b, start at multiples of 16 bytes."""
    x_itemsize = problem.x_dtype.itemsize
    dy_itemsize = problem.dy_dtype.itemsize if problem.dy_dtype is not None else 0
    bits = offset | problem.x_row_stride * x_itemsize | problem.out_row_stride * x_itemsize
    return (bits | problem.dy_row_stride * dy_itemsize) % 16 == 0


def _code(dtype: np.dtype[Any] | None) -> int:
    return choose.ELEMENT_CODES[None if dtype is None else dtype.name]
