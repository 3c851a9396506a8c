"""RMSNorm: y = x·rstd·w + b with rstd = 1/sqrt(mean(x²) + eps), as in Zhang and Sennrich (arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import dispatch
from .problem import plain_mask

_BACKWARD, _FORWARD = dispatch.backward_of("rmsnorm"), dispatch.forward_of("rmsnorm")


def rmsnorm_backward(
    x: Any,
    w: Any,
    dy: Any,
    rstd: Any,
    *,
    has_bias: bool = False,
    weight_offset: float = 0.0,
    dresidual_out: Any = None,
    output_mask: Sequence[bool] | None = None,
    out: Sequence[Any] | None = None,
    accumulate: bool = False,
) -> tuple[Any, ...]:
    """Gradients of RMSNorm, together.

    With x̂ = x·rstd and g = dy·w, for each row of N columns (Zhang and Sennrich, arXiv:1910.07467, appendix A)::

        dx = (g − x̂·mean(g·x̂))·rstd        dw = Σ_rows dy·x̂        db = Σ_rows dy

    Parameters
    ----------
    x : array, shape (..., N), N from 1 to 2³⁰, any leading shape
        The forward pass's input: float16, bfloat16, float32 or float64.
    w : array, shape (N,), or None
        The weight, of any of these dtypes; None means ones, and there is no dw.
    dy : array, shape of x
        The gradient of the output, of any of these dtypes.
    rstd : array, shape x.shape[:-1], or that with a trailing 1
        1/sqrt(mean(x²) + eps) from the forward pass: float32, float64 where x is float64.
    has_bias : bool
        Whether the forward pass added a bias; True asks for db as well.
    weight_offset, dresidual_out, accumulate
        Reserved: other values than the defaults raise NotImplementedError.
    output_mask : bools for (dx, dw) or (dx, dw, db), optional
        False returns None in that place; that gradient is neither written nor summed up.
    out : tuple (dx, dw) or (dx, dw, db), optional
        Arrays to write into; any entry may be None. They must not overlap the inputs or each other. Their
        contents are undefined if the call raises after its checks (out of memory).

    Returns
    -------
    (dx, dw), or (dx, dw, db) with has_bias
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
    arrays = x, w, dy, None, rstd, dresidual_out
    return dispatch.run(_BACKWARD, arrays, out, has_bias, weight_offset, output_mask, accumulate)


def rmsnorm_forward(
    x: Any,
    w: Any = None,
    b: Any = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Any = None,
    out: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """RMSNorm, and the rstd that its backward pass needs.

    For each row of N columns (Zhang and Sennrich, arXiv:1910.07467, equation 4, with eps inside the root)::

        rstd = 1/sqrt(mean(x²) + eps)        y = x·rstd·w + b

    Parameters
    ----------
    x : array, shape (..., N), N from 1 to 2³⁰, any leading shape
        float16, bfloat16, float32 or float64.
    w, b : array, shape (N,), or None
        Weight and bias, of any of these dtypes; None means ones and zeros.
    eps : float
        Added to the mean square; finite, at least 0.
    weight_offset, residual
        Reserved: other values than the defaults raise NotImplementedError.
    out : tuple (y, rstd), optional
        Arrays to write into; any entry may be None. They must not overlap the inputs or each other.

    Returns
    -------
    (y, rstd)
        y with x's shape and dtype; rstd with shape x.shape[:-1], float32 (float64 where x is float64). Arrays
        of the framework and on the device of x.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in `rmsnorm_backward`.
    """
    return dispatch.run(_FORWARD, (x, w, b, residual), out, eps, weight_offset)
