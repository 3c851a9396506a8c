"""What airspeed-velocity records of every commit; README.md says how to run it.

Bandwidths come from `cupynorm.bench`: the L2 cache overwritten, CUDA events around one call, the median, and the triad
in the same process. Each commit is timed by its own `cupynorm.bench`, of which only `case`, `make_inputs`, `call`,
`measure`, `measure_case`, `time_call` and the fields of `Measurement` are used: they have been there, with this method,
since the first kernels. Whoever changes the method raises VERSION, and asv then leaves out what was recorded before.

One measurement gives GB/s, fraction and time, so `setup_cache` measures a class's cases once, in one process; asv keeps
its answer for the functions below, which only look figures up. What a commit or a machine cannot do is reported as not
available: CUDA without a device, a size that does not fit into the device's memory.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

try:
    import cupynorm
    from cupynorm import bench
except ImportError as error:  # a commit from before the first kernels
    bench = None  # type: ignore[assignment]
    NO_BENCH = str(error)

VERSION = "1"
BACKWARD = ["rmsnorm_backward", "layernorm_backward"]
FORWARD = ["rmsnorm_forward", "layernorm_forward"]
SETUP_SECONDS = 900.0
GAP = 64

# asv's own --quick repeats timed functions less often, but these are measured by cupynorm.bench, case by case.
QUICK = os.environ.get("CUPYNORM_QUICK") == "1"

Figures = dict[str, float]
Cache = dict[tuple[Any, ...] | str, Figures | str]  # figures by parameters; a text says why there are none
ALL = "all"  # the key of a text that holds for every case
UNAVAILABLE = "not available: "  # how the text begins where that is no failure


def cases(*params: list[Any]) -> tuple[list[Any], ...]:
    """The parameters of a benchmark: with CUPYNORM_QUICK=1 the first of each."""
    return tuple(values[:1] if QUICK else values for values in params)


def shown(name: str, unit: str) -> Callable[[Callable[..., Any]], Any]:
    """Gives a benchmark its name and unit in asv's pages."""

    def mark(function: Any) -> Any:
        function.pretty_name, function.unit, function.version = name, unit, VERSION
        return function

    return mark


def need_cuda() -> Any:
    """CuPy where a device answers; asv takes the exception for 'not available'."""
    if bench is None:
        raise NotImplementedError(NO_BENCH)
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each raises its own kind
        raise NotImplementedError(f"no CUDA: {error}") from error
    return cupy


def need_torch() -> Any:
    """CuPy, where PyTorch is there and finds the device, too."""
    cupy = need_cuda()
    try:
        import torch
    except Exception as error:  # not there, or without a library that it needs
        raise NotImplementedError(f"no PyTorch: {error}") from error
    if not torch.cuda.is_available():
        raise NotImplementedError("no CUDA in PyTorch")
    return cupy


def need_numpy() -> None:
    """The CPU path, which came later than the first kernels."""
    if bench is None:
        raise NotImplementedError(NO_BENCH)
    try:
        cupynorm.rmsnorm_forward(np.ones((1, 1), np.float32))
    except ImportError as error:
        raise NotImplementedError(f"no CPU path: {error}") from error


def rounded(value: float) -> float:
    """To four digits: more would only be noise in the files."""
    return float(f"{value:.4g}")


# --- bandwidth on CUDA ------------------------------------------------------------------------------------


def on_cuda(
    params: Iterable[list[Any]], figures: Callable[..., Figures], need: Callable[[], Any] | None = None
) -> Cache:
    """The figures of every combination of the params, one after the other in this process.

    `need` returns CuPy, or says by NotImplementedError what is missing; need_cuda() where none is given.
    """
    try:
        cupy = (need or need_cuda)()
    except NotImplementedError as error:
        return {ALL: f"{UNAVAILABLE}{error}"}
    cache: Cache = {}
    for key in itertools.product(*params):
        try:
            cache[key] = figures(cupy, *key)
        except cupy.cuda.memory.OutOfMemoryError as error:
            cache[key] = f"{UNAVAILABLE}{error}"
        except Exception as error:  # an older commit may fail on a case; the others shall be measured
            cache[key] = f"{type(error).__name__}: {error}"
        cupy.get_default_memory_pool().free_all_blocks()
    return cache


def bandwidth(cupy: Any, op: str, rows: int, columns: int, dtype: str, w_dtype: str) -> Figures:
    return figures_of(bench.measure(op, rows, columns, dtype, w_dtype, xp=cupy))


def figures_of(measured: bench.Measurement) -> Figures:
    return {
        "GB/s": rounded(measured.gbps),
        "fraction": rounded(measured.fraction),
        "us": rounded(measured.seconds * 1e6),
    }


def rows_of(columns: int, megabytes: int) -> int:
    """Of bfloat16, in three tensors."""
    return max(1, round(megabytes * 1e6 / (3 * columns * 2)))


def bandwidth_of_data(cupy: Any, op: str, columns: int, megabytes: int) -> Figures:
    return bandwidth(cupy, op, rows_of(columns, megabytes), columns, "bfloat16", "float32")


def bandwidth_with_gaps(cupy: Any, op: str, columns: int, megabytes: int) -> Figures:
    """GAP elements lie between the rows of x and dy."""
    case = bench.case(op, rows_of(columns, megabytes), columns, "bfloat16", "float32")
    inputs = bench.make_inputs(case, cupy)
    for name in {"x", "dy"} & inputs.keys():
        rows, columns = inputs[name].shape
        view = cupy.empty((rows, columns + GAP), inputs[name].dtype)[:, :columns]
        view[...] = inputs[name]
        inputs[name] = view
    return figures_of(bench.measure_case(case, inputs, xp=cupy))


def bandwidth_of_dx_alone(cupy: Any, op: str, columns: int, megabytes: int) -> Figures:
    """dw and db are not wanted, but their bytes are counted."""
    case = bench.case(op, rows_of(columns, megabytes), columns, "bfloat16", "float32")
    mask = (True, False, False)[: len(case.output_names)]
    return figures_of(bench.measure_case(case, bench.make_inputs(case, cupy) | {"output_mask": mask}, xp=cupy))


class _Measured:
    """Takes a case's figures out of what `setup_cache` measured."""

    timeout = 120.0

    def setup(self, cache: Cache, *key: Any) -> None:
        figures = cache[ALL] if ALL in cache else cache[key]
        if isinstance(figures, str):
            raise NotImplementedError(figures) if figures.startswith(UNAVAILABLE) else RuntimeError(figures)
        self.figures = figures


def tracked(title: str) -> Callable[[type[_Measured]], type[_Measured]]:
    """Gives a class the three figures of `figures_of`, each with a name of its own in asv's pages."""

    def add(kind: type[_Measured]) -> type[_Measured]:
        for name, words, unit, key in (
            ("track_gbps", "bandwidth", "GB/s", "GB/s"),
            ("track_fraction", "fraction of z = x + dy", "of triad", "fraction"),
            ("track_microseconds", "time", "us", "us"),
        ):

            @shown(f"{title}: {words}", unit)
            def track(self: _Measured, *_: Any, key: str = key) -> float:
                return self.figures[key]

            track.__name__ = name
            setattr(kind, name, track)
        return kind

    return add


@tracked("Backward on CUDA")
class CudaBackward(_Measured):
    """bfloat16 x with float32 w, by row length and by data: three tensors of the size of x."""

    params = cases(BACKWARD, [1024, 4096, 16384, 65536], [25, 100, 1000])
    param_names = ("op", "N", "data MB")

    def setup_cache(self) -> Cache:
        return on_cuda(self.params, bandwidth_of_data)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


@tracked("Forward on CUDA")
class CudaForward(_Measured):
    """bfloat16 x with float32 w, by row length and by data."""

    params = cases(FORWARD, [1024, 4096, 16384, 65536], [100, 1000])
    param_names = ("op", "N", "data MB")

    def setup_cache(self) -> Cache:
        return on_cuda(self.params, bandwidth_of_data)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


@tracked("Rows with gaps on CUDA")
class CudaGaps(_Measured):
    """bfloat16 x with float32 w, with gaps between the rows of x and dy."""

    params = cases(BACKWARD + FORWARD, [640, 1024, 2048], [12, 37, 100])
    param_names = ("op", "N", "data MB")

    def setup_cache(self) -> Cache:
        return on_cuda(self.params, bandwidth_with_gaps)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


@tracked("Rows off 16-byte boundaries on CUDA")
class CudaUnaligned(_Measured):
    """bfloat16 x with float32 w; rows start at multiples of 8 bytes, of 4, or anywhere."""

    params = cases(BACKWARD + FORWARD, [300, 1004, 50, 129, 4095], [25, 100, 1000])
    param_names = ("op", "N", "data MB")

    def setup_cache(self) -> Cache:
        return on_cuda(self.params, bandwidth_of_data)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


@tracked("dx alone on CUDA")
class CudaDxAlone(_Measured):
    """bfloat16 x with float32 w, where neither dw nor db is wanted."""

    params = cases(BACKWARD, [1024, 4096, 16384], [6, 100, 1000])
    param_names = ("op", "N", "data MB")

    def setup_cache(self) -> Cache:
        return on_cuda(self.params, bandwidth_of_dx_alone)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


@tracked("Backward on CUDA, single shapes")
class CudaCases(_Measured):
    """Backward on single shapes: PyTorch's and Triton's own, other dtypes, odd N, one row."""

    params = cases(
        BACKWARD,
        [
            "32768x256 bfloat16/float32",
            "576000x384 bfloat16/float32",
            "1152000x512 bfloat16/float32",
            "8192x262144 bfloat16/float32",
            "4096x8192 float16/float16",
            "16384x4096 float16/float32",
            "8192x4096 float32/float32",
            "16384x1001 bfloat16/float32",
            "4096x12289 bfloat16/float32",
            "1x4096 bfloat16/float32",
            "256x4096 bfloat16/float32",
        ],
    )
    param_names = ("op", "case")

    def setup_cache(self) -> Cache:
        def bandwidth_of_case(cupy: Any, op: str, case: str) -> Figures:
            shape, dtypes = case.split()
            rows, columns = map(int, shape.split("x"))
            return bandwidth(cupy, op, rows, columns, *dtypes.split("/"))

        return on_cuda(self.params, bandwidth_of_case)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]


# --- what a call costs beside bandwidth -------------------------------------------------------------------


def inputs_and_outputs(op: str, shape: str, dtype: str, xp: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The arguments of a call and what it returned."""
    rows, columns = map(int, shape.split("x"))
    case = bench.case(op, rows, columns, dtype, "float32")
    inputs = bench.make_inputs(case, xp)
    return inputs, bench.call(case, inputs)


def host_cost(cupy: Any, function: Callable[..., Any], arguments: dict[str, Any]) -> Figures:
    """What the host pays for one call: no synchronisation, the median of 1000 calls."""
    times = []
    for call in range(1100):
        if call % 100 == 0:  # a full queue would make the host wait for the device
            cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        function(**arguments)
        times.append(time.perf_counter() - start)
    return {"us": rounded(statistics.median(times[100:]) * 1e6)}


OUTPUTS = ["allocated by the call", "out="]


class CudaHostCost(_Measured):
    """What the host pays for one call on CuPy arrays."""

    params = cases(BACKWARD + FORWARD, OUTPUTS)
    param_names = ("op", "outputs")

    def setup_cache(self) -> Cache:
        def microseconds(cupy: Any, op: str, outputs: str) -> Figures:
            arguments, results = inputs_and_outputs(op, "64x1024", "bfloat16", cupy)
            if outputs == "out=":
                arguments["out"] = results
            return host_cost(cupy, getattr(cupynorm, op), arguments)

        return on_cuda(self.params, microseconds)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]

    @shown("Host cost of a call on CUDA", "us")
    def track_microseconds(self, *_: Any) -> float:
        return self.figures["us"]


def as_tensor(array: Any) -> Any:
    """An array as PyTorch's, over the same memory; what is no array as it is."""
    import torch

    return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else array


class CudaHostCostOfTorch(_Measured):
    """The same of a call on PyTorch's tensors, whose results are such tensors."""

    params = cases(BACKWARD + FORWARD, OUTPUTS)
    param_names = ("op", "outputs")

    def setup_cache(self) -> Cache:
        def microseconds(cupy: Any, op: str, outputs: str) -> Figures:
            arguments, results = inputs_and_outputs(op, "64x1024", "bfloat16", cupy)
            tensors = {name: as_tensor(argument) for name, argument in arguments.items()}
            if outputs == "out=":
                tensors["out"] = tuple(map(as_tensor, results))
            return host_cost(cupy, getattr(cupynorm, op), tensors)

        return on_cuda(self.params, microseconds, need_torch)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]

    @shown("Host cost of a call on CUDA, PyTorch's tensors in and out", "us")
    def track_microseconds(self, *_: Any) -> float:
        return self.figures["us"]


# Zeros come from a memset: no kernel but the one that is timed is compiled.
FIRST_CALL_SETUP = """
import os, sys
os.environ["CUPY_CACHE_DIR"] = {kernels}
sys.dont_write_bytecode, sys.pycache_prefix = False, {bytecode}
import cupy, ml_dtypes, cupynorm
x, dy = cupy.zeros((2, 1024, 4096), ml_dtypes.bfloat16)
w = cupy.zeros(4096, "float32")
statistics = cupy.zeros((2, 1024), "float32")
def first_call():
    if "{op}" == "rmsnorm_backward":
        cupynorm.rmsnorm_backward(x, w, dy, statistics[0])
    else:
        cupynorm.layernorm_backward(x, w, dy, *statistics)
    cupy.cuda.get_current_stream().synchronize()
cupy.cuda.get_current_stream().synchronize()
"""


class CudaFirstCall:
    """The first call of a process, device ready: compiled anew, and found in CuPy's cache on disk.

    Python's bytecode is there, as in an installed package: else the time of compiling cupynorm's modules is in it.
    """

    params = cases(BACKWARD)
    param_names = ("op",)
    number, rounds, repeat, warmup_time, timeout = 1, 1, 2, 0, 300.0

    def setup(self, op: str) -> None:
        need_cuda()
        self.folder = tempfile.TemporaryDirectory()
        filled = f"{self.from_folder(op, self.folder.name)}\nfirst_call()"
        subprocess.run([sys.executable, "-c", filled], check=True)

    def from_folder(self, op: str, kernels: str) -> str:
        return FIRST_CALL_SETUP.format(op=op, kernels=repr(kernels), bytecode=repr(f"{self.folder.name}/bytecode"))

    def teardown(self, op: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @shown("First call on CUDA: compiled", "seconds")
    def timeraw_compiled(self, op: str) -> tuple[str, str]:
        return "first_call()", self.from_folder(op, tempfile.mkdtemp(dir=self.folder.name))

    @shown("First call on CUDA: from the disk cache", "seconds")
    def timeraw_from_disk_cache(self, op: str) -> tuple[str, str]:
        return "first_call()", self.from_folder(op, self.folder.name)


class CudaWorkspace(_Measured):
    """The most memory that a call takes beside its inputs and outputs."""

    params = cases(BACKWARD + FORWARD, ["32768x1024", "4096x16384", "512x65536"])
    param_names = ("op", "shape")

    def setup_cache(self) -> Cache:
        def mib(cupy: Any, op: str, shape: str) -> Figures:
            arguments, out = inputs_and_outputs(op, shape, "bfloat16", cupy)
            pool = cupy.cuda.MemoryPool()

            def call() -> None:
                with cupy.cuda.using_allocator(pool.malloc):
                    getattr(cupynorm, op)(**arguments, out=out)
                    cupy.cuda.get_current_stream().synchronize()

            with ThreadPoolExecutor(1) as first_call:  # a thread keeps workspace from call to call
                first_call.submit(call).result()
            return {"MiB": rounded(pool.total_bytes() / 2**20)}

        return on_cuda(self.params, mib)

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]

    @shown("Peak workspace on CUDA, bfloat16", "MiB")
    def track_mib(self, *_: Any) -> float:
        return self.figures["MiB"]


class NumpyWorkspace:
    """The same on the CPU, as NumPy reports it to tracemalloc."""

    params = cases(BACKWARD + FORWARD, ["4096x1024", "512x16384"])
    param_names = ("op", "shape")

    def setup(self, op: str, shape: str) -> None:
        need_numpy()
        self.arguments, out = inputs_and_outputs(op, shape, "float32", np)
        self.arguments["out"] = out

    @shown("Peak workspace on NumPy arrays, float32", "MiB")
    def track_mib(self, op: str, shape: str) -> float:
        tracemalloc.start()
        try:
            getattr(cupynorm, op)(**self.arguments)
            return rounded(tracemalloc.get_traced_memory()[1] / 2**20)
        finally:
            tracemalloc.stop()


class Import:
    """`import cupynorm` in a fresh process that has NumPy already."""

    number, rounds, repeat = 1, 1, 7

    @shown("Import time, beside NumPy's", "seconds")
    def timeraw_import(self) -> tuple[str, str]:
        return "import cupynorm", "import numpy"


# --- NumPy arrays -----------------------------------------------------------------------------------------


def expression(op: str, a: dict[str, Any]) -> Callable[[], Any]:
    """The formulas as one writes them in NumPy."""

    def rmsnorm_forward() -> Any:
        rstd = 1 / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + 1e-6)
        return a["x"] * rstd * a["w"], rstd

    def layernorm_forward() -> Any:
        mean = a["x"].mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(a["x"].var(-1, keepdims=True) + 1e-5)
        return (a["x"] - mean) * rstd * a["w"] + a["b"], mean, rstd

    def rmsnorm_backward() -> Any:
        rstd = a["rstd"][:, None]
        x_hat, g = a["x"] * rstd, a["dy"] * a["w"]
        dx = (g - x_hat * (g * x_hat).mean(-1, keepdims=True)) * rstd
        return dx, (a["dy"] * x_hat).sum(0)

    def layernorm_backward() -> Any:
        mean, rstd = a["mean"][:, None], a["rstd"][:, None]
        x_hat, g = (a["x"] - mean) * rstd, a["dy"] * a["w"]
        dx = (g - x_hat * (g * x_hat).mean(-1, keepdims=True) - g.mean(-1, keepdims=True)) * rstd
        return dx, (a["dy"] * x_hat).sum(0), a["dy"].sum(0)

    functions = (rmsnorm_forward, layernorm_forward, rmsnorm_backward, layernorm_backward)
    return next(function for function in functions if function.__name__ == op)


class NumpyArrays(_Measured):
    """float32 on the CPU, on all cores that the process may use."""

    params = cases(BACKWARD + FORWARD, ["4096x1024", "2048x4096", "512x16384"])
    param_names = ("op", "shape")

    def setup_cache(self) -> Cache:
        try:
            need_numpy()
        except NotImplementedError as error:
            return {ALL: f"{UNAVAILABLE}{error}"}
        cache: Cache = {}
        for op, shape in itertools.product(*self.params):
            rows, columns = map(int, shape.split("x"))
            measured = bench.measure(op, rows, columns, "float32", repeats=7)
            arguments, _ = inputs_and_outputs(op, shape, "float32", np)
            plain = bench.time_call(expression(op, arguments), np, repeats=5)
            cache[op, shape] = {
                "ms": rounded(measured.seconds * 1e3),
                "fraction": rounded(measured.fraction),
                "ratio": rounded(measured.seconds / plain),
            }
        return cache

    setup_cache.timeout = SETUP_SECONDS  # type: ignore[attr-defined]

    @shown("NumPy arrays: time", "ms")
    def track_milliseconds(self, *_: Any) -> float:
        return self.figures["ms"]

    @shown("NumPy arrays: fraction of numpy.add(x, dy)", "of triad")
    def track_fraction(self, *_: Any) -> float:
        return self.figures["fraction"]

    @shown("NumPy arrays: time over that of the formula in plain NumPy", "times")
    def track_ratio_to_expression(self, *_: Any) -> float:
        return self.figures["ratio"]
