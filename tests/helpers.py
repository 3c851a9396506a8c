"""Small tools that the tests share: calls by name, bit patterns, poisoned memory, a look at what a backend receives."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import cupynorm

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
NORMS = ("rmsnorm", "layernorm")
DEFAULT_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}


@dataclass
class Tensors:
    """The arrays of one call, forward and backward."""

    x: Any
    w: Any
    b: Any
    dy: Any
    mean: Any  # None for RMSNorm
    rstd: Any


def statistics_dtype(x_dtype: Any) -> np.dtype[Any]:
    return DTYPES["float64"] if x_dtype == np.float64 else DTYPES["float32"]


def backward(norm: str, tensors: Tensors, **options: Any) -> tuple[Any, ...]:
    if norm == "rmsnorm":
        return cupynorm.rmsnorm_backward(tensors.x, tensors.w, tensors.dy, tensors.rstd, **options)
    return cupynorm.layernorm_backward(tensors.x, tensors.w, tensors.dy, tensors.mean, tensors.rstd, **options)


def forward(norm: str, tensors: Tensors, **options: Any) -> tuple[Any, ...]:
    function = cupynorm.rmsnorm_forward if norm == "rmsnorm" else cupynorm.layernorm_forward
    return function(tensors.x, tensors.w, tensors.b, **options)


def make_tensors(
    xp: Any,
    norm: str,
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    w_dtype: str | None = "float32",
    dy_dtype: str | None = None,
    seed: int = 0,
) -> Tensors:
    """Standard normal inputs whose statistics come from the float64 reference, rounded to their dtype."""
    from cupynorm.numpy_backend import reference_forward

    random = np.random.default_rng(seed)

    def draw(extent: tuple[int, ...], name: str) -> Any:
        return xp.asarray(random.standard_normal(extent).astype(DTYPES[name]))

    x, dy = draw(shape, dtype), draw(shape, dy_dtype or dtype)
    w, b = (draw(shape[-1:], w_dtype) if w_dtype else None for _ in range(2))
    _, mean, rstd = reference_forward(norm, x, None, None, DEFAULT_EPS[norm])
    statistics = statistics_dtype(x.dtype)
    mean = None if mean is None else xp.asarray(mean).reshape(shape[:-1]).astype(statistics)
    return Tensors(x, w, b, dy, mean, xp.asarray(rstd).reshape(shape[:-1]).astype(statistics))


def bits(array: Any) -> Any:
    """The bit patterns of an array's elements, so that NaN equals itself and 0.0 differs from -0.0."""
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((bits(a) == bits(b)).all())


def assert_same_bits(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(got) == len(expected)
    for position, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one is None or other is None:
            assert one is None, f"entry {position}: one is None"
            assert other is None, f"entry {position}: one is None"
        else:
            assert same_bits(one, other), f"entry {position}: bits differ"


def poisoned(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array full of NaN (all bits set, in every dtype): whatever is not written shows."""
    pattern = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return xp.full(shape, np.iinfo(pattern).max, pattern).view(dtype)


def with_gaps(xp: Any, array: Any, gap: int) -> Any:
    """The same rows with so many elements between them, which are no numbers."""
    rows, columns = array.shape
    view = poisoned(xp, (rows, columns + gap), array.dtype)[:, :columns]
    view[...] = array
    return view


def spoilt(array: Any, index: Any, value: float) -> Any:
    """A copy of the array with one element replaced."""
    changed = array.copy()
    bits(changed)[index] = int(bits(np.asarray(value, array.dtype)))
    return changed


def is_nan(array: Any) -> Any:
    wide = array.astype(np.float64)
    return wide != wide


def litter(xp: Any, size: int = 1 << 27) -> None:
    """Fill memory that the next allocations are likely to get with NaN bytes, then free it."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
    blocks = [xp.full(extent, 0xFF, np.uint8) for extent in (size, 1 << 20, 1 << 16, 1 << 12, 512, 512, 512)]
    del blocks


def host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get()


def replace_backend(monkeypatch: Any, xp: Any, replacement: Any) -> None:
    """Have xp's backend call `replacement(work, problem, operands)` instead of doing its work.

    `work()` does it; `operands` has what the backend would work on, by name: arrays on the host, addresses on a device.
    """
    from cupynorm import dispatch, numpy_backend

    def named(problem: Any, operands: tuple[int, ...]) -> SimpleNamespace:
        operation = getattr(dispatch, f"{problem.direction}_of")(problem.norm)
        return SimpleNamespace(**dict(zip(operation.inputs + operation.outputs, operands, strict=True)))

    def on_host(function: Any) -> Any:
        return lambda problem, operands: replacement(lambda: function(problem, operands), problem, operands)

    def on_device(function: Any) -> Any:
        def call(self: Any, *operands: int) -> None:
            replacement(lambda: function(self, *operands), self.problem, named(self.problem, operands))

        return call

    if xp is np:
        for name in ("backward", "forward"):
            monkeypatch.setattr(numpy_backend, name, on_host(getattr(numpy_backend, name)))
    else:
        launch = importlib.import_module("cupynorm.cuda.launch")
        for kind in (launch.Backward, launch.Forward):
            monkeypatch.setattr(kind, "__call__", on_device(kind.__call__))


def spy(monkeypatch: Any, xp: Any) -> list[tuple[Any, Any]]:
    """A list that gathers the (problem, operands) of every call which reaches xp's backend."""
    calls: list[tuple[Any, Any]] = []

    def watch(work: Any, problem: Any, operands: Any) -> None:
        calls.append((problem, operands))
        work()

    replace_backend(monkeypatch, xp, watch)
    return calls


def record_choices(monkeypatch: Any, name: str) -> list[tuple[Any, Any]]:
    """What config.`name` is asked about from here on, which config, and what it says: of each new plan."""
    from cupynorm import dispatch
    from cupynorm.cuda import config

    asked: list[tuple[Any, Any]] = []
    choose = getattr(config, name)

    def record(found: Any, *others: Any) -> Any:
        asked.append((found, choose(found, *others)))
        return asked[-1][1]

    monkeypatch.setattr(config, name, record)
    dispatch.plan_of.cache_clear()
    return asked


def address(array: Any) -> int:
    if isinstance(array, int):
        return array
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def exit_status(main: Any, arguments: list[str]) -> int:
    """Of a script's main(), whether returned or raised by argparse."""
    try:
        return int(main(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def assert_one_line_of_error(capsys: Any, words: list[str]) -> None:
    """All that a script said: one line on standard error, with these words."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    for word in words:
        assert word in captured.err
