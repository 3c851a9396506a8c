"""From a validated problem on CuPy arrays to kernel launches on the current stream."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from ..problem import BackwardOperands, ForwardOperands, NormProblem, address_of
from . import config as choose
from .driver import Launch
from .module import kernel

# cudaDevAttr… ComputeCapabilityMajor, ComputeCapabilityMinor, MultiProcessorCount, MaxSharedMemoryPerBlockOptin
_DEVICE_ATTRIBUTES = (75, 76, 16, 97)


def backward(problem: NormProblem, operands: BackwardOperands) -> None:
    """Fill operands.dx, dw and db; those that are None are not written, nor reduced."""
    if not (problem.want_dx or problem.want_dw or problem.want_db):
        return
    if problem.rows == 0:
        for gradient in (operands.dw, operands.db):
            if gradient is not None:
                gradient.fill(0)
        return
    x, dy, dx = (_address(array) for array in (operands.x, operands.dy, operands.dx))
    plan = _backward_plan(problem, _is_aligned(problem, x, dy, dx), cupy.cuda.runtime.getDevice())
    config = plan.config

    columns, compute = problem.columns, problem.compute_dtype
    dw_partials = cupy.empty((plan.walkers, columns), compute) if problem.want_dw else None
    db_partials = cupy.empty((plan.walkers, columns), compute) if problem.want_db else None
    with_sums = config.route == "split" and problem.want_dx
    sums = cupy.empty(problem.rows * config.slabs * 2, compute) if with_sums else None
    arguments = struct.pack(
        choose.BACKWARD_ARGUMENTS,
        x,
        dy,
        _address(operands.w),
        _address(operands.mean),
        _address(operands.rstd),
        dx,
        _address(dw_partials),
        _address(db_partials),
        _address(sums),
        problem.rows,
        problem.x_row_stride,
        problem.dy_row_stride,
        problem.out_row_stride,
        columns,
        plan.w_code,
        config.group_threads,
        config.slab_columns,
        config.stages,
        config.slabs,
    )
    for launch in plan.kernels:
        launch(arguments)
    if problem.want_dw or problem.want_db:
        plan.reduce(
            struct.pack(
                choose.PARTIALS_ARGUMENTS,
                _address(dw_partials),
                _address(db_partials),
                _address(operands.dw),
                _address(operands.db),
                plan.walkers,
                columns,
                plan.parameter_code,
            )
        )


def forward(problem: NormProblem, operands: ForwardOperands) -> None:
    """Fill operands.y, mean and rstd."""
    if problem.rows == 0:
        return
    x, y = _address(operands.x), _address(operands.y)
    plan = _forward_plan(problem, _is_aligned(problem, x, 0, y), cupy.cuda.runtime.getDevice())
    arguments = struct.pack(
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
        plan.w_code,
        plan.b_code,
        plan.config.group_threads,
    )
    plan.launch(arguments)


# --- plans: everything about a call that does not depend on addresses -------------------------------------------------


@dataclass(frozen=True)
class BackwardPlan:
    config: choose.BackwardConfig
    kernels: tuple[Launch, ...]
    reduce: Launch
    walkers: int
    w_code: int
    parameter_code: int


@dataclass(frozen=True)
class ForwardPlan:
    config: choose.ForwardConfig
    launch: Launch
    w_code: int
    b_code: int


@functools.lru_cache(maxsize=4096)
def _backward_plan(problem: NormProblem, aligned: bool, device_id: int) -> BackwardPlan:
    device = device_of(device_id)
    config = choose.backward_config(problem, aligned, device)
    main_name = "backward_split_apply" if config.route == "split" else f"backward_{config.route}"
    main = _launch(config, main_name)
    if config.cluster == 1:
        at_once = main.blocks_at_once(device.multiprocessors)
    else:
        at_once = choose.clusters_at_once(main.clusters_at_once(), config.cluster, device)
    walkers = choose.partial_rows(config, problem, at_once)
    if config.route == "split":
        sums_walkers = choose.sums_walkers(config, problem, device)
        sums = _launch(config, "backward_split_sums").with_grid(config.slabs, sums_walkers)
        kernels = (*((sums,) if problem.want_dx else ()), main.with_grid(config.slabs, walkers))
    else:
        kernels = (main.with_grid(walkers * config.cluster),)
    reduce = Launch(
        kernel(
            "partials.cu",
            "reduce_partials",
            choose.partials_definitions(problem.compute_dtype.name, problem.accumulate),
        ),
        choose.partials_threads(walkers),
        (-(-problem.columns // choose.WARP), 2 if problem.want_db else 1),
        overlaps_previous=device.overlaps_launches,
    )
    return BackwardPlan(config, kernels, reduce, walkers, _code(problem.w_dtype), _code(problem.parameter_dtype))


def _launch(config: choose.BackwardConfig, name: str) -> Launch:
    return Launch(
        kernel(f"backward_{config.route}.cu", name, config.definitions),
        config.threads,
        (config.cluster, 1),
        shared_bytes=0 if name == "backward_split_sums" else config.shared_bytes,
        cluster=config.cluster,
    )


@functools.lru_cache(maxsize=4096)
def _forward_plan(problem: NormProblem, aligned: bool, device_id: int) -> ForwardPlan:
    config = choose.forward_config(problem, aligned)
    main = Launch(kernel("forward.cu", config.kernel, config.definitions), config.threads)
    at_once = main.blocks_at_once(device_of(device_id).multiprocessors)
    grid = min(at_once, -(-problem.rows // config.groups))
    return ForwardPlan(config, main.with_grid(grid), _code(problem.w_dtype), _code(problem.b_dtype))


@functools.cache
def device_of(device_id: int) -> choose.Device:
    """What launch choices need to know about a CUDA device."""
    major, minor, multiprocessors, shared_bytes = (
        int(cupy.cuda.runtime.deviceGetAttribute(attribute, device_id)) for attribute in _DEVICE_ATTRIBUTES
    )
    return choose.Device((major, minor), multiprocessors, shared_bytes, cupy.cuda.runtime.driverGetVersion())


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
