"""Backward calls that must be refused before any work, with the outputs untouched, by a message that names the
argument, what it got and what is needed. Each row of the tables changes one thing of a valid call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import (
    FLOATS,
    LAYERNORM,
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
from helpers import NORMS

OUTPUTS = {"dx": MATRIX, "dw": PARAMETER, "db": PARAMETER}


def norms_with(name: Any) -> tuple[str, ...]:
    return LAYERNORM if name == "mean" else NORMS


def shapes() -> list[Bad]:
    rows = [
        Bad("x ()", {"x": array(())}, ValueError, (r"^x: ", r"shape \(\)", r"\(\.\.\., N\)")),
        Bad("N=0", {"x": array((4, 0)), "dy": array((4, 0))}, ValueError, (r"^x: ", r"\(4, 0\)", "at least 1")),
    ]
    rows += [
        Bad(f"dy {shape}", {"dy": array(shape)}, ValueError, (r"^dy: ", exactly(shape), exactly(MATRIX)))
        for shape in ((4, 5), (3, 6), (24,), (0, 6), (1, 4, 6), ())
    ]
    rows += [
        Bad(f"w {shape}", {"w": array(shape)}, ValueError, (r"^w: ", exactly(shape), exactly(PARAMETER)))
        for shape in ((5,), (1,), (), (1, 6), (6, 1), (0,))
    ]
    rows += [
        Bad(
            f"{name} {shape}",
            {name: array(shape)},
            ValueError,
            (f"^{name}: ", exactly(shape), exactly(STATISTIC), "trailing 1"),
            norms_with(name),
        )
        for name in ("mean", "rstd")
        for shape in ((3,), (6,), (4, 2), (1, 4), (), (4, 1, 1), (4, 6))
    ]
    rows += [
        Bad(
            f"{name} {shape}",
            {("out", position): array(shape)},
            ValueError,
            (rf"^out\[{position}\] \({name}\): ", exactly(shape), exactly(needed)),
        )
        for position, (name, needed) in enumerate(OUTPUTS.items())
        for shape in ((4, 5), (24,), (1, 4, 6), (5,), (1, 6), ())
    ]
    return rows


def dtypes() -> list[Bad]:
    wrong = {"int32": "int32", "complex64": "complex64", "bool": "bool", "uint16": "uint16"}
    wrong |= {">f4": ">f4", "longdouble": "float128|longdouble", "object": "dtype object"}  # these on the host only
    rows = [
        Bad(
            f"{name} {dtype}",
            {name: array(shape, dtype)},
            ValueError,
            (f"^{name}: ", shown, FLOATS),
            host=dtype in (">f4", "longdouble", "object"),
        )
        for name, shape in (("x", MATRIX), ("w", PARAMETER), ("dy", MATRIX))
        for dtype, shown in wrong.items()
    ]
    rows += [
        Bad(
            f"{name} {dtype}",
            {name: array(STATISTIC, dtype)},
            ValueError,
            (f"^{name}: ", dtype, "float32 is needed", "x is float32"),
            norms_with(name),
            host=dtype == ">f4",
        )
        for name in ("mean", "rstd")
        for dtype in ("float64", "float16", "int64", ">f4")
    ]
    rows += [
        Bad(
            f"{name} {dtype}",
            {("out", position): array(shape, dtype)},
            ValueError,
            (rf"^out\[{position}\] \({name}\): ", dtype, "float32 is needed"),
            host=dtype == ">f4",
        )
        for position, (name, shape) in enumerate(OUTPUTS.items())
        for dtype in ("float16", "float64", "int32", ">f4")
    ]
    rows.append(
        Bad(
            "float32 statistics of a float64 x",
            {"x": array(MATRIX, "float64"), "out": value(None)},
            ValueError,
            (r"^(mean|rstd): ", "float32", "float64 is needed", "x is float64"),
        )
    )
    rows.append(
        Bad(
            "db of x's dtype where w has another",
            {"w": array(PARAMETER, "float64"), ("out", 0): value(None), ("out", 1): value(None)},
            ValueError,
            (r"^out\[2\] \(db\): ", "float32", "float64 is needed"),
        )
    )
    return rows


ARRAYS = ("x", "w", "dy", "mean", "rstd", "dresidual_out", ("out", 0), ("out", 1), ("out", 2))


def kinds() -> list[Bad]:
    rows = [
        Bad(f"{place} is a {kind}", {place: make}, TypeError, (label(place), kind, "array"), norms_with(place))
        for place in ARRAYS
        for kind, make in NOT_ARRAYS.items()
        if kind != "float32" or place not in ("mean", "rstd")  # which NumPy has of a single row
    ]
    rows += [
        Bad(
            f"{name} is a scalar",
            {name: value(np.float32(1))},
            ValueError,
            (f"^{name}: ", r"\(\)"),
            norms_with(name),
            True,
        )
        for name in ("mean", "rstd")
    ]
    rows += [
        Bad(f"{name} is None", {name: value(None)}, TypeError, (f"^{name}: ", "None", "array"), norms_with(name))
        for name in ("x", "dy", "mean", "rstd")
    ]
    rows += [
        Bad(
            f"{place} of another framework",
            {place: value(Foreign(np.ones(MATRIX, np.float32)))},
            TypeError,
            # Where x is the stranger, all others are strangers to it: the first of them is named.
            (label("w" if place == "x" else place), "Foreign", "one framework"),
            norms_with(place),
        )
        for place in ARRAYS
    ]
    return rows


class Unprintable:
    """As a deleted array of JAX's is; what an array on a device prints would have to be waited for."""

    def __repr__(self) -> str:
        raise RuntimeError("Array has been deleted.")


def outputs_and_masks() -> list[Bad]:
    names = r"\(dx, dw, db\)"
    rows = [
        Bad(f"out is {kind}", {"out": value(out)}, TypeError, (r"^out: ", kind, "tuple of 3", "dx, dw, db"))
        for kind, out in {"ndarray": np.ones(MATRIX), "dict": {"dx": None}, "str": "out", "int": 3}.items()
    ]
    rows += [
        Bad(
            f"{n} outputs",
            {"out": value((None,) * n)},
            ValueError,
            (r"^out: ", rf"{n} entr(y|ies);", "tuple of 3", names),
        )
        for n in (0, 1, 2, 4)
    ]
    rows.append(Bad("no bias", {"has_bias": value(False)}, ValueError, (r"^out: ", "3 entries", "of 2", r"\(dx, dw\)")))
    rows += [
        Bad(f"mask {mask!r}", {"output_mask": value(mask)}, error, (r"^output_mask: ", got, names))
        for mask, error, got in (
            ((True, True), ValueError, "2 entries"),
            ((), ValueError, "0 entries"),
            ((True,) * 4, ValueError, "4 entries"),
            ((1, 1, 1), TypeError, r"\(1, 1, 1\)"),
            ((True, None, True), TypeError, "None"),
            ("yes", TypeError, "yes"),
            (True, TypeError, "True"),
            (np.ones(3, bool), TypeError, "array"),
        )
    ]
    rows.append(
        Bad("mask of unprintables", {"output_mask": value([Unprintable()] * 3)}, TypeError, ("^output_mask: got list",))
    )
    rows += [
        Bad(
            f"{name} given, not wanted",
            {"output_mask": value(tuple(other != name for other in OUTPUTS))},
            ValueError,
            (rf"^out\[{position}\] \({name}\): ", "given", "output_mask"),
        )
        for position, name in enumerate(OUTPUTS)
    ]
    no_weight = (r"^out\[1\] \(dw\): ", "w is None", "None is needed")
    rows.append(Bad("dw given, no w", {"w": value(None)}, ValueError, no_weight))
    return rows


def options() -> list[Bad]:
    rows = [
        Bad(
            f"has_bias {flag!r}",
            {"has_bias": value(flag), "out": value(None)},
            TypeError,
            (r"^has_bias: ", repr(flag), "True or False"),
        )
        for flag in (1, 0, "yes", None)
    ]
    rows.append(Bad("bias is an array", {"has_bias": array(PARAMETER)}, TypeError, (r"^has_bias: got ndarray; ",)))
    rows.append(Bad("w, dy", {"w": array(MATRIX), "dy": array(PARAMETER)}, ValueError, (r"^dy: ", "order is x, w, dy")))
    offset, accumulate, residual = ("weight_offset", "accumulate", "dresidual_out")
    rows += [
        Bad("offset 1.0", {offset: value(1.0)}, NotImplementedError, (f"^{offset}: ", "1.0", "0.0")),
        Bad("offset '1'", {offset: value("1")}, TypeError, (f"^{offset}: ", "str", "number")),
        Bad("accumulate", {accumulate: value(True)}, NotImplementedError, (f"^{accumulate}: ", "True", "False")),
        Bad("accumulate 1", {accumulate: value(1)}, TypeError, (f"^{accumulate}: ", "1", "True or False")),
        Bad("residual", {residual: array(MATRIX)}, NotImplementedError, (f"^{residual}: ", "array", "None")),
        Bad("w per head", {"w": array(MATRIX)}, NotImplementedError, (r"^w: ", exactly(MATRIX), "a head", "yet")),
    ]
    return rows


TABLE = shapes() + dtypes() + kinds() + outputs_and_masks() + options()


@pytest.mark.parametrize(("xp", "norm", "row"), parameters(TABLE), indirect=["xp"])
def test_backward_refuses(xp: Any, monkeypatch: Any, norm: str, row: Bad) -> None:
    forbid_work(monkeypatch, xp)
    call = valid_call(xp, "backward", norm)
    spoil(xp, call, row.change)
    assert_refused(xp, "backward", norm, call, row.error, row.message)


def test_the_call_that_the_rows_spoil_is_valid(xp: Any) -> None:
    import cupynorm

    for norm in NORMS:
        for direction in ("backward", "forward"):
            call = valid_call(xp, direction, norm)
            results = getattr(cupynorm, f"{norm}_{direction}")(**call)
            assert all(result is given for result, given in zip(results, call["out"], strict=True))
