"""Rows longer than anyone's: beyond the CPU path's room for partial sums, and beyond what columns are counted in."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.numpy_backend import reference_backward
from cupynorm.problem import MOST_COLUMNS


@pytest.mark.parametrize("columns", [2_000_000, 4_000_000])
def test_rows_of_millions_on_the_cpu(columns: int) -> None:
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal((2, columns), np.float32) for _ in range(2))
    w, mean, rstd = np.ones(columns, np.float32), np.zeros(2, np.float32), np.ones(2, np.float32)
    out = tuple(np.full(shape, np.nan, np.float32) for shape in (x.shape, columns, columns))
    cupynorm.layernorm_backward(x, w, dy, mean, rstd, out=out)
    for result, reference in zip(out, reference_backward("layernorm", x, w, dy, mean, rstd), strict=True):
        # One to three float32 roundings of numbers of order 1: 3·2⁻²⁴ each.
        np.testing.assert_allclose(result, reference, rtol=2e-7, atol=2e-6)


def test_more_columns_than_can_be_counted() -> None:
    x = np.broadcast_to(np.float16(0), (1, MOST_COLUMNS + 1))
    with pytest.raises(ValueError, match=r"^x: .*at most 1073741824"):
        cupynorm.rmsnorm_forward(x)
