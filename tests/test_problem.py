"""The pure part of validation: from descriptions of arrays to one frozen problem, with no memory and no GPU."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, NORMS

from cupynorm.dlpack import contiguous_strides
from cupynorm.problem import (
    ArraySpec,
    NormProblem,
    backward_problem,
    check_placement,
    forward_problem,
    out_sequence,
)


def spec(shape: tuple[int, ...], dtype: str = "float32", strides: tuple[int, ...] | None = None) -> ArraySpec:
    """An array that need not exist. Strides are in elements, contiguous by default."""
    kind = DTYPES[dtype]
    if strides is None:
        return ArraySpec(shape, contiguous_strides(shape, kind.itemsize), kind)
    return ArraySpec(shape, tuple(stride * kind.itemsize for stride in strides), kind)


def backward_of(
    norm: str = "layernorm",
    shape: tuple[int, ...] = (4, 6),
    dtype: str = "float32",
    out: tuple[ArraySpec | None, ...] = (None, None, None),
    has_bias: bool = True,
    output_mask: Any = None,
    **changes: ArraySpec | None,
) -> NormProblem:
    statistics = "float64" if dtype == "float64" else "float32"
    arrays: dict[str, ArraySpec | None] = {
        "x": spec(shape, dtype),
        "w": spec(shape[-1:], dtype),
        "dy": spec(shape, dtype),
        "mean": spec(shape[:-1], statistics) if norm == "layernorm" else None,
        "rstd": spec(shape[:-1], statistics),
        "dresidual_out": None,
    }
    options = {"has_bias": has_bias, "weight_offset": 0.0, "output_mask": output_mask, "accumulate": False}
    return backward_problem(norm, arrays | changes, out, **options)  # type: ignore[arg-type]


def forward_of(norm: str = "layernorm", shape: tuple[int, ...] = (4, 6), **changes: Any) -> NormProblem:
    count = 3 if norm == "layernorm" else 2
    arrays = {"x": spec(shape), "w": spec(shape[-1:]), "b": spec(shape[-1:]), "residual": None}
    options = {"eps": changes.pop("eps", 1e-5), "weight_offset": 0.0, "out": changes.pop("out", (None,) * count)}
    return forward_problem(norm, arrays | changes, **options)  # type: ignore[arg-type]


# shape, strides in elements, and the row stride; None where the rows have none and a copy is made.
LAYOUTS = {
    "contiguous": ((4, 6), (6, 1), 6),
    "columns of a wider array": ((4, 6), (100, 1), 100),
    "an odd stride": ((4, 6), (7, 1), 7),
    "upside down": ((4, 6), (-6, 1), -6),
    "one row for all": ((4, 6), (0, 1), 0),
    "overlapping windows": ((4, 6), (1, 1), 1),
    "three axes": ((2, 4, 6), (24, 6, 1), 6),
    "three axes with gaps in the rows": ((2, 4, 6), (40, 10, 1), 10),
    "three axes upside down": ((2, 4, 6), (-24, -6, 1), -6),
    "gaps between groups of rows": ((2, 4, 6), (30, 6, 1), None),
    "swapped axes": ((2, 4, 6), (6, 12, 1), None),
    "one axis backwards": ((2, 4, 6), (-24, 6, 1), None),
    "transposed": ((4, 6), (1, 4), None),
    "every second column": ((4, 6), (12, 2), None),
    "columns backwards": ((4, 6), (6, -1), None),
    "one value for all columns": ((4, 6), (6, 0), None),
    "axes of one, with any stride": ((1, 4, 1, 6), (999, 10, 999, 1), 10),
    "one row, with any stride": ((1, 6), (999, 1), 6),
    "one row, with gaps": ((1, 6), (6, 2), None),
    "one column, with any stride": ((4, 1), (5, 999), 5),
    "one element": ((1, 1), (999, 999), 1),
    "a vector": ((6,), (1,), 6),
    "a vector with gaps": ((6,), (2,), None),
    "no rows": ((0, 6), (999, 999), 6),
    "beyond 32 bits": ((2**20, 2**12), (2**32, 1), 2**32),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_at_one_stride_run_in_place(name: str, dtype: str) -> None:
    shape, strides, row_stride = LAYOUTS[name]
    laid_out = spec(shape, dtype, strides)
    assert laid_out.strides[-1] == strides[-1] * laid_out.dtype.itemsize
    for argument in ("x", "dy"):
        problem = backward_of(shape=shape, dtype=dtype, **{argument: laid_out})
        assert problem.copies == (frozenset() if row_stride is not None else {argument})
        # The stride is that of the copy where there is one.
        assert getattr(problem, f"{argument}_row_stride") == (shape[-1] if row_stride is None else row_stride)
    problem = backward_of(shape=shape, dtype=dtype, out=(laid_out, None, None))
    assert problem.copies == (frozenset() if row_stride is not None else {"dx"})
    assert problem.out_row_stride == (shape[-1] if row_stride is None else row_stride)


def test_a_row_stride_within_an_element_is_copied() -> None:
    """Fields of a packed record lie at strides that are no multiple of their size."""
    record = np.zeros((3, 1), np.dtype([("x", "f4", 5), ("tag", "u1")]))
    x = record["x"][:, 0]
    assert x.strides == (21, 4)
    assert backward_of(shape=(3, 5), x=ArraySpec(x.shape, x.strides, x.dtype)).copies == {"x"}


def test_the_problem_describes_the_call() -> None:
    problem = backward_of("layernorm", (2, 3, 6), "bfloat16", w=spec((6,), "float32"), dy=spec((2, 3, 6), "float16"))
    assert (problem.norm, problem.direction, problem.rows, problem.columns) == ("layernorm", "backward", 6, 6)
    assert (problem.x_dtype, problem.w_dtype, problem.dy_dtype) == tuple(
        DTYPES[name] for name in ("bfloat16", "float32", "float16")
    )
    assert (problem.want_dx, problem.want_dw, problem.want_db) == (True, True, True)
    assert problem.parameter_dtype == np.float32
    assert problem.compute_dtype == np.float32
    assert problem.copies == frozenset()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_follow_from_others(dtype: str) -> None:
    wide = np.float64 if dtype == "float64" else np.float32
    assert backward_of(dtype=dtype).compute_dtype == wide
    without_weight = backward_of(dtype=dtype, w=None)
    assert without_weight.parameter_dtype == DTYPES[dtype]
    assert (without_weight.w_dtype, without_weight.want_dw, without_weight.want_db) == (None, False, True)


def test_sizes_beyond_32_bits() -> None:
    problem = backward_of(shape=(2**20, 2**13, 4), dtype="float16")
    assert problem.rows == 2**33
    assert problem.copies == frozenset()


@pytest.mark.parametrize("norm", NORMS)
def test_problems_are_frozen_and_can_be_keys(norm: str) -> None:
    """Caches of launch configurations and kernels hang on it."""
    one, same, other = backward_of(norm), backward_of(norm), backward_of(norm, (5, 6))
    assert one == same
    assert len({one, same, other, forward_of(norm), forward_of(norm)}) == 3
    with pytest.raises(FrozenInstanceError):
        one.rows = 5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["w", "mean", "rstd"])
def test_vectors_with_gaps_are_copied(name: str) -> None:
    size = 6 if name == "w" else 4
    assert backward_of(**{name: spec((size,), strides=(2,))}).copies == {name}
    assert backward_of(**{name: spec((size,), strides=(-1,))}).copies == {name}
    assert backward_of(shape=(1, 1), **{name: spec((1,), strides=(7,))}).copies == frozenset()


def test_outputs_with_gaps_are_copied_back() -> None:
    gaps = spec((6,), strides=(2,))
    assert backward_of(out=(None, gaps, None)).copies == {"dw"}
    assert backward_of(out=(None, None, gaps)).copies == {"db"}
    statistic = spec((4, 1), strides=(2, 1))
    assert forward_of(out=(None, statistic, spec((4,)))).copies == {"mean"}
    assert forward_of("rmsnorm", out=(spec((4, 6), strides=(1, 4)), statistic)).copies == {"y", "rstd"}
    assert forward_of(out=(spec((4, 6), strides=(9, 1)), None, None)).out_row_stride == 9


@pytest.mark.parametrize(
    ("has_bias", "mask", "wanted"),
    [
        (True, None, (True, True, True)),
        (False, None, (True, True, False)),
        (True, (False, True, False), (False, True, False)),
        (False, [True, False], (True, False, False)),
        (True, (np.True_, np.False_, np.True_), (True, False, True)),
    ],
)
def test_output_masks(has_bias: bool, mask: Any, wanted: tuple[bool, bool, bool]) -> None:
    problem = backward_of(has_bias=has_bias, output_mask=mask)
    assert (problem.want_dx, problem.want_dw, problem.want_db) == wanted
    assert all(type(flag) is bool for flag in (problem.want_dx, problem.want_dw, problem.want_db))


def test_forward_problems() -> None:
    problem = forward_of(b=None, eps=np.float32(0.5))
    assert (problem.direction, problem.dy_dtype, problem.b_dtype, problem.eps) == ("forward", None, None, 0.5)
    assert type(problem.eps) is float
    assert forward_of(b=spec((6,), "float16")).b_dtype == np.float16
    assert forward_of(x=spec((4, 6), strides=(9, 1))).x_row_stride == 9


def test_outputs_as_a_sequence() -> None:
    assert out_sequence(None, ("dx", "dw")) == (None, None)
    assert out_sequence([1, None], ("dx", "dw")) == (1, None)
    assert out_sequence((None, 2), ("dx", "dw")) == (None, 2)


@pytest.mark.parametrize("strides", [(6, 4), (8, 6)])
def test_elements_across_their_boundaries_are_no_devices(strides: tuple[int, int]) -> None:
    """CuPy makes such views of bytes; the hardware cannot read them. NumPy can."""
    float32 = np.dtype(np.float32)
    on_host = ArraySpec((2, 2), strides, float32)
    check_placement(["x"], [on_host], 1)
    on_device = on_host._replace(device=0)
    with pytest.raises(ValueError, match=r"x: has strides .* multiples of its element size, 4"):
        check_placement(["x"], [on_device], 1)
    with pytest.raises(ValueError, match="strides"):
        check_placement(["x"], [on_device._replace(strides=(-6, 4))], 1)
    check_placement(["x"], [on_device._replace(strides=(-8, 4))], 1)
    for shape in ((1, 1), (0, 2), (2, 0)):
        check_placement(["x"], [on_device._replace(shape=shape)], 1)
