"""Column blocks: where blocks of their own sum dw and db, how many, and how they share columns and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...problem import NormProblem
from .common import (
    ITEMSIZE,
    LINE_BYTES,
    STAGED_MAX_THREADS,
    WARP,
    BackwardConfig,
    Device,
    Grid,
    access_width,
    columns_per_thread,
    compute_itemsize,
    data_bytes,
    divide_up,
    is_short,
    kernels_sum_db,
    name_of,
    narrow_of,
    rows_lie_apart,
    rows_share_copies,
)

# Where x, dy and dx take at most so many bytes, and column blocks (column_blocks.cuh) at most so many rows for each of
# their threads, these sum dw and db, and row walkers find dx alone (25 MB, LayerNorm, N=10240: 21.8 → 15.8 us). Rows by
# whether memory is slow, by whether db is summed, and by the sectors of memory that a slice of columns is wide: one,
# two, or more; FEW_COLUMN_BLOCKS_ROWS of FEW_COLUMN_BLOCKS or less, beside walkers that take several rows a step. For
# 16-bit types in vectors and small clusters, from a scan of 23 lengths and seven sizes.
COLUMN_BLOCKS_BYTES = 44 << 20
COLUMN_BLOCK_ROWS = {False: ((28, 44, 120), (44, 48, 120)), True: ((28, 44, 120), (28, 44, 110))}
FEW_COLUMN_BLOCKS, FEW_COLUMN_BLOCKS_ROWS = 56, {False: (120, 100), True: (120, 46)}

# Longer rows gain beyond these, and by bytes alone where a block has one row a step (where memory is fast, with db,
# only in clusters, of less than eight warps a block, and where rows that lie apart take FAST_APART_THREADS or less).
# Where memory is fast, up to LONG_COLUMN_BLOCKS_BYTES, from LONG_COLUMNS on where a block has several rows, with 24
# columns a thread where eight warps share one (50 MB, LayerNorm, 12288: 25.5 → 23.5 us); without db with 40 and more in
# blocks of one row and clusters of two up to the last (70 MB, 20480: RMSNorm 29.3 → 27.4; but 32768, 32 columns, 78 MB,
# 31.4 → 39.4). Where it is slow, by whether db is summed and whether a block has one row, by columns a thread (an H100,
# 75 MB, LayerNorm, 12288: 39.5 → 36.8 us). Column blocks must be many: with db, too few fall so far behind that they
# miss the L2 cache. The ..._ELSE are for larger types, rows off 16 bytes and larger clusters.
LONG_COLUMN_BLOCKS_BYTES, LONG_COLUMNS, WIDE_COLUMN_BLOCKS_BYTES = 60 << 20, 4096, 86 << 20
SLOW_COLUMN_BLOCKS_BYTES: dict[tuple[bool, bool], dict[int, int]] = {
    (False, True): {32: 105 << 20, 40: 105 << 20},  # where no lane is idle
    (True, False): {32: 78 << 20, 28: COLUMN_BLOCKS_BYTES, 40: COLUMN_BLOCKS_BYTES},
    (True, True): {24: 73 << 20, 28: 103 << 20, 32: 103 << 20},
}
SLOW_WIDE_COLUMN_BLOCKS_BYTES = 103 << 20  # with db and 40 columns a thread, in blocks of eight warps
SLOW_CLUSTERS_BYTES = {False: 60 << 20, True: 103 << 20}  # of eight, 16-bit types on 16 bytes: up to 65536 columns
COLUMN_BLOCKS_BYTES_ELSE = {
    False: {"rmsnorm": (32 << 20, 36 << 20), "layernorm": (24 << 20, 36 << 20)},
    True: {"rmsnorm": (32 << 20, 36 << 20), "layernorm": (24 << 20, 46 << 20)},
}

# Where memory is fast, 16-bit types on 16 bytes, up to less: in small clusters by whether db is summed, blocks, and
# columns a thread, 32 of which where no more than such a part of the lanes is used (50 MB, RMSNorm, 23808, without and
# with: 21.8, 23.5 us, LayerNorm, 28672: 24.5, 27.6); in clusters and gangs of so many blocks and more, by whether db is
# summed, and whether it is a gang or has more than 40 columns a thread, for which LayerNorm's clusters have none (31
# MB, LayerNorm, 163840: 22.8, 29.0, 114688: 20.6, 22.9). In these gangs, and with db in these clusters, from so many
# rows on, by whether db is summed, and by whether each block has one slice, two or more (LayerNorm, without and with,
# 1x262144: 9.7, 14.7, 3x139264: 12.1, 10.9, 5x524288: 23.1, 29.0). Clusters and gangs of float32 likewise (1x262144:
# without 8.7, with them 24.4).
FAST_CLUSTERS_BYTES = {
    (False, 4, 24): 28 << 20,
    (False, 4, 32): 40 << 20,
    (True, 2, 28): 42 << 20,
    (True, 4, 28): 28 << 20,
}
FAST_CLUSTERS_PART_32 = 7 / 8
FAST_LARGE_BLOCKS = 16
FAST_LARGE_LEAST_ROWS = {False: (3, 3, 5), True: (2, 5, math.inf)}
FAST_LARGE_BYTES = {False: (22 << 20, 19 << 20), True: (25 << 20, 16 << 20)}
COLUMN_BLOCK_ROWS_ELSE = {False: ((28, 52, 76), (44, 48, 72)), True: ((28, 50, 76), (36, 48, 72))}
SLOW_FEW_COLUMN_BLOCKS_ELSE, SLOW_FEW_COLUMN_BLOCKS_ROWS_ELSE = 48, (60, 50)

# Where memory is fast, FAST_MORE_ROWS times as many of what is neither usual (_is_usual) nor float32 on 16 bytes, up to
# so many bytes: off 16 bytes, where walkers take long for few rows, by bytes of x's type and elements of an access,
# without and with db (LayerNorm, 2047, 3 MB: 13.7 → 7.8 us, 4100, 18 MB: 15.6 → 13.3, but RMSNorm, 4095, 18 MB: 14.6 →
# 15.8); on 16 bytes of float64 (LayerNorm, 1536, 25 MB: 17.2 → 14.4), and of two types of unlike size (x in bfloat16,
# dy in float32, LayerNorm, 3072, 25 MB: 18.1 → 14.5). Of two types off 16 bytes only in one block (RMSNorm, 12289, 12
# MB: 13.9 → 17.5). As before are rows of one warp or less, with larger gaps, and calls without dx.
FAST_MORE_ROWS = 4
FAST_OFF_16_BYTES: dict[tuple[int, int], tuple[int, int]] = {
    (2, 1): (13 << 20, 15 << 20),
    (2, 2): (14 << 20, 18 << 20),
    (2, 4): (26 << 20, 26 << 20),
    (4, 1): (15 << 20, 18 << 20),
    (8, 1): (18 << 20, 24 << 20),
}
FAST_TWO_TYPES_OFF_16_BYTES, FAST_FLOAT64_BYTES = 13 << 20, (0, 26 << 20)

# Of two types of unlike size on 16 bytes, rows of over a warp in up to so many blocks: more rows up to so many bytes,
# and where these blocks are full, up to so many column blocks at all, RMSNorm only if x is the larger (x in float32, dy
# in bfloat16, LayerNorm, 4096, 50 MB: 24.6 → 21.0 us, RMSNorm 22.6 → 21.0; but 1024, 75 MB: 28.1 → 34.7, 24576, in 192
# threads, 29.5 → 31.4, 98304, in sixteen blocks, 50 MB: 23.9 → 30.6).
FAST_TWO_SIZES_MOST_BLOCKS, FAST_TWO_SIZES_ROWS_BYTES = 8, 26 << 20
FAST_TWO_SIZES_BYTES = {"rmsnorm": 52 << 20, "layernorm": 60 << 20}

COLUMN_BLOCK_ROWS_ALONE = (20, 22, 40)  # without dx: 25 MB, N=1024, with 32 rows of a sector, 15.2 → 17.0 us
COLUMN_BLOCK_LARGE_ROW = 4 / 3  # what a row of a larger type counts: float32, 25 MB, N=65536, 64 rows, 17.9 → 20.1 us
SECTOR_BYTES = 32

# Rows of a thread that column blocks sum in turn (kSummed of column_blocks.cuh). Up to so many bytes, with db, slices
# that are no whole lines are as wide as a power of two of sectors if that is no more than so many times as wide, and
# their threads have no fewer times as many rows than the threads of such: these blocks are fewer (LayerNorm, 512x4096,
# with 43 and 32: 11.2, 11.0 us, 163x9216: 10.5, 10.0; but slices of whole lines, 46x32768: 11.0, 11.8, with three and
# four times as many rows, 448x4096: 10.3, 10.5; wider by more, an H100, 116x7168, with 45 and 28: 8.2, 8.4).
COLUMN_BLOCK_BATCH, WIDER_SLICES_BYTES, WIDER_SLICES_MOST = 8, 13 << 20, 4 / 3

# At most so many column blocks, and as many times more as there may be blocks on a multiprocessor; without dx, in small
# clusters, twice as many (LayerNorm, 814x5120: 17.8 → 14.4 us). On a small device fewer, so that at least so many
# walkers are left for each cluster of them.
COLUMN_BLOCKS = 64
COLUMN_BLOCKS_WALKERS = 5 / 8

# Walkers and column blocks are to end together, as a call takes what the slower of them take (25 MB, LayerNorm, 4096,
# with 64, 43 and 32 column blocks: 16.0, 15.3, 16.8 us). So there are about so many of 132 multiprocessors, by whether
# memory is slow and db is summed: a first number, more for each MB of x, dy and dx, a most. As slices of a power of two
# of sectors leave no such choice, they are so many quarters of that wide, too, but of whole pairs of sectors, and four
# or more, as others touch more lines of memory; wider ones only where there would be over three quarters of the most.
OTHER_SLICES, OTHER_SLICES_LEAST_SECTORS = (3, 5, 6, 8), 4
AIMED_COLUMN_BLOCKS = {
    False: {False: (32, 0.6, 47), True: (24, 2, 46)},
    True: {False: (22, 0.85, 47), True: (44, 0.4, 60)},
}

# For each of several blocks on a multiprocessor no more (an H100, 37 MB, LayerNorm, 10240, with 108 and 80: 27.9, 23.5
# us). Without db slices of under 128 bytes count as so many times as far from the aim, and so do wider ones that are no
# whole lines.
MOST_AIMED_OF_SEVERAL, NARROW_SLICE, BROKEN_LINES = 46, 1.3, 1.2

# Where memory is slow, without db, in clusters of four with it, too: with 24 columns a thread so many (these at most),
# with more data and with 40 columns at most so many; in clusters of four others yet (an H100, 6144, with 48 blocks and
# with 64: 37 MB +5%, 25 MB −9%).
SLOW_AIMED_24, SLOW_MANY_BYTES, SLOW_MOST_AIMED_40 = {False: 48, True: 64}, 28 << 20, 54
SLOW_MOST_AIMED_OF_FOUR = {False: 52, True: 56}

# Where memory is fast, at most so many: with 40 columns a thread and more by whether db is summed, without it in
# clusters of four, with it with 28 (10240, 50 MB, with 54 and 40: 22.0, 21.2 us).
FAST_MOST_AIMED_40, FAST_MOST_AIMED_OF_FOUR, FAST_MOST_AIMED_28 = {False: 43, True: 54}, 36, 56

# LayerNorm with 40 columns a thread, in one block, where memory is slow: 25 MB, 5120, with 54 blocks 19.5 us, with 80
# 17.8; 12 MB, 2560, with 40 12.5, with 80 11.9.
SLOW_WIDE_COLUMN_BLOCKS, SLOW_WIDE_BYTES = 80, 9 << 20

# Short rows make few slices of whole lines of memory, and narrow ones touch a line several times: several blocks share
# a slice's rows, where a thread of narrow slices would have more rows than these, by the sectors that such are wide.
# Slices are of a line where a multiprocessor has several blocks, else of two (an H100, 6 MB, 256: 11.3 → 9.3 us, 25 MB,
# 1280: 20.0 → 17.9). A power of two of blocks mostly makes whole batches of a thread's rows. Limits are an H100's, from
# a scan of 17 lengths and eight sizes.
SHARED_LEAST_ROWS = (10.9, 22, 50)
SHARED_SHORT_COLUMNS, SHARED_MEDIUM_COLUMNS, SHARED_MOST_COLUMNS = 768, 1280, 3072

# Slices of a line up to the first; with db by more blocks up to the second.
SHARED_SHORT_BYTES = {False: (29 << 20, 32 << 20), True: (21 << 20, 27 << 20)}
SHARED_SHORT_FEW_BYTES, SHARED_SHORTEST_COLUMNS = 9 << 19, 128
SHARED_SHORT_BLOCKS, SHARED_SHORT_BLOCKS_MORE = {False: 48, True: 96}, 128

# Where memory is fast, over FAST_SHORT_POWERS_BYTES: at most FAST_SHORT_POWERS_BLOCKS, a power of two for each slice
# (LayerNorm, 25 MB, 448, by 56 and 112: 17.3, 15.6 us). Where these are under FAST_SHORT_LEAST_BLOCKS, about
# FAST_SHORT_BLOCKS, if there are over FAST_SHORT_BYTES, without db in rows that leave lanes idle alone (640, by 80 and
# 100: 16.6, 15.6). Rows that use at most FAST_SHORT_USED of the walkers' lanes have column blocks up to
# FAST_SHORT_IDLE_BYTES (37 MB, 576, without and by 99: 20.4, 19.6).
FAST_SHORT_POWERS_BYTES, FAST_SHORT_POWERS_BLOCKS = 10 << 20, 112
FAST_SHORT_LEAST_BLOCKS, FAST_SHORT_BLOCKS = 90, 96
FAST_SHORT_BYTES = {False: 23 << 20, True: 15 << 20}
FAST_SHORT_USED, FAST_SHORT_IDLE_BYTES = {False: 0.95, True: 0.9}, {False: 34 << 20, True: 36 << 20}

# Of 769 columns and more: a power of two of blocks, but without db up to so many bytes.
SHARED_POWERS_BLOCKS, SLOW_SHARED_POWERS_BYTES, SHARED_MEDIUM_BLOCKS = 80, 27 << 20, 60
SLOW_SHARED_LONG_BYTES, SLOW_SHARED_LONG_BLOCKS = {False: 27 << 20, True: 21 << 20}, {False: 56, True: 68}

# Where memory is fast, up to so many columns in any case, and of more up to so many bytes; beyond them RMSNorm has
# slices of four lines (1280: 12 MB, LayerNorm, 12.7 → 11.0 us, 25 MB, RMSNorm, 15.3 → 14.8; 832, by 63 and by 56: 18
# MB, 12.7 → 12.4, LayerNorm 13.4 → 12.8).
FAST_SHARED_POWERS_COLUMNS, FAST_SHARED_POWERS_BYTES, FAST_SHARED_WIDE_BLOCKS = 1024, 20 << 20, 50

# Where memory is fast, with db: slices of two lines, with 32 columns a thread from so much data on, with 40 and more in
# any case (37 MB, LayerNorm, 2560: 24.3 → 20.2 us).
FAST_SHARED_LONG_BYTES, FAST_SHARED_LONG_BLOCKS = 20 << 20, 54

# Float32 (_is_float32), in place of the limits above: up to so many bytes, without and with db; of rows of a warp or
# less, with db where lanes are idle, in clusters of so many blocks, with 24 columns a thread, and else, but LayerNorm's
# rows of one block or two with 40 as RMSNorm's (an H100, from a scan of 25 lengths and ten sizes: 12 MB, LayerNorm,
# 2560 16.1 → 11.5 us, 31 MB, 4096 21.9 → 19.9; but 50 MB, 96, 28.5 → 29.6).
FLOAT32_SHORT_BYTES, FLOAT32_IDLE_BYTES = {False: 34 << 20, True: 76 << 20}, 42 << 20
FLOAT32_CLUSTERS, FLOAT32_CLUSTERS_BYTES = {False: 4, True: 8}, {False: 36 << 20, True: 50 << 20}
FLOAT32_24_COLUMNS_BYTES, FLOAT32_BYTES = 50 << 20, {False: 27 << 20, True: 38 << 20}

# Of short rows several blocks share slices of two lines, about so many, and where a multiprocessor has several; of one
# line in rows of so many, where these make just as many blocks; where memory is fast, of so many columns, of four
# (6 MB, LayerNorm, 64, an H200: 10.7 → 9.2 us, an H100: 11.6 → 10.0; 25 MB, RMSNorm, 2560, an H200: 15.7 → 14.7).
FLOAT32_SHARED_BLOCKS, FLOAT32_SHARED_BLOCKS_OF_SEVERAL = 64, 96
FLOAT32_SINGLE_LINES, FAST_FLOAT32_FOUR_LINES_COLUMNS = (2, 3, 4, 6), range(2304, 2561)

# RMSNorm's steps of eight rows of 3 to 4 KB are large, and walkers beside column blocks take few of them: up to so many
# bytes, slices of four lines. 1024, 12 MB, 13.6 → 11.2 us, 18 MB 15.9 → 14.6, 25 MB 17.5 → 18.3 (not shared 21.0).
FLOAT32_LARGE_STEPS_BYTES = 20 << 20

# Rows of a thread, as they count, at most; of a slice of which a row fills a part, such a part of these (an H100, 12
# MB, LayerNorm, without column blocks and with, N=4: 16.3, 28.5 us, 32: 15.5, 14.2).
FLOAT32_ROWS = 160

# One row alone (that few_rows.py leaves: off 16 bytes, say) gains from so many columns on (LayerNorm 7.6 → 6.9 us, of
# 1024 6.2 → 6.6); where dw and db have another type than their sums, and without dx, too (but FAST_LARGE_LEAST_ROWS).
COLUMN_BLOCKS_ONE_ROW = 4096

# Of rows that lie apart, so that a block has one a step, at most so many, by the block's warps, of four and more the
# last, and bytes of x's type: threads of such small column blocks have many rows each (an H100, with column blocks and
# without: 640, 25 MB, 50.9, 20.0 us; 1024, 6 MB, 11.2, 12.4).
APART_ROWS = {2: (1100, 1400, 2000), 4: (1100, 1100, 2000)}

# Where memory is fast, with db, those of blocks of more threads than these have the limits of COLUMN_BLOCK_ROWS as well
# (LayerNorm with gaps of 64, with and without: 781x1280 15.6, 11.8 us, 977x1024 13.9, 12.6, but 1750x4096 22.8, 24.6).
FAST_APART_THREADS = 2 * WARP


class _ColumnBlocks(NamedTuple):
    blocks: int  # in whole clusters
    column_threads: int
    slices: int  # of each
    parts: int  # that share a slice's rows
    rows: float  # of each of the block's threads, were none left over; as they count
    sectors: int  # that a slice is wide


def column_blocks_grid(
    config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device
) -> Grid | None:
    """None where column blocks are not worth it."""
    one_row = problem.narrows_sums or problem.columns >= COLUMN_BLOCKS_ONE_ROW or not problem.want_dx
    least_rows = 1 if one_row else 2
    if config.route != "staged" or problem.rows < least_rows or not (problem.want_dw or problem.want_db):
        return None
    # Gangs off 16 bytes: as single columns are read by few blocks (LayerNorm, 2x262145, 23.3 us beside these, 13.6 so).
    if config.gang and "VECTOR=0" in config.definitions:
        return None
    if data_bytes(problem) > _most_bytes(config, problem, device) or _are_many_apart(config, problem):
        return None
    steps = divide_up(problem.rows, config.groups)
    # Blocks on a multiprocessor, of 256 threads in all, where there is a step for each. Column blocks that are few
    # enough have one for themselves: LayerNorm, 2600x640, 12.8 → 11.9 us; but not blocks of a warp or two: 480x1024
    # with gaps, 9.1 → 12.1.
    together = 1
    if steps * config.slabs > device.multiprocessors:
        together = divide_up(blocks_at_once * config.slabs, device.multiprocessors)
        together = max(1, min(together, STAGED_MAX_THREADS // config.threads))

    if not problem.want_dx:
        found = _column_blocks(config, problem, COLUMN_BLOCKS * together * (2 if config.slabs <= 2 else 1))
        if found.rows > _most_rows(found, config, problem, device):
            return None
        return Grid(0, found.blocks, found.column_threads)

    def room(found: _ColumnBlocks, most: int) -> int:
        if found.parts > 1:
            return blocks_at_once
        spread = found.blocks <= most and config.threads >= 4 * WARP
        return min(blocks_at_once * config.slabs, device.multiprocessors * (1 if spread else together))

    def walkers_beside(found: _ColumnBlocks, most: int) -> int:
        return min(steps, (room(found, most) - found.blocks) // config.slabs)

    for most in (COLUMN_BLOCKS, COLUMN_BLOCKS // 2, COLUMN_BLOCKS // 4):
        found = _column_blocks(config, problem, most * together)
        shared = _shared_column_blocks(config, problem, found, blocks_at_once, most, device)
        if _is_float32(config, problem):
            found = shared or found
        elif _is_usual(config, problem):
            if shared or walkers_beside(found, most) < steps:
                aim = together * _aimed_column_blocks(config, problem, together, device)
                found = shared or _column_blocks(config, problem, max(aim, most * together), aim)
        if found.rows > _most_rows(found, config, problem, device):
            return None
        walkers = walkers_beside(found, most)
        if walkers >= min(steps, COLUMN_BLOCKS_WALKERS * found.blocks / config.slabs):
            if config.gang:  # what whole gangs leave: 25 MB, RMSNorm, 163840, with 32 blocks, not 40, 22.9 → 28.0 us
                left = _column_blocks(config, problem, room(found, most) - walkers * config.slabs)
                found = left if left.rows <= _most_rows(left, config, problem, device) else found
            if problem.rows < _least_rows(found, config, problem, device):
                return None
            return Grid(walkers, found.blocks, found.column_threads, found.parts)
    return None


def _are_many_apart(config: BackwardConfig, problem: NormProblem) -> bool:
    """Whether rows that lie apart are more than APART_ROWS."""
    if not problem.want_dx or not rows_lie_apart(config, problem):
        return False
    warps = min(config.threads // WARP, 4)
    return problem.rows > APART_ROWS.get(problem.x_dtype.itemsize, APART_ROWS[4])[warps.bit_length() - 1]


def has_column_blocks(config: BackwardConfig, problem: NormProblem, device: Device) -> bool:
    """Before it is known how many blocks the device holds at the same time: with as many as there may be."""
    blocks_at_once = device.multiprocessors * (STAGED_MAX_THREADS // config.threads)
    return column_blocks_grid(config, problem, blocks_at_once, device) is not None


def _has_16_bits(config: BackwardConfig, problem: NormProblem) -> bool:
    """16-bit types, on 16 bytes."""
    two_bytes = problem.x_dtype.itemsize == 2 == ITEMSIZE[name_of(problem.dy_dtype)]
    return two_bytes and "VECTOR=1" in config.definitions


def _is_usual(config: BackwardConfig, problem: NormProblem, most_slabs: int = 4) -> bool:
    """What most was timed of: 16-bit types, on 16 bytes, in small clusters or none, not in gangs."""
    return _has_16_bits(config, problem) and config.slabs <= most_slabs and not config.gang


def _has_float32_vectors(config: BackwardConfig, problem: NormProblem) -> bool:
    return problem.x_dtype.name == "float32" == name_of(problem.dy_dtype) and "VECTOR=1" in config.definitions


def _is_float32(config: BackwardConfig, problem: NormProblem) -> bool:
    """All float32, on 16 bytes, with dx, in clusters of up to eight or none: timed, too."""
    timed = _has_float32_vectors(config, problem) and config.slabs <= 8 and not config.gang
    return timed and problem.want_dx and (problem.norm == "rmsnorm" or kernels_sum_db(problem))


def _float32_bytes(config: BackwardConfig, problem: NormProblem) -> int:
    sums_db = kernels_sum_db(problem)
    if config.per_thread == columns_per_thread("float32"):
        idle = config.slab_columns < config.per_thread * config.group_threads
        return FLOAT32_IDLE_BYTES if sums_db and idle else FLOAT32_SHORT_BYTES[sums_db]
    if config.per_thread == 24:
        return FLOAT32_24_COLUMNS_BYTES
    if config.slabs >= FLOAT32_CLUSTERS[sums_db]:
        return FLOAT32_CLUSTERS_BYTES[sums_db]
    if _has_large_steps(config, problem):
        return FLOAT32_LARGE_STEPS_BYTES
    as_rmsnorm = config.groups == 1 and config.slabs <= 2 and config.per_thread == 40
    return FLOAT32_BYTES[sums_db and not as_rmsnorm]


def _has_large_steps(config: BackwardConfig, problem: NormProblem) -> bool:
    """Of float32: a warp with 32 columns a thread for each of a block's rows, of which RMSNorm has eight."""
    of_warps = config.per_thread == 32 and config.group_threads == WARP and config.groups == 8
    return not kernels_sum_db(problem) and of_warps


def _most_bytes(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    slow, sums_db, alone = device.has_slow_memory, kernels_sum_db(problem), config.groups == 1
    if _is_float32(config, problem):
        return _float32_bytes(config, problem)
    timed = problem.norm == "rmsnorm" or sums_db
    if not timed or not _is_usual(config, problem):
        if timed and problem.want_dx and slow and config.slabs == 8 and _is_usual(config, problem, most_slabs=8):
            return SLOW_CLUSTERS_BYTES[sums_db]
        if timed and problem.want_dx and _is_fast_large(config, problem, device):
            return _fast_large_bytes(config, problem)
        usual = COLUMN_BLOCKS_BYTES_ELSE[slow][problem.norm][sums_db]
        return max(usual, _two_sizes_bytes(config, problem, device))
    if problem.columns <= SHARED_MEDIUM_COLUMNS or not problem.want_dx:
        return COLUMN_BLOCKS_BYTES
    if not slow:
        if config.per_thread >= 40 and alone and config.slabs <= 2 and not sums_db:
            return WIDE_COLUMN_BLOCKS_BYTES
        idle = config.slab_columns <= FAST_CLUSTERS_PART_32 * config.per_thread * config.group_threads
        limit = FAST_CLUSTERS_BYTES.get((sums_db, config.slabs, config.per_thread))
        if limit and device.has_fast_memory and (idle or config.per_thread < 32):
            return limit
        many = config.per_thread > 24 or config.group_threads == STAGED_MAX_THREADS
        long = many and (alone or problem.columns >= LONG_COLUMNS)
        return LONG_COLUMN_BLOCKS_BYTES if long else COLUMN_BLOCKS_BYTES
    full = config.slab_columns == config.per_thread * config.group_threads
    if alone and not sums_db and not full:
        return COLUMN_BLOCKS_BYTES
    if sums_db and config.per_thread == 40 and config.group_threads == STAGED_MAX_THREADS:
        return SLOW_WIDE_COLUMN_BLOCKS_BYTES
    limits = SLOW_COLUMN_BLOCKS_BYTES.get((sums_db, alone), {})
    return limits.get(config.per_thread, LONG_COLUMN_BLOCKS_BYTES)


def _is_fast_large(config: BackwardConfig, problem: NormProblem, device: Device) -> bool:
    timed = _has_float32_vectors(config, problem) or _has_16_bits(config, problem)
    return device.has_fast_memory and timed and config.slabs >= FAST_LARGE_BLOCKS


def _fast_large_bytes(config: BackwardConfig, problem: NormProblem) -> int:
    sums_db, more = kernels_sum_db(problem), config.gang or config.per_thread > 40
    if sums_db and more and not config.gang:
        return 0
    return FAST_LARGE_BYTES[sums_db][more]


def _least_rows(found: _ColumnBlocks, config: BackwardConfig, problem: NormProblem, device: Device) -> float:
    sums_db = kernels_sum_db(problem)
    timed = _is_fast_large(config, problem, device) and (config.gang or sums_db)
    return FAST_LARGE_LEAST_ROWS[sums_db][min(found.slices, 3) - 1] if timed else 1


def _shared_column_blocks(
    config: BackwardConfig, problem: NormProblem, narrow: _ColumnBlocks, blocks_at_once: int, most: int, device: Device
) -> _ColumnBlocks | None:
    """Of wide slices, whose rows several blocks share; None where slices of a block each, as `narrow`, do as well."""
    slow, sums_db, float32 = device.has_slow_memory, kernels_sum_db(problem), _is_float32(config, problem)
    name, columns, itemsize = problem.x_dtype.name, problem.columns, problem.x_dtype.itemsize
    data = data_bytes(problem)
    if not float32 and not _is_usual(config, problem):
        return None
    least_rows = SHARED_LEAST_ROWS[min(narrow.sectors, 3) - 1] * STAGED_MAX_THREADS / config.threads
    fast_wide = not slow and sums_db and config.per_thread >= 40 and not float32
    if config.slabs > 1 or narrow.rows <= least_rows or columns > SHARED_MOST_COLUMNS:
        return None
    scale = device.multiprocessors / 132 * most / COLUMN_BLOCKS

    def of(lines: int, blocks: float, powers: bool = False) -> _ColumnBlocks | None:
        """About so many blocks; at most so many, and a power of two of them for each slice, with `powers`."""
        threads = lines * LINE_BYTES // 16
        slices = divide_up(columns * itemsize, lines * LINE_BYTES)
        parts = round(blocks * scale / slices)
        if powers:  # as with 132 multiprocessors, or with a half, a quarter, … of these
            parts = int(_power_of_two_at_most(blocks / slices) * 2.0 ** round(math.log2(scale)))
        if parts < 2:
            return None
        rows = divide_up(problem.rows * threads, config.threads * parts) * _counts_as_rows(name, name)
        return _ColumnBlocks(slices * parts, threads, 1, parts, rows, lines * LINE_BYTES // SECTOR_BYTES)

    several = blocks_at_once > device.multiprocessors
    if float32:
        blocks = FLOAT32_SHARED_BLOCKS_OF_SEVERAL if several else FLOAT32_SHARED_BLOCKS
        wide = _has_large_steps(config, problem) or (not slow and columns in FAST_FLOAT32_FOUR_LINES_COLUMNS)
        row_lines, rest = divmod(columns * itemsize, LINE_BYTES)
        single = not rest and row_lines in FLOAT32_SINGLE_LINES and blocks % row_lines == 0
        return of(4 if wide else 1 if single else 2, blocks)
    if several:
        if not slow and data > FAST_SHORT_POWERS_BYTES:
            return _fast_short(config, problem, device, of)
        most_bytes, most_with_db = SHARED_SHORT_BYTES[slow]
        if data <= most_bytes:
            return of(1, SHARED_SHORT_BLOCKS[data > SHARED_SHORT_FEW_BYTES], powers=True)
        more = sums_db and data <= most_with_db and columns > SHARED_SHORTEST_COLUMNS
        return of(1, SHARED_SHORT_BLOCKS_MORE) if more else None
    if columns <= SHARED_SHORT_COLUMNS:
        return None
    if columns <= SHARED_MEDIUM_COLUMNS:
        least_fast = not slow and columns <= FAST_SHARED_POWERS_COLUMNS
        if least_fast or sums_db or data <= (SLOW_SHARED_POWERS_BYTES if slow else FAST_SHARED_POWERS_BYTES):
            return of(2, SHARED_POWERS_BLOCKS, powers=True)
        wide = not slow and problem.norm == "rmsnorm"
        return of(4, FAST_SHARED_WIDE_BLOCKS) if wide else of(2, SHARED_MEDIUM_BLOCKS)
    if not slow:
        long = sums_db and config.per_thread == 32 and data > FAST_SHARED_LONG_BYTES
        return of(2, FAST_SHARED_LONG_BLOCKS) if fast_wide or long else None
    if data <= SLOW_SHARED_LONG_BYTES[sums_db]:
        return None
    blocks = SLOW_SHARED_LONG_BLOCKS[sums_db]
    found = [shared for lines in (2, 4)[: 1 if sums_db else 2] if (shared := of(lines, blocks))]
    return min(found, key=lambda shared: max(shared.blocks / blocks, blocks / shared.blocks), default=None)


def _fast_short(
    config: BackwardConfig,
    problem: NormProblem,
    device: Device,
    of: Callable[[int, float, bool], _ColumnBlocks | None],
) -> _ColumnBlocks | None:
    """Of short rows, where memory is fast. `of` makes slices of so many lines by about so many blocks."""
    sums_db, data = kernels_sum_db(problem), data_bytes(problem)
    idle = config.slab_columns <= FAST_SHORT_USED[sums_db] * config.per_thread * config.group_threads
    most = SHARED_SHORT_BYTES[False][sums_db and problem.columns > SHARED_SHORTEST_COLUMNS]
    if data > max(most, FAST_SHORT_IDLE_BYTES[sums_db] if idle else 0):
        return None
    found = of(1, FAST_SHORT_POWERS_BLOCKS, True)
    few = found is None or found.blocks < FAST_SHORT_LEAST_BLOCKS * device.multiprocessors / 132
    several = (idle or sums_db) and data > FAST_SHORT_BYTES[sums_db] and problem.columns >= SHARED_SHORTEST_COLUMNS
    return of(1, FAST_SHORT_BLOCKS, False) if few and several else found


def _power_of_two_at_most(number: float) -> int:
    return 1 << (int(number).bit_length() - 1) if number >= 1 else 0


def _aimed_column_blocks(config: BackwardConfig, problem: NormProblem, together: int, device: Device) -> int:
    """Of each of the blocks that are `together` on a multiprocessor."""
    slow, sums_db, data = device.has_slow_memory, kernels_sum_db(problem), data_bytes(problem)
    least, more, most = AIMED_COLUMN_BLOCKS[slow][sums_db]
    if slow and config.slabs == 4:
        most = SLOW_AIMED_24[False] if config.per_thread == 24 else SLOW_MOST_AIMED_OF_FOUR[sums_db]
    elif slow and not sums_db and config.per_thread == 24:
        least = most = SLOW_AIMED_24[data > SLOW_MANY_BYTES]
    elif slow and not sums_db:
        most = SLOW_MOST_AIMED_40 if config.per_thread == 40 else most
    elif slow and config.per_thread == 40 and together == 1 and data > SLOW_WIDE_BYTES:
        least = most = SLOW_WIDE_COLUMN_BLOCKS
    elif not slow and config.per_thread >= 40:
        most = FAST_MOST_AIMED_40[sums_db]
    elif not slow and not sums_db:
        most = FAST_MOST_AIMED_OF_FOUR if config.slabs == 4 else most
    elif not slow and config.per_thread == 28:
        most = FAST_MOST_AIMED_28
    most = min(most, MOST_AIMED_OF_SEVERAL) if together > 1 else most
    return int(min(most, least + more * data / 1e6) * device.multiprocessors / 132)


def _column_blocks(config: BackwardConfig, problem: NormProblem, most: int, aim: int = 0) -> _ColumnBlocks:
    """At most so many, of slices of a power of two of sectors or, where none will do, of another divisor of the block's
    threads; of still others if there are to be about `aim`."""
    x, dy = problem.x_dtype.name, name_of(problem.dy_dtype)
    itemsize, vector = min(ITEMSIZE[x], ITEMSIZE[dy]), vector_of(config, problem)
    sector_threads = SECTOR_BYTES // (itemsize * vector)

    def slices(column_threads: int) -> int:
        return divide_up(problem.columns, column_threads * vector)

    def broken_lines(column_threads: int) -> bool:
        return column_threads * SECTOR_BYTES // sector_threads % LINE_BYTES != 0

    def batches(column_threads: int) -> int:
        return divide_up(problem.rows, config.threads // column_threads * COLUMN_BLOCK_BATCH)

    # Where no power of two will do, also of another divisor of the block's threads, or as wide as the block.
    divisors = [n for n in range(sector_threads, config.threads, sector_threads) if config.threads % n == 0]
    divisors.sort(key=lambda n: n // sector_threads & (n // sector_threads - 1) != 0)  # powers of two of sectors first
    column_threads = next((n for n in divisors if slices(n) <= most), config.threads)
    if aim:
        quarters = OTHER_SLICES if slices(column_threads) > 3 * most // 4 else OTHER_SLICES[:1]
        others = [column_threads * n // 4 for n in quarters]
        step, least = 2 * sector_threads, OTHER_SLICES_LEAST_SECTORS * sector_threads
        fit = [n for n in others if n % step == 0 and least <= n <= config.threads and slices(n) <= most]
        sums_db = kernels_sum_db(problem)

        def away(n: int) -> float:
            lines = 1 if sums_db else NARROW_SLICE if n < least else BROKEN_LINES if broken_lines(n) else 1
            return max(slices(n), aim) / min(slices(n), aim) * lines

        column_threads = min([column_threads, *fit], key=away)
        wider = _power_of_two_at_most(2 * column_threads)
        small = data_bytes(problem) <= WIDER_SLICES_BYTES and wider <= WIDER_SLICES_MOST * column_threads
        if sums_db and small and broken_lines(column_threads) and batches(wider) == batches(column_threads):
            column_threads = wider
    blocks, of_a_block = min(slices(column_threads), most), divide_up(slices(column_threads), most)
    return _ColumnBlocks(
        blocks=divide_up(blocks, config.cluster) * config.cluster,
        column_threads=column_threads,
        slices=of_a_block,
        parts=1,
        rows=divide_up(problem.rows * column_threads, config.threads) * of_a_block * _counts_as_rows(x, dy),
        sectors=column_threads // sector_threads,
    )


def _most_rows(found: _ColumnBlocks, config: BackwardConfig, problem: NormProblem, device: Device) -> float:
    """Of a thread of these."""
    width = min(found.sectors, 3) - 1
    if _is_float32(config, problem):
        return FLOAT32_ROWS * min(1, problem.columns * problem.x_dtype.itemsize / (found.sectors * SECTOR_BYTES))
    if not problem.want_dx:
        return COLUMN_BLOCK_ROWS_ALONE[width]
    sums_db, slow = kernels_sum_db(problem), device.has_slow_memory
    steep = width == 2 and config.groups > 1
    alone = config.groups == 1 and _is_usual(config, problem, most_slabs=8 if slow else 4)
    few_warps = config.threads < STAGED_MAX_THREADS if config.slabs > 1 else config.threads <= FAST_APART_THREADS
    if alone and (slow or not sums_db or few_warps):
        return math.inf  # by bytes alone
    if found.parts > 1:
        return COLUMN_BLOCK_ROWS[slow][sums_db][width]
    if _is_usual(config, problem):
        few = steep and found.blocks <= FEW_COLUMN_BLOCKS
        return FEW_COLUMN_BLOCKS_ROWS[slow][sums_db] if few else COLUMN_BLOCK_ROWS[slow][sums_db][width]
    if slow and steep and found.blocks <= SLOW_FEW_COLUMN_BLOCKS_ELSE:
        return SLOW_FEW_COLUMN_BLOCKS_ROWS_ELSE[sums_db]
    more = FAST_MORE_ROWS if data_bytes(problem) <= _more_rows_bytes(config, problem, device) else 1
    return more * COLUMN_BLOCK_ROWS_ELSE[slow][sums_db][width]


def _more_rows_bytes(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """Up to which there are FAST_MORE_ROWS times as many rows."""
    x, dy, sums_db = problem.x_dtype.name, name_of(problem.dy_dtype), kernels_sum_db(problem)
    if not _gains_by_more_rows(config, problem, device):
        return 0
    if "VECTOR=1" in config.definitions:
        if _is_long_of_two_sizes(config, problem):
            return max(_long_of_two_sizes_bytes(config, problem), FAST_TWO_SIZES_ROWS_BYTES)
        return FAST_FLOAT64_BYTES[sums_db] if x == dy == "float64" else 0
    if x != dy:
        return FAST_TWO_TYPES_OFF_16_BYTES if config.slabs == 1 else 0
    return FAST_OFF_16_BYTES.get((ITEMSIZE[x], vector_of(config, problem)), (0, 0))[sums_db]


def _two_sizes_bytes(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """FAST_TWO_SIZES_BYTES."""
    gains = _is_long_of_two_sizes(config, problem) and _gains_by_more_rows(config, problem, device)
    return _long_of_two_sizes_bytes(config, problem) if gains else 0


def _long_of_two_sizes_bytes(config: BackwardConfig, problem: NormProblem) -> int:
    full = config.groups > 1 or config.threads == STAGED_MAX_THREADS
    gains = problem.norm == "layernorm" or problem.x_dtype.itemsize > ITEMSIZE[name_of(problem.dy_dtype)]
    return FAST_TWO_SIZES_BYTES[problem.norm] if full and gains else 0


def _gains_by_more_rows(config: BackwardConfig, problem: NormProblem, device: Device) -> bool:
    """Whether something like it was timed: rows of more than a warp that follow one another, dy no wider than the
    arithmetic."""
    x, dy = problem.x_dtype.name, name_of(problem.dy_dtype)
    if not device.has_fast_memory or not problem.want_dx or is_short(problem) or ITEMSIZE[dy] > compute_itemsize(x):
        return False
    vector = "VECTOR=1" in config.definitions
    return rows_share_copies(problem, vector, {}, problem.x_row_stride, problem.dy_row_stride)


def _is_long_of_two_sizes(config: BackwardConfig, problem: NormProblem) -> bool:
    """FAST_TWO_SIZES_MOST_BLOCKS."""
    two_sizes = problem.x_dtype.itemsize != ITEMSIZE[name_of(problem.dy_dtype)]
    long = config.group_threads > WARP and config.slabs <= FAST_TWO_SIZES_MOST_BLOCKS
    return two_sizes and long and "VECTOR=1" in config.definitions


def column_parts_bytes(
    config: BackwardConfig, problem: NormProblem, column_blocks: int, column_threads: int, row_parts: int
) -> int:
    """Of what column blocks that share a slice's rows found."""
    if row_parts == 1:
        return 0
    entries = column_threads * vector_of(config, problem) * (2 if problem.want_dw and problem.want_db else 1)
    return 8 * column_blocks * entries


def vector_of(config: BackwardConfig, problem: NormProblem) -> int:
    """Columns that a column block's thread has side by side: kWideVector of backward.cuh."""
    if "VECTOR=1" in config.definitions:
        return access_width(problem.x_dtype.name, name_of(problem.dy_dtype))
    return narrow_of(config.definitions)


def _counts_as_rows(x: str, dy: str) -> float:
    """What a row of these types counts; where they differ in size, by bytes that a thread reads of it."""
    if ITEMSIZE[x] == ITEMSIZE[dy]:
        return 1 if ITEMSIZE[x] == 2 else COLUMN_BLOCK_LARGE_ROW
    return divide_up(access_width(x, dy) * (ITEMSIZE[x] + ITEMSIZE[dy]), 32)
