"""LayerNorm: y = (x − mean)·rstd·w + b, as in Ba, Kiros and Hinton (arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import dispatch
from .problem import plain_mask

_BACKWARD, _FORWARD = dispatch.backward_of("layernorm"), dispatch.forward_of("layernorm")


def layernorm_backward(
    x: Any,
    w: Any,
    dy: Any,
    mean: Any,
    rstd: Any,
    *,
    has_bias: bool = True,
    weight_offset: float = 0.0,
    dresidual_out: Any = None,
    output_mask: Sequence[bool] | None = None,
    out: Sequence[Any] | None = None,
    accumulate: bool = False,
) -> tuple[Any, ...]:
    """Gradients of LayerNorm, together.

    With x̂ = (x − mean)·rstd and g = dy·w, for each row of N columns (Ba, Kiros and Hinton, arXiv:1607.06450,
    differentiated)::

        dx = (g − x̂·mean(g·x̂) − mean(g))·rstd        dw = Σ_rows dy·x̂        db = Σ_rows dy

    Parameters
    ----------
    x : array, shape (..., N), N from 1 to 2³⁰, any leading shape
        The forward pass's input: float16, bfloat16, float32 or float64.
    w : array, shape (N,), or None
        The weight, of any of these dtypes; None means ones, and there is no dw.
    dy : array, shape of x
        The gradient of the output, of any of these dtypes.
    mean, rstd : array, shape x.shape[:-1], or that with a trailing 1
        The row's mean and 1/sqrt(var + eps), var biased, from the forward pass: float32, float64 where x is
        float64.
    has_bias : bool
        Whether the forward pass added a bias; False leaves db out.
    weight_offset, dresidual_out, accumulate
        Reserved: other values than the defaults raise NotImplementedError.
    output_mask : bools for (dx, dw, db), or (dx, dw) without a bias, optional
        False returns None in that place; that gradient is neither written nor summed up.
    out : tuple (dx, dw, db), or (dx, dw) without a bias, optional
        Arrays to write into; any entry may be None. They must not overlap the inputs or each other. Their
        contents are undefined if the call raises after its checks (out of memory).

    Returns
    -------
    (dx, dw, db), or (dx, dw) without a bias
        dx with x's shape and dtype; dw and db with shape (N,) and w's dtype (x's where w is None). Arrays of
        the framework and on the device of x. Arithmetic is float32 (float64 where x is float64).

    Raises
    ------
    TypeError
        Something is not an array, an option has a wrong type, or arrays are of different frameworks or on different
        devices.
    ValueError
        A shape, a dtype or a value is wrong, or an entry of out is read-only or overlaps another array.
    NotImplementedError
        A reserved option is used.

    Rows that lie at one stride (x[..., :n] of a larger array) are read in place; other layouts are copied.
    The same inputs on the same GPU model give the same bits, and a row's dx does not depend on the rows beside it,
    where they lie in the same layout and db is asked for in both calls or in neither.
    """
    if output_mask is not None:
        output_mask = plain_mask(output_mask, has_bias)
    arrays = x, w, dy, mean, rstd, dresidual_out
    return dispatch.run(_BACKWARD, arrays, out, has_bias, weight_offset, output_mask, accumulate)


def layernorm_forward(
    x: Any,
    w: Any = None,
    b: Any = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Any = None,
    out: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """LayerNorm, and the mean and rstd that its backward pass needs.

    For each row of N columns (Ba, Kiros and Hinton, arXiv:1607.06450, equations 3 and 4, with eps inside the root)::

        mean = Σx / N        rstd = 1/sqrt(Σ(x − mean)² / N + eps)        y = (x − mean)·rstd·w + b

    Parameters
    ----------
    x : array, shape (..., N), N from 1 to 2³⁰, any leading shape
        float16, bfloat16, float32 or float64.
    w, b : array, shape (N,), or None
        Weight and bias, of any of these dtypes; None means ones and zeros.
    eps : float
        Added to the biased variance; finite, at least 0.
    weight_offset, residual
        Reserved: other values than the defaults raise NotImplementedError.
    out : tuple (y, mean, rstd), optional
        Arrays to write into; any entry may be None. They must not overlap the inputs or each other.

    Returns
    -------
    (y, mean, rstd)
        y with x's shape and dtype; mean and rstd with shape x.shape[:-1], float32 (float64 where x is float64).
        Arrays of the framework and on the device of x.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in `layernorm_backward`.
    """
    return dispatch.run(_FORWARD, (x, w, b, residual), out, eps, weight_offset)
