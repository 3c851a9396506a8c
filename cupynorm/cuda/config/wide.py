"""Rows that all blocks of a launch share: what backward_wide.cu and forward_wide.cu take."""

from __future__ import annotations

from itertools import chain
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
WIDE_FORWARD_ARGUMENTS = "7P3qd3i2h?B6x"  # struct WideForwardArguments in forward_wide.cu


class WideShape(NamedTuple):
    """How a block's threads lie over a step, and its ring."""

    block_warps: int  # that work on rows
    warps: int  # that share a row
    rows: int  # of a step, of each warp
    vectors: int  # of a row, of each thread
    stages: int = 6  # steps in the ring
    behind: int = 3  # steps from a row's sums to what is written of it

    @property
    def step_rows(self) -> int:
        """kStepRows of wide.cuh."""
        return self.block_warps // self.warps * self.rows

    @property
    def laps(self) -> int:
        """Steps whose sums have a place in memory: a power of two."""
        return 1 << (2 * self.behind + 1).bit_length()

    def holds(self, columns: int, x: str) -> bool:
        """Whether a block's part of a row may have so many."""
        return columns <= self.warps * WARP * self.vectors * vector_width(x)


Shapes = dict[WideShape, int]  # and for each so many columns of a block, at least: the first that holds these is taken

WIDE_READERS = 2  # warps that read all blocks' sums
WIDE_OTHER_THREADS = (2 + WIDE_READERS) * WARP  # of a block, beside those that work on rows

# Fewer blocks than 123 were not timed. At most: multiprocessors.
WIDE_LEAST_BLOCKS, WIDE_MOST_BLOCKS = 120, 132

# By whether db is summed, where 16-bit rows of two vectors a thread lack registers, and by bytes of an element. 16
# bits, 100 MB and 1 GB: 131072, where blocks have 1024, 35.4 → 33.8, 238.9 → 237.7 us, 114688, with 896, LayerNorm 37.9
# → 36.8, 270.9 → 249.9, but 98304, with 768, 35.7 → 36.1, 240.1 → 245.4; 196608, with 1536, 36.1 → 34.5, but 239.0 →
# 245.4, and 163840, with 1280, 36.9 → 37.1, 245.6 → 258.8; 524288, with 4032, 41.8 → 33.9, 256.6 → 244.2, LayerNorm
# 46.3 → 39.9, 268.9 → 289.2, 393216 49.6 → 41.5, 341.8 → 319.8, but 327680, with 2496, 44.6 → 45.3, 280.5 → 356.2.
# Float32: 57344, with 448, 34.5 → 32.8, 240.4 → 237.9; 69632, with 544, 36.3 → 34.3, but 255.0 → 259.5; 262144 41.7 →
# 32.9, 266.9 → 244.8, LayerNorm 44.5 → 33.4, 272.5 → 238.7.
_OF_16_BITS: Shapes = {WideShape(8, 4, 4, 1): 896, WideShape(8, 8, 4, 1): 1536}
_OF_FLOAT32: Shapes = {
    WideShape(8, 4, 4, 1): 448,
    WideShape(8, 8, 4, 1): 544,
    WideShape(8, 8, 2, 2): 1025,
    WideShape(16, 16, 1, 2): 2049,
}
WIDE_LEAST_COLUMNS: dict[bool, dict[int, Shapes]] = {
    False: {
        2: _OF_16_BITS | {WideShape(8, 8, 2, 2): 2049, WideShape(16, 16, 1, 2): 4097},
        4: _OF_FLOAT32,
    },
    True: {2: _OF_16_BITS | {WideShape(16, 16, 2, 1): 2944}, 4: _OF_FLOAT32},
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
FORWARD_WIDE_LAG = 2  # as wide_lag()

# Forward, where x and y take so many bytes at most, x is read so that it leaves the L2 cache first (524288, 33 MB of x
# and y 15.4 → 14.9 us, LayerNorm 17.9 → 17.3, 67 MB 24.5 → 24.4, 27.1 → 26.4, 134 MB 40.3 → 41.4, 42.9 → 43.6).
FORWARD_WIDE_READ_ONCE_BYTES = {"rmsnorm": 36 << 20, "layernorm": 72 << 20}


class _Blocks(NamedTuple):
    """How a row's columns lie over the blocks of a launch."""

    shape: WideShape
    slab: int
    number: int
    off_lines: bool
    row_bytes: int  # from row to row in the ring


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
    shapes = WIDE_LEAST_COLUMNS[kernels_sum_db(problem)][ITEMSIZE[x]]
    blocks = _blocks(problem, shapes, device, start, problem.x_row_stride, problem.dy_row_stride)
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
        shared_bytes=_shared_bytes(blocks, 2, 0, device),
        step_rows=blocks.shape.step_rows,
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
    blocks = _blocks(problem, FORWARD_WIDE_SHAPES, device, start, problem.x_row_stride)
    if blocks is None:
        return None
    words = FORWARD_WIDE_WORDS if problem.norm == "layernorm" and ITEMSIZE[x] > 2 else 0
    return ForwardConfig(
        "forward_wide.cu",
        "forward_wide",
        (*definitions, *wide_definitions(WIDE_FORWARD_ARGUMENTS, x, blocks.shape, blocks.off_lines)),
        threads=blocks.shape.block_warps * WARP,
        group_threads=blocks.shape.warps * WARP,
        slab_columns=blocks.slab,
        slabs=blocks.number,
        stages=blocks.shape.stages,
        shared_bytes=_shared_bytes(blocks, 1, words, device),
        step_rows=blocks.shape.step_rows,
    )


def may_be_wide(x: str, dy: str, vector: bool, device: Device) -> bool:
    """Whether there are such kernels."""
    return x == dy and ITEMSIZE[x] in FORWARD_WIDE_LEAST_COLUMNS and vector and device.is_fast_9_0


def _blocks(problem: NormProblem, least_columns: Shapes, device: Device, start: int, *strides: int) -> _Blocks | None:
    """`strides` are those of the arrays that are read."""
    x = problem.x_dtype.name
    line = LINE_BYTES // ITEMSIZE[x]
    lines = divide_up(problem.columns, line)
    slab = divide_up(lines, min(device.multiprocessors, WIDE_MOST_BLOCKS)) * line
    number = divide_up(problem.columns, slab)
    shape = next((shape for shape in least_columns if shape.holds(slab, x)), None)
    if shape is None or slab < least_columns[shape] or number < WIDE_LEAST_BLOCKS:
        return None
    off_lines = leaves_lines(start, *(stride * ITEMSIZE[x] for stride in strides))
    return _Blocks(shape, slab, number, off_lines, (slab + off_lines * line) * ITEMSIZE[x])


def _shared_bytes(blocks: _Blocks, arrays: int, words: int, device: Device) -> int:
    """Of a ring that so many arrays go through, and words of 16 bytes of each row; and so many that no two blocks are
    on one multiprocessor."""
    rows = blocks.shape.step_rows
    words_bytes = divide_up(rows * words * 16, LINE_BYTES) * LINE_BYTES
    return max(blocks.shape.stages * (arrays * rows * blocks.row_bytes + words_bytes), device.shared_bytes // 2)


def wide_lag(config: BackwardConfig, problem: NormProblem) -> int:
    """How many steps a block posts itself before it reads all blocks' sums of one.

    1 GB, with one and two: 262144, RMSNorm, 247.6, 236.6 us, LayerNorm 243.9, 241.2; but 131072, LayerNorm, 240.8,
    249.4, and where threads are idle, 122880 245.2, 246.8, 229376, LayerNorm, 244.7, 249.9. Float32: 65536 243.7,
    237.8, LayerNorm 238.2, 246.1; 114688 247.6, 236.3, LayerNorm 244.9, 240.8. Fewer than the shape's `behind`.
    """
    itemsize = problem.x_dtype.itemsize
    few_warps = config.group_threads < config.threads
    idle = config.slab_columns < config.per_thread * config.group_threads
    if problem.norm == "layernorm":
        return 1 if few_warps or (idle and itemsize == 2) else 2
    return 1 if few_warps and idle and itemsize == 2 else 2


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
        f"WIDE_READERS={WIDE_READERS}",
        f"WIDE_LAPS={shape.laps}",
        f"WIDE_LEAST_BLOCKS={WIDE_LEAST_BLOCKS}",
        f"WIDE_MOST_BLOCKS={WIDE_MOST_BLOCKS}",
        f"WIDE_REGION_BYTES={_region_bytes()}",
        f"WIDE_{argument_bytes(arguments)}",
    )


def wide_exchange_bytes() -> int:
    """struct WideMemory."""
    return LINE_BYTES + 2 * _region_bytes()


def _region_bytes() -> int:
    """Of the entries of a launch, LayerNorm's: a pair of float32 for each block and each row of a step."""
    of_types = (shapes for of_sums in WIDE_LEAST_COLUMNS.values() for shapes in of_sums.values())
    shapes = (*chain.from_iterable(of_types), *FORWARD_WIDE_SHAPES)
    return max(shape.laps * shape.step_rows * WIDE_MOST_BLOCKS * 8 for shape in shapes)
