"""Forward calls that must be refused, as in `test_bad_input.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import (
    FLOATS,
    MATRIX,
    NOT_ARRAYS,
    PARAMETER,
    STATISTIC,
    Bad,
    array,
    assert_refused,
    exactly,
    forbid_work,
    label,
    parameters,
    spoil,
    valid_call,
    value,
)
from foreign import Foreign
from helpers import NORMS, forward, make_tensors, same_bits


def arrays() -> list[Bad]:
    rows = [
        Bad("x ()", {"x": array(())}, ValueError, (r"^x: ", r"shape \(\)", r"\(\.\.\., N\)")),
        Bad("N=0", {"x": array((4, 0))}, ValueError, (r"^x: ", r"\(4, 0\)", "at least 1")),
        Bad("x is None", {"x": value(None)}, TypeError, (r"^x: ", "None", "array")),
    ]
    rows += [
        Bad(f"{name} {shape}", {name: array(shape)}, ValueError, (f"^{name}: ", exactly(shape), exactly(PARAMETER)))
        for name in ("w", "b")
        for shape in ((5,), (1,), (), (6, 1))
    ]
    rows += [
        Bad(f"{name} {dtype}", {name: array(shape, dtype)}, ValueError, (f"^{name}: ", dtype, FLOATS), host=host)
        for name, shape in (("x", MATRIX), ("w", PARAMETER), ("b", PARAMETER))
        for dtype, host in (("int64", False), ("complex64", False), ("bool", False), (">f4", True))
    ]
    rows += [
        Bad(f"{place} is a {kind}", {place: make}, TypeError, (label(place), kind, "array"))
        for place in ("x", "w", "b", "residual", ("out", 0), ("out", 1))
        for kind, make in NOT_ARRAYS.items()
    ]
    foreign = value(Foreign(np.ones(MATRIX, np.float32)))
    rows += [
        Bad(f"{place} of another framework", {place: foreign}, TypeError, (label(place), "Foreign", "one framework"))
        for place in ("w", "b", "residual", ("out", 0), ("out", 1))
    ]
    return rows


def outputs() -> list[Bad]:
    y, last = r"^out\[0\] \(y\): ", r"^out\[[12]\] \(rstd\): "
    rows = [
        Bad("y shape", {("out", 0): array((4, 5))}, ValueError, (y, r"\(4, 5\)", exactly(MATRIX))),
        Bad("y dtype", {("out", 0): array(MATRIX, "float16")}, ValueError, (y, "float16", "float32 is needed")),
        Bad("rstd shape", {("out", -1): array((5,))}, ValueError, (last, r"\(5,\)", exactly(STATISTIC))),
        Bad("rstd (1, 4)", {("out", -1): array((1, 4))}, ValueError, (last, r"\(1, 4\)", exactly(STATISTIC))),
        Bad("rstd dtype", {("out", -1): array(STATISTIC, "float64")}, ValueError, (last, "float64", "float32 is")),
        Bad("out is a str", {"out": value("y")}, TypeError, (r"^out: ", "str", "tuple of", "y, ")),
    ]
    rows += [
        Bad(
            f"{n} outputs",
            {"out": value((None,) * n)},
            ValueError,
            (r"^out: ", rf"{n} entr(y|ies);", "tuple of", "y, "),
        )
        for n in (0, 1, 4)
    ]
    return rows


def options() -> list[Bad]:
    rows = [
        Bad("residual", {"residual": array(MATRIX)}, NotImplementedError, (r"^residual: ", "array", "None")),
        Bad("offset 1", {"weight_offset": value(1)}, NotImplementedError, (r"^weight_offset: ", "1", "0.0")),
        Bad("w per head", {"w": array(MATRIX)}, NotImplementedError, (r"^w: ", exactly(MATRIX), "a head", "yet")),
    ]
    rows += [
        Bad(f"eps {eps!r}", {"eps": value(eps)}, error, (r"^eps: ", got, needed))
        for eps, error, got, needed in (
            (float("nan"), ValueError, "nan", "finite"),
            (float("inf"), ValueError, "inf", "finite"),
            (-1e-6, ValueError, "-1e-06", "at least 0"),
            ("1e-5", TypeError, "str", "number"),
            (None, TypeError, "None", "number"),
            (True, TypeError, "bool", "number"),
            (1e-5 + 0j, TypeError, "complex", "number"),
            ([1e-5], TypeError, "list", "number"),
        )
    ]
    rows.append(Bad("eps beyond float64", {"eps": value(10**400)}, ValueError, (r"^eps: ", "beyond float64")))
    return rows


@pytest.mark.parametrize(("xp", "norm", "row"), parameters(arrays() + outputs() + options()), indirect=["xp"])
def test_forward_refuses(xp: Any, monkeypatch: Any, norm: str, row: Bad) -> None:
    forbid_work(monkeypatch, xp)
    call = valid_call(xp, "forward", norm)
    spoil(xp, call, row.change)
    assert_refused(xp, "forward", norm, call, row.error, row.message)


@pytest.mark.parametrize("norm", NORMS)
def test_numbers_that_eps_may_be(xp: Any, norm: str) -> None:
    tensors = make_tensors(xp, norm, (3, 8))
    for eps in (0, 0.0, np.float32(0.0), np.int64(0)):
        assert same_bits(forward(norm, tensors, eps=eps)[0], forward(norm, tensors, eps=0.0)[0])
