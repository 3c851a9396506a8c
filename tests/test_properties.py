"""Properties that hold for any shape, layout and dtype, on drawn examples, on the NumPy path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, NORMS, Tensors, assert_same_bits, backward, forward, make_tensors, same_bits
from tolerances import check, db_bound, dw_bound, dx_bound

from cupynorm.numpy_backend import reference_backward

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)

leading_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
columns = st.one_of(st.integers(1, 70), st.sampled_from([255, 1000, 4097]))
dtype_names = st.sampled_from(list(DTYPES))


@st.composite
def calls(draw: Any, dtypes: Any = dtype_names) -> tuple[str, Tensors]:
    """A norm and inputs, each array in a layout of its own."""
    norm = draw(st.sampled_from(NORMS))
    shape = (*draw(leading_shapes), draw(columns))
    tensors = make_tensors(
        np,
        norm,
        shape,
        draw(dtypes),
        w_dtype=draw(st.one_of(st.none(), dtype_names)),
        dy_dtype=draw(dtypes),
        seed=draw(st.integers(0, 1000)),
    )
    for name in ("x", "w", "dy", "mean", "rstd"):
        array = getattr(tensors, name)
        if array is not None:
            setattr(tensors, name, relaid(draw, array))
    return norm, tensors


def relaid(draw: Any, array: Any) -> Any:
    """The same values at drawn steps (backwards, too), from a drawn start, along a drawn order of the axes."""
    order = draw(st.permutations(range(array.ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in order]
    room = [abs(step) * extent + draw(st.integers(0, 3)) for step, extent in zip(steps, array.shape, strict=True)]
    buffer = np.full([room[axis] for axis in order], np.nan, array.dtype).transpose(np.argsort(order))
    index = []
    for step, extent, size in zip(steps, array.shape, room, strict=True):
        start = size - abs(step) * extent if step > 0 else size - 1
        index.append(slice(start, None, step))
    view = buffer[(*index, ...)][(*(slice(extent) for extent in array.shape), ...)]
    view[...] = array
    return view


def flat(tensors: Tensors) -> Tensors:
    """The call as a matrix of rows, for the reference's bounds."""
    n = tensors.x.shape[-1]
    mean = None if tensors.mean is None else tensors.mean.reshape(-1)
    x, dy = (np.ascontiguousarray(array).reshape(-1, n) for array in (tensors.x, tensors.dy))
    return Tensors(x, tensors.w, None, dy, mean, tensors.rstd.reshape(-1))


@SETTINGS
@hypothesis.given(calls(), st.booleans())
def test_any_shape_layout_and_dtype(call: tuple[str, Tensors], has_bias: bool) -> None:
    """Elementwise bounds only: the l2 bounds are statements about many elements."""
    norm, tensors = call
    rows = flat(tensors)
    got = backward(norm, tensors, has_bias=has_bias)
    dx, dw, db = reference_backward(norm, rows.x, rows.w, rows.dy, rows.mean, rows.rstd)
    assert got[0].shape == tensors.x.shape
    check("dx", got[0].reshape(rows.x.shape), dx, _elementwise(dx_bound(norm, rows, dx)))
    if tensors.w is not None:
        check("dw", got[1], dw, _elementwise(dw_bound(norm, rows, dw, tensors.w.dtype)))
    if has_bias:
        check("db", got[2], db, _elementwise(db_bound(rows, db, got[2].dtype)))


def _elementwise(bound: Any) -> Any:
    bound.l2 = np.inf
    return bound


@SETTINGS
@hypothesis.given(calls(), st.integers(0, 3))
def test_a_copy_changes_no_row(call: tuple[str, Tensors], axes: int) -> None:
    """The bits of dx depend neither on where the rows lie nor on the shape around them."""
    norm, tensors = call
    rows = flat(tensors)
    got = backward(norm, tensors, has_bias=True)
    shape = (*(1,) * axes, *rows.x.shape)
    x, dy = (array.reshape(shape) for array in (rows.x, rows.dy))
    mean, rstd = (None if array is None else array.reshape(shape[:-1]) for array in (rows.mean, rows.rstd))
    again = backward(norm, Tensors(x, rows.w, None, dy, mean, rstd), has_bias=True)
    assert same_bits(again[0].reshape(got[0].shape), got[0])


@SETTINGS
@hypothesis.given(calls(st.sampled_from(["bfloat16", "float32", "float64"])), st.integers(-20, 20))
def test_linear_in_dy(call: tuple[str, Tensors], power: int) -> None:
    """A power of two passes through every product, sum and rounding: the bits scale. (float16 would underflow; so
    might a w of float16, whose dw is.)"""
    norm, tensors = call
    if tensors.w is not None and tensors.w.dtype == np.float16:
        tensors.w = tensors.w.astype(np.float32)
    factor = 2.0**power
    got = backward(norm, tensors, has_bias=True)
    tensors.dy[...] = tensors.dy.astype(np.float64) * factor  # in its place: the layout stays
    scaled = backward(norm, tensors, has_bias=True)
    expected = tuple(None if r is None else (r.astype(np.float64) * factor).astype(r.dtype) for r in got)
    assert_same_bits(scaled, expected)


@SETTINGS
@hypothesis.given(st.integers(1, 40), columns, dtype_names, st.integers(0, 1000))
def test_a_shift_of_x_has_no_gradient(rows: int, n: int, dtype: str, seed: int) -> None:
    """LayerNorm does not see a constant added to a row, so dx sums to zero over it where w is constant; up to the
    roundings of dx's elements, and of the statistics (which leave a sum of x̂)."""
    tensors = make_tensors(np, "layernorm", (rows, n), dtype, w_dtype=None, seed=seed)
    (dx, _) = backward("layernorm", tensors, has_bias=False)
    reference, _, _ = reference_backward("layernorm", tensors.x, None, tensors.dy, tensors.mean, tensors.rstd)
    allowed = dx_bound("layernorm", tensors, reference).elementwise.sum(1)
    rstd = tensors.rstd.astype(np.float64)
    x_hat = (tensors.x.astype(np.float64) - tensors.mean[:, None]) * rstd[:, None]
    c1 = (tensors.dy.astype(np.float64) * x_hat).mean(1)
    allowed += abs(x_hat.sum(1) * c1 * rstd) + 2.0**-50 * abs(tensors.dy.astype(np.float64)).sum(1) * rstd
    assert (abs(dx.astype(np.float64).sum(1)) <= allowed).all()


@SETTINGS
@hypothesis.given(st.sampled_from(NORMS), st.integers(1, 3), st.integers(2, 6), st.integers(0, 1000))
def test_gradients_are_the_slopes_of_forward(norm: str, rows: int, n: int, seed: int) -> None:
    """Central differences of Σ dy·y in float64. Step h: an error of h² times the third derivative (of order rstd³), and
    of 2⁻⁵²·|Σ|/h. eps = 0.1 keeps rstd, and so the derivatives, of order 1 in rows of two columns as well."""
    tensors = make_tensors(np, norm, (rows, n), "float64", w_dtype="float64", seed=seed)
    h, eps = 1e-5, 0.1

    def objective() -> float:
        return float((forward(norm, tensors, eps=eps)[0] * tensors.dy).sum())

    _, *statistics = forward(norm, tensors, eps=eps)
    tensors.rstd, tensors.mean = statistics[-1], statistics[0]
    for name, gradient in zip(("x", "w", "b"), backward(norm, tensors, has_bias=True), strict=True):
        array = getattr(tensors, name)
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + h
            above = objective()
            array[index] = value - h
            below = objective()
            array[index] = value
            assert abs((above - below) / (2 * h) - gradient[index]) < 1e-7, (name, index)
