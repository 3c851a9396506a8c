"""Determinism, batch invariance, containment of NaN and Inf, threads, bounded temporaries: on both backends.

Bits are compared, not values: these promises leave no room for rounding.
"""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import CAPS, Case, make_case, on_both
from helpers import (
    DTYPES,
    NORMS,
    Tensors,
    assert_same_bits,
    backward,
    bits,
    forward,
    is_nan,
    litter,
    make_tensors,
    poisoned,
    record_choices,
    same_bits,
    spoilt,
    statistics_dtype,
    with_gaps,
)

# Row lengths on every route that a backend may take, with rows whose starts share no alignment (odd N).
LENGTHS = (
    1,
    7,
    31,
    33,
    36,
    127,
    129,
    147,
    255,
    290,
    300,
    350,
    384,
    500,
    601,
    1000,
    1024,
    1500,
    4097,
    4098,
    12288,
    32768,
    131072,
)


def promise_cases(backend: str) -> list[Case]:
    """Many rows of each length, so that the work is split over blocks and workers, in every dtype for both norms."""
    return [
        Case(norm, min(1000, CAPS[backend] // columns), columns, x, "float32", x, seed=columns)
        for columns, norm, x in itertools.product(LENGTHS, NORMS, DTYPES)
    ]


def some_rows(tensors: Tensors, rows: Any) -> Tensors:
    """A call with only these rows, contiguous in memory of their own."""
    x, dy, rstd = (array[rows].copy() for array in (tensors.x, tensors.dy, tensors.rstd))
    mean = None if tensors.mean is None else tensors.mean[rows].copy()
    return replace(tensors, x=x, dy=dy, mean=mean, rstd=rstd)


@pytest.mark.parametrize(("xp", "case"), on_both(promise_cases), indirect=["xp"])
def test_same_inputs_same_bits(xp: Any, case: Case) -> None:
    """Also when fresh memory (results, workspaces) holds something else than before, and when out= does."""
    tensors = make_case(xp, case)
    first = backward(case.norm, tensors, has_bias=True)
    litter(xp, 1 << 22 if xp is np else 1 << 27)
    second = backward(case.norm, tensors, has_bias=True)
    assert_same_bits(second, first)
    out = tuple(poisoned(xp, result.shape, result.dtype) for result in first)
    assert_same_bits(backward(case.norm, tensors, has_bias=True, out=out), first)


@pytest.mark.parametrize(("xp", "case"), on_both(promise_cases), indirect=["xp"])
def test_a_row_has_the_same_dx_in_any_company(xp: Any, case: Case) -> None:
    """Alone, in a small batch and in a large one; at its own address and copied to an aligned one."""
    tensors = make_case(xp, case)
    (together, _) = backward(case.norm, tensors, has_bias=False)
    last = case.rows - 1
    for row in sorted({0, 1, last // 2, last}):
        one = slice(row, row + 1)
        (alone, _) = backward(case.norm, some_rows(tensors, one), has_bias=False)
        assert same_bits(alone, together[one]), f"row {row} of {case.rows}, alone"
    views = replace(
        tensors,
        x=tensors.x[last:],
        dy=tensors.dy[last:],
        mean=None if tensors.mean is None else tensors.mean[last:],
        rstd=tensors.rstd[last:],
    )
    assert same_bits(backward(case.norm, views, has_bias=False)[0], together[last:]), "the last row, in place"
    for few in (slice(3, 34), slice(0, case.rows, 7), slice(last // 2, None)):
        (part, _) = backward(case.norm, some_rows(tensors, few), has_bias=False)
        assert same_bits(part, together[few]), f"rows {few}"


def few_row_cases(backend: str) -> list[Case]:
    """Rows of a warp or less, and of a block or less, some with idle lanes, in every type, with dy and w of others."""
    types = [*((x, "float32", x) for x in DTYPES), ("bfloat16", "bfloat16", "float32"), ("float32", None, "float16")]
    types += [("float16", "float64", "float16")]
    columns = (8, 96, 256, 384, 1000, 1024, 1280, 1536, 3000, 4096, 5000, 6904, 7168, 8192)
    return [
        Case(norm, 240 if n > 2000 else 1100, n, x, w, dy, seed=n)
        for n, norm, (x, w, dy) in itertools.product(columns, NORMS, types)
    ]


@pytest.mark.parametrize(("xp", "case"), on_both(few_row_cases), indirect=["xp"])
def test_few_rows_have_the_dx_that_they_have_among_many(xp: Any, case: Case) -> None:
    """On a GPU the few have a kernel of their own; with small gaps between rows, too."""
    tensors = make_case(xp, case)
    for has_bias in (False, True):
        together = backward(case.norm, tensors, has_bias=has_bias)[0]
        mask = (True, False, False)[: 2 + has_bias]
        all_alone = backward(case.norm, tensors, has_bias=has_bias, output_mask=mask)[0]
        for rows in (slice(1), slice(1, 3), slice(100, 164), slice(40, 150), slice(20, None)):
            few = some_rows(tensors, rows)
            apart = replace(few, x=with_gaps(xp, few.x, 8), dy=with_gaps(xp, few.dy, 8))
            for part in (few, apart):
                dx = backward(case.norm, part, has_bias=has_bias)[0]
                assert same_bits(dx, together[rows]), f"rows {rows}, has_bias={has_bias}, apart={part is apart}"
            alone = backward(case.norm, few, has_bias=has_bias, output_mask=mask)[0]
            for expected in (all_alone,) if has_bias else (all_alone, together):
                assert same_bits(alone, expected[rows]), f"rows {rows}, has_bias={has_bias}, dx alone"


@pytest.mark.parametrize("dy", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_blocks_of_as_many_rows_as_there_may_be(xp: Any, norm: str, dy: str) -> None:
    """On a GPU 256 of a vector each, of the 513 to 1024 rows that are few."""
    tensors = make_case(xp, Case(norm, 1040, 8, "float64", "float32", dy, seed=8))
    together = backward(norm, tensors, has_bias=False)[0]
    for rows in (slice(513), slice(600), slice(16, None)):
        part = some_rows(tensors, rows)
        assert same_bits(backward(norm, part, has_bias=False)[0], together[rows])
        dx, dw = backward(norm, part, has_bias=False, output_mask=(True, False))
        assert dw is None
        assert same_bits(dx, together[rows])


def dx_alone_cases(backend: str) -> list[Case]:
    """On the GPU, so many rows that a call keeps pace, where its kernel is compiled to; and some 8 million elements."""
    columns = (128, 300, 384, 1001, 1004, 1024, 4096, 4098, 7168, 20004, 32768, 131072, 262144)
    cases = [
        Case(norm, max(1, min(24 << 20, CAPS[backend]) // n), n, x, "float32", x, seed=n)
        for n, norm, x in itertools.product(columns, NORMS, ("bfloat16", "float32"))
    ]
    types = [("bfloat16", "float32", "bfloat16"), ("float16", "float16", "bfloat16"), ("float32", "float32", "float32")]
    return cases + [
        Case(norm, min(8 << 20, CAPS[backend] // 2) // n, n, x, w, dy, seed=n)
        for n, norm, (x, w, dy) in itertools.product((520, 1024, 1536, 4000, 5120, 7168, 8192), NORMS, types)
    ]


@pytest.mark.parametrize(("xp", "case"), on_both(dx_alone_cases), indirect=["xp"])
def test_dx_alone_has_the_bits_that_it_has_beside_dw(xp: Any, case: Case) -> None:
    """On a GPU by kernels that sum nothing, which keep pace in long calls. With db, rows may be split otherwise."""
    tensors = make_case(xp, case)
    expected = backward(case.norm, tensors, has_bias=False)[0]
    for _ in range(3):
        dx, dw = backward(case.norm, tensors, has_bias=False, output_mask=(True, False))
        assert dw is None
        assert same_bits(dx, expected)


def forward_few_row_cases(backend: str) -> list[Case]:
    """As few_row_cases(), of x as large as for several rows of each multiprocessor."""
    columns = (8, 96, 384, 512, 1000, 1024, 1280, 1536, 3000, 4096, 5000, 6144, 6904, 8192, 12288)
    types = [*((x, "float32", x) for x in DTYPES), ("float32", None, "float32")]
    types += [(x, w, x) for x, w in itertools.product(("float16", "bfloat16"), repeat=2)]
    return [
        Case(norm, 3_000_000 // (n * DTYPES[x].itemsize), n, x, w, dy, seed=n)
        for n, norm, (x, w, dy) in itertools.product(columns, NORMS, types)
    ]


@pytest.mark.parametrize(("xp", "case"), on_both(forward_few_row_cases), indirect=["xp"])
def test_few_rows_have_the_y_that_they_have_among_many(monkeypatch: pytest.MonkeyPatch, xp: Any, case: Case) -> None:
    """On a GPU the few have a kernel of their own; with small gaps between rows, and an infinite element, too."""
    asked = [] if xp is np else record_choices(monkeypatch, "forward_few_rows")
    tensors = make_case(xp, case)
    tensors.x[1, case.columns - 1] = np.inf
    together = forward(case.norm, tensors)
    for rows in (slice(1), slice(1, 3), slice(case.rows // 3, case.rows // 2), slice(0, case.rows, 4)):
        few = some_rows(tensors, rows)
        for part in (few, replace(few, x=with_gaps(xp, few.x, 8))):
            for one, all_rows in zip(forward(case.norm, part), together, strict=True):
                assert same_bits(one, all_rows[rows]), f"rows {rows}, apart={part is not few}"
    if xp is np:
        return
    (_, of_many), *others = asked
    assert of_many is None
    least = [(config.definitions, few) for config, few in others[:2]]  # one row, which has no gaps, and two without
    assert len(least) == 2
    if xp.cuda.Device().attributes["MultiProcessorCount"] >= 132:
        for definitions, few in least:
            assert (few is not None) == ({"VECTOR=1", "CLUSTER=1"} <= set(definitions))


def idle_lane_cases(backend: str) -> list[Case]:
    columns = (36, 300, 384, 1000, 1004, 3000, 4000, 5000, 6904, 7168)
    shapes = [(110, 3000), *((280 if n > 2000 else 1100, n) for n in columns)]
    return [Case(norm, *shape, "bfloat16", "float32", "bfloat16") for shape in shapes for norm in NORMS]


@pytest.mark.parametrize(("xp", "case"), on_both(idle_lane_cases), indirect=["xp"])
def test_a_row_with_an_infinite_element_has_the_same_dx_alone(xp: Any, case: Case) -> None:
    """On a GPU an idle lane reads a column of another's: 0 times it is NaN where it is infinite, in any company."""
    tensors = make_case(xp, case)
    tensors.dy[1, 0], tensors.dy[2, case.columns - 1] = np.inf, -np.inf
    tensors.dy[3, (case.columns - 1) // 2048 * 2048] = np.inf  # of two warps with 32 columns a thread, the first
    together = backward(case.norm, tensors, has_bias=False)[0].astype(np.float32)
    alone = backward(case.norm, some_rows(tensors, slice(1, 4)), has_bias=False)[0].astype(np.float32)
    for dx in (together[1:4], alone):
        assert not xp.isfinite(dx).all(axis=1).any()
    assert bool((xp.isnan(alone) == xp.isnan(together[1:4])).all())
    assert bool((alone == together[1:4])[~xp.isnan(alone)].all())


def short_row_cases(backend: str) -> list[Case]:
    """Rows several of which a block has on the GPU: there the route depends on how far apart they lie."""
    return [
        Case(norm, 1000, columns, x, "float32", x, seed=columns)
        for columns, norm, x in itertools.product(
            (8, 33, 36, 70, 96, 129, 150, 180, 290, 350, 384, 512, 700, 1300), NORMS, DTYPES
        )
    ]


@pytest.mark.parametrize(("xp", "case"), on_both(short_row_cases), indirect=["xp"])
def test_a_short_row_has_the_same_bits_with_gaps_between_rows(xp: Any, case: Case) -> None:
    """dx, y and the statistics, with small gaps and large ones, which leave it as it is whether rows begin at multiples
    of 16 bytes, of 8 or of 4."""
    tensors = make_case(xp, case)
    expected = (backward(case.norm, tensors, has_bias=True)[0], *forward(case.norm, tensors))
    for gap in (8, 8 * case.columns):
        apart = replace(tensors, x=with_gaps(xp, tensors.x, gap), dy=with_gaps(xp, tensors.dy, gap))
        got = (backward(case.norm, apart, has_bias=True)[0], *forward(case.norm, apart))
        for one, other in zip(got, expected, strict=True):
            assert same_bits(one, other), f"gap {gap}"


# Of x, dy and what is written: elements between rows, and before the first.
STARTS = (
    *(((0, 0),) * 3, ((0, 1),) * 3, ((1, 0),) * 3, ((2, 1),) * 3),  # at the same half of a word
    *(((0, 1), (0, 1), (0, 0)), ((1, 0), (1, 0), (0, 0)), ((2, 0), (2, 0), (1, 1))),  # but for dx or y
    *(((1, 0), (2, 0), (0, 0)), ((3, 0), (2, 1), (0, 1))),
)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *itertools.product((1, 61, 9000), (33, 45, 65, 129, 161, 257, 300, 321, 511, 514, 641, 801, 1001, 1100, 1279)),
        *itertools.product((1, 61, 4001), (1301, 2047, 2048, 8191, 12289)),
        *itertools.product((2, 700), (9000, 24577, 40895)),
        *itertools.product((2, 170), (6209, 15001, 30001, 49152, 57001, 65537, 131073)),  # forward, in larger clusters
    ],
)
def test_an_odd_row_has_the_same_bits_wherever_it_starts(norm: str, dtype: str, rows: int, columns: int) -> None:
    """In whichever half of a word, and each array in its own; far from other rows; alone. Nothing is written beside."""
    xp = pytest.importorskip("cupy")
    tensors = make_tensors(xp, norm, (rows, columns), dtype)
    found = []
    for of_x, of_dy, of_out in (*STARTS, ((9 * columns, 1),) * 3)[0 if columns % 2 else 1 :]:
        if rows == 1 and columns % 2 == 0 and not (of_x[1] or of_dy[1] or of_out[1]):
            continue  # has no stride that counts
        mine = replace(tensors, x=placed(xp, tensors.x, *of_x)[0], dy=placed(xp, tensors.dy, *of_dy)[0])
        results = []
        for work in (backward, forward):
            target, memory = placed(xp, tensors.x, *of_out)
            target.view(np.int16)[...] = -1
            others = forward(norm, tensors)[1:] if work is forward else backward(norm, tensors, has_bias=True)[1:]
            options = {"has_bias": True} if work is backward else {}
            results += [work(norm, mine, out=(target, *others), **options)]
            beside = xp.ones(memory.size, bool)
            beside[of_out[1] :].reshape(rows, -1)[:, :columns] = False
            assert bool((bits(memory)[beside] == bits(poisoned(xp, (1,), memory.dtype))).all()), "written beside"
        found.append((results[0][0], *results[1]))
        for one, other in zip(found[-1], found[0], strict=True):
            assert same_bits(one, other), (of_x, of_dy, of_out)
    if rows > 1:
        row = slice(rows // 2, rows // 2 + 1)
        alone = some_rows(tensors, row)
        alone = replace(alone, x=placed(xp, alone.x, 0, 1)[0], dy=placed(xp, alone.dy, 0, 1)[0])
        got = (backward(norm, alone, has_bias=True)[0], *forward(norm, alone))
        for one, other in zip(got, found[0], strict=True):
            assert same_bits(one, other[row])


def placed(xp: Any, array: Any, gap: int, start: int) -> tuple[Any, Any]:
    """The same rows, with so many elements between them and before the first, which are no numbers; all that memory."""
    rows, columns = array.shape
    memory = poisoned(xp, (rows * (columns + gap) + start,), array.dtype)
    view = memory[start:].reshape(rows, columns + gap)[:, :columns]
    view[...] = array
    return view, memory


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"),
    [*itertools.product((1, 2, 3, 8), (96, 1001, 1024, 4096, 262144)), (1000, 1), (20, 1)],
)
def test_few_rows_give_the_sums_whoever_adds_them_up(columns: int, rows: int) -> None:
    """A single walker (of one short row off 16 bytes, of 1000 rows of one column) writes dw and db itself; where these
    start off 16 bytes, by way of a partial row and a meeting of one. Of a row in vectors blocks do that have nothing to
    add up. Else column blocks do."""
    cupy = pytest.importorskip("cupy")
    tensors = make_tensors(cupy, "layernorm", (rows, columns), "float32")
    for column, value in enumerate((0.0, -0.0, 1e-40)[:columns]):  # sums begin at zero, and subnormal numbers are none
        tensors.dy[:, column] = value
    # With dx, column blocks sum the 1000 rows, in another order than a single walker.
    _, dw, db = backward("layernorm", tensors, has_bias=True, output_mask=(rows < 1000, True, True))
    memory = cupy.zeros((2, columns + 5), cupy.float32)
    odd = (None, memory[0, 1 : columns + 1], memory[1, 1 : columns + 1])
    backward("layernorm", tensors, has_bias=True, out=odd, output_mask=(False, True, True))
    assert same_bits(odd[1], dw)
    assert same_bits(odd[2], db)
    assert not memory[:, columns + 1 :].any()


# What is spoilt, and which results it may reach: (rows of dx, columns of dw, columns of db), "own" or "all" or None.
REACH = {
    "x": ("own", "own", None),
    "dy": ("own", "own", "own"),
    "mean": ("own", "all", None),
    "rstd": ("own", "all", None),
    "w": ("all", None, None),
}


def containment_cases(backend: str) -> list[Case]:
    """33 rows: more than one for a worker; lengths on each route of the GPU, one of them odd. There also so many that
    no column blocks sum dw and db."""
    lengths = ((96, "bfloat16"), (1001, "float16"), (4097, "float32"), (12288, "bfloat16"), (50000, "bfloat16"))
    many = zip((60000, 2300, 500, 1600, 370), lengths, strict=True) if backend == "cupy" else ()
    return [
        Case(norm, rows, columns, x, "float32", x)
        for (rows, (columns, x)), norm in itertools.product((*((33, length) for length in lengths), *many), NORMS)
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("xp", "case"), on_both(containment_cases), indirect=["xp"])
def test_nan_and_inf_stay_where_they_belong(xp: Any, case: Case, value: float) -> None:
    clean = make_case(xp, case)
    expected = backward(case.norm, clean, has_bias=True)
    corners = ((0, 0), (17, case.columns // 2 + 1), (32, case.columns - 1))
    for name, (row, column) in itertools.product(REACH, corners):
        array = getattr(clean, name)
        if array is None:
            continue
        index = {"x": (row, column), "dy": (row, column), "w": column}.get(name, row)
        got = backward(case.norm, replace(clean, **{name: spoilt(array, index, value)}), has_bias=True)
        for label, result, good, reach, own in zip(
            ("dx", "dw", "db"), got, expected, REACH[name], (row, column, column), strict=True
        ):
            reached = xp.zeros(len(result), bool)
            if reach is not None:
                reached[own if reach == "own" else slice(None)] = True
            where = f"{label}, with {value} in {name} at row {row}, column {column}"
            assert bool((bits(result)[~reached] == bits(good)[~reached]).all()), f"{where}: it reached more"
            assert not bool(xp.isfinite(result[reached].astype(np.float64)).any()), f"{where}: it got lost"


@pytest.mark.parametrize("columns", [1001, 20000, 300000])  # in registers, read twice on some devices, on all
@pytest.mark.parametrize("norm", NORMS)
def test_forward_keeps_rows_apart(xp: Any, norm: str, columns: int) -> None:
    clean = make_tensors(xp, norm, (33, columns), "float32")
    expected = forward(norm, clean)
    dirty = replace(clean, x=spoilt(clean.x, (17, 1000), np.nan))
    for result, good in zip(forward(norm, dirty), expected, strict=True):
        others = np.arange(33) != 17
        assert same_bits(result[others], good[others])
        assert bool(is_nan(result[17]).all())


@pytest.mark.parametrize("columns", [1001, 20000, 300000])
def test_an_infinite_element_makes_rstd_zero(xp: Any, columns: int) -> None:
    """1/sqrt(inf): in the middle of a row, where more terms follow it in every thread's sum."""
    clean = make_tensors(xp, "rmsnorm", (3, columns), "float32")
    y, rstd = forward("rmsnorm", replace(clean, x=spoilt(clean.x, (1, columns // 3), np.inf)))
    assert float(rstd[1]) == 0
    assert int(is_nan(y[1]).sum()) == 1  # inf·0, in its own column


def concurrent_cases() -> list[Case]:
    sizes = ((8000, 256), (3, 4097), (133, 1024), (31, 12288), (4096, 64), (2, 65536), (3000, 500), (1, 32768))
    return [
        Case(norm, rows, columns, x, "float32", x)
        for (rows, columns), norm, x in zip(sizes, 4 * NORMS, 2 * tuple(DTYPES), strict=True)
    ]


def test_calls_from_several_threads_and_streams(xp: Any) -> None:
    """Eight threads, each with a stream of its own where there are streams, each working through all cases from
    another start. Twice, so that first uses (which compile) and later ones both meet."""
    cases = concurrent_cases()
    inputs = [make_case(xp, case) for case in cases]

    def work(start: int) -> list[tuple[int, tuple[Any, ...]]]:
        results = []
        stream = contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)
        with stream:
            for step in range(2 * len(cases)):
                index = (start + step) % len(cases)
                results.append((index, backward(cases[index].norm, inputs[index], has_bias=True)))
            if xp is not np:
                stream.synchronize()
        return results

    if xp is not np:
        xp.cuda.Device().synchronize()  # the inputs were made on the default stream
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(work, range(8)))
    alone = [backward(case.norm, tensors, has_bias=True) for case, tensors in zip(cases, inputs, strict=True)]
    for index, results in itertools.chain.from_iterable(batches):
        assert_same_bits(results, alone[index])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (131072, 128, "float32"),  # 64 MiB an array
        (16384, 2048, "bfloat16"),  # 64 MiB an array, 128 once converted
        (48, 262144, "float16"),  # one row converted to float32 is 1 MiB
        (1 << 22, 2, "float64"),  # statistics as large as half of x
    ],
)
def test_the_host_path_needs_little_memory(norm: str, rows: int, columns: int, dtype: str) -> None:
    """At most 64 MiB of temporaries, whatever the size. NumPy reports its allocations to tracemalloc; zeros need no
    memory until they are written."""
    x, dy, dx = (np.zeros((rows, columns), DTYPES[dtype]) for _ in range(3))
    mean, rstd = (np.zeros(rows, statistics_dtype(x.dtype)) for _ in range(2))
    w, dw, db = (np.zeros(columns, np.float32) for _ in range(3))
    tensors = Tensors(x, w, db.copy(), dy, mean, rstd)
    statistics = (mean, rstd) if norm == "layernorm" else (rstd,)
    tracemalloc.start()
    try:
        backward(norm, tensors, has_bias=True, out=(dx, dw, db))
        (_, backward_peak) = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        forward(norm, tensors, out=(dx, *statistics))
        (_, forward_peak) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(backward_peak, forward_peak) <= 64 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
def test_a_call_in_several_launches_has_the_same_rows(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its workspace would be too large, which is put so low here that a few rows go at a time."""
    cupy = pytest.importorskip("cupy")
    from cupynorm import dispatch
    from cupynorm.cuda import config

    rows, columns = 37, 262146
    tensors = make_tensors(cupy, norm, (rows, columns), "bfloat16", dy_dtype="float16", seed=3)
    whole = forward(norm, tensors), backward(norm, tensors)
    zeros = config.KEPT_COUNTER_BYTES + config.KEPT_EXCHANGE_BYTES + config.KEPT_WIDE_BYTES
    monkeypatch.setattr(config, "WORKSPACE_BYTES", zeros + 8 * 8 * -(-columns // 4096))
    dispatch.plan_of.cache_clear()
    try:
        parts = forward(norm, tensors), backward(norm, tensors)
    finally:
        dispatch.plan_of.cache_clear()
    assert_same_bits((*parts[0], parts[1][0]), (*whole[0], whole[1][0]))
    for got, expected in zip(parts[1][1:], whole[1][1:], strict=True):  # dw and db, perhaps by other walkers
        assert float(abs(got - expected).max()) <= 1e-6 * float(abs(expected).max())
