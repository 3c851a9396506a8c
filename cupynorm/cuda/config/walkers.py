"""How many blocks run, and who does what: row walkers, column blocks, the final reduction, pace."""

from __future__ import annotations

from typing import NamedTuple

from ...problem import NormProblem
from .common import (
    ITEMSIZE,
    STAGED_MAX_THREADS,
    STEP_COUNTERS,
    WARP,
    BackwardConfig,
    Device,
    ForwardConfig,
    compute_itemsize,
    divide_up,
    kernels_sum_db,
    name_of,
)

# One walker on a multiprocessor then beats two: LayerNorm, 1017x4096, where walkers met, 19.7 us, 21.0 with two.
FEW_ROWS_A_WALKER = 4
# With fewer steps a walker there are as few walkers as take no more steps each, if these are such a part or more:
# where 132 take 15 or 16, 128 take 16. 100 MB, RMSNorm, N=4096 36.2 → 35.6 us, 16384 36.2 → 35.8; 25 MB, 768, with 227
# of 264, 16.8 → 16.3, LayerNorm 1280, with 102 of 132, 19.5 → 18.9; forward, LayerNorm, 100 MB, N=65536 26.5 → 25.5,
# RMSNorm 8192 24.0 → 23.6. Not off 16 bytes, where fewer multiprocessors lost (4096 36.0 → 37.3), nor beside column
# blocks (LayerNorm, 25 MB, 1536 18.0 → 19.2, but 2560 16.8 → 16.0), nor forward where several blocks share a
# multiprocessor (LayerNorm 512 23.9 → 24.5).
EVEN_BELOW_STEPS, EVEN_LEAST_WALKERS = 48, 3 / 4
WORKSPACE_BYTES = 64 << 20
KEPT_BYTES = 16 << 20  # of workspace, for each stream; a call that needs more allocates its own
KEPT_COUNTER_BYTES = 64 << 10  # of these, for meetings of up to 8000 blocks
KEPT_EXCHANGE_BYTES = 32 << 10  # and for what gangs of up to 255 blocks in all exchange
STEP_COUNTERS_BYTES = STEP_COUNTERS * 128
# Where x, dy and dx together take at least the first and at most the second, x and dy are read so that they leave the
# L2 cache first, but not beside column blocks. RMSNorm, 25 MB, N=1024 15.8 → 15.3 us; 50 MB, N=16384 24.2 → 23.2. With
# 10 MB it gained nothing, with 75 MB little, and with 1 GB it took 3 to 13% longer.
READ_ONCE_BYTES = (16 << 20, 50 << 20)
# Where x, dy and dx take at most so many bytes, and column blocks (column_blocks.cuh) at most so many rows for each of
# their threads, these sum dw and db, and row walkers find dx alone. Rows by whether db is summed and by the sectors of
# memory that a slice of columns is wide: one, two, or more. RMSNorm, 64x1024 9.6 → 6.8 us, 1628x2560 17.7 → 14.8;
# LayerNorm, 64x4096 12.7 → 7.9, 407x10240 21.8 → 15.8. Where memory is slow (True), fewer walkers lose more.
#
# Of 16-bit types in vectors and small clusters, from a scan of 23 lengths and seven sizes with and without, 37 MB
# unless said: an H200, RMSNorm 10240, 57 rows, 20.1 → 18.5 us, 32768 20.9 → 18.8, LayerNorm 8192, 71, 21.9 → 19.6,
# 32768 23.2 → 19.9, 43 MB, 8192, 83, 23.9 → 22.1, 10240, 88, 25.9 → 24.1; an H100, LayerNorm 10240 28.3 → 24.3, 6144,
# 48, 25.5 → 23.4. But of few column blocks, beside walkers that take several rows a step, an H200, 31 MB, LayerNorm,
# 2560, 64 rows, 19.0 → 20.3, an H100, 25 MB, 51 rows, 19.8 → 21.9. Some lose within the limits: an H200, 37 MB, 7168
# 18.4 → 18.9; an H100, 28 MB, LayerNorm 5120 4%. Since a thread waits for sixteen rows at a time more are worth it,
# an H200, 37 MB, 4096, 71 rows, 19.1 → 18.0; an H100, 37 MB, 5120, 57, 22.8 → 21.1, 43 MB, 10240, 66, 26.1 → 22.9,
# 20480 27.1 → 23.5, 16384, 82, 24.9 → 23.9, but 37 MB, 2560, 76, 22.2 → 22.7, 25 MB, LayerNorm 1024, 32 of one
# sector, 17.9 → 18.8.
#
# Else: beyond these limits some lost, RMSNorm, 36 MB, N=131072 9%, LayerNorm without db, 31 MB, N=65536 14%; within
# them RMSNorm 65536 loses 4 to 5% from 28 MB on, LayerNorm without db 65536 7% at 25 MB. Where memory is slow, an H100:
# LayerNorm, 43 MB, 65536 29.5 → 27.1, but gangs, 262144, 34.1 → 35.3.
COLUMN_BLOCKS_BYTES = 44 << 20
COLUMN_BLOCK_ROWS = {False: ((28, 44, 72), (44, 48, 88)), True: ((28, 44, 84), (28, 44, 88))}
FEW_COLUMN_BLOCKS, FEW_COLUMN_BLOCKS_ROWS = 56, {False: (72, 62), True: (72, 46)}
COLUMN_BLOCKS_BYTES_ELSE = {
    False: {"rmsnorm": (32 << 20, 36 << 20), "layernorm": (24 << 20, 36 << 20)},
    True: {"rmsnorm": (32 << 20, 36 << 20), "layernorm": (24 << 20, 46 << 20)},
}
COLUMN_BLOCK_ROWS_ELSE = {False: ((28, 52, 76), (44, 48, 72)), True: ((28, 50, 76), (36, 48, 72))}
SLOW_FEW_COLUMN_BLOCKS_ELSE, SLOW_FEW_COLUMN_BLOCKS_ROWS_ELSE = 48, (60, 50)
COLUMN_BLOCK_ROWS_ALONE = (20, 22, 40)  # without dx: 25 MB, N=1024, with 32 rows of a sector, 15.2 → 17.0 us
COLUMN_BLOCK_LARGE_ROW = 4 / 3  # what a row of a larger type counts: float32, 25 MB, N=65536, 64 rows, 17.9 → 20.1 us
SECTOR_BYTES = 32
# At most so many column blocks, and as many times more as there may be blocks on a multiprocessor. On a small device
# fewer, so that at least so many walkers are left for each cluster of them; without dx, in small clusters, twice as
# many: LayerNorm, 814x5120 17.8 → 14.4 us.
COLUMN_BLOCKS = 64
COLUMN_BLOCKS_WALKERS = 5 / 8
# Walkers and column blocks are to end together. A call takes what the slower of them take: by kernels without the one
# or the other, 25 MB, an H200, N=4096, with 64 column blocks walkers take 15.3 us, column blocks 13.1, the call 15.3,
# with 32 14.2, 15.9 and 15.5, LayerNorm 16.4, 13.8 and 16.5, 14.8, 17.6 and 17.7. So there are about so many of 132
# multiprocessors: a first number, more for each MB of x, dy and dx, a most; without and with db. LayerNorm, 25 MB, with
# 64, 52, 43 and 32, an H200, 4096 16.0, 15.7, 15.3, 16.8 us, 16384 16.1, 15.7, 15.2, 16.7, 32768 with 64, 44 and 32
# 18.9, 15.8, 16.9; an H100 18.0, 18.5, 19.5, 20.7 and 17.9, 17.9, 18.5, 21.1, at 12 MB 11.8, 12.5, 11.6, 12.2. As
# slices of a power of two of sectors leave no such choice, they are so many quarters of that wide, too, but of whole
# pairs of sectors, and four or more: three and seven of them took longer than four and eight, as they touch more lines
# of memory (25 MB, an H100, LayerNorm, 5120, with 40, 46 and 54 blocks 20.5, 23.2, 20.6). Wider ones only where there
# would be over three quarters of the most, and where walkers have several steps: 6 MB, LayerNorm, 5120 with 40 and 32
# blocks 9.1, 9.9.
OTHER_SLICES, OTHER_SLICES_LEAST_SECTORS = (3, 5, 6, 8), 4
AIMED_COLUMN_BLOCKS = {
    False: {False: (32, 0.6, 48), True: (24, 2, 46)},
    True: {False: (22, 0.85, 52), True: (44, 0.4, 60)},
}
# For each of several blocks on a multiprocessor no more: LayerNorm, an H100, 37 MB, 10240 with 108 and 80 blocks 27.9,
# 23.5 us, 20480 24.7, 22.5. And without db slices of under 128 bytes count as so many times as far from the aim: 25 MB,
# 2048 with 64 and 32 blocks, an H200 15.4, 14.3, an H100 17.9, 17.1 (LayerNorm 17.9, 19.5).
MOST_AIMED_OF_SEVERAL, NARROW_SLICE = 46, 1.3
# Short rows make few slices of whole lines of memory, and narrow ones touch a line several times: several blocks share
# a slice's rows, where a thread of narrow slices would have more rows than these, by the sectors that such are wide. An
# H100, from a scan of 17 lengths and eight sizes, 3 to 43 MB. Where a multiprocessor has several blocks (up to 768
# columns), slices of a line: 6 MB, N=128 11.6 → 10.0 us, 256 11.3 → 9.3, LayerNorm 12.5 → 10.5, 12.9 → 10.2, 12 MB, 512
# 13.5 → 11.4, LayerNorm 15.2 → 12.7, 384 14.9 → 12.8. Up to 1280 columns, of two lines: 18 MB, 896 15.7 → 13.6,
# LayerNorm 16.8 → 14.0, 1280 18.4 → 14.7, 25 MB 20.0 → 17.9. Up to 3072: 37 MB, 2560 22.6 → 21.9, LayerNorm, 2048 23.5
# → 23.1. A power of two of them mostly makes whole batches of a thread's rows: 256, 25 MB, with 64 blocks 17.0 us, with
# 60 18.4. Limits of data and numbers of blocks are the scan's; where memory is fast they are inferred from it and from
# an H100 with 92 multiprocessors (8.4 MB, 128 12.8 → 11.0, LayerNorm 640 12.8 → 11.7; 17 MB, 896 16.5 → 14.5).
SHARED_LEAST_ROWS = (10.5, 22, 50)
SHARED_SHORT_COLUMNS, SHARED_MEDIUM_COLUMNS, SHARED_MOST_COLUMNS = 768, 1280, 3072
SHARED_SHORT_BYTES = {False: {False: 29 << 20, True: 32 << 20}, True: {False: 21 << 20, True: 27 << 20}}
SHARED_SHORT_FEW_BYTES, SHARED_SHORTEST_COLUMNS = 9 << 19, 128
SHARED_SHORT_BLOCKS, SHARED_SHORT_BLOCKS_MORE = {False: 48, True: 96}, 128
SHARED_MEDIUM_BLOCKS = {False: {False: 48, True: 56}, True: {False: 60, True: 64}}
SLOW_SHARED_POWERS_BYTES, SLOW_SHARED_POWERS_BLOCKS = 27 << 20, 80
SLOW_SHARED_LONG_BYTES, SLOW_SHARED_LONG_BLOCKS = {False: 27 << 20, True: 21 << 20}, {False: 56, True: 68}
LINE_BYTES = 128
# LayerNorm with 40 columns a thread, in one block, where memory is slow: 25 MB, 5120, with 54 blocks 19.5 us, with 80
# 17.8; 12 MB, 2560, with 40 12.5, with 80 11.9.
SLOW_WIDE_COLUMN_BLOCKS, SLOW_WIDE_BYTES = 80, 9 << 20
# One row alone gains past the ring and, else (off 16 bytes, in clusters, of 40 columns a thread), from so many columns
# on, LayerNorm 7.6 → 6.9 us, of 1024 6.2 → 6.6; where dw and db have another type than their sums, in any case.
COLUMN_BLOCKS_ONE_ROW = 4096
# So few rows, where no group has more than one, take the kernel's short way (kTakesFewRows of few_rows.cuh). An
# H100: 130x1024 7.2 → 6.8 us, LayerNorm 7.8 → 7.0, 264x1024 7.4 → 7.1, 8.0 → 7.3, but 512x1024 7.3 → 7.5, 7.6 → 7.8;
# of 40 columns a thread 1x5120 7.2 → 7.5, in clusters 1x16384 7.6 → 8.1.
FEW_ROWS_A_MULTIPROCESSOR = 2
ONE_WALKER_STEPS = 4  # so few steps take one block less time than several and their final reduction, if there is one
REDUCTION_RUN = 4  # kReductionRun of reduction.cuh
REDUCTION_BATCH = 10  # kReductionBatch of reduction.cuh


class Grid(NamedTuple):
    """The blocks of a backward launch."""

    walkers: int  # blocks, clusters, gangs, or blocks of one slab, that walk along the rows
    column_blocks: int = 0  # behind them, blocks that sum dw and db (column_blocks.cuh); 0: the walkers do
    column_threads: int = 0  # of a column block, side by side; those that lie so many apart share columns
    row_parts: int = 1  # column blocks that share a slice's rows
    few_rows: bool = False  # no group has more than one, and walkers sum no columns


class _ColumnBlocks(NamedTuple):
    blocks: int  # in whole clusters
    column_threads: int
    parts: int  # that share a slice's rows
    rows: float  # of each of the block's threads, were none left over; as they count
    sectors: int  # that a slice is wide


def grid(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> Grid:
    """`blocks_at_once` is how many blocks (clusters, gangs) the device holds at the same time."""
    found = _column_blocks_grid(config, problem, blocks_at_once, device)
    found = found or Grid(partial_rows(config, problem, blocks_at_once, device))
    sums = (problem.want_dw or problem.want_db) and not found.column_blocks
    most = min(found.walkers * config.groups, FEW_ROWS_A_MULTIPROCESSOR * device.multiprocessors)
    return found._replace(few_rows=takes_few_rows(config) and not sums and problem.rows <= most)


def takes_few_rows(config: BackwardConfig) -> bool:
    """Whether the kernel has a way past the ring for these: kTakesFewRows of few_rows.cuh."""
    return (
        config.route == "staged" and "VECTOR=1" in config.definitions and config.slabs == 1 and config.per_thread <= 32
    )


def _column_blocks_grid(
    config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device
) -> Grid | None:
    """None where column blocks are not worth it."""
    least_rows = 1 if problem.narrows_sums or problem.columns >= COLUMN_BLOCKS_ONE_ROW or takes_few_rows(config) else 2
    if config.route != "staged" or problem.rows < least_rows or not (problem.want_dw or problem.want_db):
        return None
    if _data_bytes(problem) > _most_bytes(config, problem, device):
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
        if _is_usual(config, problem):
            shared = _shared_column_blocks(config, problem, found, blocks_at_once, most, device)
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
            return Grid(walkers, found.blocks, found.column_threads, found.parts)
    return None


def has_column_blocks(config: BackwardConfig, problem: NormProblem, device: Device) -> bool:
    """Before it is known how many blocks the device holds at the same time: with as many as there may be."""
    blocks_at_once = device.multiprocessors * (STAGED_MAX_THREADS // config.threads)
    return _column_blocks_grid(config, problem, blocks_at_once, device) is not None


def _is_usual(config: BackwardConfig, problem: NormProblem) -> bool:
    """What most was timed of: 16-bit types, on 16 bytes, in small clusters or none."""
    two_bytes = problem.x_dtype.itemsize == 2 == ITEMSIZE[name_of(problem.dy_dtype)]
    return two_bytes and "VECTOR=1" in config.definitions and config.slabs <= 4


def _most_bytes(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    sums_db = kernels_sum_db(problem)
    usual = _is_usual(config, problem) and (problem.norm == "rmsnorm" or sums_db)
    return COLUMN_BLOCKS_BYTES if usual else COLUMN_BLOCKS_BYTES_ELSE[device.has_slow_memory][problem.norm][sums_db]


def _shared_column_blocks(
    config: BackwardConfig, problem: NormProblem, narrow: _ColumnBlocks, blocks_at_once: int, most: int, device: Device
) -> _ColumnBlocks | None:
    """Of wide slices, whose rows several blocks share; None where slices of a block each, as `narrow`, do as well."""
    slow, sums_db = device.has_slow_memory, kernels_sum_db(problem)
    columns, data = problem.columns, _data_bytes(problem)
    least_rows = SHARED_LEAST_ROWS[min(narrow.sectors, 3) - 1] * STAGED_MAX_THREADS / config.threads
    if config.slabs > 1 or narrow.rows <= least_rows or columns > SHARED_MOST_COLUMNS:
        return None
    scale = device.multiprocessors / 132 * most / COLUMN_BLOCKS

    def of(lines: int, blocks: float, powers: bool = False) -> _ColumnBlocks | None:
        """About so many blocks; at most so many, and a power of two of them for each slice, with `powers`."""
        threads = lines * LINE_BYTES // 16
        slices = divide_up(columns * problem.x_dtype.itemsize, lines * LINE_BYTES)
        parts = _power_of_two_at_most(blocks * scale / slices) if powers else round(blocks * scale / slices)
        if parts < 2:
            return None
        rows = divide_up(problem.rows * threads, config.threads * parts)
        return _ColumnBlocks(slices * parts, threads, parts, rows, lines * LINE_BYTES // SECTOR_BYTES)

    if blocks_at_once > device.multiprocessors:
        if data <= SHARED_SHORT_BYTES[slow][False]:
            return of(1, SHARED_SHORT_BLOCKS[data > SHARED_SHORT_FEW_BYTES], powers=True)
        more = data <= SHARED_SHORT_BYTES[slow][sums_db] and columns > SHARED_SHORTEST_COLUMNS
        return of(1, SHARED_SHORT_BLOCKS_MORE) if more else None
    if columns <= SHARED_SHORT_COLUMNS:
        return None
    if columns <= SHARED_MEDIUM_COLUMNS:
        if slow and (sums_db or data <= SLOW_SHARED_POWERS_BYTES):
            return of(2, SLOW_SHARED_POWERS_BLOCKS, powers=True)
        return of(2, SHARED_MEDIUM_BLOCKS[slow][sums_db])
    if not slow or data <= SLOW_SHARED_LONG_BYTES[sums_db]:
        return None
    blocks = SLOW_SHARED_LONG_BLOCKS[sums_db]
    found = [shared for lines in (2, 4)[: 1 if sums_db else 2] if (shared := of(lines, blocks))]
    return min(found, key=lambda shared: max(shared.blocks / blocks, blocks / shared.blocks), default=None)


def _power_of_two_at_most(number: float) -> int:
    return 1 << (int(number).bit_length() - 1) if number >= 1 else 0


def _aimed_column_blocks(config: BackwardConfig, problem: NormProblem, together: int, device: Device) -> int:
    """Of each of the blocks that are `together` on a multiprocessor."""
    if config.per_thread == 40 and kernels_sum_db(problem) and device.has_slow_memory and together == 1:
        if _data_bytes(problem) > SLOW_WIDE_BYTES:
            return SLOW_WIDE_COLUMN_BLOCKS * device.multiprocessors // 132
    least, more, most = AIMED_COLUMN_BLOCKS[device.has_slow_memory][kernels_sum_db(problem)]
    most = min(most, MOST_AIMED_OF_SEVERAL) if together > 1 else most
    return int(min(most, least + more * _data_bytes(problem) / 1e6) * device.multiprocessors / 132)


def _column_blocks(config: BackwardConfig, problem: NormProblem, most: int, aim: int = 0) -> _ColumnBlocks:
    """At most so many, of slices of a power of two of sectors; of others, too, if there are to be about `aim`."""
    x, dy = problem.x_dtype.itemsize, ITEMSIZE[name_of(problem.dy_dtype)]
    itemsize = min(x, dy)
    vector = 16 // itemsize if "VECTOR=1" in config.definitions else 1
    sector_threads = SECTOR_BYTES // (itemsize * vector)

    def slices(column_threads: int) -> int:
        return divide_up(problem.columns, column_threads * vector)

    column_threads = sector_threads
    while slices(column_threads) > most and config.threads % (2 * column_threads) == 0:
        column_threads *= 2
    if aim:
        quarters = OTHER_SLICES if slices(column_threads) > 3 * most // 4 else OTHER_SLICES[:1]
        others = [column_threads * n // 4 for n in quarters]
        step, least = 2 * sector_threads, OTHER_SLICES_LEAST_SECTORS * sector_threads
        fit = [n for n in others if n % step == 0 and least <= n <= config.threads and slices(n) <= most]
        narrow = 1 if kernels_sum_db(problem) else NARROW_SLICE

        def away(n: int) -> float:
            return max(slices(n), aim) / min(slices(n), aim) * (narrow if n < least else 1)

        column_threads = min([column_threads, *fit], key=away)
    blocks, of_a_block = min(slices(column_threads), most), divide_up(slices(column_threads), most)
    return _ColumnBlocks(
        blocks=divide_up(blocks, config.cluster) * config.cluster,
        column_threads=column_threads,
        parts=1,
        rows=divide_up(problem.rows * column_threads, config.threads) * of_a_block * _counts_as_rows(x, dy),
        sectors=column_threads // sector_threads,
    )


def _most_rows(found: _ColumnBlocks, config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """Of a thread of these."""
    width = min(found.sectors, 3) - 1
    if not problem.want_dx:
        return COLUMN_BLOCK_ROWS_ALONE[width]
    sums_db, slow = kernels_sum_db(problem), device.has_slow_memory
    steep = width == 2 and config.groups > 1
    if found.parts > 1:
        return COLUMN_BLOCK_ROWS[slow][sums_db][width]
    if _is_usual(config, problem):
        few = steep and found.blocks <= FEW_COLUMN_BLOCKS
        return FEW_COLUMN_BLOCKS_ROWS[slow][sums_db] if few else COLUMN_BLOCK_ROWS[slow][sums_db][width]
    if slow and steep and found.blocks <= SLOW_FEW_COLUMN_BLOCKS_ELSE:
        return SLOW_FEW_COLUMN_BLOCKS_ROWS_ELSE[sums_db]
    return COLUMN_BLOCK_ROWS_ELSE[slow][sums_db][width]


def column_parts_bytes(
    config: BackwardConfig, problem: NormProblem, column_blocks: int, column_threads: int, row_parts: int
) -> int:
    """Of what column blocks that share a slice's rows found."""
    if row_parts == 1:
        return 0
    itemsize = min(problem.x_dtype.itemsize, ITEMSIZE[name_of(problem.dy_dtype)])
    columns = column_threads * (16 // itemsize if "VECTOR=1" in config.definitions else 1)
    return column_blocks * columns * (2 if problem.want_dw and problem.want_db else 1) * 8


def _counts_as_rows(x_itemsize: int, dy_itemsize: int) -> float:
    """What a row of these types counts; where they differ in size, as many as vectors of the smaller are its mean."""
    if x_itemsize == dy_itemsize:
        return 1 if x_itemsize == 2 else COLUMN_BLOCK_LARGE_ROW
    return divide_up(x_itemsize + dy_itemsize, 2 * min(x_itemsize, dy_itemsize))


def partial_rows(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> int:
    """How many row walkers (blocks, clusters, gangs, or blocks of one slab) run, each with a partial row of dw and db.

    `blocks_at_once` is how many blocks (clusters, gangs) the device holds at the same time.
    """
    walkers = divide_up(blocks_at_once, config.slabs) if config.route == "split" else blocks_at_once
    if problem.rows <= FEW_ROWS_A_WALKER * walkers:
        walkers = min(walkers, device.multiprocessors)
    bytes_a_row = problem.columns * compute_itemsize(problem.x_dtype.name) * (2 if problem.want_db else 1)
    steps = divide_up(problem.rows, config.groups)
    one_takes_all = steps <= ONE_WALKER_STEPS and (problem.want_dw or problem.want_db)
    walkers = min(walkers, max(1, WORKSPACE_BYTES // 2 // bytes_a_row), 1 if one_takes_all else steps)
    walkers = max(1, walkers)
    return _evenly(steps, walkers) if config.route == "staged" and "VECTOR=1" in config.definitions else walkers


def _evenly(steps: int, walkers: int) -> int:
    """As few walkers as take no more steps each than so many do, where steps are few and few walkers are left out."""
    each = divide_up(steps, walkers)
    fewer = divide_up(steps, each)
    return fewer if each < EVEN_BELOW_STEPS and fewer >= EVEN_LEAST_WALKERS * walkers else walkers


def forward_walkers(config: ForwardConfig, rows: int, blocks_at_once: int, device: Device) -> int:
    """Of a forward launch; `blocks_at_once` is how many blocks (clusters) the device holds at the same time."""
    steps = divide_up(rows, config.groups)
    walkers = min(blocks_at_once, steps)
    alone = config.kernel == "forward_staged" and blocks_at_once * config.cluster <= device.multiprocessors
    fewer = _evenly(steps, walkers) if alone else walkers
    drawn = forward_steps(config, rows, fewer)[2]  # then whoever is done first takes more
    return walkers if drawn else fewer


def reads_once(problem: NormProblem) -> bool:
    """Whether the staged kernels' reads of x and dy say that these need not stay in the L2 cache; dx always counts."""
    least, most = READ_ONCE_BYTES
    return least <= _data_bytes(problem) <= most


def _data_bytes(problem: NormProblem) -> int:
    """Of x, dy and dx, whether it is wanted or not."""
    itemsizes = 2 * problem.x_dtype.itemsize + ITEMSIZE[name_of(problem.dy_dtype)]
    return problem.rows * problem.columns * itemsizes


def pace(config: BackwardConfig | ForwardConfig, rows: int, walkers: int) -> tuple[int, int]:
    """How many quarters of a step ahead of the average a walker may be (0: as it likes), and counters of steps."""
    long = takes_at_least(rows, config.paced_steps, config.groups, walkers)
    return config.lead if long else 0, config.step_counters


def takes_at_least(rows: int, steps: int, groups: int, walkers: int) -> bool:
    """So many steps of each walker."""
    return divide_up(rows, groups) >= steps * walkers


def least_steps(groups: int, rows: int, walkers: int) -> int:
    """Of each walker, of `groups` rows; some may have one more."""
    return divide_up(rows, groups) // walkers if walkers else 0


def forward_steps(config: ForwardConfig, rows: int, walkers: int) -> tuple[int, int, int]:
    """At least so many steps of each walker, the rows that the walkers take in these, and the steps that are drawn."""
    all_steps = divide_up(rows, config.groups)
    steps = int(all_steps * (1 - config.drawn_part)) // walkers
    # What the ring begins with is not drawn.
    if not config.drawn_part or all_steps < config.drawn_steps * walkers or steps < config.stages:
        return least_steps(config.groups, rows, walkers), rows, 0
    return steps, steps * walkers * config.groups, all_steps - steps * walkers


# Clusters that an H100 or H200 with 132 multiprocessors holds at once, one block on each, by cluster size.
_CLUSTERS_OF_132 = {2: 66, 4: 30, 8: 15, 16: 7}


def usual_clusters(cluster: int, device: Device) -> int:
    """With one block on each multiprocessor; of units that were not looked at, as many as have room."""
    known = _CLUSTERS_OF_132 if device.multiprocessors == 132 else {}
    return known.get(cluster, device.multiprocessors // cluster)


def clusters_at_once(reported: int, cluster: int, device: Device) -> int:
    """How many clusters walk the rows, given what the driver reports for this very unit.

    Units of one model differ in which multiprocessors are switched off, and so in what they report; the walkers
    set the order of the sums in dw and db, which are to be the same on all of them.
    """
    if cluster == 1 or device.multiprocessors != 132:
        return reported
    usual = usual_clusters(cluster, device)
    return usual * max(1, round(reported / usual))


def sums_walkers(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """Blocks that walk rows in the first sweep of the split route: 8 for a multiprocessor, no partial rows to pay."""
    return max(1, min(problem.rows, divide_up(8 * device.multiprocessors, config.slabs)))


def partial_row_stride(columns: int) -> int:
    """Elements from one partial row to the next: partial_row_stride of reduction.cuh."""
    return divide_up(columns, 4) * 4


def meeting_bytes(blocks: int) -> int:
    """struct Meeting of reduction.cuh, for a launch of so many blocks."""
    return STEP_COUNTERS_BYTES + 8 * (3 + blocks)


def exchange_bytes(blocks: int) -> int:
    """struct GangMemory of gang.cuh and its entries, eight of 16 bytes for each of so many blocks in all."""
    return 128 + 8 * 16 * blocks


def reduction_row_threads(threads: int, blocks: int, partial_rows: int, problem: NormProblem) -> int:
    """Threads that share a column in the final reduction, of blocks with so many threads.

    What a block waits for memory is to be short: its share of the slices, times the batches of partial rows in each.
    """
    threads = 1 << (threads.bit_length() - 1)
    outputs = int(problem.want_dw) + int(problem.want_db)

    def waits(row_threads: int) -> int:
        slices = outputs * divide_up(problem.columns, threads // row_threads * REDUCTION_RUN)
        batches = divide_up(partial_rows, row_threads * REDUCTION_BATCH)
        return divide_up(slices, blocks) * (batches + (row_threads > 1))

    return min((1 << power for power in range(threads.bit_length() - 1)), key=waits)
