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
    vector_width,
)

WIDE_ARGUMENTS = "9P4q3if2h??Bx"  # struct WideArguments in backward_wide.cu

# Of a block: warps that work on rows, rows of a step for each, steps in the ring, steps from a row's first half to its
# second, warps that read all blocks' sums.
WIDE_WARPS, WIDE_ROWS, WIDE_STAGES, WIDE_BEHIND, WIDE_READERS = 8, 4, 6, 3, 2
WIDE_THREADS = (WIDE_WARPS + 2 + WIDE_READERS) * WARP  # with those that do not work on rows
WIDE_LAPS, WIDE_MOST_BLOCKS = 8, 132  # steps whose sums have a place in memory, and multiprocessors

# Columns of a block, at least, by the bytes of an element and by warps that share a row, of which each thread has a
# vector. 16 bits, 100 MB and 1 GB: 131072, where blocks have 1024, 35.4 → 33.8, 238.9 → 237.7 us, 114688, with 896,
# LayerNorm 37.9 → 36.8, 270.9 → 249.9, but 98304, with 768, 35.7 → 36.1, 240.1 → 245.4; 196608, with 1536, 36.1 → 34.5,
# but 239.0 → 245.4, and 163840, with 1280, 36.9 → 37.1, 245.6 → 258.8. Float32: 57344, with 448, 34.5 → 32.8, 240.4 →
# 237.9; 69632, with 544, 36.3 → 34.3, but 255.0 → 259.5.
WIDE_LEAST_COLUMNS = {2: {4: 896, 8: 1536}, 4: {4: 448, 8: 544}}

# Fewer blocks than 123 were not timed.
WIDE_LEAST_BLOCKS = 120


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
    line, least = LINE_BYTES // ITEMSIZE[x], WIDE_LEAST_COLUMNS[ITEMSIZE[x]]
    lines = divide_up(problem.columns, line)
    slab = divide_up(lines, min(device.multiprocessors, WIDE_MOST_BLOCKS)) * line
    blocks = divide_up(problem.columns, slab)
    warps = next((warps for warps in least if slab <= warps * WARP * vector_width(x)), None)
    if warps is None or slab < least[warps] or blocks < WIDE_LEAST_BLOCKS:
        return None
    off_lines = leaves_lines(start, *(stride * ITEMSIZE[x] for stride in (problem.x_row_stride, problem.dy_row_stride)))
    pitch = (slab + off_lines * line) * ITEMSIZE[x]  # from row to row in the ring
    ring_bytes = WIDE_STAGES * 2 * _step_rows(warps) * pitch
    return BackwardConfig(
        route="wide",
        definitions=(*definitions, *wide_definitions(x, warps, off_lines)),
        threads=WIDE_WARPS * WARP,
        group_threads=warps * WARP,
        slab_columns=slab,
        slabs=blocks,
        stages=WIDE_STAGES,
        shared_bytes=max(ring_bytes, device.shared_bytes // 2),  # so that no two are on one multiprocessor
    )


def may_be_wide(x: str, dy: str, vector: bool, device: Device) -> bool:
    """Whether there are such kernels."""
    return x == dy and ITEMSIZE[x] in WIDE_LEAST_COLUMNS and vector and device.is_fast_9_0


def wide_lag(config: BackwardConfig, problem: NormProblem) -> int:
    """How many steps a block posts itself before it reads all blocks' sums of one.

    1 GB, with one and two: 262144, RMSNorm, 247.6, 236.6 us, LayerNorm 243.9, 241.2; but 131072, LayerNorm, 240.8,
    249.4, and where threads are idle, 122880 245.2, 246.8, 229376, LayerNorm, 244.7, 249.9. Float32: 65536 243.7,
    237.8, LayerNorm 238.2, 246.1; 114688 247.6, 236.3, LayerNorm 244.9, 240.8. Fewer than WIDE_BEHIND.
    """
    itemsize = problem.x_dtype.itemsize
    few_warps = config.group_threads < config.threads
    idle = config.slab_columns < config.group_threads * vector_width(problem.x_dtype.name)
    if problem.norm == "layernorm":
        return 1 if few_warps or (idle and itemsize == 2) else 2
    return 1 if few_warps and idle and itemsize == 2 else 2


def _step_rows(warps: int) -> int:
    """kStepRows, where so many warps share a row."""
    return WIDE_WARPS // warps * WIDE_ROWS


def wide_definitions(x: str, warps: int, off_lines: bool) -> tuple[str, ...]:
    return (
        *((OFF_LINES,) if off_lines else ()),
        f"COLUMNS_PER_THREAD={vector_width(x)}",
        f"ROW_WARPS={warps}",
        f"WIDE_WARPS={WIDE_WARPS}",
        f"WIDE_ROWS={WIDE_ROWS}",
        f"WIDE_STAGES={WIDE_STAGES}",
        f"WIDE_BEHIND={WIDE_BEHIND}",
        f"WIDE_READERS={WIDE_READERS}",
        f"WIDE_LAPS={WIDE_LAPS}",
        f"WIDE_MOST_BLOCKS={WIDE_MOST_BLOCKS}",
        f"WIDE_REGION_BYTES={_region_bytes()}",
        f"WIDE_{argument_bytes(WIDE_ARGUMENTS)}",
    )


def wide_exchange_bytes() -> int:
    """struct WideMemory."""
    return 128 + 2 * _region_bytes()


def _region_bytes() -> int:
    """Of the entries of a launch, LayerNorm's: a pair of float32 for each block and each row of a step."""
    least_warps = min(min(least) for least in WIDE_LEAST_COLUMNS.values())
    return WIDE_LAPS * _step_rows(least_warps) * WIDE_MOST_BLOCKS * 8
