"""How cupynorm is measured: one way to time a call, and one yardstick to hold the time against.

::

    from cupynorm import bench
    import cupy

    m = bench.measure("rmsnorm_backward", 32768, 4096, "bfloat16", w_dtype="float32", xp=cupy)
    print(m.seconds, m.gbps, m.fraction)

**Time.** The whole public function, outputs allocated by the call: the median of many single calls after a
warm-up. Before each call 256 MB (or four times the L2 cache, where that is more) are overwritten, so that no
operand is left in a cache. On CUDA the call lies between two events, and the device is kept busy overwriting
for as long as the host needs to issue the call: what is timed is the device's work, not Python's. On the host the
clock is ``time.perf_counter``.

**Yardstick.** The *triad* is z = x + dy over tensors of x's size and dtype, timed the same way: on CUDA the kernel
in ``kernels_cu/triad.cu``; on the host ``numpy.add``, on one thread or on every core that the process may use,
whichever is faster. NumPy adds no float16 or bfloat16 at the speed of memory, so there the triad is float32.

**Fraction.** The triad's time, scaled to the bytes that the work needs, over the call's time::

    fraction = (triad time / call time) · (bytes that the work needs / triad's bytes)

The work needs, at the least: backward, to read x, dy, w and rstd (mean) and write dx and dw (db); forward, to read x
and w (b) and write y and rstd (mean).
"""

from __future__ import annotations

import collections
import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.random import default_rng  # not when first needed: its import loses what a signal's handler raises

import cupynorm

from . import numpy_backend
from .problem import MOST_COLUMNS, Norm

OPS = ("rmsnorm_backward", "layernorm_backward", "rmsnorm_forward", "layernorm_forward")
DTYPES = ("float16", "bfloat16", "float32", "float64")
FLUSH_BYTES = 256 << 20
WARM_UPS = 3


def dtype_of(name: Any) -> np.dtype[Any]:
    """The NumPy dtype of one of `DTYPES`. Raises ValueError, also where bfloat16 lacks its package."""
    try:
        text = str(name) if isinstance(name, (str, np.dtype)) or name is None else np.dtype(name).name
    except TypeError:
        text = repr(name)
    if text not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}; one of {', '.join(DTYPES)} is needed")
    if text == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("dtype bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
        text = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


@dataclass(frozen=True)
class Case:
    """One thing to measure: a public function on one size and dtype. Make it with `case`."""

    op: str
    rows: int
    columns: int
    dtype: np.dtype[Any]  # of x, dy, dx, y
    w_dtype: np.dtype[Any]  # of w, b, dw, db
    has_bias: bool

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def norm(self) -> Norm:
        return "layernorm" if self.op.startswith("layernorm") else "rmsnorm"

    @property
    def output_names(self) -> tuple[str, ...]:
        if self.backward:
            return ("dx", "dw", "db") if self.has_bias else ("dx", "dw")
        return ("y", "mean", "rstd") if self.norm == "layernorm" else ("y", "rstd")

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """Of the arithmetic, and of mean and rstd."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def bytes(self) -> int:
        """What the work needs to read and write at the least."""
        tensors = 3 if self.backward else 2
        parameters = (2 if self.backward else 1) + self.has_bias  # w, b; backward w, dw, db
        statistics_ = 2 if self.norm == "layernorm" else 1
        return (
            tensors * self.rows * self.columns * self.dtype.itemsize
            + parameters * self.columns * self.w_dtype.itemsize
            + statistics_ * self.rows * self.compute_dtype.itemsize
        )

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.columns}"

    @property
    def dtypes(self) -> str:
        return self.dtype.name if self.w_dtype == self.dtype else f"{self.dtype.name}/{self.w_dtype.name}"


def case(
    op: str, rows: int, columns: int, dtype: Any = "float32", w_dtype: Any = None, has_bias: bool | None = None
) -> Case:
    """A validated `Case`. w is float32 (float64 for float64) unless said; LayerNorm has a bias unless said.

    Raises ValueError for an unknown op or dtype, for a size below 1 and for too many columns, TypeError for a size that
    is no integer, or a has_bias that is neither True nor False.
    """
    if has_bias is not None and not isinstance(has_bias, (bool, np.bool_)):
        raise TypeError(f"has_bias: got {has_bias!r}; True, False or None is needed")
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; one of {', '.join(OPS)} is needed")
    rows, columns = operator.index(rows), operator.index(columns)
    if rows < 1 or columns < 1:
        raise ValueError(f"shape {rows}x{columns} is empty; at least 1x1 is needed")
    if columns > MOST_COLUMNS:
        raise ValueError(f"shape {rows}x{columns}: N of at most {MOST_COLUMNS} is needed")
    x_dtype = dtype_of(dtype)
    if w_dtype is None:
        w_dtype = "float64" if x_dtype == np.float64 else "float32"
    return Case(
        op, rows, columns, x_dtype, dtype_of(w_dtype), op.startswith("layernorm") if has_bias is None else has_bias
    )


def make_inputs(case: Case, xp: Any = np, seed: int = 0) -> dict[str, Any]:
    """The arguments of the case's function by name: x around 0.5, everything normally distributed."""
    names = ("x", "w", "dy") if case.backward else ("x", "w", "b") if case.has_bias else ("x", "w")
    inputs: dict[str, Any] = {}
    for position, name in enumerate(names):
        shape = (case.rows, case.columns) if name in ("x", "dy") else (case.columns,)
        dtype = case.dtype if name in ("x", "dy") else case.w_dtype
        inputs[name] = _normal(shape, dtype, 0.5 if name == "x" else 0.0, seed * 10 + position, xp)
    if case.backward:
        forward = getattr(cupynorm, f"{case.norm}_forward")
        statistics_ = ("mean", "rstd") if case.norm == "layernorm" else ("rstd",)
        inputs.update(zip(statistics_, forward(inputs["x"])[1:], strict=True))
        inputs["has_bias"] = case.has_bias
    return inputs


def call(case: Case, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """The public function on the inputs that `make_inputs` made."""
    results: tuple[Any, ...] = getattr(cupynorm, case.op)(**inputs)
    return results


@dataclass(frozen=True)
class Triad:
    """z = x + dy, measured."""

    seconds: float
    bytes: int

    @property
    def gbps(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True)
class Measurement:
    """One case, timed."""

    case: Case
    device: str
    seconds: float  # median of single calls
    triad: Triad
    empty_seconds: float  # what the same clock says of a call that does nothing; it is included in `seconds`

    @property
    def gbps(self) -> float:
        """1e9 bytes a second, of the bytes that the work needs."""
        return self.case.bytes / self.seconds / 1e9

    @property
    def triad_seconds(self) -> float:
        """The triad's time, scaled to the bytes that the work needs."""
        return self.triad.seconds * self.case.bytes / self.triad.bytes

    @property
    def fraction(self) -> float:
        """How close the call comes to the triad; 1 is the speed of memory."""
        return self.triad_seconds / self.seconds


def measure(
    op: str,
    rows: int,
    columns: int,
    dtype: Any = "float32",
    w_dtype: Any = None,
    *,
    has_bias: bool | None = None,
    xp: Any = np,
    repeats: int | None = None,
) -> Measurement:
    """Measure one of `OPS` on x of shape (rows, columns); xp is numpy or cupy (its current device and stream)."""
    return measure_case(case(op, rows, columns, dtype, w_dtype, has_bias), xp=xp, repeats=repeats)


def measure_case(
    case: Case, inputs: dict[str, Any] | None = None, *, xp: Any = np, repeats: int | None = None
) -> Measurement:
    """Measure a `Case`, on the given inputs or on new ones."""
    triad = measure_triad(case.rows * case.columns, case.dtype, xp, repeats)
    arguments = make_inputs(case, xp) if inputs is None else inputs
    seconds = time_call(lambda: call(case, arguments), xp, repeats)
    return Measurement(case, device_name(xp), seconds, triad, _empty_seconds(xp, _device_id(xp)))


def time_call(function: Callable[[], Any], xp: Any = np, repeats: int | None = None) -> float:
    """The median time of single calls, in seconds, caches flushed before each.

    Without `repeats`: on CUDA 50 calls, 12 where a call takes over 5 ms; on the host 12. Raises ValueError for fewer
    than one.
    """
    if repeats is not None and repeats < 1:
        raise ValueError(f"repeats: got {repeats!r}; at least 1 is needed")
    return _time_on_host(function, repeats) if xp is np else _time_on_cuda(function, xp, repeats)


def measure_triad(elements: int, dtype: Any, xp: Any = np, repeats: int | None = None) -> Triad:
    """Time z = x + dy over three tensors of so many elements; measured once a process for each size, dtype, place."""
    where = _triad_threads() if xp is np else _device_id(xp)
    return _measure_triad(elements, np.dtype(dtype), xp, where, repeats)


def device_name(xp: Any = np) -> str:
    """What the measured device calls itself."""
    if xp is np:
        return f"CPU, {numpy_backend.threads()} threads"
    name = xp.cuda.runtime.getDeviceProperties(_device_id(xp))["name"]
    return str(name.decode() if isinstance(name, bytes) else name)


# --- timing -----------------------------------------------------------------------------------------------


def _time_on_host(function: Callable[[], Any], repeats: int | None) -> float:
    flush = _host_flush_buffer()
    function()
    times = []
    for turn in range(repeats or 12):
        flush.fill(turn & 0xFF)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _time_on_cuda(function: Callable[[], Any], cupy: Any, repeats: int | None) -> float:
    stream = cupy.cuda.get_current_stream()
    flush = _cuda_flush_buffer(cupy, _device_id(cupy))

    def between_events(work: Callable[[], Any]) -> tuple[Any, Any]:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        end.record()
        return start, end

    def seconds(events: tuple[Any, Any]) -> float:
        events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*events)) * 1e-3

    def overwrite() -> None:
        flush.data.memset_async(0, flush.nbytes, stream)

    host = []
    for _ in range(WARM_UPS + 5):
        begin = time.perf_counter()
        events = between_events(function)
        host.append(time.perf_counter() - begin)
    on_device = seconds(events)
    overwrite()
    flush_seconds = seconds(between_events(overwrite))

    # An idle device would wait for the host between the events, and that wait would be timed.
    passes = max(1, math.ceil(2 * statistics.median(host[WARM_UPS:]) / flush_seconds))
    timed = []
    for _ in range(repeats or (12 if on_device > 5e-3 else 50)):
        for _ in range(passes):
            overwrite()
        timed.append(between_events(function))
    return statistics.median(map(seconds, timed))


@cache
def _empty_seconds(xp: Any, device: int | None) -> float:
    return time_call(lambda: None, xp)


@lru_cache(maxsize=1)
def _host_flush_buffer() -> Any:
    return np.zeros(FLUSH_BYTES, np.uint8)


@cache
def _cuda_flush_buffer(cupy: Any, device: int) -> Any:
    l2_bytes = cupy.cuda.runtime.getDeviceProperties(device)["l2CacheSize"]
    return cupy.empty(max(FLUSH_BYTES, 4 * l2_bytes), np.uint8)


def _device_id(xp: Any) -> int | None:
    return None if xp is np else int(xp.cuda.runtime.getDevice())


# --- the yardstick ----------------------------------------------------------------------------------------


@cache
def _measure_triad(elements: int, dtype: np.dtype[Any], xp: Any, where: int | None, repeats: int | None) -> Triad:
    """`where`: on how many threads of the host, or on which device; the current ones."""
    if xp is np and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    x, dy = (_normal((elements,), dtype, 0.0, seed, xp) for seed in range(2))
    z = xp.empty_like(x)
    if xp is np:
        with ThreadPoolExecutor(_triad_threads()) as pool:
            seconds = min(time_call(add, np, repeats) for add in _host_triads(pool, x, dy, z))
    else:
        seconds = time_call(cuda_triad(xp, x, dy, z), xp, repeats)
    return Triad(seconds, 3 * x.nbytes)


def _host_triads(pool: ThreadPoolExecutor, x: Any, dy: Any, z: Any) -> Iterator[Callable[[], Any]]:
    """On one thread and, where waking others may pay, on all."""
    yield lambda: np.add(x, dy, out=z)
    if x.nbytes >= 1 << 20:
        parts = [np.array_split(array, _triad_threads()) for array in (x, dy, z)]
        yield lambda: collections.deque(pool.map(np.add, *parts), maxlen=0)


def _triad_threads() -> int:
    """As many as a call gets, but no more than there are cores."""
    return min(numpy_backend.threads(), os.cpu_count() or 1)


def cuda_triad(cupy: Any, x: Any, dy: Any, z: Any) -> Callable[[], None]:
    """One launch of the triad's kernel, to be called."""
    from .cuda.config.common import triad_definitions
    from .cuda.module import kernel

    # Best of 128 to 1024 threads, 1 to 8 vectors a thread and three cache hints on an H200, by tensor size: the
    # streaming hint gains 2% up to 16 MiB and loses 10% at 1 GiB; 1024 threads gain 0.4% at 1 GiB.
    small = x.nbytes <= 16 << 20
    triad = kernel("triad.cu", "triad", triad_definitions(x.dtype.name, streaming=small))
    threads = 128 if x.nbytes < 128 << 20 else 1024
    per_vector = 16 // x.itemsize
    grid = -(-(x.size // per_vector + x.size % per_vector) // threads)
    arguments = (x, dy, z, np.int64(x.size))
    return lambda: triad((grid,), (threads,), arguments)


# --- inputs -----------------------------------------------------------------------------------------------


def _normal(shape: tuple[int, ...], dtype: np.dtype[Any], mean: float, seed: int, xp: Any) -> Any:
    """Normally distributed numbers, deviation 1, made in pieces: a float32 piece is all that lives beside the array."""
    array = xp.empty(shape, dtype)
    flat = array.reshape(-1)
    piece = 1 << 24
    for number, start in enumerate(range(0, flat.size, piece)):
        part = flat[start : start + piece]
        if xp is np:
            values = default_rng((seed, number)).standard_normal(part.size, np.float32)
        else:
            values = xp.empty(part.size, np.float32)
            _normal_kernel(xp)(np.uint64(seed * 1_000_003 + number + 1), values)
        part[...] = values + np.float32(mean)
    return array


@lru_cache(maxsize=1)
def _normal_kernel(cupy: Any) -> Any:
    # cupy.random loads cuRAND, which is not among this package's requirements. Here: SplitMix64's mixing function on
    # the index, and Box and Muller's transform of the two halves.
    return cupy.ElementwiseKernel(
        "uint64 seed",
        "float32 z",
        """
        unsigned long long bits = (seed << 32) + i;
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
        bits ^= bits >> 31;
        const float radius = sqrtf(-2.0f * logf(((bits >> 40) + 1) * 0x1p-24f));
        z = radius * cospif((bits & 0xffffff) * 0x1p-23f);
        """,
        "cupynorm_bench_normal",
    )
