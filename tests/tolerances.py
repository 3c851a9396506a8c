"""How far a result may lie from the float64 reference, derived from the roundings that the formulas cannot avoid.

One rounding to a dtype with machine epsilon eps (the gap above 1) moves a value v by at most eps/2·|v|. Over many
values the errors spread evenly between these ends, so their root mean square is at most eps/√12·|v|. Two checks come
from that:

- `l2`: the norm of the whole error. Independent roundings add up as squares. A norm estimated from n samples is itself
  uncertain by 1/√(2n): three such deviations are allowed, with n the number of elements that carry the norm (`_l2`).
- `elementwise`: the largest error. Every rounding at its worst (eps/2), all in one direction; where a long sum is
  involved, six standard deviations of it.

The arithmetic's dtype is float32 (float64 where x is float64). In the latter case the reference makes errors of the
same size, hence the factor of 2.

Sums. A sum of terms t, each with some roundings of its own, added in any order that first gathers short runs and then
combines them (SIMD lanes, threads, a tree), has a root mean square error near 2.5·eps/√12·Σ|t|: a balanced tree over
terms of one sign gives √2, runs of length L in front of it L/√(3·N) more. Runs must be short, 64 terms or so: terms on
a coarse grid (squares of bfloat16) round in a preferred direction, and such errors grow with L itself. ROW_SUM = 3 is
asked for in the l2 check, 16·eps/2 (nine such deviations) in the elementwise one. Where one term outweighs the others
("outliers") every addition after it rounds at its size: √80 = 9 for a run of 64 and a tree of 16 levels, and twice the
16.

Families whose elements repeat a few values ("constant", "zeros") repeat their errors, too, which then do not spread:
their l2 bound is the norm of the elementwise one.

Sums over the rows (dw, db) follow the promise instead: 1.3e-7 of the norm of the terms, √Σt², up to N = 4096 columns,
3e-7 beyond (fewer rows in flight, longer runs). That is the promise for terms of random sign; a sum that grows steadily
(biased families) may in addition be off by SAME_SIGN·eps/√12 of itself: two levels of additions in a row, of up to 192
terms each, reach √(192/3) = 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
SUBNORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
SPREAD = 1 / sqrt(12)
ROW_SUM, ROW_SUM_UNEVEN = 3.0, 9.0
ROW_SUM_WORST, ROW_SUM_WORST_UNEVEN = 16.0, 32.0
UNEVEN = ("outliers",)
CORRELATED = ("constant", "zeros")
SAME_SIGN = 8.0
PROMISED_DW, PROMISED_DW_LONG_ROWS, LONG_ROWS = 1.3e-7, 3e-7, 4096


@dataclass
class Bound:
    """What a result is held to."""

    elementwise: Any
    l2: float


def check(name: str, got: Any, reference: Any, bound: Bound) -> None:
    """Assert both bounds; the message says by which factor a bound was missed."""
    if not got.size:
        return
    error = abs(got.astype(np.float64) - reference)
    assert bool((error == error).all()), f"{name}: NaN in {int((error != error).sum())} of {got.size} elements"
    excess = float((error - bound.elementwise).max())
    if excess > 0:
        worst = int((error - bound.elementwise).argmax())
        pair = float(got.reshape(-1)[worst]), float(reference.reshape(-1)[worst])
        allowed = float((bound.elementwise + 0 * error).reshape(-1)[worst])
        raise AssertionError(f"{name}: element {worst} is {pair[0]!r}, not {pair[1]!r}: more than {allowed:.3g} off")
    l2 = _norm(error)
    scale = _norm(reference) or 1.0
    assert l2 <= bound.l2, f"{name}: relative L2 error {l2 / scale:.3g}; at most {bound.l2 / scale:.3g} is allowed"


def dx_bound(norm: str, tensors: Any, reference: Any, family: str = "normal") -> Bound:
    """dx = (g − x̂·c1 − c2)·rstd.

    Roundings: g is a product of two converted factors (3), x̂ a difference and a product (2), then x̂·c1 (1), two
    differences (2) and the product with rstd (1). So |g| carries 6 of them, |x̂·c1| 6, |c2| 3, and c1 and c2 the
    error of a sum over the row, seen through x̂ and 1. Where g − x̂·c1 − c2 cancels these terms stay: the conditioning
    is in the bound.
    """
    x_hat, g, rstd = _x_hat(norm, tensors), _g(tensors), _column(tensors.rstd)
    columns = g.shape[1]
    c1 = (g * x_hat).sum(1, keepdims=True) / columns
    c1_sum = abs(g * x_hat).sum(1, keepdims=True) / columns
    if norm == "layernorm":
        c2, c2_sum = g.sum(1, keepdims=True) / columns, abs(g).sum(1, keepdims=True) / columns
    else:
        c2 = c2_sum = 0 * c1
    unit = _unit(tensors)
    x_hat, g, c1, c2 = abs(x_hat), abs(g), abs(c1), abs(c2)
    row_sum, row_sum_worst = _row_sums(family, rows=len(g))
    worst = 6 * g + 6 * x_hat * c1 + 3 * c2 + row_sum_worst * (x_hat * c1_sum + c2_sum)
    square = 6 * g**2 + 6 * (x_hat * c1) ** 2 + 3 * c2**2 + row_sum**2 * ((x_hat * c1_sum) ** 2 + c2_sum**2)
    result = _rounded(reference, tensors.x.dtype)
    elementwise = result / 2 + unit / 2 * abs(rstd) * worst
    return _bound(elementwise, SPREAD**2 * (result**2 + (unit * rstd) ** 2 * square), family)


def dw_bound(norm: str, tensors: Any, reference: Any, dtype: Any, family: str = "normal") -> Bound:
    """dw = Σ dy·x̂."""
    terms = tensors.dy.astype(np.float64) * _x_hat(norm, tensors)
    return _column_sum_bound(tensors, terms, reference, dtype, family)


def db_bound(tensors: Any, reference: Any, dtype: Any) -> Bound:
    """db = Σ dy."""
    return _column_sum_bound(tensors, tensors.dy.astype(np.float64), reference, dtype, "normal")


def column_sum_tolerance(rows: int, columns: int, dtype: str) -> float:
    """Root mean square error of a sum over the rows, as a fraction of √Σt²."""
    promise = PROMISED_DW if columns <= LONG_ROWS else PROMISED_DW_LONG_ROWS
    if dtype != "float64":
        return promise
    # The same scheme in float64, and the reference's sum: `rows` additions in a row, each rounding a partial sum that
    # has grown like a random walk.
    return promise * EPS["float64"] / EPS["float32"] + SPREAD * EPS["float64"] * sqrt(rows / 2)


def _column_sum_bound(tensors: Any, terms: Any, reference: Any, dtype: Any, family: str) -> Bound:
    rows, columns = terms.shape
    tolerance = column_sum_tolerance(rows, columns, _arithmetic(tensors))
    if family in CORRELATED:  # all of a row's x̂ are off by the same two roundings
        tolerance += _unit(tensors)
    variance = (tolerance**2) * (terms**2).sum(0) + (SAME_SIGN * SPREAD * _unit(tensors) * reference) ** 2
    result = _rounded(reference, dtype)
    return Bound(result / 2 + 6 * variance**0.5, _l2((SPREAD * result) ** 2 + variance))


def mean_bound(tensors: Any, reference: Any, family: str) -> Bound:
    """A sum over the row and one rounding."""
    unit = _unit(tensors)
    average = abs(tensors.x.astype(np.float64)).sum(1) / tensors.x.shape[1]
    row_sum, row_sum_worst = _row_sums(family)
    elementwise = unit / 2 * (abs(reference) + row_sum_worst * average)
    return _bound(elementwise, (SPREAD * unit) ** 2 * (reference**2 + (row_sum * average) ** 2), family)


def rstd_bound(norm: str, tensors: Any, reference: Any, family: str) -> Bound:
    """1/√(Σd²/N + eps) with d = x − mean.

    Half of: the sum's error and the two roundings of d²; then three more roundings (division, root, result), in the
    l2 check two: 12 and 4.5 roundings with even terms. The error δ of the mean enters squared, (δ·rstd)²/2.
    """
    unit = _unit(tensors)
    average = abs(tensors.x.astype(np.float64)).sum(1) / tensors.x.shape[1]
    row_sum, row_sum_worst = _row_sums(family)
    shift = (unit / 2 * row_sum_worst * average * reference) ** 2 / 2 if norm == "layernorm" else 0
    elementwise = reference * (unit / 2 * (0.5 * (row_sum_worst + 2) + 3) + shift)
    spread = SPREAD * unit * (0.5 * (row_sum + 2) + 2) + shift
    return _bound(elementwise, (spread * reference) ** 2, family)


def y_bound(norm: str, tensors: Any, reference: Any, rstd: Any, family: str) -> Bound:
    """y = x̂·w + b: rstd's error, five more roundings of x̂·w, b's conversion, the final sum's rounding, and the mean's
    error, magnified by rstd·|w|."""
    unit = _unit(tensors)
    x = tensors.x.astype(np.float64)
    w = 1.0 if tensors.w is None else abs(tensors.w.astype(np.float64))
    b = 0.0 if tensors.b is None else abs(tensors.b.astype(np.float64))
    average = abs(x).sum(1, keepdims=True) / x.shape[1]
    shift = average * rstd[:, None] * w if norm == "layernorm" else 0 * x
    scaled = abs(reference) + b  # at least |x̂·w|
    result = _rounded(reference, tensors.x.dtype)
    row_sum, row_sum_worst = _row_sums(family, rows=len(x))
    rstd_error, rstd_worst = 0.5 * (row_sum + 2) + 2, 0.5 * (row_sum_worst + 2) + 3
    elementwise = result / 2 + unit / 2 * ((rstd_worst + 5) * scaled + abs(reference) + b + row_sum_worst * shift)
    square = (rstd_error**2 + 5) * scaled**2 + reference**2 + b**2 + (row_sum * shift) ** 2
    return _bound(elementwise, SPREAD**2 * (result**2 + unit**2 * square), family)


def _arithmetic(tensors: Any) -> str:
    return "float64" if tensors.x.dtype == np.float64 else "float32"


def _unit(tensors: Any) -> float:
    dtype = _arithmetic(tensors)
    return EPS[dtype] * (2 if dtype == "float64" else 1)


def _rounded(reference: Any, dtype: Any) -> Any:
    """The gap between representable numbers near each value of the reference, or at its widest a little more."""
    return EPS[dtype.name] * abs(reference) + SUBNORMAL[dtype.name]


def _row_sums(family: str, rows: int | None = None) -> tuple[float, float]:
    """Errors of a sum over a row, in roundings of Σ|t|: root mean square, and worst. All elements of a row share them,
    so where the l2 check is over elements, the number of rows says how well they spread."""
    row_sum = ROW_SUM_UNEVEN if family in UNEVEN else ROW_SUM
    worst = ROW_SUM_WORST_UNEVEN if family in UNEVEN else ROW_SUM_WORST
    return row_sum * (1 if rows is None else _samples(rows)), worst


def _bound(elementwise: Any, variance: Any, family: str) -> Bound:
    worst = _norm(elementwise)
    return Bound(elementwise, worst if family in CORRELATED else min(worst, _l2(variance)))


def _samples(count: float) -> float:
    return 1 + 3 / sqrt(2 * max(count, 1))


def _l2(variance: Any) -> float:
    """The norm that errors of these variances stay within. (Σv)²/Σv² of the elements carry it: all of them where the
    variances are alike, hardly more than the largest where these stand out."""
    total, squares = float(variance.sum()), float((variance**2).sum())
    return sqrt(total) * _samples(total**2 / squares if squares else 1)


def _column(statistic: Any) -> Any:
    return statistic.astype(np.float64).reshape(-1, 1)


def _x_hat(norm: str, tensors: Any) -> Any:
    x = tensors.x.astype(np.float64)
    return (x - _column(tensors.mean) if norm == "layernorm" else x) * _column(tensors.rstd)


def _g(tensors: Any) -> Any:
    dy = tensors.dy.astype(np.float64)
    return dy if tensors.w is None else dy * tensors.w.astype(np.float64)


def _norm(values: Any) -> float:
    return sqrt(float((values**2).sum()))
