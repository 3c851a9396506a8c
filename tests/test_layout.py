"""Memory layouts, shapes, out= and output_mask, on both backends.

Rows at one stride run in place: the backend must receive the caller's own memory and leave the gaps between the rows
alone. Anything else is copied. Gaps are filled with NaN, so reading one shows as well.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import (
    DTYPES,
    NORMS,
    Tensors,
    address,
    assert_same_bits,
    backward,
    bits,
    forward,
    host,
    is_nan,
    make_tensors,
    poisoned,
    spy,
)
from tolerances import check, db_bound, dw_bound, dx_bound

import cupynorm
from cupynorm.numpy_backend import reference_backward

ROWS = 12
INNER = slice(3, -5)  # starts off any vector's alignment


def _swap(base: Any) -> Any:
    return base.transpose(1, 0, 2)


# name: (shape of the buffer for N columns, the view of it that is used)
IN_PLACE = {
    "leading columns": (lambda n: (ROWS, n + 7), lambda base: base[:, :-7]),
    "inner columns": (lambda n: (ROWS, n + 8), lambda base: base[:, INNER]),
    "all but the last four columns": (lambda n: (ROWS, n + 4), lambda base: base[:, :-4]),
    "all but the first two columns": (lambda n: (ROWS, n + 2), lambda base: base[:, 2:]),
    "reversed rows": (lambda n: (ROWS, n), lambda base: base[::-1]),
    "every second row": (lambda n: (2 * ROWS, n), lambda base: base[1::2]),
    "reversed rows of inner columns": (lambda n: (ROWS, n + 9), lambda base: base[::-1, 3:-6]),
    "three axes": (lambda n: (3, 4, n + 5), lambda base: base[..., :-5]),
    "four axes": (lambda n: (2, 3, 2, n + 5), lambda base: base[..., 5:]),
    "axes of one": (lambda n: (1, ROWS, 1, n + 1), lambda base: base[..., 1:]),
}
COPIED = {
    "transposed": (lambda n: (n, ROWS), lambda base: base.T),
    "every second column": (lambda n: (ROWS, 2 * n), lambda base: base[:, ::2]),
    "reversed columns": (lambda n: (ROWS, n), lambda base: base[:, ::-1]),
    "gaps between groups of rows": (lambda n: (3, 5, n), lambda base: base[:, :4]),
    "swapped axes": (lambda n: (4, 3, n), _swap),
}
LAYOUTS = IN_PLACE | COPIED


def laid_out(xp: Any, layout: str, values: Any) -> tuple[Any, Any]:
    """The values in this layout, and the buffer around them, NaN in its gaps."""
    shape, view = LAYOUTS[layout]
    base = poisoned(xp, shape(values.shape[-1]), values.dtype)
    placed = view(base)
    placed[...] = values.reshape(placed.shape)
    return placed, base


def assert_close(norm: str, flat: Tensors, got: tuple[Any, ...]) -> None:
    """Results of any leading shape against the reference on the same rows as a matrix."""
    dx, dw, db = reference_backward(norm, flat.x, flat.w, flat.dy, flat.mean, flat.rstd)
    if got[0] is not None:
        dx = dx.reshape(flat.x.shape)
        check("dx", got[0].reshape(flat.x.shape), dx, dx_bound(norm, flat, dx))
    if got[1] is not None:
        check("dw", got[1], dw, dw_bound(norm, flat, dw, got[1].dtype))
    if len(got) == 3 and got[2] is not None:
        check("db", got[2], db, db_bound(flat, db, got[2].dtype))


# 48: a few vectors. 300: a multiple of four, so that rows start at multiples of 8 bytes, or of 4. 1001: odd, so every
# row starts at another alignment. 8192 and 20000: long rows, split on a GPU.
@pytest.mark.parametrize("columns", [1, 48, 300, 1001, 8192, 20000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("norm", "dtype"), [("rmsnorm", "bfloat16"), ("layernorm", "float32")])
def test_layouts(xp: Any, monkeypatch: Any, norm: str, dtype: str, layout: str, columns: int) -> None:
    flat = make_tensors(xp, norm, (ROWS, columns), dtype)
    x, _ = laid_out(xp, layout, flat.x)
    dy, _ = laid_out(xp, layout, flat.dy)
    dx, around = laid_out(xp, layout, poisoned(xp, flat.x.shape, flat.x.dtype))
    statistics = {name: getattr(flat, name) for name in ("mean", "rstd")}
    statistics = {name: None if s is None else s.reshape(x.shape[:-1]) for name, s in statistics.items()}
    mine = replace(flat, x=x, dy=dy, **statistics)
    before = {id(array): bits(array).copy() for array in (x, dy)}
    calls = spy(monkeypatch, xp)
    got = backward(norm, mine, has_bias=True, out=(dx, None, None))
    assert got[0] is dx
    assert_close(norm, flat, got)
    _, untouched = laid_out(xp, layout, xp.zeros(flat.x.shape, flat.x.dtype))
    gaps = is_nan(untouched)
    assert bool((bits(around)[gaps] == bits(untouched)[gaps]).all()), "wrote into the gaps of dx"
    for array in (x, dy):
        assert bool((bits(array) == before[id(array)]).all()), "wrote into an input"
    ((_, operands),) = calls
    if layout in IN_PLACE:
        for array, operand in ((x, operands.x), (dy, operands.dy), (dx, operands.dx)):
            assert address(array) == address(operand)
            assert xp is not np or array.strides == operand.strides
    # A fresh dx has x's shape whatever x's layout, and the same values.
    assert_close(norm, flat, backward(norm, mine, has_bias=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_layouts(xp: Any, monkeypatch: Any, norm: str, layout: str) -> None:
    flat = make_tensors(xp, norm, (ROWS, 1001), "float32")
    expected = forward(norm, flat)
    x, _ = laid_out(xp, layout, flat.x)
    y, around = laid_out(xp, layout, poisoned(xp, flat.x.shape, flat.x.dtype))
    calls = spy(monkeypatch, xp)
    got = forward(norm, replace(flat, x=x), out=(y, *[None] * (len(expected) - 1)))
    assert got[0] is y
    for result, good in zip(got, expected, strict=True):
        # The same arithmetic on the same rows: one rounding of float32 leaves room for another vector width.
        np.testing.assert_allclose(host(result).reshape(good.shape), host(good), rtol=1e-6, atol=1e-6)
    _, untouched = laid_out(xp, layout, xp.zeros(flat.x.shape, flat.x.dtype))
    gaps = is_nan(untouched)
    assert bool((bits(around)[gaps] == bits(untouched)[gaps]).all()), "wrote into the gaps of y"
    if layout in IN_PLACE:
        assert (address(calls[0][1].x), address(calls[0][1].y)) == (address(x), address(y))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("columns", [48, 1001, 20000])
def test_each_array_in_its_own_layout(xp: Any, norm: str, columns: int) -> None:
    flat = make_tensors(xp, norm, (ROWS, columns), "bfloat16")
    x, _ = laid_out(xp, "inner columns", flat.x)
    dy, _ = laid_out(xp, "reversed rows", flat.dy)
    dx, _ = laid_out(xp, "leading columns", flat.x)
    w, rstd = (xp.repeat(array, 3)[::3] for array in (flat.w, flat.rstd))
    mean = None if flat.mean is None else xp.repeat(flat.mean, 2)[::2]
    dw_buffer, db_buffer = poisoned(xp, (2 * columns,), w.dtype), poisoned(xp, (columns, 2), w.dtype)
    out = (dx, dw_buffer[::-2], db_buffer[:, 1])
    got = backward(norm, Tensors(x, w, None, dy, mean, rstd), has_bias=True, out=out)
    assert all(result is given for result, given in zip(got, out, strict=True))
    assert_close(norm, flat, got)
    assert bool(xp.isnan(dw_buffer[::2]).all()), "wrote between the elements of dw"
    assert bool(xp.isnan(db_buffer[:, 0]).all()), "wrote between the elements of db"


@pytest.mark.parametrize("columns", [48, 1001, 20000])
@pytest.mark.parametrize("norm", NORMS)
def test_one_row_of_dy_for_all_rows(xp: Any, monkeypatch: Any, norm: str, columns: int) -> None:
    """The gradient of a sum is one broadcast row: row stride 0, read in place."""
    flat = make_tensors(xp, norm, (ROWS, columns), "float32")
    row = flat.dy[0].copy()
    mine = replace(flat, dy=xp.broadcast_to(row, (ROWS, columns)))
    calls = spy(monkeypatch, xp)
    got = backward(norm, mine, has_bias=True)
    assert calls[0][0].dy_row_stride == 0
    assert address(calls[0][1].dy) == address(row)
    assert_close(norm, mine, got)


@pytest.mark.parametrize("norm", NORMS)
def test_one_vector_and_trailing_axes(xp: Any, norm: str) -> None:
    """x of shape (N,) has statistics of shape () or (1,); a matrix has (M,) or (M, 1), also in out=."""
    flat = make_tensors(xp, norm, (1, 500), "float32")
    expected = backward(norm, flat, has_bias=True)
    for shape in ((), (1,)):
        statistics = {
            name: None if getattr(flat, name) is None else getattr(flat, name).reshape(shape)
            for name in ("mean", "rstd")
        }
        got = backward(norm, replace(flat, x=flat.x[0], dy=flat.dy[0], **statistics), has_bias=True)
        assert got[0].shape == (500,)
        assert_same_bits((got[0][None], *got[1:]), expected)
    results = forward(norm, replace(flat, x=flat.x[0]))
    assert [result.shape for result in results] == [(500,), *[()] * (len(results) - 1)]

    flat = make_tensors(xp, norm, (6, 500), "float32")
    expected = backward(norm, flat, has_bias=True)
    columns = {"rstd": flat.rstd[:, None], "mean": None if flat.mean is None else flat.mean[:, None]}
    assert_same_bits(backward(norm, replace(flat, **columns), has_bias=True), expected)
    y, *statistics = forward(norm, flat)
    out = (None, *(poisoned(xp, (6, 1), statistic.dtype) for statistic in statistics))
    again = forward(norm, flat, out=out)
    assert all(got is given for got, given in zip(again[1:], out[1:], strict=True))
    assert_same_bits((again[0], *(column[:, 0] for column in again[1:])), (y, *statistics))


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_by_its_index(xp: Any, norm: str) -> None:
    """Of its statistics NumPy makes scalars, which are no arrays."""
    tensors = make_tensors(xp, norm, (5, 300), "float32")
    names = [name for name in ("x", "dy", "mean", "rstd") if getattr(tensors, name) is not None]
    dx, *sums = backward(norm, replace(tensors, **{name: getattr(tensors, name)[2] for name in names}))
    of_one = backward(norm, replace(tensors, **{name: getattr(tensors, name)[2:3] for name in names}))
    assert_same_bits((dx[None], *sums), of_one)


def test_what_broadcast_arrays_returned_is_read_without_a_warning() -> None:
    """NumPy warns who asks whether it may be written."""
    tensors = make_tensors(np, "layernorm", (5, 300), "float32")
    row, _ = np.broadcast_arrays(tensors.dy[:1], tensors.x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = backward("layernorm", replace(tensors, dy=row))
    assert_same_bits(got, backward("layernorm", replace(tensors, dy=row.copy())))


@pytest.mark.parametrize("order", ["C", "F"])
def test_out_of_a_class_that_assigns_in_its_own_way(order: Any) -> None:
    """As units' do, which want a unit."""

    class OfUnits(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("no unit")

    tensors = make_tensors(np, "rmsnorm", (5, 300), "float32")
    out = np.zeros((5, 300), np.float32, order).view(OfUnits)
    dx, _ = backward("rmsnorm", tensors, out=(out, None))
    assert dx is out
    assert np.array_equal(np.asarray(out), backward("rmsnorm", tensors)[0])


@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7), (0, 4096), (0, 65536)])
@pytest.mark.parametrize("norm", NORMS)
def test_no_rows(xp: Any, norm: str, shape: tuple[int, ...]) -> None:
    """An empty dx, and sums over nothing: zeros, also where out= held something else."""
    tensors = make_tensors(xp, norm, shape, "bfloat16")
    for out in (None, (None, poisoned(xp, shape[-1:], np.float32), poisoned(xp, shape[-1:], np.float32))):
        dx, dw, db = backward(norm, tensors, has_bias=True, out=out)
        assert dx.shape == shape
        assert not dw.any()
        assert not db.any()
    y, *statistics = forward(norm, tensors)
    assert y.shape == shape
    assert all(statistic.shape == shape[:-1] for statistic in statistics)


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("columns", [33, 1024, 20000])
@pytest.mark.parametrize("norm", NORMS)
def test_output_mask(xp: Any, norm: str, columns: int, mask: tuple[bool, bool, bool]) -> None:
    tensors = make_tensors(xp, norm, (33, columns), "bfloat16")
    got = backward(norm, tensors, has_bias=True, output_mask=mask)
    assert tuple(result is not None for result in got) == mask
    assert_close(norm, tensors, got)
    without_w = replace(tensors, w=None)
    got = backward(norm, without_w, has_bias=True, output_mask=list(mask))
    assert tuple(result is not None for result in got) == (mask[0], False, mask[2])
    assert_close(norm, without_w, got)
    if mask[2]:
        got = backward(norm, tensors, has_bias=False, output_mask=mask[:2])
        assert tuple(result is not None for result in got) == mask[:2]
        assert_close(norm, tensors, got)


@pytest.mark.parametrize("given", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("norm", NORMS)
def test_out(xp: Any, norm: str, given: tuple[bool, bool, bool]) -> None:
    """Any entry may be given; what is returned is that very object; it may be used again for the next call."""
    first, second = (make_tensors(xp, norm, (33, 500), "float16", w_dtype="bfloat16", seed=s) for s in (1, 2))
    shapes = (((33, 500), "float16"), ((500,), "bfloat16"), ((500,), "bfloat16"))
    out = [poisoned(xp, shape, DTYPES[name]) if g else None for (shape, name), g in zip(shapes, given, strict=True)]
    for tensors in (first, second):
        got = backward(norm, tensors, has_bias=True, out=tuple(out))
        assert all(result is wanted for result, wanted in zip(got, out, strict=True) if wanted is not None)
        assert_same_bits(got, backward(norm, tensors, has_bias=True))
    assert_same_bits(backward(norm, first, has_bias=True, out=out), backward(norm, first, has_bias=True))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [False, True], ids=["plain first", "metadata first"])
def test_what_a_dtype_says_of_its_array_is_no_other_results(name: str, first: bool) -> None:
    """Equal dtypes may carry metadata, and share a plan."""
    from cupynorm import dispatch

    dispatch.plan_of.cache_clear()
    x = np.ones((6, 12), DTYPES[name])
    marked = x.view(np.dtype(DTYPES[name], metadata={"unit": "m"}))
    assert marked.dtype.metadata
    for each in (marked, x) if first else (x, marked):
        y, rstd = cupynorm.rmsnorm_forward(each)
        assert y.dtype == x.dtype
        assert not y.dtype.metadata
        assert not rstd.dtype.metadata
