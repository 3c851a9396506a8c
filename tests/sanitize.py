"""Every route of the CUDA kernels once, small, for the tools that watch memory:

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

Parts may run at the same time: of sixteen, `python tests/sanitize.py 0 16` to `15 16`. No assertion: the tools say what
they find. Run from the root of the repository, on a CUDA device.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cupynorm
from cupynorm.cuda.config import column_blocks

# Parts of a warp, one warp, several, blocks of several teams, clusters of 2 to 16; off 16 bytes where N is odd, then
# read in pairs (16-bit types, from 33 to 40896), in several elements at a time where it is even, but no multiple of 8
# (of float32, of 4, up to 512). With
# little data blocks of their own sum dw and db, two of them on a multiprocessor at 400x3072 of float32 and 150x10240 of
# bfloat16, with slices of any width at 1017x4096, 407x10240 and 127x32768, several for a slice from 9000x128 on; the
# few rows, 300x128 the most, one row and 90x896, have a kernel of their own.
SHAPES = (
    (40, 128), (300, 128), (20, 256), (9, 512), (9, 1001), (40, 1024), (7, 4096), (5, 5120), (5, 4095), (6, 8192),
    (6, 16384), (6, 20480), (4, 16385), (4, 65536), (3, 131072), (3, 262144), (400, 3072), (150, 10240),
    (70, 33), (40, 129), (30, 300), (20, 350), (20, 513), (9, 700), (9, 850), (9, 1100), (5, 6001), (6, 12289),
    (900, 601),
    (1017, 4096), (407, 10240), (127, 32768), (9000, 128), (4069, 384), (4069, 512), (4069, 1024), (2500, 3072),
    (1, 128), (1, 1024), (1, 4096), (1, 7168), (8, 8192), (64, 2048), (90, 896), (7, 3328), (4, 40960),
    (69, 4096), (126, 4096), (35, 8192), (110, 3000),
    (3, 81920), (3, 163840), (3, 196608), (9, 126728), (9, 262152), (9, 65540), (9, 139268), (19, 400008), (35, 600008),
    (19, 278536), (5, 540672), (19, 900000),
    (40, 200), (40, 264), (40, 832), (9, 1344), (9, 1792), (9, 2304), (9, 3136), (5, 22528), (3, 90112), (3, 114688),
)  # fmt: skip
# Without such blocks: those that walk along the rows meet. The forward pass draws steps of 51000x1024 to 300000x128, at
# least, on a device of 132 multiprocessors; in these, 3200x7168 and the last two, walkers of both norms keep pace:
# alone on their multiprocessor, with other blocks, in clusters.
MEETING = (
    (6200, 1024), (1900, 4096), (400, 4095), (500, 16384), (240, 40960), (120, 65536), (60, 262144),
    (70, 131072), (90, 98304), (20, 524288),
    (51000, 1004), (12000, 4098), (900, 20004), (51000, 1001), (60000, 513), (90001, 257), (5000, 5001), (900, 16385),
    (51000, 1024), (3200, 7168), (300000, 128), (102000, 512), (1800, 14336), (3200, 16384),
)  # fmt: skip
# With gaps of so many elements between rows: several in a copy, or one. Of odd rows dx starts elsewhere than x, y too.
GAPS = (
    (40, 128, 8), (3000, 512, 64), (77, 384, 8), (300, 129, 1), (40, 300, 50), (70, 33, 7),
    (77, 640, 1), (30, 1100, 21), (9, 1024, 8), (600, 640, 64), (30, 700, 1), (70, 65, 1), (50, 1001, 2), (40, 500, 1),
    (40, 4097, 1), (20, 12289, 1),
)  # fmt: skip


def main(part: int = 0, parts: int = 1) -> None:
    generator = np.random.default_rng(0)
    few, many = ([(*shape, 0) for shape in shapes] for shapes in (SHAPES, MEETING))
    dtypes = ml_dtypes.bfloat16, np.float32
    for dtype, shape in [*itertools.product(dtypes, (*few, *GAPS))][part::parts]:
        calls(generator, dtype, *shape)
    column_blocks._most_bytes = lambda *_: 0
    for dtype, shape in [*itertools.product(dtypes, many)][part::parts]:
        calls(generator, dtype, *shape)


def calls(generator: np.random.Generator, dtype: Any, rows: int, columns: int, gap: int) -> None:
    values = generator.standard_normal((rows, columns), np.float32).astype(dtype)
    x, dy = (with_gaps(cupy.asarray(values[::step]), gap) for step in (1, -1))
    w, b = cupy.ones(columns, np.float32), cupy.zeros(columns, np.float32)
    _, rstd = cupynorm.rmsnorm_forward(x, w)
    cupynorm.rmsnorm_backward(x, w, dy, rstd)
    cupynorm.rmsnorm_backward(x, w, dy, rstd, output_mask=(True, False))
    cupynorm.layernorm_forward(x, w.astype(dtype), b.astype(dtype))
    _, mean, rstd = cupynorm.layernorm_forward(x, w, b)
    cupynorm.layernorm_backward(x, w, dy, mean, rstd)
    cupynorm.layernorm_backward(x, w.astype(np.float16), dy, mean, rstd)  # a type that is widened first
    cupynorm.layernorm_backward(x, w, dy, mean, rstd, output_mask=(True, False, False))
    cupy.cuda.Device().synchronize()
    print(np.dtype(dtype).name, rows, columns, gap, flush=True)


def with_gaps(array: cupy.ndarray, gap: int) -> cupy.ndarray:
    """The same rows in an array that ends with the last of them."""
    rows, columns = array.shape
    memory = cupy.empty(rows * (columns + gap) - gap, array.dtype)
    stride = (columns + gap) * array.itemsize
    view = cupy.lib.stride_tricks.as_strided(memory, array.shape, (stride, array.itemsize))
    view[...] = array
    return view


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
