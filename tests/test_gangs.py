"""Rows that no cluster of eight holds: on a device with clusters gangs of blocks share them (gang.cuh), whatever else
runs, clusters of sixteen, or all blocks of a launch (wide.cuh), these also in the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from grid import Case, make_case
from helpers import (
    DEFAULT_EPS,
    NORMS,
    Tensors,
    assert_same_bits,
    backward,
    forward,
    make_tensors,
    poisoned,
    same_bits,
    spoilt,
    with_gaps,
)
from test_cuda_runtime import assert_a_graph_gives, spin
from test_numerics import check_backward, check_forward
from test_promises import some_rows

pytestmark = pytest.mark.gpu

# Lanes full and not, the last block short, entries for one warp and for more, one gang of nearly all multiprocessors;
# some of these all blocks share where db is not summed.
GANGS = (
    (90120, "bfloat16"),  # LayerNorm's, as the next: where memory is fast clusters of eight hold RMSNorm's
    (98304, "float16"),
    (1048576, "bfloat16"),
    (946176, "float16"),
    # off 16 bytes: single columns, two and four an access
    (82945, "bfloat16"),
    (131073, "bfloat16"),
    (262145, "float16"),
    (262148, "bfloat16"),
    (300002, "float16"),
    (1048575, "bfloat16"),
    (131073, "float32"),
    (500001, "float32"),
)
# Where memory is fast all blocks share these: two groups of a block and one, lanes full and not, rows off whole lines,
# one and two vectors a thread, of which some warps have one, sixteen warps, sums in registers and in shared memory.
WIDE = (
    (114688, "bfloat16"),
    (65536, "float32"),
    (65540, "float32"),
    (67588, "float32"),
    (131072, "float32"),
    (139268, "float32"),
    (160000, "float32"),
    (262144, "float32"),
    (280000, "float32"),
    (300000, "float32"),
    (330000, "float32"),
    (500004, "float32"),
    (540672, "float32"),
    (126728, "bfloat16"),
    (131072, "float16"),
    (196608, "bfloat16"),
    (262144, "bfloat16"),
    (262152, "float16"),
    (278528, "bfloat16"),
    (300000, "float16"),
    (327688, "bfloat16"),
    (400008, "float16"),
    (524288, "bfloat16"),
    (540672, "float16"),
    (548864, "bfloat16"),
    (700000, "bfloat16"),
    (802816, "float16"),
    (900000, "bfloat16"),
)
LENGTHS = *GANGS, *WIDE


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("rows", [1, 2, 9, 67])
@pytest.mark.parametrize(("columns", "dtype"), LENGTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_against_float64(cupy: Any, norm: str, columns: int, dtype: str, rows: int) -> None:
    """From one row to several of each gang, with column blocks and without; to so many steps that entries, and the
    ring's places, are used again."""
    check_calls(cupy, norm, columns, dtype, min(rows, max(1, 35_000_000 // columns)))


@pytest.mark.parametrize("rows", [1, 67, 250])
@pytest.mark.parametrize(
    ("columns", "dtype", "cluster"),
    [
        *((122880, "bfloat16", 16), (131072, "float16", 16), (98304, "float32", 16)),
        *((139264, "float32", 1), (500000, "float32", 1), (524288, "bfloat16", 1)),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.usefixtures("without_wide_rows")
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_gangs_or_clusters_of_sixteen(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_memory: Callable[[bool], None],
    slow: bool,
    norm: str,
    columns: int,
    dtype: str,
    cluster: int,
    rows: int,
) -> None:
    """By whether memory is slow, and where all blocks do not share them."""
    made = choices(monkeypatch)
    of_memory(slow)
    check_calls(cupy, norm, columns, dtype, min(rows, 35_000_000 // columns))
    if cupy.cuda.Device().compute_capability == "90":
        expected = 1 if slow else cluster
        assert {(chosen.gang, chosen.cluster) for chosen in made} == {(expected == 1, expected)}


def choices(monkeypatch: pytest.MonkeyPatch, name: str = "backward_config") -> list[Any]:
    """All that launches choose from now on."""
    from cupynorm.cuda import config

    made: list[Any] = []
    choose = getattr(config, name)

    def noted(*given: Any, **named: Any) -> Any:
        made.append(choose(*given, **named))
        return made[-1]

    monkeypatch.setattr(config, name, noted)
    return made


def check_calls(cupy: Any, norm: str, columns: int, dtype: str, rows: int) -> None:
    """Against float64; without dw, without dx, into out=."""
    case = Case(norm, rows, columns, dtype, "float32", dtype, has_bias=norm == "layernorm", seed=rows)
    tensors = make_long_case(cupy, case)
    results = backward(norm, tensors, has_bias=case.has_bias)
    check_backward(case, tensors, results)
    out = tuple(poisoned(cupy, like.shape, like.dtype) for like in results)
    assert_same_bits(backward(norm, tensors, has_bias=case.has_bias, out=out), results)
    alone = backward(norm, tensors, has_bias=case.has_bias, output_mask=(True, *(False for _ in results[1:])))
    assert same_bits(alone[0], backward(norm, tensors, has_bias=False)[0])
    if not goes_by_db(case):
        assert same_bits(alone[0], results[0])
    sums = backward(norm, tensors, has_bias=case.has_bias, output_mask=(False, *(True for _ in results[1:])))
    check_backward(case, tensors, (results[0], *sums[1:]))


backward_with_db = functools.partial(backward, has_bias=True)


def goes_by_db(case: Case) -> bool:
    """Whether blocks' parts of a row, or how many rows come at a time, are others where db is summed."""
    lengths = (321025, 371712), (540673, 743424), (937729, 1081344)
    return case.x != "float32" and case.columns % 8 == 0 and any(a <= case.columns <= b for a, b in lengths)


def make_long_case(cupy: Any, case: Case) -> Tensors:
    """make_case(), whose numbers for w do not reach so far."""
    if case.columns <= 262144:
        return make_case(cupy, case)
    return make_tensors(cupy, case.norm, (case.rows, case.columns), case.x, seed=case.seed)


def test_gangs_are_what_is_tested_here(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, of_memory: Callable[[bool], None]
) -> None:
    from cupynorm import dispatch

    of_memory(False)
    made = choices(monkeypatch)
    dispatch.plan_of.cache_clear()
    for columns, dtype in LENGTHS:
        backward("layernorm", make_tensors(cupy, "layernorm", (2, columns), dtype), has_bias=True)
    dispatch.plan_of.cache_clear()
    if cupy.cuda.Device().compute_capability == "90":
        assert [chosen.gang for chosen in made] == [length in GANGS for length in LENGTHS]
        assert {chosen.route for chosen in made[len(GANGS) :]} == {"wide"}


@pytest.mark.parametrize(("columns", "dtype"), LENGTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_same_bits_in_any_company_and_after_anything(cupy: Any, norm: str, columns: int, dtype: str) -> None:
    """Rows alone, few, many, with gaps; calls of other kernels, which use the same memory, come between."""
    rows = 50_000_000 // columns
    tensors = make_tensors(cupy, norm, (rows, columns), dtype)
    others = [make_tensors(cupy, "layernorm", shape, "float32") for shape in ((3000, 4096), (5, 262139), (40, 65536))]
    together = backward(norm, tensors, has_bias=True)
    for other in others:
        backward("layernorm", other)
        assert_same_bits(backward(norm, tensors, has_bias=True), together)
    for part in (slice(1), slice(rows - 1, None), slice(0, rows, 3), slice(rows // 2 - 2, rows // 2 + 7)):
        few = some_rows(tensors, part)
        assert same_bits(backward(norm, few, has_bias=True)[0], together[0][part])
        apart = replace(few, x=with_gaps(cupy, few.x, 64), dy=with_gaps(cupy, few.dy, 8))
        assert same_bits(backward(norm, apart, has_bias=True)[0], together[0][part])


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(98304, "float16"), (262144, "bfloat16"), (65536, "float32"), (500000, "float32"), (300000, "bfloat16")],
)
@pytest.mark.parametrize("norm", NORMS)
def test_on_streams_in_threads_and_graphs(cupy: Any, norm: str, columns: int, dtype: str) -> None:
    """All blocks of a gang, or that share all rows, run at the same time, or none: launches on several streams wait for
    one another."""
    cases = [make_tensors(cupy, norm, (rows, columns), dtype, seed=rows) for rows in (3, 90, 20)]
    short = make_tensors(cupy, "layernorm", (4000, 4096), "bfloat16")
    expected = [backward(norm, tensors, has_bias=True) for tensors in cases]
    expected_forward = [forward(norm, tensors) for tensors in cases]
    expected_short = backward("layernorm", short)
    cupy.cuda.Device().synchronize()

    def work(start: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            results = [
                (
                    (start + i) % 3,
                    backward(norm, cases[(start + i) % 3], has_bias=True),
                    forward(norm, cases[(start + i) % 3]),
                    backward("layernorm", short),
                )
                for i in range(9)
            ]
            stream.synchronize()
        for index, got, normalized, beside in results:
            assert_same_bits(got, expected[index])
            assert_same_bits(normalized, expected_forward[index])
            assert_same_bits(beside, expected_short)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, start) for start in range(6)]:
            done.result()
    stream = cupy.cuda.Stream(non_blocking=True)
    for call, wanted in ((backward_with_db, expected), (forward, expected_forward)):
        out = tuple(poisoned(cupy, like.shape, like.dtype) for like in wanted[1])
        assert_a_graph_gives(stream, functools.partial(call, norm, cases[1], out=out), out, wanted[1])


@pytest.mark.parametrize("norm", NORMS)
def test_tags_begin_anew_before_they_come_twice(cupy: Any, norm: str) -> None:
    """They are counted from launch to launch; what counts the blocks that are done is zero in between."""
    from cupynorm.cuda import config, launch

    tensors = make_tensors(cupy, norm, (90, 163840), "bfloat16")
    expected = backward(norm, tensors, has_bias=True)
    stream = cupy.cuda.get_current_stream()
    memory = launch._kept.on_device[cupy.cuda.Device().id][stream.ptr][2]
    before, left = cupy.ndarray((2,), np.uint32, memory + config.KEPT_COUNTER_BYTES)
    if cupy.cuda.Device().compute_capability == "90":
        assert int(before) > 0
    seen = []
    before[...] = 2**31 - 5
    for _ in range(4):
        assert_same_bits(backward(norm, tensors, has_bias=True), expected)
        assert int(left) == 0
        seen.append(int(before))
    if cupy.cuda.Device().compute_capability == "90":
        assert seen[0] > 2**31
        assert seen[1] == 0
        assert 0 < seen[2] < seen[3] < 1000
    # What was in the entries is gone with it, but for that of the last two calls.
    memory_of_entries = cupy.ndarray((config.KEPT_EXCHANGE_BYTES // 8,), np.uint64, memory + config.KEPT_COUNTER_BYTES)
    assert not (memory_of_entries[16:] >> 32 >= 1000).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [9, 90])
@pytest.mark.parametrize(("columns", "dtype"), [(262144, "bfloat16"), (65536, "float32"), (524288, "float32")])
@pytest.mark.parametrize("norm", NORMS)
def test_nan_and_inf_stay_in_their_row_and_column(
    cupy: Any, norm: str, columns: int, dtype: str, rows: int, value: float
) -> None:
    clean = make_tensors(cupy, norm, (rows, columns), dtype)
    dx, dw, db = backward(norm, clean, has_bias=True)
    for name, (row, column) in product(("x", "dy"), ((0, 0), (rows - 1, columns - 1), (4, columns // 3))):
        dirty = replace(clean, **{name: spoilt(getattr(clean, name), (row, column), value)})
        got = backward(norm, dirty, has_bias=True)
        rows_left, columns_left = np.arange(rows) != row, np.arange(columns) != column
        assert same_bits(got[0][rows_left], dx[rows_left])
        assert not cupy.isfinite(got[0][row].astype(np.float32)).any()
        assert same_bits(got[1][columns_left], dw[columns_left])
        assert not cupy.isfinite(got[1][column])
        assert same_bits(got[2][columns_left], db[columns_left])
        assert bool(cupy.isfinite(got[2][column])) == (name == "x")
        if np.isinf(value):  # not what the addition of an infinity loses
            assert bool(cupy.isinf(got[1][column]))
            assert bool(cupy.isinf(got[2][column])) == (name == "dy")


# In the forward pass: one, two and four vectors a thread, lanes full and not, rows off whole lines.
FORWARD = (
    (229376, "float16"),
    (262144, "bfloat16"),
    (262152, "float16"),
    (270344, "bfloat16"),
    (524288, "bfloat16"),
    (540680, "float16"),
    (1081344, "bfloat16"),
    (131076, "float32"),
    (135168, "float32"),
    (139264, "float32"),
    (262144, "float32"),
    (300004, "float32"),
    (540672, "float32"),
)


@pytest.mark.parametrize(("columns", "dtype"), FORWARD)
@pytest.mark.parametrize("norm", NORMS)
def test_forward(cupy: Any, norm: str, columns: int, dtype: str) -> None:
    """Against float64, from one row to so many steps that entries, and the ring's places, are used again; the same bits
    in any company, with gaps, and after other kernels, which use the same memory."""
    rows = 34_000_000 // columns
    case = Case(norm, rows, columns, dtype, "float32", dtype, seed=rows)
    tensors = make_long_case(cupy, case)
    together = forward(norm, tensors)
    check_forward(case, tensors, together)
    other = make_tensors(cupy, "layernorm", (5, 262144), "float32")
    for part in (slice(1), slice(rows - 1, None), slice(0, rows, 3), slice(rows // 2 - 2, rows // 2 + 7)):
        few = some_rows(tensors, part)
        backward("layernorm", other, has_bias=True)
        for one in (few, replace(few, x=with_gaps(cupy, few.x, 64))):
            assert_same_bits(forward(norm, one), tuple(result[part] for result in together))


@pytest.mark.parametrize(("columns", "dtype"), FORWARD)
def test_forward_far_from_zero(cupy: Any, columns: int, dtype: str) -> None:
    """At a mean of five hundred deviations: a mean of 16-bit numbers has the roundings of large sums, of which rstd is
    free, and so is y of float32, which is counted from elsewhere."""
    rows = 20_000_000 // columns
    tensors = make_tensors(cupy, "layernorm", (rows, columns), dtype, seed=rows)
    x = (2 * tensors.x.astype(np.float32) + 1000).astype(tensors.x.dtype)
    y, mean, rstd = forward("layernorm", replace(tensors, x=x, w=None, b=None))
    exact = x.astype(np.float64)
    expected = exact.mean(1), 1 / cupy.sqrt(exact.var(1) + DEFAULT_EPS["layernorm"])
    cupy.testing.assert_allclose(mean, expected[0], rtol=4 * 2.0**-24)
    cupy.testing.assert_allclose(rstd, expected[1], rtol=8 * 2.0**-24)
    if dtype == "float32":
        cupy.testing.assert_allclose(y, (exact - expected[0][:, None]) * expected[1][:, None], rtol=1e-6, atol=1e-6)


def test_forward_is_what_is_tested_here(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, of_memory: Callable[[bool], None]
) -> None:
    from cupynorm import dispatch

    of_memory(False)
    made = choices(monkeypatch, "forward_config")
    dispatch.plan_of.cache_clear()
    for columns, dtype in FORWARD:
        forward("layernorm", make_tensors(cupy, "layernorm", (2, columns), dtype))
    dispatch.plan_of.cache_clear()
    if cupy.cuda.Device().compute_capability == "90":
        assert [chosen.kernel for chosen in made] == ["forward_wide"] * len(FORWARD)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("columns", "dtype"), [(262144, "bfloat16"), (300004, "float32")])
@pytest.mark.parametrize("norm", NORMS)
def test_nan_and_inf_stay_in_their_row_forward(cupy: Any, norm: str, columns: int, dtype: str, value: float) -> None:
    clean = make_tensors(cupy, norm, (90, columns), dtype)
    expected = forward(norm, clean)
    for row, column in ((0, 0), (89, columns - 1), (4, columns // 3)):
        got = forward(norm, replace(clean, x=spoilt(clean.x, (row, column), value)))
        others = np.arange(90) != row
        for result, good in zip(got, expected, strict=True):
            assert same_bits(result[others], good[others])
        assert not cupy.isfinite(got[0][row, column])


@pytest.mark.parametrize("columns", [262144, 1048576])
def test_a_gang_that_finds_no_room_waits_for_it(cupy: Any, columns: int) -> None:
    """Other work holds more multiprocessors than it leaves free: neither of two calls hangs, and both are right."""
    tensors = make_tensors(cupy, "layernorm", (40, columns), "bfloat16")
    expected = backward("layernorm", tensors, has_bias=True)
    held = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        for other in held:
            with other:
                spin(cupy, 0.02, 40)
        with stream:
            results = backward("layernorm", tensors, has_bias=True)
        with held[0]:
            others = backward("layernorm", tensors, has_bias=True)
        cupy.cuda.Device().synchronize()
        assert_same_bits(results, expected)
        assert_same_bits(others, expected)
