"""The machinery of the tables of bad input: a valid call, a row that spoils it, and what refusing it means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import NORMS, replace_backend

import cupynorm

ROWS, COLUMNS = 4, 6
MATRIX, PARAMETER, STATISTIC = (ROWS, COLUMNS), (COLUMNS,), (ROWS,)
FLOATS = "float16, bfloat16, float32, float64"
LAYERNORM = ("layernorm",)

Call = dict[str, Any]
Make = Callable[[Any], Any]  # a value from xp
Place = str | tuple[str, int]  # an argument, or ("out", position)


@dataclass(frozen=True)
class Bad:
    """One way to spoil a valid call, and the error that must come of it."""

    id: str
    change: dict[Place, Make]
    error: type[Exception]
    message: tuple[str, ...]  # regular expressions, each found in the message
    norms: tuple[str, ...] = NORMS
    host: bool = False  # CuPy has no such arrays


def valid_call(xp: Any, direction: str, norm: str) -> Call:
    def ones(shape: tuple[int, ...]) -> Any:
        return xp.ones(shape, "float32")

    if direction == "backward":
        statistics = {name: ones(STATISTIC) for name in (("mean", "rstd") if norm == "layernorm" else ("rstd",))}
        call = {"x": ones(MATRIX), "w": ones(PARAMETER), "dy": ones(MATRIX), **statistics, "has_bias": True}
        return call | {"out": (ones(MATRIX), ones(PARAMETER), ones(PARAMETER))}
    out = [ones(MATRIX), *(ones(STATISTIC) for _ in range(2 if norm == "layernorm" else 1))]
    return {"x": ones(MATRIX), "w": ones(PARAMETER), "b": ones(PARAMETER), "out": tuple(out)}


def spoil(xp: Any, call: Call, change: dict[Place, Make]) -> None:
    for place, make in change.items():
        if isinstance(place, tuple):
            out = list(call["out"])
            out[place[1]] = make(xp)
            call["out"] = tuple(out)
        else:
            call[place] = make(xp)


def array(shape: tuple[int, ...], dtype: str = "float32") -> Make:
    return lambda xp: xp.ones(shape, dtype)


def value(anything: Any) -> Make:
    return lambda xp: anything


NOT_ARRAYS: dict[str, Make] = {
    "list": value([[1.0] * COLUMNS] * ROWS),
    "float": value(1.0),
    "float32": value(np.float32(1.0)),
    "str": value("x"),
    "object": value(object()),
    "type": lambda xp: type(xp.ones(1)),  # it has __dlpack__, but is no array
}


def exactly(shape: tuple[int, ...]) -> str:
    return re.escape(str(shape))


def label(place: Place) -> str:
    return rf"^out\[{place[1]}\]" if isinstance(place, tuple) else f"^{place}: "


def parameters(rows: list[Bad]) -> list[Any]:
    """(xp, norm, row) for every row, norm and backend."""
    return [
        pytest.param(
            backend, norm, row, marks=pytest.mark.gpu if backend == "cupy" else (), id=f"{backend}-{norm}-{row.id}"
        )
        for row in rows
        for norm in row.norms
        for backend in (["numpy"] if row.host else ["numpy", "cupy"])
    ]


def forbid_work(monkeypatch: pytest.MonkeyPatch, xp: Any) -> None:
    """Reaching the backend is a failure."""

    replace_backend(monkeypatch, xp, lambda *_: pytest.fail("the backend ran"))


def assert_refused(
    xp: Any, direction: str, norm: str, call: Call, error: type[Exception], message: tuple[str, ...]
) -> None:
    """The call raises exactly this error, says all of this, and leaves every array as it was."""
    out = call.get("out")
    candidates = (*call.values(), *(out if isinstance(out, (tuple, list)) else ()))
    arrays = [array for array in candidates if isinstance(array, xp.ndarray) and array.dtype != object]
    before = [array.copy() for array in arrays]
    with pytest.raises(error) as caught:
        getattr(cupynorm, f"{norm}_{direction}")(**call)
    assert type(caught.value) is error
    for expression in message:
        assert re.search(expression, str(caught.value)), f"{expression!r} is not in {str(caught.value)!r}"
    for array, copy in zip(arrays, before, strict=True):
        assert array.tobytes() == copy.tobytes(), "an array was touched"
