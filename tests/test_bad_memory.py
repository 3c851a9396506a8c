"""Outputs that must be refused for where they lie (read-only, overlapping), those that only look like it, and arrays
on the wrong device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bad_input import COLUMNS, MATRIX, PARAMETER, ROWS, STATISTIC, assert_refused, forbid_work, valid_call
from foreign import Broken, Foreign, Homeless
from helpers import NORMS, assert_same_bits, backward, forward, make_tensors

import cupynorm

N = COLUMNS
DX, DW, DB = (rf"^out\[{position}\] \({name}\): " for position, name in enumerate(("dx", "dw", "db")))


def _windows(xp: Any) -> Any:
    """Rows that start one element after each other."""
    return xp.lib.stride_tricks.as_strided(xp.ones(64, "float32"), MATRIX, (4, 4))


def _broadcast(xp: Any) -> Any:
    return xp.lib.stride_tricks.as_strided(xp.ones(N, "float32"), MATRIX, (0, 4))


def _ones(xp: Any, *shape: int) -> Any:
    return xp.ones(shape, "float32")


def _split(buffer: Any, first: Any, second: Any) -> tuple[Any, Any]:
    return buffer[first], buffer[second]


# id: (changes to a valid call from xp, for out an index and an array; what the message must say)
OVERLAPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "dx is x": (lambda xp, c: {"out": (c["x"], None, None)}, (DX, "overlaps x", "own")),
    "dx is dy": (lambda xp, c: {"out": (c["dy"], None, None)}, (DX, "overlaps dy", "own")),
    "dw is w": (lambda xp, c: {"out": (None, c["w"], None)}, (DW, "overlaps w", "own")),
    "db is w": (lambda xp, c: {"out": (None, None, c["w"])}, (DB, "overlaps w", "own")),
    "db is dw": (lambda xp, c: {"out": (None, c["out"][1], c["out"][1])}, (DB, r"overlaps out\[1\] \(dw\)", "own")),
    "dx is x upside down": (lambda xp, c: {"out": (c["x"][::-1], None, None)}, (DX, "overlaps x", "own")),
    "dx starts in x": (
        lambda xp, c: dict(zip(("x", "dx"), _split(_ones(xp, ROWS + 3, N), slice(ROWS), slice(3, None)), strict=True)),
        (DX, "overlaps x", "own"),
    ),
    "dx shares columns with dy": (
        lambda xp, c: dict(zip(("dy", "dx"), _split(_ones(xp, ROWS, N + 3), _cols(0), _cols(3)), strict=True)),
        (DX, "overlaps dy", "own"),
    ),
    "dx shares its last column with dy": (
        lambda xp, c: dict(zip(("dy", "dx"), _split(_ones(xp, ROWS, 2 * N - 1), _cols(N - 1), _cols(0)), strict=True)),
        (DX, "overlaps dy", "own"),
    ),
    "rstd lies in dx": (
        lambda xp, c: {"rstd": c["out"][0].reshape(-1)[:ROWS]},
        (DX, "overlaps rstd", "own"),
    ),
    "dw is a row of dx": (
        lambda xp, c: {"out": (c["out"][0], c["out"][0][2], None)},
        (DW, r"overlaps out\[0\]", "own"),
    ),
    "rows of dx overlap": (lambda xp, c: {"dx": _windows(xp)}, (DX, "overlap each other")),
    "all rows of dx are one": (lambda xp, c: {"dx": _broadcast(xp)}, (DX, "overlap each other")),
    "all elements of db are one": (
        lambda xp, c: {"out": (None, None, xp.lib.stride_tricks.as_strided(_ones(xp, 1), PARAMETER, (0,)))},
        (DB, "overlap each other"),
    ),
}


def _cols(start: int) -> tuple[slice, slice]:
    return slice(None), slice(start, start + N)


DISJOINT: dict[str, Any] = {
    "neighbouring columns": lambda xp: _split(_ones(xp, ROWS, 2 * N), _cols(0), _cols(N)),
    "neighbouring columns, the other way": lambda xp: _split(_ones(xp, ROWS, 2 * N), _cols(N), _cols(0)),
    "columns with a gap": lambda xp: _split(_ones(xp, ROWS, 2 * N + 5), _cols(0), _cols(N + 5)),
    "interleaved rows": lambda xp: _split(_ones(xp, 2 * ROWS, N), slice(0, None, 2), slice(1, None, 2)),
    "neighbouring rows": lambda xp: _split(_ones(xp, 2 * ROWS, N), slice(ROWS), slice(ROWS, None)),
    "the upper rows, upside down": lambda xp: _split(
        _ones(xp, 2 * ROWS, N), slice(ROWS - 1, None, -1), slice(ROWS, None)
    ),
}


def apply(call: dict[str, Any], changes: dict[str, Any]) -> None:
    if "dx" in changes:
        call["out"] = (changes.pop("dx"), None, None)
    call.update(changes)


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("norm", NORMS)
def test_overlapping_outputs_are_refused(xp: Any, monkeypatch: Any, norm: str, name: str) -> None:
    forbid_work(monkeypatch, xp)
    change, message = OVERLAPS[name]
    call = valid_call(xp, "backward", norm)
    apply(call, change(xp, call))
    assert_refused(xp, "backward", norm, call, ValueError, message)


@pytest.mark.parametrize("source", ["x", "dy"])
@pytest.mark.parametrize("name", DISJOINT)
@pytest.mark.parametrize("norm", NORMS)
def test_disjoint_parts_of_one_buffer_are_fine(xp: Any, norm: str, name: str, source: str) -> None:
    part, dx = DISJOINT[name](xp)
    call = valid_call(xp, "backward", norm)
    apply(call, {source: part, "dx": dx})
    results = getattr(cupynorm, f"{norm}_backward")(**call)
    assert results[0] is dx
    assert bool((part == 1).all()), "an input was written to"


def test_inputs_may_overlap(xp: Any) -> None:
    """Only outputs need memory of their own: x may be dy, and its rows may be one."""
    row = _ones(xp, N)
    same = xp.broadcast_to(row, MATRIX)
    dx, dw, db = cupynorm.layernorm_backward(same, row, same, _ones(xp, ROWS) * 0, _ones(xp, ROWS))
    # x̂ = 1, g = 1: c1 = c2 = 1, so dx = 1 - 1 - 1.
    assert bool((dx == -1).all())
    assert bool((dw == ROWS).all())
    assert bool((db == ROWS).all())


def test_empty_outputs_overlap_nothing(xp: Any) -> None:
    empty = _ones(xp, 0, N)
    results = cupynorm.rmsnorm_backward(empty, None, empty, _ones(xp, 0), out=(empty, None))
    assert results[0] is empty


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("norm", NORMS)
def test_read_only_outputs_are_refused(monkeypatch: Any, norm: str, position: int) -> None:
    forbid_work(monkeypatch, np)
    call = valid_call(np, "backward", norm)
    call["out"][position].flags.writeable = False
    message = ((DX, DW, DB)[position], "read-only", "writable")
    assert_refused(np, "backward", norm, call, ValueError, message)
    call = valid_call(np, "forward", norm)
    position = min(position, len(call["out"]) - 1)
    call["out"][position].flags.writeable = False
    assert_refused(np, "forward", norm, call, ValueError, (rf"^out\[{position}\]", "read-only", "writable"))


def test_read_only_inputs_are_fine() -> None:
    call = valid_call(np, "backward", "layernorm")
    for name in ("x", "w", "dy", "mean", "rstd"):
        call[name].flags.writeable = False
    assert cupynorm.layernorm_backward(**call)[0] is call["out"][0]


def foreign_call(**changes: Any) -> dict[str, Any]:
    arrays = {"x": MATRIX, "w": PARAMETER, "dy": MATRIX, "rstd": STATISTIC}
    return {name: Foreign(_ones(np, *shape)) for name, shape in arrays.items()} | changes


def _read_only(shape: tuple[int, ...]) -> Any:
    array = _ones(np, *shape)
    array.flags.writeable = False
    return array


MATRIX_ONES = np.ones(MATRIX, np.float32)
FOREIGN: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "a read-only output": ({"out": (Foreign(_read_only(MATRIX)), None)}, ValueError, (DX, "read-only", "writable")),
    "another device": (
        {"dy": Foreign(MATRIX_ONES, device=(2, 0))},
        TypeError,
        (r"^dy: ", "cuda:0", "x is on the host", "one device"),
    ),
    "an unknown device": (
        {"x": Foreign(MATRIX_ONES, device=(8, 0))},
        TypeError,
        (r"^x: ", "device type 8", "host or CUDA memory is needed"),
    ),
    "an unknown device of another argument": (
        {"rstd": Foreign(MATRIX_ONES, device=(7, 0))},
        TypeError,
        (r"^rstd: ", "device type 7", "host or CUDA memory is needed"),
    ),
    "a producer that refuses": ({"dy": Broken(MATRIX_ONES)}, TypeError, (r"^dy: ", "DLPack", "not for export")),
    "a framework without from_dlpack": ({"x": Homeless(MATRIX_ONES)}, TypeError, (r"^x: ", "from_dlpack")),
    "integers": ({"dy": Foreign(np.ones(MATRIX, int))}, ValueError, (r"^dy: ", "int64", "float32, float64")),
    "booleans": ({"dy": Foreign(np.ones(MATRIX, bool))}, ValueError, (r"^dy: ", "float32, float64")),
    "a NumPy array beside": ({"dy": MATRIX_ONES}, TypeError, (r"^dy: ", "numpy.ndarray", "Foreign", "one framework")),
    "a list beside": ({"dy": [[1.0]]}, TypeError, (r"^dy: ", "list", "array")),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_arrays_are_refused(monkeypatch: Any, name: str) -> None:
    forbid_work(monkeypatch, np)
    changes, error, message = FOREIGN[name]
    assert_refused(np, "backward", "rmsnorm", foreign_call(**changes), error, message)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w", "dy", "rstd", "out"])
def test_host_and_cuda_arrays_do_not_mix(monkeypatch: Any, name: str) -> None:
    import cupy

    for xp, other in ((np, cupy), (cupy, np)):
        with monkeypatch.context() as patch:
            forbid_work(patch, xp)
            call = valid_call(xp, "backward", "rmsnorm")
            stranger = valid_call(other, "backward", "rmsnorm")[name]
            call[name] = (*call["out"][:2], stranger[2]) if name == "out" else stranger
            label = DB if name == "out" else f"^{name}: "
            message = (label, f"{other.__name__}.ndarray", f"{xp.__name__}.ndarray", "one framework")
            assert_refused(xp, "backward", "rmsnorm", call, TypeError, message)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["float16", "float32", "float64"])
def test_a_matrix_is_an_array_like_any_other(norm: str, x: str) -> None:
    """Though it indexes and reshapes otherwise; what was given to be written into comes back."""
    tensors = make_tensors(np, norm, (4, 40), x)
    as_matrix = replace(tensors, x=np.asmatrix(tensors.x), dy=np.asmatrix(tensors.dy))
    assert_same_bits(forward(norm, as_matrix), forward(norm, tensors))
    expected = backward(norm, tensors)
    assert_same_bits(backward(norm, as_matrix), expected)
    out = np.asmatrix(np.zeros_like(tensors.x))
    got = backward(norm, as_matrix, out=(out, *(None for _ in expected[1:])))
    assert got[0] is out
    assert_same_bits((np.asarray(out), *got[1:]), expected)


def test_masked_arrays_are_refused() -> None:
    """Their mask would be lost without a word."""
    plain = np.ones((2, 8), np.float32)
    with pytest.raises(TypeError, match=r"^x: got numpy.ma.MaskedArray"):
        cupynorm.rmsnorm_forward(np.ma.masked_less(plain, 0))
