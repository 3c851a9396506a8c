"""From a validated problem on CuPy arrays to kernel launches on the current stream."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ..problem import NormProblem, address_of
from . import config as choose
from .module import kernel

if TYPE_CHECKING:
    from ..dispatch import BackwardOperands, ForwardOperands

_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
# cudaDevAttr… ComputeCapabilityMajor, ComputeCapabilityMinor, MultiProcessorCount, MaxSharedMemoryPerBlockOptin
_DEVICE_ATTRIBUTES = (75, 76, 16, 97)
_STATIC_SHARED_BYTES = 48 << 10  # what a block may have without asking


def backward(problem: NormProblem, operands: BackwardOperands) -> None:
    """Fill operands.dx, dw and db; those that are None are not computed."""
    if problem.rows == 0:
        for gradient in (operands.dw, operands.db):
            if gradient is not None:
                gradient.fill(0)
        return
    x, dy, dx = (_address(array) for array in (operands.x, operands.dy, operands.dx))
    plan = _backward_plan(problem, _is_aligned(problem, x, dy, dx), cupy.cuda.runtime.getDevice())
    config = plan.config

    columns, compute = problem.columns, problem.compute_dtype
    want_partials = problem.want_dw or problem.want_db
    partials = cupy.empty((2, plan.walkers, columns) if problem.want_db else (1, plan.walkers, columns), compute)
    sums = cupy.empty(problem.rows * config.slabs * 2, compute) if config.route == "split" else None
    dw_partials = partials.data.ptr if problem.want_dw else 0
    db_partials = partials.data.ptr + plan.walkers * columns * compute.itemsize if problem.want_db else 0
    arguments = _pack(
        choose.BACKWARD_ARGUMENTS,
        x,
        dy,
        _address(operands.w),
        _address(operands.mean),
        _address(operands.rstd),
        dx,
        dw_partials,
        db_partials,
        _address(sums),
        problem.rows,
        problem.x_row_stride,
        problem.dy_row_stride,
        problem.out_row_stride,
        columns,
        _code(problem.w_dtype),
        config.group_threads,
        config.slab_columns,
        config.stages,
        config.slabs,
    )
    for launch in plan.kernels:
        launch.kernel(launch.grid, (config.threads,), (arguments,), shared_mem=launch.shared_bytes)
    if want_partials:
        arguments = _pack(
            choose.PARTIALS_ARGUMENTS,
            dw_partials,
            db_partials,
            _address(operands.dw),
            _address(operands.db),
            plan.walkers,
            columns,
            _code(problem.parameter_dtype),
        )
        plan.reduce(((columns + 31) // 32, 2), (1024,), (arguments,))


def forward(problem: NormProblem, operands: ForwardOperands) -> None:
    """Fill operands.y, mean and rstd."""
    if problem.rows == 0:
        return
    x, y = _address(operands.x), _address(operands.y)
    plan = _forward_plan(problem, _is_aligned(problem, x, 0, y), cupy.cuda.runtime.getDevice())
    arguments = _pack(
        choose.FORWARD_ARGUMENTS,
        x,
        _address(operands.w),
        _address(operands.b),
        y,
        _address(operands.mean),
        _address(operands.rstd),
        problem.rows,
        problem.x_row_stride,
        problem.out_row_stride,
        problem.eps,
        problem.columns,
        _code(problem.w_dtype),
        _code(problem.b_dtype),
        plan.config.group_threads,
    )
    plan.launch.kernel(plan.launch.grid, (plan.config.threads,), (arguments,))


# --- plans: everything about a call that does not depend on addresses -------------------------------------------------


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    shared_bytes: int = 0


@dataclass(frozen=True)
class BackwardPlan:
    config: choose.BackwardConfig
    kernels: tuple[Launch, ...]
    reduce: Any
    walkers: int


@dataclass(frozen=True)
class ForwardPlan:
    config: choose.ForwardConfig
    launch: Launch


@functools.lru_cache(maxsize=4096)
def _backward_plan(problem: NormProblem, aligned: bool, device_id: int) -> BackwardPlan:
    device = device_of(device_id)
    config = choose.backward_config(problem, aligned, device)
    file = f"backward_{config.route}.cu"
    reduce = kernel("partials.cu", "reduce_partials", choose.partials_definitions(problem.compute_dtype.name))
    if config.route == "split":
        sums_kernel = kernel(file, "backward_split_sums", config.definitions)
        apply_kernel = kernel(file, "backward_split_apply", config.definitions)
        at_once = _blocks_at_once(apply_kernel, config, device_id)
        walkers = choose.partial_rows(config, problem, at_once)
        sums_walkers = min(problem.rows, -(-8 * device.multiprocessors // config.slabs), 65535)
        sums_launch = Launch(sums_kernel, (config.slabs, sums_walkers))
        apply_launch = Launch(apply_kernel, (config.slabs, walkers), config.shared_bytes)
        kernels = (sums_launch, apply_launch) if problem.want_dx else (apply_launch,)
        return BackwardPlan(config, kernels, reduce, walkers)
    main = kernel(file, f"backward_{config.route}", config.definitions)
    walkers = choose.partial_rows(config, problem, _blocks_at_once(main, config, device_id))
    return BackwardPlan(config, (Launch(main, (walkers * config.cluster,), config.shared_bytes),), reduce, walkers)


@functools.lru_cache(maxsize=4096)
def _forward_plan(problem: NormProblem, aligned: bool, device_id: int) -> ForwardPlan:
    config = choose.forward_config(problem, aligned)
    main = kernel("forward.cu", config.kernel, config.definitions)
    at_once = _resident_blocks(main, config.threads, 0) * device_of(device_id).multiprocessors
    return ForwardPlan(config, Launch(main, (min(at_once, -(-problem.rows // config.groups)),)))


@functools.cache
def device_of(device_id: int) -> choose.Device:
    """What launch choices need to know about a CUDA device."""
    major, minor, multiprocessors, shared_bytes = (
        int(cupy.cuda.runtime.deviceGetAttribute(attribute, device_id)) for attribute in _DEVICE_ATTRIBUTES
    )
    return choose.Device((major, minor), multiprocessors, shared_bytes)


def _blocks_at_once(main: Any, config: choose.BackwardConfig, device_id: int) -> int:
    """How many blocks, or clusters, of a kernel the whole device holds at the same time. Also sets the kernel up."""
    if config.shared_bytes > _STATIC_SHARED_BYTES - 8192:
        main.max_dynamic_shared_size_bytes = config.shared_bytes
    multiprocessors = device_of(device_id).multiprocessors
    if config.cluster == 1:
        return _resident_blocks(main, config.threads, config.shared_bytes) * multiprocessors
    if config.cluster > 8:
        cupy.cuda.driver.funcSetAttribute(main.kernel.ptr, _NON_PORTABLE_CLUSTER, 1)
    return _resident_clusters(main, config)


def _resident_blocks(main: Any, threads: int, shared_bytes: int) -> int:
    occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return max(1, int(occupancy(main.kernel.ptr, threads, shared_bytes)))


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute, with the value for cluster dimensions
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def _resident_clusters(main: Any, config: choose.BackwardConfig) -> int:
    """cuOccupancyMaxActiveClusters, which CuPy does not expose."""
    attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
    attribute.value[:3] = (config.cluster, 1, 1)
    launch = _LaunchConfig(shared_bytes=config.shared_bytes, attributes=ctypes.pointer(attribute), attribute_count=1)
    launch.grid[:] = (config.cluster, 1, 1)
    launch.block[:] = (config.threads, 1, 1)
    clusters = ctypes.c_int()
    status = _driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(clusters), ctypes.c_void_p(main.kernel.ptr), ctypes.byref(launch)
    )
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters failed with CUDA driver error {status}")
    return max(1, clusters.value)


@functools.cache
def _driver() -> Any:
    import sys

    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


# --- small pieces -----------------------------------------------------------------------------------------------------


def _address(array: Any) -> int:
    return 0 if array is None else address_of(array)


def _is_aligned(problem: NormProblem, x: int, dy: int, out: int) -> bool:
    """Whether every row of x, dy and the output starts at a multiple of 16 bytes."""
    x_itemsize = problem.x_dtype.itemsize
    dy_itemsize = problem.dy_dtype.itemsize if problem.dy_dtype is not None else 0
    bits = x | dy | out | problem.x_row_stride * x_itemsize | problem.out_row_stride * x_itemsize
    return (bits | problem.dy_row_stride * dy_itemsize) % 16 == 0


def _code(dtype: np.dtype[Any] | None) -> int:
    return choose.ELEMENT_CODES[None if dtype is None else dtype.name]


def _pack(layout: str, *values: Any) -> np.ndarray[Any, Any]:
    """A kernel argument of struct type: CuPy passes a NumPy array of one element by value."""
    packed = struct.pack(layout, *values)
    return np.frombuffer(packed, f"V{len(packed)}")
