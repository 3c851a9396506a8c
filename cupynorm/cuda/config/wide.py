"""Rows that all blocks of a launch share: what backward_wide.cu and forward_wide.cu take."""

from __future__ import annotations

from itertools import chain, product
from typing import NamedTuple

from ...problem import NormProblem
from .common import (
    ITEMSIZE,
    LINE_BYTES,
    OFF_LINES,
    WARP,
    BackwardConfig,
    Device,
    ForwardConfig,
    argument_bytes,
    divide_up,
    kernels_sum_db,
    leaves_lines,
    name_of,
    vector_width,
)

WIDE_ARGUMENTS = "9P4q3if2h??Bx"  # struct WideArguments in backward_wide.cu
FORWARD_WIDE_ARGUMENTS = "7P3qd3i2h?B6x"  # struct WideForwardArguments in forward_wide.cu


class WideShape(NamedTuple):
    """How a block's threads lie over a step, and its ring."""

    block_warps: int  # that work on rows
    warps: int  # that share a row
    rows: int  # of a step, of each warp
    vectors: int  # of a row, of each thread
    stages: int = 6  # steps in the ring; of a table's shapes at most
    behind: int = 3  # steps from a row's sums to what is written of it; likewise
    shared_totals: bool = False  # backward: the second level of dw's and db's sums lies in shared memory, not registers

    @property
    def step_rows(self) -> int:
        """kStepRows of wide.cuh."""
        return self.block_warps // self.warps * self.rows

    @property
    def laps(self) -> int:
        """Steps whose sums have a place in memory: a power of two."""
        return 1 << (2 * self.behind + 1).bit_length()

    @property
    def region_bytes(self) -> int:
        """What these sums take at most: kEntryBytes of wide.cuh, of LayerNorm."""
        return self.laps * self.step_rows * WIDE_MOST_BLOCKS * (16 if self.step_rows <= 2 else 8)

    def most_columns(self, x: str) -> int:
        """That a block's part of a row may have."""
        return self.warps * WARP * self.vectors * vector_width(x)


Shapes = dict[WideShape, int]  # and for each so many columns of a block, at least; the first that has room is taken

WIDE_READERS = 2  # warps that read all blocks' sums
WIDE_LEAST_STAGES = 4  # fewer keep memory less busy than gangs do (LayerNorm, 16 bits, 1048576, by three: 274 → 360 us)
WIDE_SHARED_BYTES, WIDE_STATE_BYTES = 224 << 10, 3 << 10  # of a block: what a launch asks for, struct WideState at most
WIDE_OTHER_THREADS = (2 + WIDE_READERS) * WARP  # of a block, beside those that work on rows

# Fewer blocks than 123 were not timed. At most: multiprocessors.
WIDE_LEAST_BLOCKS, WIDE_MOST_BLOCKS = 120, 132

# By whether db is summed, and by bytes of an element. 16 bits, 100 MB and 1 GB: 131072, where blocks have 1024 columns,
# 35.4 → 33.8, 238.9 → 237.7 us, 114688, with 896, LayerNorm 37.9 → 36.8, 270.9 → 249.9, but 98304, with 768, 35.7 →
# 36.1, 240.1 → 245.4; 196608, with 1536, 36.1 → 34.5, but 239.0 → 245.4, and 163840, with 1280, 36.9 → 37.1, 245.6 →
# 258.8. Float32: 57344, with 448, 34.5 → 32.8, 240.4 → 237.9; 69632, with 544, 36.3 → 34.3, but 255.0 → 259.5. Of two
# vectors a thread, four rows and two, 1 GB: 278528, with 2112, 241.8, 268.2, 360448, with 2752, 244.1, 246.6, but one
# row 9.0, 8.1; LayerNorm with db 301, 330, 327680 271, 285; float32 139264, with 1056, 238, 254, but 196608, with 1504,
# 247, 240. Sixteen warps, two rows and one: 557056 265, 303, float32 278528 238, 257, 327680 241, 246.
_OF_16_BITS: Shapes = {WideShape(8, 4, 4, 1): 896, WideShape(8, 8, 4, 1): 1536}
_OF_FLOAT32: Shapes = {
    WideShape(8, 4, 4, 1): 448,
    WideShape(8, 8, 4, 1): 544,
    WideShape(8, 8, 2, 2): 1281,
    WideShape(8, 8, 4, 2): 1025,
    WideShape(16, 16, 1, 2): 2561,
    WideShape(16, 16, 2, 2, shared_totals=True): 2049,
}
WIDE_LEAST_COLUMNS: dict[bool, dict[int, Shapes]] = {
    False: {
        2: {
            **_OF_16_BITS,
            WideShape(8, 8, 2, 2): 2433,
            WideShape(8, 8, 4, 2): 2049,
            WideShape(16, 16, 2, 2, shared_totals=True): 4097,
            WideShape(16, 16, 1, 2): 4097,
        },
        4: _OF_FLOAT32,
    },
    True: {
        2: {
            **_OF_16_BITS,
            WideShape(8, 8, 4, 2, shared_totals=True): 2049,
            WideShape(8, 8, 2, 2, shared_totals=True): 2049,
            WideShape(16, 16, 1, 2, shared_totals=True): 4097,
        },
        4: _OF_FLOAT32,
    },
}

# Forward, and rows of so many columns at least, by bytes of an element: those that no cluster holds, and few that one
# does (RMSNorm, LayerNorm, 16 bits, 262144: one row 8.8 → 7.2, 10.2 → 8.0 us, 25 MB 11.7 → 10.8, 13.6 → 12.0, 100 MB
# 23.7 → 23.8, 25.7 → 25.0, 1 GB 165.9 → 167.6, 170.2 → 166.1; 229376, 100 MB 23.6 → 24.5, 25.4 → 25.9; float32,
# 262144, 100 MB 31.9 → 24.1, 36.6 → 26.6, 1 GB 253.9 → 168.6, 259.2 → 170.4).
FORWARD_WIDE_LEAST_COLUMNS = {
    2: {"rmsnorm": 262144, "layernorm": 229376},
    4: {"rmsnorm": 131073, "layernorm": 131073},
}
FORWARD_WIDE_SHAPES: Shapes = dict.fromkeys(
    (WideShape(8, 8, 4, 1, stages=8, behind=4), WideShape(8, 8, 4, 2), WideShape(8, 8, 2, 4)), 1
)
FORWARD_WIDE_WORDS = 3  # kWords of forward_wide.cu, where that has any
FORWARD_WIDE_LAG = 2  # as _lag()

# Forward, where x and y take so many bytes at most, x is read so that it leaves the L2 cache first (524288, 33 MB of x
# and y 15.4 → 14.9 us, LayerNorm 17.9 → 17.3, 67 MB 24.5 → 24.4, 27.1 → 26.4, 134 MB 40.3 → 41.4, 42.9 → 43.6).
FORWARD_WIDE_READ_ONCE_BYTES = {"rmsnorm": 36 << 20, "layernorm": 72 << 20}


class _InShared(NamedTuple):
    """What lies in a block's shared memory: a ring that so many arrays go through, and words of 16 bytes of each row,
    and so many sums of each column, where a shape has these there. For dx `alone` there are none: it has the shape that
    has room beside them, which gives it the bits that it has beside dw, and all the room."""

    arrays: int
    words: int = 0
    sums: int = 0
    alone: bool = False


class _Blocks(NamedTuple):
    """How a row's columns lie over the blocks of a launch."""

    shape: WideShape
    slab: int
    number: int
    off_lines: bool
    shared_bytes: int


def wide_config(
    problem: NormProblem, vector: bool, definitions: tuple[str, ...], device: Device, start: int
) -> BackwardConfig | None:
    """Blocks on nearly all multiprocessors, each with the same columns of all rows, as many as whole lines have; None
    where that is not chosen.

    x and dy of one type, of 16 bits or float32, in vectors, where memory is fast, on compute capability 9.0; `start` is
    that of leaves_lines().
    """
    x = problem.x_dtype.name
    if not may_be_wide(x, name_of(problem.dy_dtype), vector, device):
        return None
    shapes, memory = _of_backward(x, kernels_sum_db(problem), alone=not (problem.want_dw or problem.want_db))
    blocks = _blocks(problem, shapes, memory, device, start, problem.x_row_stride, problem.dy_row_stride)
    if blocks is None:
        return None
    return BackwardConfig(
        route="wide",
        definitions=(*definitions, *wide_definitions(WIDE_ARGUMENTS, x, blocks.shape, blocks.off_lines)),
        threads=blocks.shape.block_warps * WARP,
        group_threads=blocks.shape.warps * WARP,
        slab_columns=blocks.slab,
        slabs=blocks.number,
        stages=blocks.shape.stages,
        shared_bytes=blocks.shared_bytes,
        step_rows=blocks.shape.step_rows,
        lag=_lag(problem, blocks),
    )


def forward_wide_config(
    problem: NormProblem, vector: bool, definitions: tuple[str, ...], device: Device, start: int
) -> ForwardConfig | None:
    """The same for the forward pass."""
    x = problem.x_dtype.name
    if not may_be_wide(x, x, vector, device):
        return None
    if problem.columns < FORWARD_WIDE_LEAST_COLUMNS[ITEMSIZE[x]][problem.norm]:
        return None
    shapes, memory = _of_forward(x, problem.norm)
    blocks = _blocks(problem, shapes, memory, device, start, problem.x_row_stride)
    if blocks is None:
        return None
    return ForwardConfig(
        "forward_wide.cu",
        "forward_wide",
        (*definitions, *wide_definitions(FORWARD_WIDE_ARGUMENTS, x, blocks.shape, blocks.off_lines)),
        threads=blocks.shape.block_warps * WARP,
        group_threads=blocks.shape.warps * WARP,
        slab_columns=blocks.slab,
        slabs=blocks.number,
        stages=blocks.shape.stages,
        shared_bytes=blocks.shared_bytes,
        step_rows=blocks.shape.step_rows,
        lag=min(FORWARD_WIDE_LAG, blocks.shape.behind - 1),
    )


def may_be_wide(x: str, dy: str, vector: bool, device: Device) -> bool:
    """Whether there are such kernels."""
    return x == dy and ITEMSIZE[x] in FORWARD_WIDE_LEAST_COLUMNS and vector and device.is_fast_9_0


def wide_shapes(x: str, sums_db: bool, alone: bool) -> list[tuple[WideShape, bool]]:
    """All that the backward pass has kernels for, and whether for rows that leave whole lines."""
    return _all_shapes(x, *_of_backward(x, sums_db, alone))


def forward_wide_shapes(x: str, norm: str) -> list[tuple[WideShape, bool]]:
    """And the forward pass."""
    return _all_shapes(x, *_of_forward(x, norm))


def _of_backward(x: str, sums_db: bool, alone: bool) -> tuple[Shapes, _InShared]:
    return WIDE_LEAST_COLUMNS[sums_db][ITEMSIZE[x]], _InShared(arrays=2, sums=1 + sums_db, alone=alone)


def _of_forward(x: str, norm: str) -> tuple[Shapes, _InShared]:
    has_words = norm == "layernorm" and ITEMSIZE[x] > 2
    return FORWARD_WIDE_SHAPES, _InShared(arrays=1, words=FORWARD_WIDE_WORDS if has_words else 0)


def _all_shapes(x: str, shapes: Shapes, memory: _InShared) -> list[tuple[WideShape, bool]]:
    line = LINE_BYTES // ITEMSIZE[x]
    most = max((shape.most_columns(x) for shape in shapes), default=0)
    fitting = (_fitting(shapes, x, slab, memory) for slab in range(line, most + 1, line))
    return sorted(product({of_slab[0] for of_slab in fitting if of_slab}, (False, True)))


def _fitting(shapes: Shapes, x: str, slab: int, memory: _InShared) -> tuple[WideShape, int] | None:
    """For blocks of so many columns the first shape that has room, with as many stages as there is room for, and the
    bytes that they take; for dx alone as many as there is room for without its sums. Rows that leave whole lines, which
    take a line more, are no question: orders of sums are those of the shape.
    """
    row_bytes = slab * ITEMSIZE[x] + LINE_BYTES
    for shape, least in shapes.items():
        words_bytes = divide_up(shape.step_rows * memory.words * 16, LINE_BYTES) * LINE_BYTES
        step_bytes = memory.arrays * shape.step_rows * row_bytes + words_bytes
        totals_bytes = shape.shared_totals * memory.sums * slab * 8
        room = (WIDE_SHARED_BYTES - totals_bytes) // step_bytes
        if least <= slab <= shape.most_columns(x) and room >= WIDE_LEAST_STAGES:
            if memory.alone:
                shape, totals_bytes, room = shape._replace(shared_totals=False), 0, WIDE_SHARED_BYTES // step_bytes
            stages = min(shape.stages, room)
            fitted = shape._replace(stages=stages, behind=min(shape.behind, stages - 2))
            return fitted, stages * step_bytes + totals_bytes
    return None


def _blocks(
    problem: NormProblem, shapes: Shapes, memory: _InShared, device: Device, start: int, *strides: int
) -> _Blocks | None:
    """`strides` are those of the arrays that are read."""
    x = problem.x_dtype.name
    line = LINE_BYTES // ITEMSIZE[x]
    slab = divide_up(divide_up(problem.columns, line), min(device.multiprocessors, WIDE_MOST_BLOCKS)) * line
    number = divide_up(problem.columns, slab)
    off_lines = leaves_lines(start, *(stride * ITEMSIZE[x] for stride in strides))
    fitting = _fitting(shapes, x, slab, memory)
    if fitting is None or number < WIDE_LEAST_BLOCKS:
        return None
    shape, shared_bytes = fitting
    # At least so many that no two blocks are on one multiprocessor.
    return _Blocks(shape, slab, number, off_lines, max(shared_bytes, device.shared_bytes // 2))


def _lag(problem: NormProblem, blocks: _Blocks) -> int:
    """How many steps a block posts itself before it reads all blocks' sums of one.

    1 GB, with one and two: 262144, RMSNorm, 247.6, 236.6 us, LayerNorm 243.9, 241.2; but 131072, LayerNorm, 240.8,
    249.4, and where threads are idle, 122880 245.2, 246.8, 229376, LayerNorm, 244.7, 249.9. Float32: 65536 243.7,
    237.8, LayerNorm 238.2, 246.1; 114688 247.6, 236.3, LayerNorm 244.9, 240.8. By two vectors a thread: 278528 249.3,
    241.8, float32 139264 248.8, 238.1, LayerNorm 524288 272.1, 263.0, 557056 328.3, 332.0. Fewer than the shape's
    `behind`.
    """
    x, shape = problem.x_dtype.name, blocks.shape
    few_warps = shape.warps < shape.block_warps
    idle = shape.vectors == 1 and ITEMSIZE[x] == 2 and blocks.slab < shape.most_columns(x)
    one = few_warps or idle if problem.norm == "layernorm" else few_warps and idle
    return 1 if one else min(2, shape.behind - 1)


def forward_wide_reads_once(problem: NormProblem) -> bool:
    """Whether reads of x say that it need not stay in the L2 cache."""
    size = 2 * problem.rows * problem.columns * problem.x_dtype.itemsize
    return size <= FORWARD_WIDE_READ_ONCE_BYTES[problem.norm]


def wide_definitions(arguments: str, x: str, shape: WideShape, off_lines: bool) -> tuple[str, ...]:
    """Of the kernel that takes such arguments."""
    return (
        *((OFF_LINES,) if off_lines else ()),
        f"COLUMNS_PER_THREAD={shape.vectors * vector_width(x)}",
        f"ROW_WARPS={shape.warps}",
        f"WIDE_WARPS={shape.block_warps}",
        f"WIDE_ROWS={shape.rows}",
        f"WIDE_STAGES={shape.stages}",
        f"WIDE_BEHIND={shape.behind}",
        *(("WIDE_SHARED_TOTALS=1",) if shape.shared_totals else ()),
        f"WIDE_READERS={WIDE_READERS}",
        f"WIDE_LAPS={shape.laps}",
        f"WIDE_LEAST_BLOCKS={WIDE_LEAST_BLOCKS}",
        f"WIDE_MOST_BLOCKS={WIDE_MOST_BLOCKS}",
        f"WIDE_REGION_BYTES={_region_bytes()}",
        f"WIDE_STATE_BYTES={WIDE_STATE_BYTES}",
        f"WIDE_{argument_bytes(arguments)}",
    )


def wide_exchange_bytes() -> int:
    """struct WideMemory."""
    return LINE_BYTES + 2 * _region_bytes()


def _region_bytes() -> int:
    """Of the entries of a launch."""
    of_types = (shapes for of_sums in WIDE_LEAST_COLUMNS.values() for shapes in of_sums.values())
    return max(shape.region_bytes for shape in (*chain.from_iterable(of_types), *FORWARD_WIDE_SHAPES))
