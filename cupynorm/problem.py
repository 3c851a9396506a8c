"""The validated description of one call. All validation lives here.

`backward_problem` and `forward_problem` take descriptions of the arrays, not the arrays: pure functions that need
no GPU. What they return is frozen and says all that a backend may ask: sizes, dtypes, row strides, which
outputs are wanted, which operands must be copied first because their rows do not lie at one stride.
`check_placement` looks at where each array lies; whether an output overlaps another array is all that is left to ask
once the addresses are known: `possible_overlaps` says of which pairs, `overlap` answers.

Every error names the argument, what it got and what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

Norm = Literal["rmsnorm", "layernorm"]
MOST_COLUMNS = 1 << 30  # a column's number, and twice as much, fits in 32 bits; the number of rows has no limit
FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


# Kernels are chosen by where arrays start: VECTOR_BYTES are read at once, and where of START_BYTES x or dy start in the
# second half, others do better.
VECTOR_BYTES, START_BYTES, START_BYTES_COUNT = 16, 32, ("x", "dy")


class ArraySpec(NamedTuple):
    """What validation looks at: an array without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: np.dtype[Any]
    device: int | None = None  # the CUDA device, None on the host
    offset: int = 0  # bytes from the last multiple of START_BYTES to its start; on the host it does not matter and is 0
    read_only: bool = False


@dataclass(frozen=True)
class NormProblem:
    """One call, validated. Row strides are in elements and hold after `copies` have been made.

    `weight_offset`, `accumulate`, `dresidual_out`, `residual` and `heads` have their place here, but only
    their neutral values are supported so far; validation raises NotImplementedError for the others.
    """

    norm: Norm
    direction: Literal["forward", "backward"]
    rows: int
    columns: int
    x_dtype: np.dtype[Any]
    dy_dtype: np.dtype[Any] | None  # None in forward problems
    w_dtype: np.dtype[Any] | None  # None: no weight
    b_dtype: np.dtype[Any] | None  # forward: dtype of the bias, None: no bias
    x_row_stride: int
    dy_row_stride: int
    out_row_stride: int  # of dx or y
    copies: frozenset[str]  # operands to copy before (or, for outputs, after) the work
    want_dx: bool = False
    want_dw: bool = False
    want_db: bool = False
    eps: float = 0.0
    weight_offset: float = 0.0
    heads: int = 1
    accumulate: bool = False
    dresidual_out: bool = False
    residual: bool = False

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the arithmetic, of mean and rstd, and of the partial sums."""
        return statistics_dtype(self.x_dtype)

    @property
    def parameter_dtype(self) -> np.dtype[Any]:
        """The dtype of dw and db."""
        return self.x_dtype if self.w_dtype is None else self.w_dtype

    @property
    def narrows_sums(self) -> bool:
        """Whether dw and db have another type than their sums."""
        return self.parameter_dtype != self.compute_dtype

    def results(self, x_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each output that is wanted."""
        if self.direction == "backward":
            wanted = {"dx": self.want_dx, "dw": self.want_dw, "db": self.want_db}
            parameter = x_shape[-1:], self.parameter_dtype
            results = {"dx": (x_shape, self.x_dtype), "dw": parameter, "db": parameter}
        else:
            wanted = {"y": True, "mean": self.norm == "layernorm", "rstd": True}
            statistic = x_shape[:-1], self.compute_dtype
            results = {"y": (x_shape, self.x_dtype), "mean": statistic, "rstd": statistic}
        return {name: result for name, result in results.items() if wanted[name]}


@dataclass(kw_only=True)
class BackwardOperands:
    """The arrays of a backward problem; x, dy and dx have rows at the problem's strides."""

    x: Any
    w: Any
    dy: Any
    mean: Any
    rstd: Any
    dresidual_out: Any = None
    dx: Any
    dw: Any
    db: Any


@dataclass(kw_only=True)
class ForwardOperands:
    """The arrays of a forward problem; x and y have rows at the problem's strides."""

    x: Any
    w: Any
    b: Any
    residual: Any = None
    y: Any
    mean: Any = None
    rstd: Any


def statistics_dtype(x_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float64 where x is float64, else float32."""
    return np.dtype(np.float64 if x_dtype == np.float64 else np.float32)


def backward_problem(
    norm: Norm,
    arrays: Mapping[str, ArraySpec | None],
    out: Sequence[ArraySpec | None],
    *,
    has_bias: bool,
    weight_offset: float,
    output_mask: Sequence[bool] | None,
    accumulate: bool,
) -> NormProblem:
    """Validate a backward call: arrays are x, w, dy, mean (LayerNorm), rstd, dresidual_out; out is (dx, dw, db)."""
    x = _require(arrays, "x")
    rows, columns = _rows_and_columns(x)
    dy = _require(arrays, "dy")
    if dy.shape != x.shape:
        w_spec = arrays["w"]
        swapped = w_spec is not None and w_spec.shape == x.shape and dy.shape == x.shape[-1:]
        order = " (the order is x, w, dy)" if swapped else ""
        raise ValueError(f"dy: has shape {dy.shape}; the shape of x, {x.shape}, is needed{order}")
    _float_dtype("dy", dy.dtype)
    _reject_later_options(weight_offset, accumulate, "dresidual_out", arrays["dresidual_out"])
    w = _parameter("w", arrays["w"], x)
    copies: set[str] = set()
    for name in ("mean", "rstd") if norm == "layernorm" else ("rstd",):
        _statistic(name, _require(arrays, name), x, copies)
    want_dx, want_dw, want_db = _output_mask(output_mask, has_bias)
    problem_dtype = x.dtype if w is None else w.dtype
    row_strides = {name: _row_stride(name, spec, copies) for name, spec in (("x", x), ("dy", dy))}
    if w is not None and not _is_contiguous(w):
        copies.add("w")

    wanted = {"dx": want_dx, "dw": want_dw, "db": want_db}
    needed = {"dx": (x.shape, x.dtype), "dw": ((columns,), problem_dtype), "db": ((columns,), problem_dtype)}
    dx_row_stride = columns
    for position, (name, spec) in enumerate(zip(wanted, out, strict=True)):
        if spec is None:
            continue
        label = f"out[{position}] ({name})"
        if not wanted[name]:
            reason = "has_bias" if name == "db" and not has_bias else f"output_mask[{position}]"
            raise ValueError(f"{label}: was given, but {reason} is False; None is needed")
        if name == "dw" and w is None:
            raise ValueError(f"{label}: was given, but w is None, so there is no dw; None is needed")
        _output(label, spec, *needed[name])
        if name == "dx":
            dx_row_stride = _row_stride(name, spec, copies)
        elif not _is_contiguous(spec):
            copies.add(name)
    return NormProblem(
        norm=norm,
        direction="backward",
        rows=rows,
        columns=columns,
        x_dtype=x.dtype,
        dy_dtype=dy.dtype,
        w_dtype=None if w is None else w.dtype,
        b_dtype=None,
        x_row_stride=row_strides["x"],
        dy_row_stride=row_strides["dy"],
        out_row_stride=dx_row_stride,
        copies=frozenset(copies),
        want_dx=want_dx,
        want_dw=want_dw and w is not None,
        want_db=want_db,
    )


def forward_problem(
    norm: Norm,
    arrays: Mapping[str, ArraySpec | None],
    out: Sequence[ArraySpec | None],
    *,
    eps: float,
    weight_offset: float,
) -> NormProblem:
    """Validate a forward call: arrays are x, w, b, residual; out is (y, mean, rstd) or (y, rstd)."""
    x = _require(arrays, "x")
    rows, columns = _rows_and_columns(x)
    _reject_later_options(weight_offset, False, "residual", arrays["residual"])
    w = _parameter("w", arrays["w"], x)
    b = _parameter("b", arrays["b"], x)
    eps = _number("eps", eps)
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps: got {eps}; a finite number of at least 0 is needed")
    copies: set[str] = set()
    x_row_stride = _row_stride("x", x, copies)
    for name, spec in (("w", w), ("b", b)):
        if spec is not None and not _is_contiguous(spec):
            copies.add(name)
    y_row_stride = columns
    names = ("y", "mean", "rstd") if norm == "layernorm" else ("y", "rstd")
    for position, (name, spec) in enumerate(zip(names, out, strict=True)):
        if spec is None:
            continue
        label = f"out[{position}] ({name})"
        if name == "y":
            _output(label, spec, x.shape, x.dtype)
            y_row_stride = _row_stride(name, spec, copies)
        else:
            _output(label, spec, x.shape[:-1], statistics_dtype(x.dtype), may_keep_axis=True)
            if not _is_contiguous(spec):
                copies.add(name)
    return NormProblem(
        norm=norm,
        direction="forward",
        rows=rows,
        columns=columns,
        x_dtype=x.dtype,
        dy_dtype=None,
        w_dtype=None if w is None else w.dtype,
        b_dtype=None if b is None else b.dtype,
        x_row_stride=x_row_stride,
        dy_row_stride=0,
        out_row_stride=y_row_stride,
        copies=frozenset(copies),
        eps=eps,
    )


def gradient_names(has_bias: Any) -> tuple[str, ...]:
    """What a backward call returns."""
    if not isinstance(has_bias, (bool, np.bool_)):
        raise TypeError(f"has_bias: got {_short(has_bias)}; True or False is needed")
    return ("dx", "dw", "db") if has_bias else ("dx", "dw")


def out_sequence(out: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The entries of `out=`, one for each name; all None where out is None."""
    if out is None:
        return (None,) * len(names)
    needed = f"a tuple of {len(names)} entries ({', '.join(names)}), each an array or None, is needed"
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: got {type(out).__name__}; {needed}")
    if len(out) != len(names):
        raise ValueError(f"out: has {_entries(len(out))}; {needed}")
    return tuple(out)


def plain_mask(mask: Any, has_bias: Any) -> tuple[bool, ...]:
    """`output_mask`, checked, as a tuple of Python's own bools."""
    names = gradient_names(has_bias)
    if not isinstance(mask, (tuple, list)) or not all(isinstance(entry, (bool, np.bool_)) for entry in mask):
        raise TypeError(f"output_mask: got {_short(mask)}; a tuple of bools for ({', '.join(names)}) is needed")
    if len(mask) != len(names):
        raise ValueError(f"output_mask: has {_entries(len(mask))}; one for each of ({', '.join(names)}) is needed")
    return tuple(map(bool, mask))


def _short(value: Any) -> str:
    """The value, or its type, of what would fill a screen, or may have a representation of its own."""
    plain = (bool, int, float, str, type(None))
    entries = value if type(value) in (tuple, list) else (value,)
    try:
        text = repr(value) if all(type(entry) in plain for entry in entries) else ""
    except ValueError:  # of an integer with thousands of digits
        text = ""
    return text if 0 < len(text) <= 40 else type(value).__name__


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def check_placement(labels: Sequence[str], specs: Sequence[ArraySpec | None], written: int) -> None:
    """Raise ValueError for an array that cannot be worked on where it lies; those from `written` on are outputs.

    That is an output that is read-only or overlaps itself, and any array on a device whose elements lie across
    their natural boundaries, where the hardware could not read them.
    """
    for position, (label, spec) in enumerate(zip(labels, specs, strict=False)):
        if spec is None:
            continue
        itemsize = spec.dtype.itemsize
        steps = zip(spec.shape, spec.strides, strict=True)
        across = any(stride % itemsize for extent, stride in steps if extent > 1)
        if spec.device is not None and across and 0 not in spec.shape:
            raise ValueError(
                f"{label}: has strides {spec.strides}; multiples of its element size, {itemsize}, are needed"
            )
        if spec.offset % itemsize:
            raise ValueError(
                f"{label}: starts {spec.offset % itemsize} bytes past a multiple of its element size, {itemsize}; "
                "such a multiple is needed"
            )
        if position < written or 0 in spec.shape:
            continue
        if spec.read_only:
            raise ValueError(f"{label}: is read-only; a writable array is needed")
        if _overlaps_itself(spec):
            raise ValueError(
                f"{label}: strides {spec.strides} make its elements overlap each other, or lie between each other; "
                "rows that follow one another are needed"
            )


class Pair(NamedTuple):
    """An output and another array: they may overlap where `least` < address − other address < `most`."""

    output: int
    other: int
    least: int
    most: int


def possible_overlaps(specs: Sequence[ArraySpec | None], written: int) -> tuple[Pair, ...]:
    """The pairs that have to be told apart on every call, as positions among a call's arrays."""
    reaches = {
        position: _reach(spec) for position, spec in enumerate(specs) if spec is not None and 0 not in spec.shape
    }
    return tuple(
        Pair(output, other, reaches[other][0] - reaches[output][1], reaches[other][1] - reaches[output][0])
        for output in reaches
        for other in reaches
        if output >= written and other < output
    )


def overlap(a: ArraySpec, a_address: int, b: ArraySpec, b_address: int) -> bool:
    """Whether two arrays share an element: exact, unless that takes too long to find out."""
    most: Any = 100_000  # steps of the search
    try:
        return bool(np.shares_memory(_outline(a, a_address), _outline(b, b_address), max_work=most))
    except RuntimeError:  # numpy's TooHardError, whose home differs between versions
        return True


# --- pieces -----------------------------------------------------------------------------------------------


def _require(arrays: Mapping[str, ArraySpec | None], name: str) -> ArraySpec:
    spec = arrays[name]
    if spec is None:
        raise TypeError(f"{name}: got None; an array is needed")
    return spec


def _float_dtype(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.name not in FLOAT_NAMES or not dtype.isnative:
        raise ValueError(f"{name}: has dtype {dtype}; one of {', '.join(FLOAT_NAMES)} in native byte order is needed")


def _rows_and_columns(x: ArraySpec) -> tuple[int, int]:
    _float_dtype("x", x.dtype)
    if not x.shape:
        raise ValueError("x: has shape (); at least one axis, (..., N), is needed")
    columns = x.shape[-1]
    if columns < 1:
        raise ValueError(f"x: has shape {x.shape}; a last axis of at least 1 element is needed")
    if columns > MOST_COLUMNS:
        raise ValueError(f"x: has shape {x.shape}; a last axis of at most {MOST_COLUMNS} elements is needed")
    rows = 1
    for extent in x.shape[:-1]:
        rows *= extent
    return rows, columns


def _parameter(name: str, spec: ArraySpec | None, x: ArraySpec) -> ArraySpec | None:
    if spec is None:
        return None
    _float_dtype(name, spec.dtype)
    if len(spec.shape) == 2 and len(x.shape) >= 2 and spec.shape == x.shape[-2:]:
        raise NotImplementedError(
            f"{name}: has shape {spec.shape}; {x.shape[-1:]}, the last axis of x, is needed "
            "(one row a head is not supported yet)"
        )
    if spec.shape != x.shape[-1:]:
        raise ValueError(f"{name}: has shape {spec.shape}; {x.shape[-1:]}, the last axis of x, is needed")
    return spec


def _statistic(name: str, spec: ArraySpec, x: ArraySpec, copies: set[str]) -> None:
    if spec.shape not in (x.shape[:-1], (*x.shape[:-1], 1)):
        raise ValueError(
            f"{name}: has shape {spec.shape}; {x.shape[:-1]}, the shape of x without its last axis, "
            "or that with a trailing 1, is needed"
        )
    needed = statistics_dtype(x.dtype)
    if spec.dtype != needed:
        raise ValueError(f"{name}: has dtype {spec.dtype}; {needed.name} is needed where x is {x.dtype.name}")
    if not _is_contiguous(spec):
        copies.add(name)


def _output(
    label: str, spec: ArraySpec, shape: tuple[int, ...], dtype: np.dtype[Any], may_keep_axis: bool = False
) -> None:
    if spec.shape != shape and not (may_keep_axis and spec.shape == (*shape, 1)):
        raise ValueError(f"{label}: has shape {spec.shape}; {shape} is needed")
    if spec.dtype != dtype:
        raise ValueError(f"{label}: has dtype {spec.dtype}; {dtype.name} is needed")


def _output_mask(mask: Sequence[bool] | None, has_bias: bool) -> tuple[bool, bool, bool]:
    """Which of dx, dw, db are wanted."""
    wanted = (True,) * len(gradient_names(has_bias)) if mask is None else plain_mask(mask, has_bias)
    return wanted[0], wanted[1], wanted[2] if has_bias else False


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: got {type(value).__name__}; a real number of Python or NumPy is needed")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: got an integer beyond float64; a number that it holds is needed") from error


def _reject_later_options(weight_offset: Any, accumulate: Any, name: str, residual: ArraySpec | None) -> None:
    if _number("weight_offset", weight_offset) != 0.0:
        raise NotImplementedError(f"weight_offset: got {weight_offset}; only 0.0 is supported yet")
    if not isinstance(accumulate, (bool, np.bool_)):
        raise TypeError(f"accumulate: got {_short(accumulate)}; True or False is needed")
    if accumulate:
        raise NotImplementedError("accumulate: got True; only False is supported yet")
    if residual is not None:
        raise NotImplementedError(f"{name}: got an array; only None is supported yet")


def _is_contiguous(spec: ArraySpec) -> bool:
    step = spec.dtype.itemsize
    for extent, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def _row_stride(name: str, spec: ArraySpec, copies: set[str]) -> int:
    """The one stride, in elements, between the rows of an (..., N) array.

    Where there is none (the last axis has gaps, or the leading axes do not merge), the operand is noted in
    `copies`, and the stride is that of the copy.
    """
    itemsize, columns = spec.dtype.itemsize, spec.shape[-1]
    if 0 in spec.shape:
        return columns
    merges = columns == 1 or spec.strides[-1] == itemsize
    leading = [axis for axis in zip(spec.shape[:-1], spec.strides[:-1], strict=True) if axis[0] > 1]
    for (_, outer), (extent, inner) in pairwise(leading):
        merges = merges and outer == extent * inner
    if not merges or (leading and leading[-1][1] % itemsize):
        copies.add(name)
        return columns
    return leading[-1][1] // itemsize if leading else columns


def _reach(spec: ArraySpec) -> tuple[int, int]:
    """The first byte of an array's memory and the one after its last, counted from its first element."""
    low, high = 0, spec.dtype.itemsize
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high


class _Outline:
    """An array's place in memory, as NumPy's array interface describes it; the memory itself is never looked at."""

    def __init__(self, spec: ArraySpec, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": spec.shape,
            "strides": spec.strides,
            "typestr": f"|V{spec.dtype.itemsize}",
        }


def _outline(spec: ArraySpec, address: int) -> Any:
    return np.asarray(_Outline(spec, address))


def _overlaps_itself(spec: ArraySpec) -> bool:
    """Whether two indices name the same element (by the sufficient test of nested strides)."""
    reach = spec.dtype.itemsize
    axes = zip(spec.shape, spec.strides, strict=True)
    for stride, extent in sorted((abs(stride), extent) for extent, stride in axes if extent > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False
