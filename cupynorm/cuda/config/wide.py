"""Rows that all blocks of a launch share: what backward_wide.cu takes."""

from __future__ import annotations

from ...problem import NormProblem
from .common import (
    ITEMSIZE,
    LINE_BYTES,
    OFF_LINES,
    WARP,
    BackwardConfig,
    Device,
    argument_bytes,
    divide_up,
    leaves_lines,
    name_of,
)

WIDE_ARGUMENTS = "9P4q3if2h??2x"  # struct WideArguments in backward_wide.cu
WIDE_COLUMNS_PER_THREAD = 8  # a vector of 16 bits

# kWarps, kRows, kStages, kReaders, kLaps and kMostBlocks of backward_wide.cu.
WIDE_WARPS, WIDE_ROWS, WIDE_STAGES, WIDE_READERS, WIDE_LAPS, WIDE_MOST_BLOCKS = 8, 4, 6, 2, 8, 132
WIDE_THREADS = (WIDE_WARPS + 2 + WIDE_READERS) * WARP  # of a block, with those that do not work on rows

# Columns of a block, at least, by warps that share a row (131072, where blocks have 1024: 100 MB 35.4 → 33.8 us, 1 GB
# 238.9 → 237.7; but 98304, with 768, 35.7 → 36.1, 240.1 → 245.4; 196608, with 1536, 36.1 → 34.5, but 239.0 → 245.4, and
# 163840, with 1280, 36.9 → 37.1, 245.6 → 258.8).
WIDE_LEAST_COLUMNS = {4: 1024, 8: 1536}

# Fewer blocks than 124 were not timed.
WIDE_LEAST_BLOCKS = 120


def wide_config(
    problem: NormProblem, vector: bool, definitions: tuple[str, ...], device: Device, start: int
) -> BackwardConfig | None:
    """Blocks on nearly all multiprocessors, each with the same columns of all rows, as many as whole lines have; None
    where that is not chosen.

    x and dy of one 16-bit type, in vectors, where memory is fast, on compute capability 9.0; `start` is that of
    leaves_lines().
    """
    x = problem.x_dtype.name
    if not may_be_wide(x, name_of(problem.dy_dtype), vector, device):
        return None
    line = LINE_BYTES // ITEMSIZE[x]
    lines = divide_up(problem.columns, line)
    slab = divide_up(lines, min(device.multiprocessors, WIDE_MOST_BLOCKS)) * line
    blocks = divide_up(problem.columns, slab)
    warps = next((warps for warps in WIDE_LEAST_COLUMNS if slab <= warps * WARP * WIDE_COLUMNS_PER_THREAD), None)
    if warps is None or slab < WIDE_LEAST_COLUMNS[warps] or blocks < WIDE_LEAST_BLOCKS:
        return None
    off_lines = leaves_lines(start, *(stride * ITEMSIZE[x] for stride in (problem.x_row_stride, problem.dy_row_stride)))
    pitch = (slab + off_lines * line) * ITEMSIZE[x]  # from row to row in the ring
    return BackwardConfig(
        route="wide",
        definitions=(*definitions, *wide_definitions(warps, off_lines)),
        threads=WIDE_WARPS * WARP,
        group_threads=warps * WARP,
        slab_columns=slab,
        slabs=blocks,
        stages=WIDE_STAGES,
        shared_bytes=WIDE_STAGES * 2 * _step_rows(warps) * pitch,
    )


def may_be_wide(x: str, dy: str, vector: bool, device: Device) -> bool:
    """Whether there are such kernels."""
    return x == dy and ITEMSIZE[x] == 2 and vector and device.is_fast_9_0


def _step_rows(warps: int) -> int:
    """kStepRows, where so many warps share a row."""
    return WIDE_WARPS // warps * WIDE_ROWS


def wide_definitions(warps: int, off_lines: bool) -> tuple[str, ...]:
    return (
        *((OFF_LINES,) if off_lines else ()),
        f"COLUMNS_PER_THREAD={WIDE_COLUMNS_PER_THREAD}",
        f"ROW_WARPS={warps}",
        f"WIDE_MOST_BLOCKS={WIDE_MOST_BLOCKS}",
        f"WIDE_REGION_BYTES={_region_bytes()}",
        f"WIDE_{argument_bytes(WIDE_ARGUMENTS)}",
    )


def wide_exchange_bytes() -> int:
    """struct WideMemory."""
    return 128 + 2 * _region_bytes()


def _region_bytes() -> int:
    """Of the entries of a launch, LayerNorm's: a pair of float32 for each block and each row of a step."""
    return WIDE_LAPS * _step_rows(min(WIDE_LEAST_COLUMNS)) * WIDE_MOST_BLOCKS * 8
