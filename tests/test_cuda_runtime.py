"""What only a GPU has: streams, graphs, huge arrays, running out of memory, several devices."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpu_record import NEEDS_MEMORY, NEEDS_TWO_DEVICES
from helpers import (
    DTYPES,
    NORMS,
    Tensors,
    assert_same_bits,
    backward,
    forward,
    host,
    make_tensors,
    poisoned,
    same_bits,
)
from tolerances import EPS, check, db_bound, dw_bound, dx_bound

import cupynorm
from cupynorm.cuda.config import KEPT_BYTES
from cupynorm.numpy_backend import reference_backward

pytestmark = pytest.mark.gpu

# Lengths on each route: several rows a block, one row a block, a row over several blocks, the longest.
LENGTHS = (100, 1024, 8192, 20000, 262144)
SHARED = ((9000, 128), (4069, 512), (4069, 1024))  # rows and columns; test_config.py asks


def rows_of(columns: int, many: bool) -> int:
    """So few that blocks of their own sum dw and db, or so many that those which walk along the rows meet:
    test_config.py asks, off 16 bytes of rows without clusters."""
    return 120_000_000 // (6 * columns) if many else (90 if columns < 10000 else 10)


SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def spin(cupy: Any, seconds: float, multiprocessors: int = 0) -> None:
    """Keep the current stream busy, and so many multiprocessors, whose shared memory is taken."""
    kernel = cupy.RawKernel(SPIN, "spin")
    shared_bytes = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"] if multiprocessors else 0
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    kernel((multiprocessors or 1,), (1,), (np.uint64(seconds * 1e9),), shared_mem=shared_bytes)


def empty_results(cupy: Any, tensors: Tensors) -> tuple[Any, Any, Any]:
    w = tensors.w
    return tuple(poisoned(cupy, like.shape, like.dtype) for like in (tensors.x, w, w))


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_calls_return_while_the_stream_is_busy(cupy: Any, norm: str, columns: int) -> None:
    """With the stream occupied for half a second, calls come back at once and the stream is still not done: nothing
    waited for it, neither for inputs nor for copies nor for results."""
    tensors = make_tensors(cupy, norm, (40, columns), "bfloat16")
    strided = replace(tensors, x=cupy.asfortranarray(tensors.x), w=cupy.repeat(tensors.w, 2)[::2])
    stream = cupy.cuda.Stream(non_blocking=True)
    out = empty_results(cupy, tensors)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(2):  # the first round compiles and fills the memory pool
            stream.synchronize()
            spin(cupy, 0.5)
            start = time.perf_counter()
            results = backward(norm, tensors, has_bias=True)
            backward(norm, tensors, has_bias=True, out=out)
            backward(norm, strided, has_bias=True)
            forward(norm, tensors)
            elapsed = time.perf_counter() - start
            busy = not stream.done
        stream.synchronize()
    assert busy, f"the calls took {elapsed:.3f} s: they waited for the stream"
    assert_same_bits(out, results)
    assert_same_bits(out, backward(norm, tensors, has_bias=True))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_stream_capture(cupy: Any, norm: str, columns: int, many: bool) -> None:
    """Captured once, launched with new inputs: the results follow, and memory that was free between capture and launch
    (and belongs to others by then) is left alone."""
    rows = rows_of(columns, many)
    first, second = (make_tensors(cupy, norm, (rows, columns - 5), "bfloat16", seed=s) for s in (1, 2))
    expected = [backward(norm, tensors, has_bias=True) for tensors in (first, second)]
    expected_forward = forward(norm, second)
    out = empty_results(cupy, first)
    forward_out = tuple(poisoned(cupy, like.shape, like.dtype) for like in expected_forward)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        backward(norm, first, has_bias=True, out=out)  # once before, to compile
        forward(norm, first, out=forward_out)
        stream.synchronize()
        stream.begin_capture()
        backward(norm, first, has_bias=True, out=out)
        forward(norm, first, out=forward_out)
        graph = stream.end_capture()
        neighbours = [cupy.full(1 << power, 0x5A, np.uint8) for power in range(9, 27) for _ in range(2)]
        for round_ in range(2):
            for result in (*out, *forward_out):
                result.view(f"u{result.dtype.itemsize}").fill(0xAA)
            if round_:
                for name in ("x", "w", "b", "dy", "mean", "rstd"):
                    if getattr(first, name) is not None:
                        getattr(first, name)[...] = getattr(second, name)
            graph.launch(stream)
            stream.synchronize()
            assert_same_bits(out, expected[round_])
        assert_same_bits(forward_out, expected_forward)
        assert all(bool((neighbour == 0x5A).all()) for neighbour in neighbours), "the graph wrote into others' memory"


def poison(arrays: Sequence[Any]) -> None:
    for array in arrays:
        array.view(f"u{array.dtype.itemsize}").fill(0xAA)


def assert_a_graph_gives(stream: Any, call: Callable[[], Any], out: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """The same bits, of a call that is captured once, whenever the graph is launched."""
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for _ in range(2):
            poison(out)
            graph.launch(stream)
            stream.synchronize()
            assert_same_bits(out, expected)


@pytest.mark.parametrize("columns", [128, 384, 520, 1001, 1024, 4096, 6144])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_drawn_steps(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_memory: Callable[[bool], None],
    slow: bool,
    norm: str,
    columns: int,
) -> None:
    """Rows of steps that are drawn have the bits that they have alone: in one call after another, on two streams at
    once, and in a graph, each of which has a counter of its own; and the bits that they have if the memory is not
    slow."""
    from cupynorm.cuda import config

    of_memory(False)
    drawn, divide = [], config.forward_steps
    monkeypatch.setattr(
        config, "forward_steps", lambda *given: drawn.append((*given, divide(*given)[2])) or divide(*given)
    )
    rows = 48_000_000 // columns
    x = cupy.random.default_rng(columns).standard_normal((rows, columns), np.float32).astype(DTYPES["bfloat16"])
    w, b = cupy.random.default_rng(1).standard_normal((2, columns), np.float32)
    function = cupynorm.rmsnorm_forward if norm == "rmsnorm" else cupynorm.layernorm_forward
    arguments = (w,) if norm == "rmsnorm" else (w, b)
    part = rows // 100 + 1
    expected = [function(x[start : start + part], *arguments) for start in range(0, rows, part)]
    expected = tuple(cupy.concatenate(parts) for parts in zip(*expected, strict=True))
    assert not any(steps for *_, steps in drawn)
    of_memory(slow)
    out = tuple(poisoned(cupy, like.shape, like.dtype) for like in expected)
    for _ in range(3):  # what one leaves in the counter the next one finds
        poison(out)
        assert_same_bits(function(x, *arguments, out=out), expected)
    if drawn:
        chosen, *_, steps = drawn[-1]
        assert (steps > 0) == (chosen.drawn_part > 0)
        if cupy.cuda.Device().compute_capability == "90":
            assert steps > 0
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    outputs = [tuple(poisoned(cupy, like.shape, like.dtype) for like in expected) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(4):
        for stream, out in zip(streams, outputs, strict=True):
            with stream:
                poison(out)
                function(x, *arguments, out=out)
        cupy.cuda.Device().synchronize()
        for out in outputs:
            assert_same_bits(out, expected)
    assert_a_graph_gives(streams[0], lambda: function(x, *arguments, out=outputs[0]), outputs[0], expected)


LAYERNORM_KEEPS_PACE = {
    "bfloat16": (
        *(128, 384, 512, 896, 1001, 1024, 1344, 1536, 3072, 3328, 4096, 5120, 7168, 14336, 16384, 20480, 22528),
        *(32768, 40960, 65536, 81920, 163840),
    ),
    "float32": (256, 768, 1792, 4096, 7168, 16384, 32768, 131072),
    "float32/bfloat16": (1024, 6144, 16384, 65536),
    "bfloat16/float32": (512, 4096, 32768, 131072),
    "float64/float32": (2048,),
}
PACE_CASES = {
    "bfloat16": (
        *(128, 384, 512, 896, 1001, 1024, 1344, 1536, 2047, 3072, 3328, 4096, 5120, 7168, 14336, 16384, 20480, 22528),
        *(24576, 32768, 40960, 65536, 81920, 163840),
    ),
    "float32": (256, 768, 1792, 4096, 7168, 16384, 32768, 131072),
    "float32/bfloat16": (1024, 4608, 6144, 16384, 65536),
    "bfloat16/float32": (512, 4096, 32768, 131072),
    "float64/float32": (2048,),
}
PACE_GANGS = {
    ("bfloat16", 131072),
    ("float32", 131072),
    ("bfloat16", 163840),
}  # if memory is fast, only if they have to
PACE_NEVER = {("bfloat16", 2047), ("float32/bfloat16", 4608)}  # odd, of few warps, with idle lanes; of five warps
RMSNORM_KEEPS_NONE = {("float32", 1792), ("bfloat16", 1344), ("bfloat16", 22528)}  # with idle lanes
RMSNORM_NEVER_FAST = "bfloat16", 163840  # in clusters of sixteen; where memory is slow in gangs


# As if memory were not slow; these as if it were, too.
PACE_SLOW = (128, 384, 1024, 1536, 4096, 5120, 7168, 16384, 32768, 65536, 163840)


@pytest.mark.parametrize(
    ("types", "columns", "slow"),
    [
        *((types, n, False) for types, lengths in PACE_CASES.items() for n in lengths),
        *(("bfloat16", n, True) for n in PACE_SLOW),
    ],
)
@pytest.mark.usefixtures("without_wide_rows")
def test_pace(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_memory: Callable[[bool], None],
    columns: int,
    types: str,
    slow: bool,
) -> None:
    """Whether walkers keep pace, and how closely, changes no bits: in one call after another, and on two streams at
    once, where blocks wait for some that have not started. What counts their steps is zero again in the end."""
    from cupynorm import dispatch
    from cupynorm.cuda import config, launch

    asked: list[tuple[int, int]] = []
    keep = config.pace
    random = cupy.random.default_rng(columns)
    shape = (66_000_000 // columns, columns)
    of_x, _, of_dy = types.partition("/")
    x, dy = (random.standard_normal(shape, np.float32).astype(DTYPES[name]) for name in (of_x, of_dy or of_x))
    w = random.standard_normal(columns, np.float32)

    def results(out: Any = (None,) * 12) -> tuple[Any, ...]:
        rmsnorm = cupynorm.rmsnorm_forward(x, w, out=out[:2])
        gradients = cupynorm.rmsnorm_backward(x, w, dy, rmsnorm[1], out=out[5:7])
        layernorm = cupynorm.layernorm_forward(x, w, out=out[2:5])
        gradients += cupynorm.layernorm_backward(x, w, dy, *layernorm[1:], out=out[7:10])
        dx_alone: dict[str, Any] = {"output_mask": (True, False), "out": (out[10], None)}
        gradients += cupynorm.rmsnorm_backward(x, w, dy, rmsnorm[1], **dx_alone)[:1]
        dx_alone = {"output_mask": (True, False, False), "out": (out[11], None, None)}
        gradients += cupynorm.layernorm_backward(x, w, dy, *layernorm[1:], **dx_alone)[:1]
        return (*rmsnorm, *layernorm, *gradients)

    monkeypatch.setattr(config, "pace", lambda *given: (0, keep(*given)[1]))
    of_memory(slow)
    expected = results()
    monkeypatch.setattr(config, "pace", lambda *given: asked.append(keep(*given)) or asked[-1])
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    outputs = [tuple(poisoned(cupy, like.shape, like.dtype) for like in expected) for _ in streams]
    for closest in (None, 4, 1):  # as usual; a step; so close that walkers may give it up
        if closest:
            for module, choice in ((config.backward, "_lead"), (config.forward, "_forward_lead")):
                monkeypatch.setattr(module, choice, lambda *_, quarters=closest: quarters)
            monkeypatch.setattr(config.backward, "GANG_LEAD", {key: {2: closest, 4: closest} for key in (False, True)})
        asked.clear()
        dispatch.plan_of.cache_clear()
        for out in outputs:
            poison(out)
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            for stream, out in zip(streams, outputs, strict=True):
                with stream:
                    results(out)
        cupy.cuda.Device().synchronize()
        for stream, out in zip(streams, outputs, strict=True):
            assert_same_bits(out, expected)
            kept = launch._kept.on_device[cupy.cuda.Device().id][stream.ptr][2]
            assert not cupy.ndarray((config.STEP_COUNTERS_BYTES,), np.uint8, kept).any()
        if cupy.cuda.Device().compute_capability == "90":
            may = slow or bool(closest) or (types, columns) not in PACE_GANGS
            may &= (types, columns) not in PACE_NEVER
            rmsnorm_may = may and (types, columns) not in RMSNORM_KEEPS_NONE
            rmsnorm_may &= slow or (types, columns) != RMSNORM_NEVER_FAST
            assert (asked[1][0] > 0) == rmsnorm_may  # of the backward pass
            assert (asked[3][0] > 0) == (may and columns in LAYERNORM_KEEPS_PACE[types])
            assert [lead > 0 for lead, _ in asked[4:]] == [rmsnorm_may, may]  # dx alone
            assert {lead for lead, _ in asked} <= {0, closest} or not closest
        assert_a_graph_gives(streams[0], lambda: results(outputs[0]), outputs[0], expected)
    dispatch.plan_of.cache_clear()


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(384, "bfloat16"), (768, "float16"), (1536, "bfloat16"), (3072, "float32"), (3584, "float32"), (7168, "float16")],
)
def test_a_row_has_the_same_bits_in_short_and_long_launches(cupy: Any, columns: int, dtype: str) -> None:
    """A long one may have other blocks (of 24 or 28 columns a thread, of float32), one of little data larger ones: a
    row's sums do not depend on them."""
    random = cupy.random.default_rng(columns)
    shape = (66_000_000 // columns, columns)
    x, dy = (random.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for _ in range(2))
    w, statistics = random.standard_normal(columns, np.float32), random.random((2, shape[0]), np.float32)
    rmsnorm = cupynorm.rmsnorm_backward(x, w, dy, statistics[0])[0]
    layernorm = cupynorm.layernorm_backward(x, w, dy, *statistics)[0]
    for part in (slice(1000), slice(2000), slice(shape[0] // 2, shape[0] // 2 + 3)):
        of_part = tuple(map(cupy.ascontiguousarray, (x[part], dy[part], *statistics[:, part])))
        alone = cupynorm.rmsnorm_backward(of_part[0], w, of_part[1], of_part[2])[0]
        layernorm_alone = cupynorm.layernorm_backward(of_part[0], w, of_part[1], *of_part[2:])[0]
        assert_same_bits((alone, layernorm_alone), (rmsnorm[part], layernorm[part]))


WALKS_OF_FEW_STEPS = [
    *product((512, 1001, 1024, 4096, 5120, 7168, 8191, 12288, 12289, 14336, 16384, 20480, 65536), (1, 2, 3, 4)),
    *((1001, 16), (4096, 15), (4096, 17), (16384, 17), (262144, 70)),  # around and beyond one level of column sums, and
    *((262144, steps) for steps in (1, 2, 3, 4)),  # gangs
    *((896, 20), (3328, 20), (7160, 20), (28672, 20), (14336, 40)),  # LayerNorm: 28 columns a thread
    *((10240, 20), (40960, 20), (81920, 20)),  # 40
    (163840, 20),
]


@pytest.mark.parametrize(("columns", "steps"), WALKS_OF_FEW_STEPS)
@pytest.mark.parametrize("norm", NORMS)
def test_walks_of_few_steps(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_memory: Callable[[bool], None],
    norm: str,
    columns: int,
    steps: int,
) -> None:
    """Six walkers, or four, take so many steps before they meet, the first one step more, and there a group may have no
    row."""
    from cupynorm import dispatch
    from cupynorm.cuda import config

    asked = []

    def grid(chosen: Any, *_: Any) -> config.Grid:
        asked.append(chosen.groups)
        return config.Grid(walkers)

    if columns == 262144:
        of_memory(True)  # where it is fast all blocks share these rows
    groups = {512: 8, 896: 8, 1001: 4, 1024: 8, 3328: 2, 4096: 2, 5120: 2}.get(columns, 1)
    walkers = 4 if columns == 262144 else 6
    rows = groups * (walkers * steps + 1) - (groups > 1)
    tensors = make_tensors(cupy, norm, (rows, columns), "bfloat16")
    expected = backward(norm, tensors, has_bias=norm == "layernorm")
    monkeypatch.setattr(config, "grid", grid)
    monkeypatch.setattr(config, "few_rows_blocks", lambda *_: None)
    dispatch.plan_of.cache_clear()
    dx, dw, *db = backward(norm, tensors, has_bias=norm == "layernorm")
    _, *sums = backward(norm, tensors, has_bias=norm == "layernorm", output_mask=(False, True, True)[: 2 + len(db)])
    dispatch.plan_of.cache_clear()
    if cupy.cuda.Device().compute_capability == "90":
        assert asked[0] == groups
    assert same_bits(dx, expected[0])
    assert_same_bits(tuple(sums), (dw, *db))
    _, dw_ref, db_ref = reference_backward(norm, tensors.x, tensors.w, tensors.dy, tensors.mean, tensors.rstd)
    check("dw", dw, dw_ref, dw_bound(norm, tensors, dw_ref, dw.dtype))
    if db:
        check("db", db[0], db_ref, db_bound(tensors, db_ref, dw.dtype))


@pytest.mark.parametrize("columns", [96, 1001, 1024, 4096, 20480])
@pytest.mark.parametrize("norm", NORMS)
def test_reads_that_leave_the_cache_first(cupy: Any, monkeypatch: pytest.MonkeyPatch, norm: str, columns: int) -> None:
    """Whether x and dy are to stay in the L2 cache changes no bits."""
    from cupynorm import dispatch
    from cupynorm.cuda import config

    tensors = make_tensors(cupy, norm, (12_000_000 // columns, columns), "bfloat16")
    asked, decide, results = [], config.reads_once, []
    monkeypatch.setattr(config, "reads_once", lambda problem: asked.append(decide(problem)) or asked[-1])
    for span in ((0, 1 << 40), (1 << 40, 1 << 40)):
        monkeypatch.setattr(config.walkers, "READ_ONCE_BYTES", span)
        dispatch.plan_of.cache_clear()
        results.append(backward(norm, tensors, has_bias=True))
    dispatch.plan_of.cache_clear()
    assert asked == [True, False]
    assert_same_bits(*results)


@pytest.mark.parametrize("norm", NORMS)
def test_stream_capture_with_results_that_need_a_copy(cupy: Any, norm: str) -> None:
    """dx, dw and db with gaps: the stand-ins that the kernels write into belong to the graph."""
    tensors = make_tensors(cupy, norm, (300, 1000), "bfloat16")
    expected = backward(norm, tensors, has_bias=True)
    dx, dw, db = (poisoned(cupy, (*like.shape[:-1], 2 * like.shape[-1]), like.dtype) for like in expected)
    out = dx[:, ::2], dw[::2], db[::-2]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        backward(norm, tensors, has_bias=True, out=out)
        stream.synchronize()
        stream.begin_capture()
        backward(norm, tensors, has_bias=True, out=out)
        graph = stream.end_capture()
        neighbours = [cupy.full(1 << power, 0x5A, np.uint8) for power in range(9, 24) for _ in range(2)]
        for whole in (dx, dw, db):
            whole.view(f"u{whole.dtype.itemsize}").fill(0xAA)
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(tuple(cupy.ascontiguousarray(result) for result in out), expected)
        assert all(bool((neighbour == 0x5A).all()) for neighbour in neighbours)


def test_a_thread_without_a_context(cupy: Any) -> None:
    """A new thread whose first act is a call with a new shape: nothing before it made a context current."""
    warm = make_tensors(cupy, "layernorm", (300, 1024), "float32")
    backward("layernorm", warm)
    cupy.cuda.Device().synchronize()
    fewer = replace(warm, x=warm.x[:77], dy=warm.dy[:77], mean=warm.mean[:77], rstd=warm.rstd[:77])
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(backward, "layernorm", fewer).result()
    assert_same_bits(got, backward("layernorm", fewer))


def test_work_follows_the_current_stream(cupy: Any) -> None:
    """Inputs that the current stream has yet to produce are seen, with no synchronisation by the caller."""
    expected_inputs = make_tensors(cupy, "layernorm", (1000, 1024), "float32")
    expected = backward("layernorm", expected_inputs)
    late = replace(expected_inputs, x=cupy.zeros_like(expected_inputs.x), dy=cupy.zeros_like(expected_inputs.dy))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        spin(cupy, 0.2)
        late.x[...] = expected_inputs.x
        late.dy[...] = expected_inputs.dy
        results = backward("layernorm", late)
        stream.synchronize()
    assert_same_bits(results, expected)


# The allocator, whether workspace is kept, whether each call has a thread of its own, to which no allocator is set.
DROPPED = [
    ("pool", True, False),
    ("pool", False, False),
    ("pool", True, True),
    ("malloc_async", True, False),
    ("malloc_async", False, False),
]


def calls_on_streams_that_are_dropped(
    monkeypatch: Any, cupy: Any, allocator: str, kept: bool, threads: bool, hold: Callable[[Any, Any], None]
) -> None:
    """Right after each call, whose kernels have yet to run, for `hold` holds them up; blocks of several calls then meet
    at the same time, none of them in the workspace of another."""
    from cupynorm import dispatch
    from cupynorm.cuda import config

    tensors = make_tensors(cupy, "rmsnorm", (7000, 1024), "bfloat16")
    expected = backward("rmsnorm", tensors, has_bias=True)
    # Of twelve: where some 32 streams live, CUDA waits until the device is idle to make one more.
    outs = [empty_results(cupy, tensors) for _ in range(12)]
    gate, start = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    if not kept:
        monkeypatch.setattr(config, "KEPT_BYTES", 0)
        dispatch.plan_of.cache_clear()

    def call(out: Any) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            hold(stream, start)
            backward("rmsnorm", tensors, has_bias=True, out=out)

    spin(cupy, 0)
    start.record(gate)
    call(outs[0])
    cupy.cuda.Device().synchronize()
    in_order = cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    with in_order if allocator == "malloc_async" else contextlib.nullcontext():
        in_time = 0  # calls that were not too late to tell: once to have workspace in the pool, once to meet there
        for _ in range(6):
            with gate:
                spin(cupy, 1.0)
            start.record(gate)
            for out in outs:
                if threads:
                    thread = threading.Thread(target=call, args=(out,))
                    thread.start()
                    thread.join()
                else:
                    call(out)
            in_time += not gate.done
            cupy.cuda.Device().synchronize()
            for out in outs:
                assert_same_bits(out, expected)
            if in_time == 2:
                break
        assert in_time == 2, "CUDA made their streams only when the device was idle"
    dispatch.plan_of.cache_clear()


@pytest.mark.parametrize(("allocator", "kept", "threads"), DROPPED)
def test_streams_that_come_and_go(monkeypatch: Any, cupy: Any, allocator: str, kept: bool, threads: bool) -> None:
    held = monkeypatch, cupy, allocator, kept, threads
    calls_on_streams_that_are_dropped(*held, lambda stream, start: stream.wait_event(start))


@pytest.mark.parametrize(("allocator", "kept", "threads"), DROPPED)
def test_streams_that_come_and_go_one_after_the_other(
    monkeypatch: Any, cupy: Any, allocator: str, kept: bool, threads: bool
) -> None:
    calls_on_streams_that_are_dropped(monkeypatch, cupy, allocator, kept, threads, lambda *_: spin(cupy, 0.01))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "columns"), SHARED)
def test_blocks_that_share_rows(cupy: Any, norm: str, rows: int, columns: int) -> None:
    """They count who is done: at the same time on two streams, in a graph, and while other work holds all but a few
    multiprocessors; the counters are zero again, and the bits the same."""
    from cupynorm.cuda import config, launch

    tensors = make_tensors(cupy, norm, (rows, columns), "bfloat16")
    expected = backward(norm, tensors, has_bias=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [empty_results(cupy, tensors) for _ in streams[1:]]
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    for held in (0, multiprocessors - 3):
        for out in outs:
            poison(out)
        cupy.cuda.Device().synchronize()
        with streams[0]:
            if held:
                spin(cupy, 0.01, held)
        for _ in range(3):
            for stream, out in zip(streams[1:], outs, strict=True):
                with stream:
                    backward(norm, tensors, has_bias=True, out=out)
        cupy.cuda.Device().synchronize()
        for stream, out in zip(streams[1:], outs, strict=True):
            assert_same_bits(out, expected)
            if cupy.cuda.Device().compute_capability == "90":  # elsewhere others may be chosen
                kept = launch._kept.on_device[cupy.cuda.Device().id][stream.ptr][2]
                assert not cupy.ndarray((config.STEP_COUNTERS_BYTES,), np.uint8, kept).any()
    assert_a_graph_gives(streams[1], lambda: backward(norm, tensors, has_bias=True, out=outs[0]), outs[0], expected)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("free", [1, 2, 40, 120])
@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_blocks_that_start_late(cupy: Any, norm: str, columns: int, free: int, many: bool) -> None:
    """While other work holds all multiprocessors but a few, most blocks start only when others have ended. None waits
    for them; the gradients are the same, also those of the next call, with the whole device."""
    tensors = make_tensors(cupy, norm, (rows_of(columns, many), columns), "bfloat16")
    expected = backward(norm, tensors, has_bias=True)
    outs = [empty_results(cupy, tensors) for _ in range(3)]
    held, stream = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # these streams do not wait for what fills the results with NaN
    with stream:
        backward(norm, tensors, has_bias=True, out=outs[0])
    cupy.cuda.Device().synchronize()
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    with held:
        spin(cupy, 0.03, multiprocessors - free)
    with stream:
        for out in outs[1:]:
            backward(norm, tensors, has_bias=True, out=out)
        stream.synchronize()
        early = not held.done
    with held:
        held.synchronize()
    assert early or columns >= 10000, "the call waited for the other work"  # a cluster may find no room
    for out in outs:
        assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_w_that_is_too_long_to_be_converted(cupy: Any, norm: str, dtype: str) -> None:
    """It is read as it is, by kernels of its own (ANY_W): as one that was converted before the call."""
    shape = 3, 4_200_007
    assert shape[1] * 4 > KEPT_BYTES
    tensors = make_tensors(cupy, norm, shape, dtype, w_dtype="float16")
    dx, dw, db = backward(norm, tensors, has_bias=True)
    wide = replace(tensors, w=tensors.w.astype(np.float32))
    expected_dx, *sums = backward(norm, wide, has_bias=True)
    place = 2.0**-7 if dtype == "bfloat16" else 2.0**-20
    for start in range(0, shape[1], 1_000_000):
        part = (slice(None), slice(start, start + 1_000_000))
        np.testing.assert_allclose(host(dx[part]).astype(float), host(expected_dx[part]).astype(float), place, 1e-6)
    for got, expected in zip((dw, db), sums, strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(host(got).astype(float), host(expected).astype(float), 2.0**-10, 1e-6)


def needs(cupy: Any, size: float) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < size:
        pytest.skip(f"{NEEDS_MEMORY}: {size / 2**30:.0f} GiB")


@pytest.fixture
def fresh_pool(cupy: Any) -> Any:
    """The memory pool, emptied before and after, without a limit."""
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    yield pool
    pool.set_limit(size=0)
    pool.free_all_blocks()


@pytest.mark.usefixtures("fresh_pool")
@pytest.mark.parametrize(
    ("columns", "dtype"), [(1, "bfloat16"), (256, "bfloat16"), (256, "float16"), (4096, "bfloat16"), (65536, "float16")]
)
@pytest.mark.parametrize("norm", NORMS)
def test_more_than_2_to_the_31_elements(cupy: Any, norm: str, columns: int, dtype: str) -> None:
    """2³¹ + 2²⁰ elements: rows beyond element 2³¹ are right, the first ones have not been written twice, and the sums
    count every row. One column: more than 2³¹ rows, too."""
    size = (1 << 31) + (1 << 20)
    rows = size // columns
    needs(cupy, 3 * 2 * size + 3 * 4 * rows + (2 << 30))
    period = 127 * max(1, 32768 // columns)  # no power of two, so an index that wraps around meets another row
    block = make_tensors(cupy, norm, (period, columns), dtype)
    mean = cupy.resize(block.mean, (rows,)) if norm == "layernorm" else None
    x, dy = (_repeat_rows(cupy, array, rows) for array in (block.x, block.dy))
    tensors = Tensors(x, block.w, None, dy, mean, cupy.resize(block.rstd, (rows,)))
    dx, dw, db = backward(norm, tensors, has_bias=True)
    dx_ref, dw_ref, db_ref = reference_backward(norm, block.x, block.w, block.dy, block.mean, block.rstd)
    bound = dx_bound(norm, block, dx_ref.reshape(period, columns))
    whole, rest = divmod(rows, period)
    for start in (0, whole // 2 * period, (whole - 1) * period):
        check("dx", dx[start : start + period], dx_ref.reshape(period, columns), bound)
    boundary = (1 << 31) // columns // period * period
    around = dx[boundary : boundary + period]
    assert same_bits(around, dx[: len(around)]), "rows around element 2³¹"
    assert same_bits(dx[rows - rest :], dx[:rest]), "the last rows"
    part = reference_backward(
        norm, block.x[:rest], block.w, block.dy[:rest], None if mean is None else block.mean[:rest], block.rstd[:rest]
    )
    # An index that wraps around loses or doubles a large part of the rows. The sums' own error is smaller: √(rows/1000)
    # roundings for the thousand or so runs of additions that a GPU has under way at once.
    allowed = EPS["float32"] * np.sqrt(rows / 1000)
    x_hat = (block.x.astype(np.float64) - (0 if mean is None else block.mean[:, None])) * block.rstd[:, None]
    terms = {"dw": block.dy * x_hat, "db": block.dy.astype(np.float64)}
    for name, got, reference, extra in (("dw", dw, dw_ref, part[1]), ("db", db, db_ref, part[2])):
        expected = whole * reference + extra
        scale = cupy.sqrt((terms[name] ** 2).sum(0) * (rows / period)) + abs(expected)
        assert bool((abs(got - expected) <= 6 * allowed * scale).all()), name


def _repeat_rows(cupy: Any, block: Any, rows: int) -> Any:
    result = cupy.empty((rows, block.shape[1]), block.dtype)
    for start in range(0, rows, len(block)):
        part = result[start : start + len(block)]
        part[...] = block[: len(part)]
    return result


@pytest.mark.usefixtures("fresh_pool")
@pytest.mark.parametrize("columns", [500, 8192, 20000])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_far_apart(cupy: Any, norm: str, columns: int) -> None:
    """17 rows at a stride of 2²⁷ + 1 elements: the offsets, not the sizes, leave 32 bits."""
    rows, stride = 17, (1 << 27) + 1
    needs(cupy, 3 * 2 * rows * stride)
    near = make_tensors(cupy, norm, (rows, columns), "float16")
    x, dy, dx = (cupy.empty((rows, stride), np.float16)[:, :columns] for _ in range(3))
    x[...], dy[...] = near.x, near.dy
    got = backward(norm, replace(near, x=x, dy=dy), has_bias=True, out=(dx, None, None))
    reference, _, _ = reference_backward(norm, near.x, near.w, near.dy, near.mean, near.rstd)
    check("dx", got[0], reference.reshape(rows, columns), dx_bound(norm, near, reference.reshape(rows, columns)))


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("given", [False, True], ids=["results", "workspace"])
def test_out_of_memory(cupy: Any, fresh_pool: Any, columns: int, given: bool) -> None:
    """CuPy's own error comes up, and the library works as before once there is memory again. With out= given, only
    workspace is allocated, so the call may also succeed."""
    OutOfMemoryError = cupy.cuda.memory.OutOfMemoryError
    tensors = make_tensors(cupy, "layernorm", ((1 << 24) // columns, columns), "float32")
    expected = backward("layernorm", tensors)
    out = empty_results(cupy, tensors) if given else None
    cupy.cuda.Device().synchronize()
    fresh_pool.free_all_blocks()
    fresh_pool.set_limit(size=fresh_pool.total_bytes())
    hoard = []  # what the pool has left
    for power in range(27, 8, -1):
        with contextlib.suppress(OutOfMemoryError):
            while True:
                hoard.append(cupy.empty(1 << power, np.uint8))
    try:
        backward("layernorm", tensors, out=out)
        assert given, "64 MiB came from nowhere"
    except OutOfMemoryError:
        pass
    finally:
        hoard.clear()
        fresh_pool.set_limit(size=0)
    assert_same_bits(backward("layernorm", tensors, out=out), expected)


def test_each_device_does_its_own_work(cupy: Any) -> None:
    """Arrays on a device that is not the current one: results lie beside them, with the same bits."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(NEEDS_TWO_DEVICES)
    here = make_tensors(cupy, "layernorm", (133, 1024), "bfloat16")
    expected = backward("layernorm", here)
    with cupy.cuda.Device(1):
        there = Tensors(*(cupy.asarray(getattr(here, name)) for name in ("x", "w", "b", "dy", "mean", "rstd")))
        cupy.cuda.Device(1).synchronize()
    results = backward("layernorm", there)
    assert cupy.cuda.Device().id == here.x.device.id
    assert all(result.device.id == 1 for result in results)
    with cupy.cuda.Device(1):
        cupy.cuda.Device(1).synchronize()
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got.get().astype(np.float64), wanted.get().astype(np.float64))


def test_arrays_on_two_devices_are_an_error(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(NEEDS_TWO_DEVICES)
    tensors = make_tensors(cupy, "rmsnorm", (3, 8), "float32")
    with cupy.cuda.Device(1):
        other = cupy.zeros((3, 8), DTYPES["float32"])
    with pytest.raises(TypeError, match=r"dy: is on cuda:1, but x is on cuda:0; .* one device"):
        backward("rmsnorm", replace(tensors, dy=other))
