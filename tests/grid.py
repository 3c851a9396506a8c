"""The grid of sizes, dtypes and input families that the numerical tests walk through.

Every column count meets every row count that keeps a case within a backend's cap, for both norms; dtypes, families
and options rotate over these pairs, with steps that make every column count meet every dtype of x, and every dtype
every family (`test_numerics.py` asserts that it is so). The dtypes of w and dy hang on N and x's dtype alone, which
bounds the number of kernels to compile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import DEFAULT_EPS, DTYPES, NORMS, Tensors, poisoned, statistics_dtype

# Powers of two, their neighbours, model widths, and one odd number above each kind of row that a kernel may split.
COLUMNS = (1, 2, 7, 31, 32, 33, 64, 127, 128, 255, 256, 384, 500, 768, 1000, 1024, 1536, 2048, 2560, 4096, 4097, 5120,
           8192, 12288, 16384, 32768, 65536, 131072, 262144)  # fmt: skip
# None, single rows, the H200's 132 processors and one more, several rows each, many.
ROWS = (0, 1, 2, 31, 132, 133, 1000, 4096)
CAPS = {"numpy": 2_000_000, "cupy": 35_000_000}  # elements: 132 rows of 262144, 1000 of 32768, 4096 of 8192

# (w, dy) for each dtype of x.
COMPANIONS: dict[str, tuple[tuple[str | None, str], ...]] = {
    "float16": (("float16", "float16"), ("float32", "float16"), (None, "float32"), ("bfloat16", "float16")),
    "bfloat16": (("bfloat16", "bfloat16"), ("float32", "bfloat16"), (None, "bfloat16"), ("float32", "float32")),
    "float32": (("float32", "float32"), ("bfloat16", "float32"), (None, "bfloat16"), ("float64", "float16")),
    "float64": (("float64", "float64"), ("float32", "float64"), (None, "float64"), ("float16", "float32")),
}

FAMILIES = (
    "normal",
    "shifted",  # x = -2.3 + 0.5 z: a mean far from zero
    "biased",  # the same, and dy = 1 + 0.5 z: sums that grow with their length, and g - c2 cancels
    "outliers",  # three channels 1000 times larger, as real activations have
    "tiny",  # x² underflows in float32
    "huge",  # x² is near float32's limit
    "row_scales",  # each row at its own power of two
    "constant",  # no variance
    "zeros",
)
# "far", which the grid leaves out: LayerNorm's rows at so many of their deviations from zero, of up to so many columns.
DISTANCES = {"float16": 1e3, "bfloat16": 200, "float32": 1e3, "float64": 1e6}
FAR_COLUMNS = {"float16": 262144, "bfloat16": 262144, "float32": 262144, "float64": 131072}
SCALES = {"tiny": {"float16": 1e-4}, "huge": {"float16": 1e3}}
DEFAULT_SCALES = {"tiny": 1e-20, "huge": 1e15}


@dataclass(frozen=True)
class Case:
    norm: str
    rows: int
    columns: int
    x: str  # names of dtypes
    w: str | None
    dy: str
    family: str = "normal"
    has_bias: bool = True
    given_out: bool = False  # write into poisoned arrays passed as out=
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.norm}-{self.rows}x{self.columns}-{self.x}-{self.w}-{self.dy}-{self.family}"


def grid(backend: str) -> list[Case]:
    cases = []
    for i, columns in enumerate(COLUMNS):
        for j, rows in enumerate(ROWS):
            if rows * columns > CAPS[backend]:
                continue
            for k, norm in enumerate(NORMS):
                x = tuple(DTYPES)[(i + j + 2 * k) % 4]
                w, dy = COMPANIONS[x][(i + k) % 4]
                family = FAMILIES[(i + 2 * j + 4 * k) % len(FAMILIES)]
                has_bias = (i % 3 == 2) != (norm == "layernorm")  # each norm's default, and now and then the other
                cases.append(Case(norm, rows, columns, x, w, dy, family, has_bias, (i + j) % 2 == 0, 31 * i + j))
    return cases


def far(x: str, rows: int, columns: int) -> Case:
    columns = min(columns, FAR_COLUMNS[x])
    return Case("layernorm", rows, columns, x, "float32", x, "far", seed=columns)


def on_both(cases: Any) -> list[Any]:
    """Parameters (xp, case) from a function that lists a backend's cases; those of CuPy under the gpu mark."""
    return [
        pytest.param(backend, case, marks=pytest.mark.gpu if backend == "cupy" else (), id=f"{backend}-{case}")
        for backend in CAPS
        for case in cases(backend)
    ]


@functools.cache
def _normal_pool(xp: Any, which: int) -> Any:
    """Standard normal numbers in float64, drawn once: x and dy have a pool each, so they never coincide."""
    spare = 100_003  # lets cases start at different places
    size = (CAPS[xp.__name__] if which < 2 else COLUMNS[-1]) + spare
    return xp.asarray(np.random.default_rng(which).standard_normal(size))


def normals(xp: Any, which: int, shape: tuple[int, ...], seed: int = 0) -> Any:
    size = int(np.prod(shape))
    start = seed * 7919 % 100_003
    return _normal_pool(xp, which)[start : start + size].reshape(shape)


def make_case(xp: Any, case: Case) -> Tensors:
    """The inputs of a case. The statistics are the float64 reference's, rounded to their dtype."""
    from cupynorm.numpy_backend import reference_forward

    shape = (case.rows, case.columns)
    z = normals(xp, 0, shape, case.seed)
    dy = normals(xp, 1, shape, case.seed)
    w = 1 + 0.25 * normals(xp, 2, (case.columns,), case.seed)
    b = 0.5 * normals(xp, 3, (case.columns,), case.seed)
    x, eps = z, DEFAULT_EPS[case.norm]
    if case.family in ("shifted", "biased"):
        x = 0.5 * z - 2.3
    if case.family == "far":
        x = z + DISTANCES[case.x]
    if case.family == "biased":
        dy = 0.5 * dy + 1
    if case.family == "outliers":
        x = z.copy()
        x[:, [case.columns // 7, case.columns // 2, case.columns - 1]] *= 1000
    if case.family in DEFAULT_SCALES:
        scale = SCALES[case.family].get(case.x, DEFAULT_SCALES[case.family])
        x = scale * z
        if case.family == "tiny":
            eps = scale * scale  # rstd stays near 1/scale even where a short row has hardly any variance
            dy = 0.1 * dy  # and dx below float16's limit
    if case.family == "row_scales":
        x = z * (2.0 ** (xp.arange(case.rows) % 21 - 10.0))[:, None]
    if case.family == "constant":
        x = 3 * z[:, :1] + xp.zeros(shape)
    if case.family == "zeros":
        x = xp.zeros(shape)
    x = x.astype(DTYPES[case.x])
    _, mean, rstd = reference_forward(case.norm, x, None, None, eps)
    statistics = statistics_dtype(x.dtype)
    return Tensors(
        x=x,
        w=None if case.w is None else w.astype(DTYPES[case.w]),
        b=None if case.w is None else b.astype(DTYPES[case.w]),
        dy=dy.astype(DTYPES[case.dy]),
        mean=None if mean is None else mean.reshape(case.rows).astype(statistics),
        rstd=rstd.reshape(case.rows).astype(statistics),
    )


def poisoned_backward_out(xp: Any, case: Case) -> tuple[Any, ...]:
    parameter = DTYPES[case.w or case.x]
    out = [poisoned(xp, (case.rows, case.columns), DTYPES[case.x])]
    out.append(None if case.w is None else poisoned(xp, (case.columns,), parameter))
    return (*out, poisoned(xp, (case.columns,), parameter)) if case.has_bias else tuple(out)


def poisoned_forward_out(xp: Any, case: Case) -> tuple[Any, ...]:
    statistics = statistics_dtype(DTYPES[case.x])
    count = 2 if case.norm == "layernorm" else 1
    y = poisoned(xp, (case.rows, case.columns), DTYPES[case.x])
    return (y, *(poisoned(xp, (case.rows,), statistics) for _ in range(count)))
