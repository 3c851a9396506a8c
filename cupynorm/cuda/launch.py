"""From a validated problem to kernel launches on CuPy's current stream."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import cupy
import numpy as np

from ..arrays import is_capturing
from ..problem import NormProblem
from . import config as choose
from .driver import Arguments, Launch, PerThread, ReadyLaunch, launch_all
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
        device = device_of(cupy.cuda.runtime.getDevice())
        config = choose.backward_config(problem, _is_aligned(problem, offset), device)
        split = config.route == "split"
        main = _backward_launch(config, "backward_split_apply" if split else f"backward_{config.route}")
        walkers = choose.partial_rows(config, problem, _walkers_at_once(main, config.cluster, device))

        # A single partial row is the sum.
        self._one_row = walkers == 1 and sums_offset == 0 and problem.parameter_dtype == problem.compute_dtype
        itemsize = problem.compute_dtype.itemsize
        partials_bytes = 0 if self._one_row else walkers * choose.partial_row_stride(problem.columns) * itemsize
        self._workspace = _Workspace(
            partials_bytes if problem.want_dw else 0,
            partials_bytes if problem.want_db else 0,
            problem.rows * config.slabs * 2 * itemsize if split and problem.want_dx else 0,
        )

        # The kernels and their grids.
        kernels = [(main, (config.slabs, walkers) if split else (walkers * config.cluster, 1))]
        if split and problem.want_dx:
            sums_walkers = choose.sums_walkers(config, problem, device)
            kernels.insert(0, (_backward_launch(config, "backward_split_sums"), (config.slabs, sums_walkers)))
        reduction = choose.reduction_config(walkers)
        reductions = []
        if (problem.want_dw or problem.want_db) and not self._one_row:
            definitions = choose.partials_definitions(problem.compute_dtype.name, problem.accumulate)
            reduce = Launch(
                kernel("partials.cu", "reduce_partials", definitions),
                reduction.threads,
                overlaps_previous=device.overlaps_launches,
            )
            reductions.append((reduce, (-(-problem.columns // reduction.columns), 2 if problem.want_db else 1)))

        def make_ready() -> tuple[Any, Any, list[ReadyLaunch]]:
            arguments = Arguments(
                choose.BACKWARD_ARGUMENTS,
                problem.rows,
                problem.x_row_stride,
                problem.dy_row_stride,
                problem.out_row_stride,
                problem.columns,
                _code(problem.w_dtype),
                config.group_threads,
                config.slab_columns,
                config.stages,
                choose.least_steps(config, problem.rows, walkers),
            )
            partials = Arguments(
                choose.PARTIALS_ARGUMENTS,
                walkers,
                problem.columns,
                _code(problem.parameter_dtype),
                reduction.row_threads,
            )
            launches = [launch.ready(arguments, *grid) for launch, grid in kernels]
            launches += [launch.ready(partials, *grid) for launch, grid in reductions]
            return arguments.fill, partials.fill, launches

        self._thread = PerThread(make_ready)

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
        fill, fill_partials, launches = self._thread.own
        memory = self._workspace.allocate(stream)
        dw_partials, db_partials, sums = self._workspace.parts(memory)
        if self._one_row:
            dw_partials, db_partials = dw, db
        fill(x, dy, w, mean, rstd, dx, dw_partials, db_partials, sums)
        fill_partials(dw_partials, db_partials, dw, db)
        launch_all(launches, stream.ptr)


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
            (config.cluster, 1),
            shared_bytes=config.shared_bytes,
            cluster=config.cluster,
        )
        walkers = min(_walkers_at_once(main, config.cluster, device), -(-problem.rows // config.groups))

        def make_ready() -> tuple[Any, list[ReadyLaunch]]:
            arguments = Arguments(
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
            )
            return arguments.fill, [main.ready(arguments, walkers * config.cluster)]

        self._thread = PerThread(make_ready)

    def __call__(self, x: int, w: int, b: int, residual: int, y: int, *statistics: int) -> None:
        """Fill y, mean (LayerNorm) and rstd."""
        if not self.problem.rows:
            return
        mean, rstd = statistics if len(statistics) == 2 else (0, *statistics)
        fill, launches = self._thread.own
        fill(x, w, b, y, mean, rstd)
        launch_all(launches, _current_stream().ptr)


class _Workspace:
    """Memory that a call needs until its last kernel is done: one allocation, in parts of the given sizes."""

    def __init__(self, *sizes: int) -> None:
        whole = [-(-size // _PART_BYTES) * _PART_BYTES for size in sizes]
        self._bytes = sum(whole)
        starts = accumulate(whole, initial=0)
        self._starts = [start if size else None for start, size in zip(starts, sizes, strict=False)]

    def allocate(self, stream: Any) -> Any:
        """The memory, or None where none is needed.

        CuPy's pool may hand it to others as soon as it is let go: what they do comes later on this stream. Not so while
        the stream is captured into a graph, to which the memory must belong then.
        """
        if not self._bytes:
            return None
        return (_malloc_async if is_capturing(stream) else _alloc)(self._bytes)

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
    return choose.Device((major, minor), multiprocessors, shared_bytes, cupy.cuda.runtime.driverGetVersion())


def _backward_launch(config: choose.BackwardConfig, name: str) -> Launch:
    return Launch(
        kernel(f"backward_{config.route}.cu", name, config.definitions),
        config.threads,
        (config.cluster, 1),
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
