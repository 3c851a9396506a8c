"""Both passes of both norms against float64, over the grid of sizes, dtypes and input families.

The tolerances are derived in `tolerances.py`. The backward pass gets the float64 reference's statistics, rounded to
their dtype, so an error of the forward pass cannot hide in it or be blamed on it.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import (
    CAPS,
    COLUMNS,
    FAMILIES,
    ROWS,
    Case,
    far,
    grid,
    make_case,
    normals,
    on_both,
    poisoned_backward_out,
    poisoned_forward_out,
)
from helpers import (
    DEFAULT_EPS,
    DTYPES,
    NORMS,
    Tensors,
    assert_same_bits,
    backward,
    forward,
    record_choices,
    statistics_dtype,
    with_gaps,
)
from tolerances import check, db_bound, dw_bound, dx_bound, mean_bound, rstd_bound, y_bound

import cupynorm
from cupynorm.numpy_backend import reference_backward, reference_forward


def test_the_grid_crosses_what_it_promises() -> None:
    """Every N with every dtype and every M that fits, every dtype with every family, given and new outputs."""
    cases = grid("cupy")
    for norm in NORMS:
        mine = [case for case in cases if case.norm == norm and case.rows]
        assert {(case.columns, case.x) for case in mine} == set(itertools.product(COLUMNS, DTYPES))
        assert {(case.x, case.family) for case in mine} == set(itertools.product(DTYPES, FAMILIES))
        assert {(case.x, case.has_bias, case.w is None) for case in mine} == set(
            itertools.product(DTYPES, (True, False), (True, False))
        )
        assert {case.columns for case in mine if case.given_out} == set(COLUMNS)
    for backend, cap in CAPS.items():
        pairs = {(case.rows, case.columns) for case in grid(backend)}
        assert pairs == {(m, n) for m, n in itertools.product(ROWS, COLUMNS) if m * n <= cap}


def check_backward(case: Case, tensors: Tensors, got: tuple[Any, ...]) -> None:
    """Shapes, dtypes and values of a backward call's results."""
    shape = (case.rows, case.columns)
    dx_ref, dw_ref, db_ref = reference_backward(
        case.norm, tensors.x, tensors.w, tensors.dy, tensors.mean, tensors.rstd
    )  # fmt: skip
    assert len(got) == (3 if case.has_bias else 2)
    dx, dw = got[:2]
    assert dx.shape == shape
    assert dx.dtype == tensors.x.dtype
    dx_ref = dx_ref.reshape(shape)
    check("dx", dx, dx_ref, dx_bound(case.norm, tensors, dx_ref, case.family))
    parameter = DTYPES[case.w or case.x]
    if case.w is None:
        assert dw is None
    else:
        assert dw.shape == (case.columns,)
        assert dw.dtype == parameter
        check("dw", dw, dw_ref, dw_bound(case.norm, tensors, dw_ref, parameter, case.family))
    if case.has_bias:
        assert got[2].shape == (case.columns,)
        assert got[2].dtype == parameter
        check("db", got[2], db_ref, db_bound(tensors, db_ref, parameter))
    if not case.rows:
        assert not any(float(abs(result.astype(np.float64)).sum()) for result in got[1:] if result is not None)


def run_backward(xp: Any, case: Case) -> None:
    tensors = make_case(xp, case)
    out = poisoned_backward_out(xp, case) if case.given_out else None
    got = backward(case.norm, tensors, has_bias=case.has_bias, out=out)
    if out is not None:
        assert all(result is given for result, given in zip(got, out, strict=True))
    check_backward(case, tensors, got)


@pytest.mark.parametrize(("xp", "case"), on_both(grid), indirect=["xp"])
def test_backward(xp: Any, case: Case) -> None:
    run_backward(xp, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in grid("cupy") if 0 < case.rows < 1000], ids=str)
def test_few_rows_by_walkers(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """What few rows take where they have no kernel of their own; dx has the same bits."""
    cupy = pytest.importorskip("cupy")
    from cupynorm import dispatch
    from cupynorm.cuda import config

    tensors = make_case(cupy, case)
    dx = backward(case.norm, tensors, has_bias=case.has_bias)[0]
    monkeypatch.setattr(config, "few_rows_blocks", lambda *_: None)
    dispatch.plan_of.cache_clear()
    results = backward(case.norm, tensors, has_bias=case.has_bias)
    dispatch.plan_of.cache_clear()
    check_backward(case, tensors, results)
    assert_same_bits((dx,), results[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((1017, 4096), (407, 10240), (1356, 3072), (127, 32768), (2600, 640), (1500, 1280), (100, 8191), (16, 262144)),
        *((2713, 1536), (1682, 3072), (2604, 384)),  # larger blocks
        *((16276, 128), (8138, 256), (5001, 392), (8138, 512), (5425, 768), (4650, 896), (4069, 1024), (3255, 1280)),
        *((4882, 1536), (3662, 2048), (2441, 3072)),  # slices whose rows several share
        *((1500, 8192), (600, 20480), (190, 65536)),  # some where memory is slow, none on an H200
        *((1, 128), (1, 1001), (1, 1024), (1, 3072)),
    ],
)
def test_column_blocks(norm: str, rows: int, columns: int) -> None:
    """Two together, of slices of any width, in clusters, off 16 bytes, several for a slice, of one row without dx; on
    an H200 some of the largest have none. test_config.py has what is chosen. Without dx their number is another, and so
    are the bits of dw and db."""
    cupy = pytest.importorskip("cupy")
    case = Case(norm, rows, columns, "bfloat16", "bfloat16" if rows == 1 else "float32", "bfloat16")
    tensors = make_case(cupy, case)
    results = backward(norm, tensors, has_bias=case.has_bias)
    check_backward(case, tensors, results)
    wanted = (False, True, True)[: len(results)]
    (dx, *sums) = backward(norm, tensors, has_bias=case.has_bias, output_mask=wanted)
    assert dx is None
    check_backward(case, tensors, (results[0], *sums))


def check_both_passes(xp: Any, case: Case) -> None:
    tensors = make_case(xp, case)
    check_backward(case, tensors, backward(case.norm, tensors, has_bias=case.has_bias))
    check_forward(case, tensors, forward(case.norm, tensors, eps=DEFAULT_EPS[case.norm]))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "x", "dy"),
    [
        # slices that are no power of two, some two of a block
        *((6, 40960, "float32", ""), (18, 57344, "float32", ""), (9, 81920, "float32", ""), (6, 114688, "float32", "")),
        *((40, 24576, "float64", ""), (20, 98304, "float32", "bfloat16"), (60, 24576, "bfloat16", "float32")),
        # more rows than elsewhere
        *((1300, 4096, "float32", "bfloat16"), (1000, 3072, "bfloat16", "float32"), (650, 1536, "float64", "")),
        *(
            (700, 4100, "bfloat16", ""),
            (950, 2050, "float16", ""),
            (250, 2047, "float64", ""),
            (600, 4096, "float64", "bfloat16"),
        ),
        *((1, 262144, "float32", ""), (4, 131072, "float32", "")),  # none, in gangs
    ],
)
@pytest.mark.usefixtures("without_wide_rows")
def test_column_blocks_of_other_types_and_accesses(norm: str, rows: int, columns: int, x: str, dy: str) -> None:
    cupy = pytest.importorskip("cupy")
    case = Case(norm, rows, columns, x, "float32", dy or x, has_bias=norm == "layernorm", seed=rows)
    tensors = make_case(cupy, case)
    check_backward(case, tensors, backward(norm, tensors, has_bias=case.has_bias))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float16"])
@pytest.mark.parametrize("w", ["float32", None])
@pytest.mark.parametrize(("rows", "columns"), [(69, 4096), (126, 4096), (35, 8192), (110, 3000)])
def test_few_rows_by_threads_with_all_vectors(
    monkeypatch: pytest.MonkeyPatch, norm: str, x: str, w: str | None, rows: int, columns: int
) -> None:
    """More rows than find room with a vector a thread; with w (and b) of x's type, too. RMSNorm's forward pass has a
    kernel for as few rows, LayerNorm's walks them."""
    cupy = pytest.importorskip("cupy")
    asked = record_choices(monkeypatch, "few_rows_blocks")
    check_both_passes(cupy, Case(norm, rows, columns, x, w or x, x, seed=rows))
    if cupy.cuda.Device().attributes["MultiProcessorCount"] == 132:
        assert [few is not None and few.whole_threads for _, few in asked] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((40, 896), (5000, 896), (40, 3328), (3000, 3328), (1500, 6160), (700, 13312), (400, 25600)),
        *((1000, 10240), (16, 24576), (400, 24576), (240, 40960), (200, 49152), (16, 81920), (130, 81920)),
        *((100, 98304), (70, 163840), (50, 196608)),
        # more than 40 backward, and 40 in clusters of sixteen
        *((40, 1288), (5000, 1344), (3000, 1400), (17, 2640), (3000, 2816), (1000, 5632), (300, 10760), (9, 11264)),
        *((300, 22528), (130, 45056), (4, 83968), (60, 90112), (60, 93184), (60, 106496), (60, 109824), (36, 147456)),
        *((36, 172032), (3, 180224), (30, 212992), (30, 221184)),
        # RMSNorm by 28
        *((30, 1600), (3000, 3136), (900, 6400)),
        # forward by 28, 36, 40 in short rows, and 56
        *((9, 136), (30000, 200), (20000, 264), (9000, 448), (40, 832), (5000, 1792), (3000, 2304), (2000, 3584)),
        *((900, 7168), (700, 9216), (500, 14336), (250, 28672), (130, 57344), (60, 114688), (36, 229376)),
    ],
)
def test_rows_that_fill_the_lanes(norm: str, x: str, rows: int, columns: int) -> None:
    """24 to 56 columns a thread where test_config.py has them chosen for 16 bits, and what float32 has there: in one
    block, in clusters and gangs, with blocks that meet and beside column blocks, in both passes."""
    check_both_passes(pytest.importorskip("cupy"), Case(norm, rows, columns, x, "float32", x, seed=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((40, 41), (70000, 41), (9, 65), (40000, 65), (40, 150), (20000, 150), (20, 257), (12000, 257), (8000, 383)),
        *((20, 513), (9000, 601), (5000, 700), (5000, 850), (60, 1100), (2000, 1500), (1500, 2601), (9, 6001)),
        *((600, 6001), (400, 9001), (300, 12289), (17, 24001), (170, 24001), (64, 65537)),
    ],
)
def test_rows_off_16_bytes_that_fill_the_lanes(norm: str, x: str, rows: int, columns: int) -> None:
    """12 to 40 columns a thread where test_config.py has them chosen for 16 bits, and what float32 has there."""
    check_both_passes(pytest.importorskip("cupy"), Case(norm, rows, columns, x, "float32", x, seed=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((9, 6), (700000, 10), (500001, 20), (300000, 36), (30000, 50), (150000, 68), (80000, 70), (200, 90)),
        *((90000, 100), (1000, 132), (60001, 150), (40000, 178), (50000, 180), (40000, 300), (333, 300), (20000, 500)),
        *((50000, 516), (30000, 700), (20000, 1002), (1000, 1004), (20000, 1004), (20000, 1500), (4000, 2052)),
        *((240, 4100), (8000, 4098), (7000, 4100), (3000, 8196), (2000, 12292), (1000, 20004), (300, 65540)),
        *((3000, 6212), (3000, 7108), (800, 28420), (700, 30004), (300, 49156), (180, 130052)),
        *((100, 131076), (50, 262148)),
    ],
)
def test_rows_off_16_bytes_in_accesses_of_several_elements(norm: str, x: str, rows: int, columns: int) -> None:
    """Of four and two of 16 bits, of two of float32; in long launches with pace, and with little data."""
    check_both_passes(pytest.importorskip("cupy"), Case(norm, rows, columns, x, "float32", x, seed=columns))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *(
            (1, 33),
            (9, 33),
            (500001, 33),
            (200000, 45),
            (300001, 65),
            (90, 77),
            (150000, 95),
            (100001, 129),
            (777, 129),
        ),
        *((80000, 161), (70001, 193), (60000, 257), (333, 257), (40001, 321), (40000, 385), (30001, 511), (30000, 513)),
        *(
            (20001, 641),
            (1, 801),
            (20000, 801),
            (20001, 1001),
            (500, 1001),
            (20000, 1023),
            (15001, 1151),
            (13001, 1279),
        ),
        # Of several warps, and of clusters.
        *((1, 2047), (2, 2047), (700, 2047), (9001, 2047), (12001, 1301), (4001, 4095), (5000, 5001), (2001, 8191)),
        *((3, 12289), (301, 12289), (1501, 12289), (1200, 16385), (700, 20001), (600, 32001), (401, 40895)),
        # Forward in blocks of four warps, or in clusters of eight and sixteen; backward with a stage more.
        *((3, 6209), (4001, 6209), (4001, 7105), (1501, 15001), (900, 28417), (700, 30001), (250, 49153), (3, 57001)),
        *((300, 65537), (101, 98305), (2, 131073), (131, 131073), (99, 163809)),
    ],
)
def test_odd_rows(norm: str, x: str, rows: int, columns: int) -> None:
    """In pairs of columns; in long launches with pace, and with little data."""
    check_both_passes(pytest.importorskip("cupy"), Case(norm, rows, columns, x, "float32", x, seed=columns))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "x_gap", "dy_gap"),
    [
        *((30000, 640, 8, 8), (20000, 1024, 8, 8), (9000, 2048, 8, 8), (5000, 4096, 8, 8)),  # up to eight blocks
        *((60000, 512, 64, 64), (60001, 512, 128, 0), (90000, 384, 8, 24), (100001, 256, 0, 64), (200000, 64, 8, 8)),
        *((60000, 512, 1, 1), (60001, 400, 0, 300), (90001, 300, 7, 1), (200000, 129, 1, 0), (300001, 24, 1, 1)),
        *((40001, 640, 1, 1), (20001, 1024, 1, 3), (30000, 700, 13, 0), (9001, 2047, 1, 50), (300, 65536, 1, 1)),
        *((60001, 300, 4, 4), (60001, 300, 2, 6), (40001, 300, 600, 4), (20001, 1000, 4, 12), (8001, 4096, 2, 2)),
    ],
)
def test_rows_with_gaps(norm: str, rows: int, columns: int, x_gap: int, dy_gap: int, x: str) -> None:
    """In long launches, whose blocks keep pace but where rows come by single elements: with counters that are zero
    again for the next. A step of a block, several short rows, may have fewer at the end; what lies in the gaps is no
    number."""
    cupy = pytest.importorskip("cupy")
    case = Case(norm, rows, columns, x, "float32", x, has_bias=norm == "layernorm")
    tensors = make_case(cupy, case)
    apart = replace(tensors, x=with_gaps(cupy, tensors.x, x_gap), dy=with_gaps(cupy, tensors.dy, dy_gap))
    first, second = (backward(norm, apart, has_bias=case.has_bias) for _ in range(2))
    check_backward(case, tensors, first)
    assert_same_bits(second, first)
    check_forward(case, tensors, forward(norm, apart))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("columns", "x", "start"),
    [
        # steps that begin 16, 32 and 64 bytes further in a line than those before
        *(
            (3000, "bfloat16", 0),
            (4040, "float16", 0),
            (5000, "bfloat16", 0),
            (4112, "float16", 0),
            (7688, "bfloat16", 0),
        ),
        *((8136, "float16", 0), (8160, "bfloat16", 0), (8104, "bfloat16", 8), (16328, "bfloat16", 0)),
        *((32712, "float16", 0), (65480, "bfloat16", 0), (130952, "float16", 0), (163784, "bfloat16", 0)),
        *((262152, "float16", 0), (1540, "float32", 0), (4100, "float32", 4), (8196, "float32", 0)),
        *((16388, "float32", 0), (40004, "float32", 0), (65540, "float32", 0), (163844, "float32", 0)),
        # all at one place
        *((4096, "bfloat16", 8), (8192, "float32", 4), (65536, "float16", 8)),
    ],
)
def test_rows_that_leave_whole_lines(norm: str, columns: int, x: str, start: int) -> None:
    """In many steps; what a team of warps still reads no other overwrites."""
    cupy = pytest.importorskip("cupy")
    case = Case(norm, 34_000_000 // columns, columns, x, "float32", x, has_bias=norm == "layernorm", seed=columns)
    tensors = make_case(cupy, case)
    if start:
        moved = {name: placed_from(cupy, getattr(tensors, name), start) for name in ("x", "dy")}
        tensors = replace(tensors, **moved)
    first = backward(norm, tensors, has_bias=case.has_bias)
    check_backward(case, tensors, first)
    for _ in range(3):
        assert_same_bits(backward(norm, tensors, has_bias=case.has_bias), first)
    y = forward(norm, tensors)
    check_forward(case, tensors, y)
    assert_same_bits(forward(norm, tensors), y)


def placed_from(xp: Any, array: Any, start: int) -> Any:
    """The same behind so many elements."""
    memory = xp.empty(array.size + start, array.dtype)
    placed = memory[start:].reshape(array.shape)
    placed[...] = array
    return placed


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 163841), (150, 163841), (2, 262150), (2, 262148), (2, 262152), (140, 66000)]
)
@pytest.mark.usefixtures("without_wide_rows")
def test_rows_that_no_cluster_holds(norm: str, x: str, rows: int, columns: int) -> None:
    """Forward, by blocks that have a part of it each and read it twice, by single elements, by two and four of 16 bits,
    and in vectors, as where all blocks do not share rows; 66000 of other types than float64 are still held."""
    cupy = pytest.importorskip("cupy")
    case = Case(norm, rows, columns, x, "float32", x, seed=rows)
    tensors = make_case(cupy, case)
    check_forward(case, tensors, forward(norm, tensors, eps=DEFAULT_EPS[norm]))


def best_reference_forward(case: Case, tensors: Tensors, eps: float) -> Any:
    """Where x is float64 the reference rounds as the library does, and CuPy's sums run in long chains: there NumPy's,
    which are pairwise, are the better measure."""
    arrays = tensors.x, tensors.w, tensors.b
    if case.x != "float64" or isinstance(tensors.x, np.ndarray):
        return reference_forward(case.norm, *arrays, eps)
    import cupy

    on_host = reference_forward(case.norm, *(None if array is None else array.get() for array in arrays), eps)
    return tuple(None if result is None else cupy.asarray(result) for result in on_host)


def check_forward(case: Case, tensors: Tensors, got: tuple[Any, ...]) -> None:
    """Shapes, dtypes and values of a forward call's results, with the norm's own eps."""
    y_ref, mean_ref, rstd_ref = best_reference_forward(case, tensors, DEFAULT_EPS[case.norm])
    y_ref, rstd_ref = y_ref.reshape(case.rows, case.columns), rstd_ref.reshape(case.rows)
    y, rstd = got[0], got[-1]
    assert y.shape == tensors.x.shape
    assert y.dtype == tensors.x.dtype
    assert rstd.shape == (case.rows,)
    assert rstd.dtype == statistics_dtype(tensors.x.dtype)
    family = "constant" if case.columns == 1 else case.family  # x̂ is 0 or ±1: the same few values everywhere
    check("y", y, y_ref, y_bound(case.norm, tensors, y_ref, rstd_ref, family))
    check("rstd", rstd, rstd_ref, rstd_bound(case.norm, tensors, rstd_ref, case.family))
    assert len(got) == (3 if case.norm == "layernorm" else 2)
    if case.norm == "layernorm":
        assert got[1].shape == (case.rows,)
        assert got[1].dtype == rstd.dtype
        mean_ref = mean_ref.reshape(case.rows)
        check("mean", got[1], mean_ref, mean_bound(tensors, mean_ref, case.family))


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("columns", [96, 300, 384, 512, 768, 1001, 1024, 6144, 20480])
@pytest.mark.parametrize("rows", [2, 90])
def test_rows_far_from_zero(xp: Any, x: str, rows: int, columns: int) -> None:
    """A row is centred in parts, and how these parts' means are rounded must not show in rstd."""
    case = far(x, rows, columns)
    tensors = make_case(xp, case)
    check_forward(case, tensors, forward(case.norm, tensors))


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("columns", [40960, 81920, 163840])
@pytest.mark.parametrize("rows", [1, 12])
def test_long_rows_far_from_zero(xp: Any, x: str, rows: int, columns: int) -> None:
    """On an H200 or H100 by clusters of four, eight and sixteen, as launch choices are; longer ones of wider types by
    parts, or by all blocks."""
    case = far(x, rows, columns)
    tensors = make_case(xp, case)
    check_forward(case, tensors, forward(case.norm, tensors))


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("columns", [96, 300, 512, 1001])
def test_rows_far_from_zero_that_lie_apart(xp: Any, x: str, columns: int) -> None:
    """For other kernels: as launch choices are, rows of a warp or less with large gaps take the direct route."""
    case = far(x, 700, columns)
    tensors = make_case(xp, case)
    wide = xp.zeros((case.rows, 3 * columns), tensors.x.dtype)
    wide[:, :columns] = tensors.x
    tensors.x = wide[:, :columns]
    check_forward(case, tensors, forward(case.norm, tensors))


@pytest.mark.parametrize("columns", [96, 384, 664, 1024, 6144, 20480])
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("x_type", ["bfloat16", "float32"])
def test_constant_rows_have_no_variance(xp: Any, x_type: str, rows: int, columns: int) -> None:
    """Squares are put together from parts, and where some count as 0 their sum may come out below 0: no NaN of it."""
    in_type = np.geomspace(1e-19, 1e-6, rows).astype(DTYPES[x_type])
    values = xp.asarray(in_type.astype(np.float32))
    x = xp.ascontiguousarray(xp.broadcast_to(xp.asarray(in_type)[:, None], (rows, columns)))
    _, mean, rstd = cupynorm.layernorm_forward(x, eps=0.0)
    assert not xp.isnan(rstd).any()
    assert (rstd > 1e3 / values).all()  # the deviation is no more than the mean's rounding makes it
    assert (abs(mean - values) <= 1e-6 * values).all()


@pytest.mark.parametrize(("xp", "case"), on_both(grid), indirect=["xp"])
def test_forward(xp: Any, case: Case) -> None:
    tensors = make_case(xp, case)
    if case.family == "zeros" and case.has_bias:
        tensors.b = None  # now and then no bias at all
    out = poisoned_forward_out(xp, case) if case.given_out else None
    eps = DEFAULT_EPS[case.norm]
    got = forward(case.norm, tensors, out=out) if case.rows % 2 else forward(case.norm, tensors, eps=eps, out=out)
    if out is not None:
        assert all(result is given for result, given in zip(got, out, strict=True))
    check_forward(case, tensors, got)


@pytest.mark.parametrize("dy", DTYPES)
@pytest.mark.parametrize("w", [*DTYPES, None])
@pytest.mark.parametrize("x", DTYPES)
def test_every_combination_of_dtypes(xp: Any, x: str, w: str | None, dy: str) -> None:
    """96 columns: whole 16-byte vectors of every dtype; 67 rows: several for each worker, and an odd one."""
    norm = NORMS[(list(DTYPES).index(x) + list(DTYPES).index(dy)) % 2]
    run_backward(xp, Case(norm, 67, 96, x, w, dy))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_bounds_hold_a_mistake_to_account(norm: str, family: str) -> None:
    """A dx without its c1 term, a dw that lost a row: each is far outside the bounds on the families where it shows."""
    case = Case(norm, 133, 96, "bfloat16", "float32", "bfloat16", family)
    tensors = make_case(np, case)
    dx, dw, db = reference_backward(norm, tensors.x, tensors.w, tensors.dy, tensors.mean, tensors.rstd)
    x_hat = tensors.x.astype(np.float64) - (0 if tensors.mean is None else tensors.mean[:, None])
    x_hat = x_hat * tensors.rstd[:, None].astype(np.float64)
    g = tensors.dy.astype(np.float64) * tensors.w
    if family not in ("zeros", "constant"):
        wrong = dx + x_hat * (g * x_hat).mean(1, keepdims=True) * tensors.rstd[:, None]
        with pytest.raises(AssertionError, match="dx"):
            check("dx", wrong, dx, dx_bound(norm, tensors, dx))
        with pytest.raises(AssertionError, match="dw"):
            check("dw", dw - tensors.dy[-1] * x_hat[-1], dw, dw_bound(norm, tensors, dw, DTYPES["bfloat16"]))
    with pytest.raises(AssertionError, match="db"):
        check("db", db - tensors.dy[-1].astype(np.float64), db, db_bound(tensors, db, DTYPES["bfloat16"]))


# The largest relative L2 errors of dx, by dtype: standard normal inputs, and rows of 1024 columns or more. 1 % is for
# other numbers having other leading digits. In shorter rows x̂·c1 and c2, each 1/√N as large as g, add some ten
# roundings of their own to the three of float32's 4.4e-8 (g, the difference, the product with rstd).
PROMISED_DX = {"bfloat16": 1.66e-3, "float16": 2.1e-4, "float32": 4.4e-8}


def promised_dx(dtype: str, columns: int) -> float:
    return 1.01 * math.hypot(PROMISED_DX[dtype], math.sqrt(10 / columns) * PROMISED_DX["float32"])


def promise_cases(backend: str) -> list[Case]:
    sizes = {"numpy": [(32768, 256)], "cupy": [(32768, 256), (32768, 1024), (32768, 4096), (8192, 16384)]}
    return [
        Case(norm, rows, columns, x, "float32", x)
        for (rows, columns), norm, x in itertools.product(sizes[backend], NORMS, PROMISED_DX)
    ]


@pytest.mark.parametrize(("xp", "case"), on_both(promise_cases), indirect=["xp"])
def test_promised_accuracy(xp: Any, case: Case) -> None:
    shape = (case.rows, case.columns)
    x, dy = (tiled_normals(xp, which, shape).astype(DTYPES[case.x]) for which in (0, 1))
    w = normals(xp, 2, (case.columns,)).astype(np.float32)
    error_dx = norm_dx = 0.0
    dw_ref = xp.zeros(case.columns)
    statistics: list[list[Any]] = [[], []]
    blocks = [slice(start, start + 1024) for start in range(0, case.rows, 1024)]
    for block in blocks:
        _, mean, rstd = reference_forward(case.norm, x[block], None, None, DEFAULT_EPS[case.norm])
        statistics[0].append(xp.zeros(1024, np.float32) if mean is None else mean.reshape(-1).astype(np.float32))
        statistics[1].append(rstd.reshape(-1).astype(np.float32))
    mean, rstd = (xp.concatenate(parts) for parts in statistics)
    tensors = Tensors(x, w, None, dy, mean if case.norm == "layernorm" else None, rstd)
    dx, dw = backward(case.norm, tensors, has_bias=False)
    for block in blocks:
        part_mean = None if tensors.mean is None else mean[block]
        dx_ref, part, _ = reference_backward(case.norm, x[block], w, dy[block], part_mean, rstd[block])
        dw_ref += part
        error_dx += float(((dx[block].astype(np.float64) - dx_ref.reshape(-1, case.columns)) ** 2).sum())
        norm_dx += float((dx_ref**2).sum())
    error_dw = math.sqrt(float(((dw - dw_ref) ** 2).sum() / (dw_ref**2).sum()))
    assert math.sqrt(error_dx / norm_dx) <= promised_dx(case.x, case.columns)
    assert error_dw <= (1.3e-7 if case.columns <= 4096 else 3e-7)


def tiled_normals(xp: Any, which: int, shape: tuple[int, ...]) -> Any:
    """As many numbers as asked for from the pool, over and over, each time from another place; x and dy step through
    it differently, so no pair repeats."""
    rows, columns = shape
    step = max(1, CAPS[xp.__name__] // columns // 8)
    block = [
        normals(xp, which, (min(step, rows - start), columns), start // step * (5 + which))
        for start in range(0, rows, step)
    ]
    return xp.concatenate([part.astype(np.float32) for part in block])


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
def test_the_reference_is_the_same_on_both_kinds_of_array(norm: str) -> None:
    """The float64 reference runs on the GPU above, for speed; NumPy's run of it must agree to its own rounding."""
    import cupy

    case = Case(norm, 133, 500, "bfloat16", "float32", "bfloat16", "outliers")
    on_device, on_host = (make_case(xp, replace(case)) for xp in (cupy, np))
    for name in ("x", "w", "dy", "rstd"):
        np.testing.assert_array_equal(getattr(on_device, name).get(), getattr(on_host, name))
    results = [
        reference_backward(norm, t.x, t.w, t.dy, t.mean, t.rstd) for t in (on_device, on_host)
    ]  # fmt: skip
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got.get(), expected, rtol=1e-12, atol=1e-12 * abs(expected).max())


@pytest.mark.parametrize("norm", NORMS)
def test_the_reference_is_the_definition(norm: str) -> None:
    """Term by term, with exactly rounded sums, as the formulas are written."""
    case = Case(norm, 5, 7, "float64", "float64", "float64", "biased")
    t = make_case(np, case)
    dx, dw, db = reference_backward(norm, t.x, t.w, t.dy, t.mean, t.rstd)
    x_hat = [
        [(t.x[i, j] - (t.mean[i] if norm == "layernorm" else 0.0)) * t.rstd[i] for j in range(7)] for i in range(5)
    ]
    for i in range(5):
        g = [t.dy[i, j] * t.w[j] for j in range(7)]
        c1 = math.fsum(g[j] * x_hat[i][j] for j in range(7)) / 7
        c2 = math.fsum(g) / 7 if norm == "layernorm" else 0.0
        expected = [(g[j] - x_hat[i][j] * c1 - c2) * t.rstd[i] for j in range(7)]
        # A dozen roundings of terms that are all near 1/σ times a few.
        np.testing.assert_allclose(dx.reshape(5, 7)[i], expected, rtol=0, atol=1e-14 * t.rstd[i] * 10)
    for j in range(7):
        assert math.isclose(dw[j], math.fsum(t.dy[i, j] * x_hat[i][j] for i in range(5)), rel_tol=0, abs_tol=1e-13)
        assert math.isclose(db[j], math.fsum(t.dy[i, j] for i in range(5)), rel_tol=1e-15)


LONG_ROW = """
import numpy, cupynorm
x = numpy.full((2, 8192), 0.8917, numpy.float32)
y, rstd = cupynorm.rmsnorm_forward(x, eps=0)
print(float(abs(rstd * x[0, 0].astype(float) - 1).max()))
"""


@pytest.mark.parametrize("core", ["Nehalem", "Haswell"])
def test_blas_with_few_running_sums(core: str) -> None:
    """Where OpenBLAS takes its dot product for SSE4 or AVX2; another BLAS does not read the variable."""
    environment = {**os.environ, "OPENBLAS_CORETYPE": core}
    done = subprocess.run([sys.executable, "-c", LONG_ROW], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 3e-7
