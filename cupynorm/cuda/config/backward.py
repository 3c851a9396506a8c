"""Which kernel a backward problem takes, and the shape of its blocks."""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

from ...problem import NormProblem
from .column_blocks import has_column_blocks
from .common import (
    CLUSTERS,
    ITEMSIZE,
    LONG_LEAST_STEPS,
    SMALL_BLOCK,
    STAGED_MAX_THREADS,
    STAGED_MOST_STAGES,
    STEP_COUNTERS,
    WARP,
    BackwardConfig,
    Choice,
    Device,
    Kind,
    PartLanes,
    argument_bytes,
    columns_per_thread,
    compute_itemsize,
    compute_name,
    counts_to_try,
    divide_up,
    groups_in_block,
    have_gaps,
    in_whole_warps,
    is_short,
    kernels_sum_db,
    name_of,
    of_choice,
    part_bytes,
    part_definitions,
    reserved_definitions,
    reserved_of,
    rows_share_copies,
    short_row,
    slab_of,
    staged_choice,
    staged_definitions,
    staged_static_bytes,
    staged_threads,
    takes_part,
    vector_width,
)
from .walkers import takes_at_least, usual_clusters

# Steps of a ring: the one at work, the next (its sums are needed early), and at least one on its way.
STAGED_LEAST_STAGES = 3
# In a long launch the least stages take no more on a multiprocessor, where fewer groups or blocks do with less: 1 GB,
# float32, RMSNorm N=1024 251 → 242 us, 4096 251 → 245, LayerNorm 1536 254 → 248. At 25 and 100 MB it lost up to 7%. Not
# off 16 bytes and with mixed types, where it was not measured.
STAGED_MOST_RING_BYTES = 128 << 10
# In flight on a multiprocessor: see _ring_bytes().
STAGED_RING_BYTES, STAGED_LARGE_RING_BYTES = 112 << 10, 128 << 10
# In vectors or single columns, by bytes of x's type. In vectors, 1 GB, LayerNorm: N=384 265 → 249 us, N=192 273 →
# 254; with 32, with the registers it needs, 256 254 → 249, but at 100 MB 38 → 42, and 128 258 → 272; in float32
# LayerNorm loses 5% with 24. Single columns, 1 GB, an H100: RMSNorm 65 656 → 573, 129 533 → 476, 257 498 → 389, 350
# 376 → 371, LayerNorm 681 → 592, 579 → 520, 560 → 392, 415 → 377; with fewer lanes 12 lost at 25 MB (9 to 20 up to
# 28%; RMSNorm 33, which has it, loses 7%), though at 1 GB it gained 2 to 17%; 24 lost or gained less, and 20 but
# where rows are turned (33 with 20 549 → 1063, 129 497, turned 426); in float32 24 lost 6 to 18%, 12 gained nothing.
STAGED_PART_OF_WARP_LANES: dict[bool, dict[int, PartLanes]] = {
    True: {2: {24: (1, 16)}},
    False: {2: {12: (4, 32), 20: (8, 16)}},
}
# Rows of a warp or less with gaps between them: several are copied at once, with the gaps, where strides are on
# average at most so many times as long as rows, by whether they come in vectors; else they take the direct route. 300
# MB, an H100, direct and so, in vectors: RMSNorm N=512 with gaps of 8 columns 121.4 → 112.8 us, of 64 119.7 → 119.0,
# of 128 117.8 → 126.1 (not there), 384 with 64 131.9 → 121.2; LayerNorm 512 148.6 → 113.2, 148.0 → 119.0, 146.4 →
# 125.7, with 256 146.0 → 139.9, 64 with 64 152.8 → 178.1 (not there). Single columns: RMSNorm 512 with 1 218.4 →
# 116.6, with 513 221.9 → 175.2, 129 with 1 313.7 → 167.4, LayerNorm 228.2 → 119.0, 230.3 → 178.9, 343.0 → 183.4;
# strides of over twice the row were not timed.
MOST_COPIED_GAPS = {True: {"rmsnorm": 1.17, "layernorm": 1.5}, False: {"rmsnorm": 2.5, "layernorm": 2.5}}
# Of LayerNorm with db, x and dy of one type, in place of 32, by the bytes of x's type from so many threads a row on and
# in clusters of up to so many blocks: of 16 bits where they cover a block's columns, in accesses of 8 bytes, and where
# they fill its lanes with pace; in float32 where they fill the lanes of all blocks, with pace. 1 GB, not full, 1600
# 267.9 → 247.2 us, 3328 259.0 → 248.0, 6400 267.2 → 247.0 (with pace 269.9); 25 MB 3 to 6% less; but in pairs of blocks
# 13312 245.0 → 246.4, 13824 246.1 → 249.3 (not there).
# Full, 896 254.0 → 240.8, 3584 246.7 → 242.1, 7168 247.5 → 240.2, 14336 252.2 → 241.5, but without pace 28672 253.9 →
# 246.8 (with it 248.5); 25 MB 3584 16.6 → 15.9, 7168 16.9 → 16.0. float32, 1 GB, 1792 256.9 → 240.3, 3584 254.5 →
# 239.4, 7168 251.5 → 242.9, 14336 243.5 → 242.8; 25 MB 18.2 → 15.0, 17.1 → 17.1, 17.4 → 15.2, 18.0 → 15.2. Not there:
# float32 in clusters of eight, 28672 242.2 → 240.2; RMSNorm, whose loop is fast enough with 32.
STAGED_FILLING_COLUMNS = 28
STAGED_FILLING_LEAST_THREADS = {2: 32, 4: 64}
STAGED_FILLING_CLUSTER = {2: 4, 4: 2, 8: 0}
# With 40 columns a thread LayerNorm has no longer part of a row in blocks alone or in pairs, but twice as many blocks:
# 1 GB, 9216 243.9 us, 247.7 in one block; 10240, 20480 0.2 to 0.3% less so; though 18432 250.0, 247.8 in two. RMSNorm
# lost so, 9216 243.9 → 240.5 in one, 10240 242.1 → 240.6; and LayerNorm in clusters of four, 40960 246 us, with 32
# columns a thread in eight blocks 357. But where memory is slow lanes that all have 40, in one block, gain by column
# blocks: an H100, 10240, 50 MB 31.8 → 29.2, 62 MB 38.9 → 34.9, 75 MB 42.4 → 39.6, 1 GB 344.7 → 342.1, though 200 MB
# 81.3 → 82.8; in pairs of blocks 20480 lost, 37 to 62 MB 3 to 5% (not there). An H200, 10240, 25 MB 15.8 → 16.7, 50 MB
# 24.3 → 29.5, with the best number of column blocks 26.5, 1 GB 246.6 → 245.9 (not there).
STAGED_MOST_COLUMNS_LAYERNORM, STAGED_MOST_COLUMNS_CLUSTER = {40: 8448}, 2
# In launches with so many steps a walker and more, walkers keep pace: so many quarters of a step less than the average
# may one have before it. RMSNorm, 1 GB, N=4096: 246 us without, 242 so. With fewer steps RMSNorm gains as well, 150 and
# 200 MB 2% on average, 100 MB 0.9%, float32, 200 MB, 1024 59.2 → 57.1; LayerNorm with half as many, 200 MB, 4096 61.9 →
# 60.5, 8192 61.0 → 59.6 (with a quarter, at 100 MB, some lengths lost).
PACE_LEAST_STEPS = {"rmsnorm": 12, "layernorm": 24}
PACED_PART_LEAST_THREADS = 8  # of a row: see may_keep_pace()
# Backward (_lead() chooses), as many quarters as make so many bytes, of a step in all blocks of a multiprocessor, but
# no more than seven, and of RMSNorm's with four stages six, with more five. RMSNorm, 1 GB, with four, five, six and
# seven: three stages, N=1024 248.5, 243.9, 239.7, 238.1 us, 10240 244.4, 243.4, 241.9, 241.4, of 40 KB a step 5120
# 240.6, 239.6, 240.0, 242.2; four, 7168 243.3, 239.9, 238.7, 238.5, 32768 247.9, 240.5, 239.6, 239.9; five, 768 238.8,
# 238.4, 239.0, 240.5, 6144 239.5, 238.6, 238.8, 239.7. LayerNorm, four stages, 4096 262.9, 252.5, 245.1, 243.3, 8192
# 262.1, 251.3, 243.6, 241.7. With more most take longer: with eight, nine and ten, RMSNorm 1024 239.2, 241.1, 242.2,
# 4096 241.0, 242.6, 244.0, LayerNorm 1024 241.7, 242.3, 243.3, 5120, which has six, 243.1, then 244.8, 246.8, 247.8.
# More stages than five were not timed, but in clusters of four or more, with five, seven, nine and eleven, 24576 242.8,
# 239.8, 239.1, 239.9, 25600 274.0, 249.6, 249.0, 248.3, 49152 244.7, 240.2, 239.5, 239.9. LayerNorm in float32, with
# four, five, six and seven: 1024 244.2, 240.9, 243.8, (of another run) 247.4, 2048 245.3, 241.4, 242.4, 4096 244.8,
# 240.5, 242.0, 5120 242.4, 241.6, 240.8, 8192 244.2, 244.2, 243.7; in clusters 16384 257 with five, 248, 245.
LEAD_BYTES, MOST_LEAD, MOST_LEAD_ALONE_FLOAT32_LAYERNORM = 56 << 10, 7, 5
MOST_LEAD_OF_STAGES = {3: 7, 4: 6}  # RMSNorm
MOST_LEAD_OF_MORE_STAGES, MOST_LEAD_OF_MORE_STAGES_CLUSTERS = 5, 9
# Of whatever bytes, 16-bit types that gain from more. RMSNorm, 1 GB, with seven, eight, nine and ten: N=128 244.8,
# 244.0, 242.5, 243.5 us, 256 244.0, 243.4, 242.3, 243.8, 512 243.6, 242.2, 241.2, 242.1. LayerNorm with 24 columns a
# thread, seven (of an older tree), eight, nine, ten and twelve: 1536 244.9, 244.7, 244.5, 244.4, 243.7, 3072 245.5,
# 243.4, 243.2, 243.2, 243.3, 6144 247.3, 244.1, 243.9, 245.4, 247.1, 12288 248.6, 246.0, 244.6, 244.9, 245.2; in
# clusters of four and eight, 20480 246.6 (six), 244.7, 245.9, 246.8, 247.8, 32768 247.0, 248.4, 249.2, 248.8, 248.9,
# 65536 247.6, 247.5, 247.2, 247.0, 247.2.
LEAD_SHORT_ROWS = 9  # RMSNorm
LEAD_LAYERNORM_24_COLUMNS, LEAD_LAYERNORM_CLUSTERS = 9, 8
# With 28 columns a thread, LayerNorm, 1 GB, with seven, eight, nine and ten: 7168 244.8, 244.3, 244.2, 244.7 us, 14336
# 241.3, 241.4, 242.9, 244.3. In float32, by threads of a block that share a row, with five, seven and nine: 64, 1792
# 241.9, 240.3, 241.8; 128, 3584 241.3, 239.4, 240.7; 256, 7168 242.9, 246.5, 249.1, 14336 242.8, 246.1, 248.6.
LEAD_FILLING, LEAD_FILLING_FLOAT32 = 8, {64: 7, 128: 7, 256: 5}
# Where memory is slow, 16-bit types: less by so much, and no more than so much. 1 GB, an H100, RMSNorm, less by none,
# two, three, four and five: N=128 (nine) 343.6, 339.8, 338.4, 337.5, 337.4 us, 768 (five) 339.4, 337.0, 336.3, 335.1,
# 335.2, 1024 (seven) 339.6, 335.0, 337.2, 352.0, 353.6, 4096 339.2, 336.2, 337.0, 349.3, 355.5, 5120 (six) 340.9,
# 337.0, 336.8, 340.6, 371.2, 7168 338.5, 335.9, 335.6, 339.4, 358.1, 65536 338.5, 336.3, 335.5, 338.9, 370.5;
# LayerNorm 128 (seven) 347.2, 344.8, 344.4, 343.8, 343.1, 768 (nine) 348.7, 346.6, 344.6, 344.7, 341.6, 4096 (seven)
# 345.2, 341.5, 338.6, 338.9, 344.6, 5120 (six) 343.1, 339.7, 339.2, 343.3, 382.9, 7168 (eight) 345.7, 342.4, 340.7,
# 339.2, 337.8, 65536 344.8, 342.7, 341.3, 340.2, 339.7. In float32 by two LayerNorm 1024 338.8 → 336.0, but RMSNorm
# 339.6 → 348.5 and 16384 longer, though 256 and 4096 shorter (not there); gangs, LayerNorm, 131072 342.8 → 345.5 (not
# there). Rows with gaps, a block of a warp for each: RMSNorm 1024 with gaps of 64 354.8 → 375.4, LayerNorm 353.8 →
# 369.3 (not there), but of two warps, 2048 with gaps of 8 376.0 → 366.6, 388.7 → 374.7; several to a block, with gaps,
# were not timed (not there).
SLOW_LESS_LEAD, SLOW_MOST_LEAD = {"rmsnorm": 2, "layernorm": 3}, {"rmsnorm": 5, "layernorm": 4}
# So both gain in shorter launches, too. From twelve steps on, 100 MB, LayerNorm 1024 46.0 → 44.9, 4096 47.1 → 46.3,
# 8192 47.2 → 46.9 us; from eight on, 50 MB, 1024 28.2 → 27.7, 4096 29.5 → 28.7, RMSNorm 2048 27.6 → 27.1, 32768 29.7
# → 28.5; with six and seven steps RMSNorm, 42 MB, 1024 23.6 → 23.3, 5120 24.7 → 24.3, 8192 25.0 → 24.5, 50 MB 5120 27.9
# → 27.1, LayerNorm, 42 MB, 256 25.5 → 25.3, 4096 26.5 → 26.4, 50 MB 10240 32.1 → 32.2 (in another run 32.7 → 33.3).
SLOW_PACE_LEAST_STEPS = 6
# Rows that no cluster of eight holds go to gangs (gang.cuh), where memory is slow in place of clusters of sixteen,
# longer ones everywhere in place of two sweeps over memory. An H100, 1 GB, RMSNorm N=98304 337 → 341 us, 131072 339 →
# 339, 196608 344 → 340, 262144 348 → 341, 524288 605 → 341, LayerNorm 98304 351 → 347, 131072 353 → 345, 262144 376 →
# 345, 524288 621 → 359; 100 MB, RMSNorm 98304 46 → 48, 262144 54 → 49, 524288 78 → 51, LayerNorm 98304 50 → 53, 262144
# 62 → 54; float32, 1 GB, 98304 337 → 341, LayerNorm 348 → 342, 131072 597 → 340, 611 → 341. Not where clusters of eight
# hold the row: LayerNorm, 65536, 1 GB 350 → 342, but 25 MB 20 → 22.
MOST_CLUSTER_BESIDE_GANGS = 8
# Where memory is fast, clusters of sixteen take rows of so many bytes and more for each of their blocks. An H200, 1 GB,
# clusters and gangs, 98304 (12 KB) 276.7, 263.0 us, LayerNorm 303.4, 259.6, 106496 263.2, 266.0 and 283.0, 261.4,
# 114688 (14 KB) 249.0, 264.7 and 265.5, 265.0, 131072 241.7, 248.7 and 247.1, 256.0; 100 MB, 106496 37.3, 39.6 and
# 40.3, 42.5, 131072 38.9, 37.7 and 41.1, 41.4; 25 MB, 114688 20.1, 18.2 and 23.5, 19.9, 131072 as long; float32, 65536
# 241.1, 251.3 and 243.2, 254.3, 98304 241.3, 271.3 and 244.9, 262.1. There the blocks of a gang lack time, not bytes:
# of a step of 2900 cycles (LayerNorm 3100), RMSNorm, 131072, they wait 85 for rows, and 300 to 500 for each other.
FAST_LARGE_CLUSTER_LEAST_BYTES = 14 << 10
# A block's columns of x and dy together, at most: 32 columns a thread for 256 threads, in float32 for 128. They begin
# at whole lines of memory: else, 1 GB, an H100, RMSNorm, 262144 in gangs of 33 blocks, 339 → 359 us.
GANG_STEP_BYTES, GANG_COLUMNS_PER_THREAD, GANG_UNIT = 32 << 10, 32, 64
# Where gangs of the fewest blocks would leave more of the multiprocessors without work, they have more blocks, with
# fewer columns each. 1 GB, an H100: 300000 352.0 → 349.6 us, 400000 373.2 → 371.5, LayerNorm 383.8 → 377.0, 418.6 →
# 406.2, 700000 434.2 → 426.1, but RMSNorm 700000 380.3 → 385.0, and with hardly any left LayerNorm 262144 344 → 349.
GANG_LEAST_PART = 0.9
# Of the steps of a ring one is at work, two wait for their sums, one is on its way. An H100, 1 GB, with four and five:
# 131072 337.5, 338.0 us, 262144 338.8, 339.8, LayerNorm 342.1, 343.1 and 344.4, 344.7, float32, 65536, 336.0, 338.6 and
# 339.3, 340.6; with three that wait, and six steps, 131072 342.1, LayerNorm, five steps, 344.8.
GANG_STAGES = 4
# Pace, quarters of a step, by whether memory is slow and by bytes of x's type. An H100, rings of five steps, 131072,
# with four, five, seven, nine and none 339.3, 338.0, 339.7, 344.3, 367.4 us, LayerNorm 344.8, 343.1, 345.4, 347.2,
# 367.5; float32, 65536, with four, six, seven and nine 338.8, 338.6, 340.2, 343.2. But an H200, 262144 265.4 with five,
# 249.8 with thirteen, 250.1 without, LayerNorm 287.0, 259.6, 258.0.
GANG_LEAD = {False: {2: 0, 4: 0}, True: {2: 5, 4: 6}}
DIRECT_MAX_THREADS = {True: (256, 512), False: (256, 384)}  # of the direct route's variants: vectors, single columns
SPLIT_THREADS = 256
# Where more blocks share a multiprocessor, they count their steps in so many places, not in one (Pace of staged.cuh).
# RMSNorm, rows with gaps of 512 columns, from 1536 on of 64, a row a block, 1 GB, an H100: eight blocks, N=640 789 →
# 434 us, with gaps of 8 839 → 466 (since without pace: _lead()), 768 702 → 361, 1024 568 → 359, four, 1536 410 → 345,
# 2048 362 → 344, but two 3072 338 → 345, 4096 339 → 344. Without pace 369, 364, 363, 359, 356; 100 MB, 1024 58.9 us,
# so 50.2, without pace 48.9.
MOST_BLOCKS_A_COUNTER = {"rmsnorm": 2, "layernorm": 1}
STATIC_SHARED_BYTES = 1024  # more than the direct and split kernels declare
BACKWARD_ARGUMENTS = "12P4q8i7h?B"  # struct BackwardArguments in backward.cuh
# On a multiprocessor, not eight, of RMSNorm's rows of one warp, 32 single columns of 16 bits a thread, in launches of
# so many steps and more where memory is fast. An H100 with 92 multiprocessors, 700 MB, 897 290 → 266 us, 1001 270 →
# 256, 70 MB, 1001 38.6 → 37.5, 897 40.6 → 38.1; but rows of two warps, 2047, 257 → 265, and where memory is slow, 1 GB,
# 1001 352 → 360, 100 MB 46.1 → 47.2, 25 MB 18.9 → 20.6.
MANY_WARPS, MANY_WARPS_LEAST_STEPS = 12, 12
# kTurns of columns.cuh: single columns a thread, and the lanes that share a row, where a warp has several. 65 on eight
# lanes, 1 GB, an H100, 570 → 470 us, LayerNorm 590 → 521; 12 columns on sixteen lanes and more lost 2%.
TURNED_ROWS = {12: (8,), 20: (8, 16)}
BANKS = 32  # of shared memory, of four bytes
WIDENING_ARGUMENTS = "2P2i"  # struct WideningArguments in widen_w.cu


def backward_config(problem: NormProblem, aligned: bool, device: Device) -> BackwardConfig:
    """Choose the backward kernels; `aligned` says that every row of x, dy and dx starts at a multiple of 16 bytes."""
    x, dy = problem.x_dtype.name, name_of(problem.dy_dtype)
    vector = vector_width(x, dy) if aligned and problem.columns % vector_width(x, dy) == 0 else 1
    definitions = backward_definitions(problem.norm, x, dy, kernels_sum_db(problem), vector > 1, reserved_of(problem))
    per_thread = columns_per_thread(x)
    outer_bytes = _column_sums_bytes(problem, per_thread)

    if device.has_clusters and (staged := _staged(problem, vector > 1, definitions, device)):
        return staged
    if problem.columns <= WARP * per_thread:
        choice = staged_choice(x, dy, vector > 1, 1, device)
        parts = part_of_warp_lanes(x, vector > 1, choice, device)
        return _direct(problem, definitions, SMALL_BLOCK, *short_row(x, problem.columns, parts))
    threads = in_whole_warps(divide_up(problem.columns, per_thread))
    fits = outer_bytes * threads + STATIC_SHARED_BYTES <= device.shared_bytes
    if fits and threads <= DIRECT_MAX_THREADS[vector > 1][-1]:
        return _direct(problem, definitions, threads, per_thread, threads)
    slab = SPLIT_THREADS * per_thread
    return BackwardConfig(
        route="split",
        definitions=(*definitions, f"COLUMNS_PER_THREAD={per_thread}"),
        threads=SPLIT_THREADS,
        group_threads=SPLIT_THREADS,
        slab_columns=slab,
        slabs=divide_up(problem.columns, slab),
        shared_bytes=outer_bytes * SPLIT_THREADS,
    )


def _direct(
    problem: NormProblem, definitions: tuple[str, ...], threads: int, per_thread: int, group: int
) -> BackwardConfig:
    part, vector = takes_part(problem.x_dtype.name, (per_thread, group)), "VECTOR=1" in definitions
    turned = may_turn_rows(vector, (per_thread, group))
    return BackwardConfig(
        route="direct",
        definitions=(*definitions, *direct_definitions(per_thread, threads, vector, part, turned)),
        threads=threads,
        group_threads=group,
        slab_columns=problem.columns,
        slabs=1,
        shared_bytes=_column_sums_bytes(problem, per_thread) * threads,
    )


def direct_definitions(
    per_thread: int, threads: int, vector: bool, part: bool = False, turned: bool = False
) -> tuple[str, ...]:
    max_threads = next(most for most in DIRECT_MAX_THREADS[vector] if threads <= most)
    return f"COLUMNS_PER_THREAD={per_thread}", f"MAX_THREADS={max_threads}", *part_definitions(part, turned)


def _column_sums_bytes(problem: NormProblem, per_thread: int) -> int:
    """Shared memory that each thread needs for the second level of dw and db."""
    return per_thread * compute_itemsize(problem.x_dtype.name) * (2 if kernels_sum_db(problem) else 1)


def _staged(problem: NormProblem, vector: bool, definitions: tuple[str, ...], device: Device) -> BackwardConfig | None:
    """The smallest cluster whose blocks have room for a ring of enough rows, else a gang; None where there is neither.

    At N=8192, 16384 and 65536 no larger cluster than the smallest was over 1% faster.
    """
    name, dy_name = problem.x_dtype.name, name_of(problem.dy_dtype)
    width = vector_width(name, dy_name) if vector else 1
    small, strides = is_short(problem), (problem.x_row_stride, problem.dy_row_stride)
    several = rows_share_copies(problem, vector, MOST_COPIED_GAPS, *strides)
    gaps = small and have_gaps(problem, *strides)
    if small and not several:
        return None
    gangs = may_form_gangs(name, dy_name, vector, device)
    kind = (problem.norm, name, dy_name, kernels_sum_db(problem), vector)
    for cluster in CLUSTERS:
        slab = slab_of(problem.columns, cluster, width)
        most = 1 if small else device.largest_cluster
        if cluster > most or (cluster - 1) * slab >= problem.columns:
            continue
        if gangs and _leaves_to_gangs(cluster, slab * ITEMSIZE[name], device):
            continue
        choice = staged_choice(name, dy_name, vector, cluster, device)
        parts = part_of_warp_lanes(name, vector, choice, device)
        held = short_row(name, slab, parts) if small else staged_threads(slab, choice)
        if held is None or _is_too_long(kind, slab, held, cluster, device):
            continue
        if may_fill_lanes(kind, cluster, device) and _fills_lanes(problem.columns, cluster, slab, held, name):
            held = STAGED_FILLING_COLUMNS, held[1]
        paced = may_keep_pace(kind, held, cluster, full=slab == held[0] * held[1])
        split = _Split(kind, *held, cluster, slab, several and cluster == 1, gaps, paced)
        if config := _staged_blocks(problem, split, definitions, device):
            return config
    return _gang(problem, definitions, device) if gangs and not small else None


def _gang(problem: NormProblem, definitions: tuple[str, ...], device: Device) -> BackwardConfig | None:
    """As many blocks as the row needs, one on a multiprocessor, or as there are; None where these are too few."""
    x = problem.x_dtype.name
    most_columns = GANG_STEP_BYTES // (2 * ITEMSIZE[x])
    blocks, threads = divide_up(problem.columns, most_columns), most_columns // GANG_COLUMNS_PER_THREAD
    most_blocks = min(device.multiprocessors, threads)
    if blocks > most_blocks:
        return None
    gangs = device.multiprocessors // blocks
    if gangs * blocks < GANG_LEAST_PART * device.multiprocessors:
        blocks = min(most_blocks, device.multiprocessors // gangs)
    slab = divide_up(divide_up(problem.columns, blocks), GANG_UNIT) * GANG_UNIT
    blocks = divide_up(problem.columns, slab)
    outer_bytes = _column_sums_bytes(problem, GANG_COLUMNS_PER_THREAD) * threads
    step_bytes = 2 * part_bytes(x, True, slab)
    room = device.shared_bytes - staged_static_bytes(x, 1) - outer_bytes
    if GANG_STAGES * step_bytes > room:
        return None
    return BackwardConfig(
        route="staged",
        definitions=(*definitions, *gang_definitions()),
        threads=threads,
        group_threads=threads,
        slab_columns=slab,
        slabs=blocks,
        gang=True,
        stages=GANG_STAGES,
        shared_bytes=max(outer_bytes + step_bytes * GANG_STAGES, device.shared_bytes // 2),
        lead=GANG_LEAD[device.has_slow_memory][ITEMSIZE[x]],
        paced_steps=PACE_LEAST_STEPS[problem.norm],
    )


def may_form_gangs(x: str, dy: str, vector: bool, device: Device) -> bool:
    """Whether there are gangs beside clusters of over eight. Mixed types and single columns were not tried."""
    return vector and x == dy and ITEMSIZE[x] <= 4 and device.has_large_shared_memory


def _leaves_to_gangs(cluster: int, slab_bytes: int, device: Device) -> bool:
    """Whether gangs take rows that such a cluster would hold, of so many bytes for each block."""
    large = cluster > MOST_CLUSTER_BESIDE_GANGS
    return large and (device.has_slow_memory or slab_bytes < FAST_LARGE_CLUSTER_LEAST_BYTES)


def gang_definitions() -> tuple[str, ...]:
    return (*staged_definitions(GANG_COLUMNS_PER_THREAD, 1, part=False, paced=True), "GANG=1")


class _Split(NamedTuple):
    """How a row is split: over the blocks of a cluster, `slab` columns each, over the threads of a group."""

    kind: Kind
    per_thread: int
    group: int
    cluster: int
    slab: int
    several: bool  # rows in a block
    gaps: bool  # between these
    paced: bool  # in long launches


def _staged_blocks(
    problem: NormProblem, split: _Split, definitions: tuple[str, ...], device: Device
) -> BackwardConfig | None:
    """The blocks; larger ones than usual where beside these column blocks pay.

    Of 16-bit types and rows of two warps and more: LayerNorm, 25 MB, 1536 17.5 → 16.1 us, 3072 15.8 → 15.5, an H100, 18
    MB, 1536 15.9 → 14.7, 25 MB, 3072 19.6 → 18.1, RMSNorm 17.9 → 16.9, but 12 MB, 3072 10.2 → 10.8. Else only where
    with usual blocks they do not pay: LayerNorm, float32, 1536, 25 MB gained so, 17.6 → 15.3, RMSNorm's 768, 12 MB, and
    384, 6 MB, too, until usual ones had column blocks there; where both pay, larger ones lost up to 8%, as where
    neither does; of a warp or less LayerNorm 384, 12 MB 13.8 → 16.1, 768, 25 MB 17.9 → 19.0. Not timed: shorter rows of
    RMSNorm, LayerNorm without db, calls without dx.
    """
    config = _staged_config(problem, split, definitions, device)
    least_group = WARP // 2 if problem.norm == "rmsnorm" else 2 * WARP
    timed = problem.want_dx and (problem.norm == "rmsnorm" or problem.want_db) and split.group >= least_group
    usual = not timed or split.cluster > 1 or not split.kind[-1]
    if config is None or usual or config.threads == STAGED_MAX_THREADS:
        return config
    larger = _staged_config(problem, split, definitions, device, largest=True)
    if larger is None or not has_column_blocks(larger, problem, device):
        return config
    keeps_usual = split.group < 2 * WARP or problem.x_dtype.itemsize > 2
    return config if keeps_usual and has_column_blocks(config, problem, device) else larger


def _staged_config(
    problem: NormProblem, split: _Split, definitions: tuple[str, ...], device: Device, largest: bool = False
) -> BackwardConfig | None:
    """Of what has room, the largest block that pays, or the `largest`, and then as many as there may be; else None."""
    kind, per_thread, group, cluster, slab, several, gaps, paced = split
    _, name, dy_name, _, vector = kind

    def most_threads(keeps_pace: bool) -> int:
        return STAGED_MAX_THREADS if largest else _block_threads(kind, per_thread, keeps_pace)

    least_steps = _pace_least_steps(split, device)
    most_groups = groups_in_block(most_threads(paced), group, problem.rows) if several else 1
    at_least = functools.partial(takes_at_least, problem.rows)
    at_once = _threads_at_once(kind, per_thread, device)
    if _takes_many_warps(split, device) and at_least(MANY_WARPS_LEAST_STEPS, most_groups, device.multiprocessors):
        at_once = MANY_WARPS * WARP
    limited = vector and name == dy_name and at_least(LONG_LEAST_STEPS, most_groups, device.multiprocessors)
    pairs = [(g, b) for g in counts_to_try(most_groups) for b in counts_to_try(at_once // (g * group))]
    for groups, blocks in pairs:
        threads = groups * group
        outer_bytes = _column_sums_bytes(problem, per_thread) * threads
        parts = (name, problem.x_row_stride), (dy_name, problem.dy_row_stride)
        step_bytes = sum(part_bytes(part, vector, (groups - 1) * stride + slab) for part, stride in parts)
        long = at_least(least_steps, groups, usual_clusters(cluster, device) * blocks)
        keeps_pace = paced and long and (problem.want_dw or problem.want_db)  # where they meet
        too_large = limited and blocks * STAGED_LEAST_STAGES * step_bytes > STAGED_MOST_RING_BYTES
        too_many = groups > 1 and threads > most_threads(keeps_pace)
        if (too_large or too_many) and (groups, blocks) != pairs[-1]:
            continue
        room = device.shared_bytes // blocks - staged_static_bytes(name, cluster) - outer_bytes
        stages = min(room // step_bytes, STAGED_MOST_STAGES)
        if stages < STAGED_LEAST_STAGES:
            continue
        ring_bytes = _ring_bytes(kind, per_thread, cluster, blocks, keeps_pace)
        least = STAGED_LEAST_STAGES + _takes_a_stage_more(split, device)
        stages = min(stages, max(least, ring_bytes // (blocks * step_bytes)))
        part = takes_part(name, (per_thread, group))
        short = not part and has_short_rows(name, vector, per_thread, problem.columns - (cluster - 1) * slab)
        turned = part and may_turn_rows(vector, (per_thread, group))
        staged = staged_definitions(per_thread, cluster, part, paced, short, gaps, turned=turned)
        return BackwardConfig(
            route="staged",
            definitions=(*definitions, *staged),
            threads=threads,
            group_threads=group,
            slab_columns=slab,
            slabs=cluster,
            cluster=cluster,
            stages=stages,
            # At least so much that no more blocks fit.
            shared_bytes=max(outer_bytes + step_bytes * stages, device.shared_bytes // (blocks + 1)),
            lead=_lead(split, stages, blocks, step_bytes, device) if paced else 0,
            paced_steps=least_steps,
            step_counters=STEP_COUNTERS if blocks > MOST_BLOCKS_A_COUNTER[problem.norm] else 1,
        )
    return None


def may_turn_rows(vector: bool, held: tuple[int, int]) -> bool:
    """Whether kernels turn a warp's rows (TURN_ROWS); `held` is what short_row() chose."""
    per_thread, group = held
    return not vector and group in TURNED_ROWS.get(per_thread, ())


def turn_of_rows(config: BackwardConfig, problem: NormProblem) -> int:
    """Quarters by which a warp's rows are turned, kTurns of columns.cuh: those that spread them best over the banks."""
    lanes, per_thread = config.group_threads, config.per_thread
    if "TURN_ROWS=1" not in config.definitions:
        return 0
    dy_itemsize = ITEMSIZE[name_of(problem.dy_dtype)]
    of_both = (problem.x_row_stride, problem.x_dtype.itemsize), (problem.dy_row_stride, dy_itemsize)

    def rows_of_a_bank(turn: int, stride: int, itemsize: int) -> int:
        """Of the rows' first columns, one for each lane, the most that lie in one bank."""
        found = Counter[int]()
        for row in range(WARP // lanes):
            first = row * stride + row * turn % 4 * (per_thread // 4) * lanes
            found.update({(first + lane) * itemsize // 4 % BANKS for lane in range(lanes)})
        return max(found.values())

    return min(range(4), key=lambda turn: sum(rows_of_a_bank(turn, *one) for one in of_both))


def may_keep_pace(kind: Kind, held: tuple[int, int], cluster: int, full: bool) -> bool:
    """Whether walkers keep pace in long launches; not where a row is shorter than a thread's columns (8: 345 → 371 us).

    `held` is what short_row() or staged_threads() chose; `full` says that the lanes of every block, but perhaps the
    last of a cluster, all hold as many columns. With db LayerNorm, at 1 GB, gains with 16 columns a thread (64 252
    → 249 us, 128 252.6 → 248.2, 256 250.8 → 247.3, 448 255 → 248; 192 and 320 as long), 24 (768 252.5 → 243.3, 1536
    246.6 → 244.5, 3072 245.8 → 243.2, 6144 246.7 → 243.9, 12288 246.6 → 244.6; with _ring_bytes() of 128 KB also
    192 251.0 → 246.7, 384 247.7 → 243.9), 28 (STAGED_FILLING_COLUMNS), 32 (see _ring_bytes(); in clusters of four
    and eight 32768 252.4 → 248.4, 65536 250.4 → 247.5) and 40 (5120 255 → 248, in clusters 10240 252 → 247, 20480
    250 → 247, 81920 248.5 → 247.0). Its loop is then nearly as slow as memory, so that it loses where columns of a
    step are missing or fewer multiprocessors walk: not full (24 640 260 → 276, of an older tree, 28 6400 247.0 →
    269.9, 32 7168 246.2 → 255.1, 14336 as long), in clusters from four blocks on with 24 (24576 251.1 → 263.5,
    98304 271.1 → 285.5) and 28 (28672 246.8 → 248.5), of sixteen, as mixed types have, with 32 (131072 247.5 →
    259.2); nor with 24 where four lanes or fewer hold a row (24 277 → 295, 96 254.6 → 255.1).
    In float32 it gains with 16 (256 252.6 → 246.8), 32 (1024 248.8 → 243.0, 16384 252.3 → 246.6, in clusters of
    eight 32768 255.4 → 247.6) and 40 (10240 249.3 → 244.5), but with 32 not where not full (14336 249.4 → 272.9),
    nor for all lengths with 24 (768 249.6 → 244.6, 3072 248.6 → 253.7). Not timed, so without pace: with db types
    of two sizes, float32 with 40 columns in clusters where not full, and with 32 columns or in clusters float64,
    and RMSNorm, which sums db where the types of x and dy differ.
    """
    norm, x, dy, sums_db, vector = kind
    per_thread, group = held
    if not vector or (group == 1 and not full):
        return False
    if not sums_db:
        return True
    if ITEMSIZE[x] != ITEMSIZE[dy]:
        return False
    if norm == "layernorm" and ITEMSIZE[x] == 4:
        gains = per_thread in (32, 40) and full
        return gains or per_thread in (16, STAGED_FILLING_COLUMNS) or (per_thread == 40 and cluster == 1)
    if norm == "layernorm" and ITEMSIZE[x] == 2:
        if per_thread in (24, STAGED_FILLING_COLUMNS):
            return full and cluster <= 2 and group >= PACED_PART_LEAST_THREADS
        return per_thread == 16 or (cluster <= 8 and (per_thread == 40 or (per_thread == 32 and full)))
    return cluster == 1 and per_thread in (16, 40) and group >= WARP


def _is_paced_part(kind: Kind, per_thread: int, group: int) -> bool:
    """LayerNorm's rows of parts of a warp that keep pace, but from LONG_LEAST_STEPS on: 200 MB, 192 62.7 → 64.3 us."""
    return kind[0] == "layernorm" and per_thread == 24 and group < WARP


def _pace_least_steps(split: _Split, device: Device) -> int:
    """Of a walker, from which on it keeps pace."""
    if _is_paced_part(split.kind, split.per_thread, split.group):
        return LONG_LEAST_STEPS
    usual = PACE_LEAST_STEPS[split.kind[0]]
    return min(usual, SLOW_PACE_LEAST_STEPS) if _keeps_closer(split, device) else usual


def has_short_rows(x: str, vector: bool, per_thread: int, least_columns: int) -> bool:
    """SHORT_ROWS of columns.cuh, where blocks have so many columns of a row or more.

    Kernels for both took NVRTC a quarter longer: N=4095 0.90 s of one core, not 0.75, LayerNorm 1.15, not 0.84.
    """
    return not vector and per_thread > columns_per_thread(x) and least_columns < WARP * per_thread


def _has_short_steps(kind: Kind, per_thread: int) -> bool:
    """24 columns a thread of 16-bit types, RMSNorm or LayerNorm with db: larger blocks and rings pay with pace."""
    norm, x, dy, sums_db, _ = kind
    return ITEMSIZE[x] == ITEMSIZE[dy] == 2 and per_thread == 24 and sums_db == (norm == "layernorm")


def _ring_bytes(kind: Kind, per_thread: int, cluster: int, blocks: int, keeps_pace: bool) -> int:
    """What the `blocks` on a multiprocessor are to have in flight, if that makes more than the least stages.

    More bytes lose: under the load some multiprocessors get ahead, by up to 15% at 160 KB, and in the end wait for the
    others. 1 GB: RMSNorm, N=4096, main kernel, 247 us with 96 KB, 255 with 128 KB. With 112 KB LayerNorm gains, slower
    over a row, where these make four stages of three: N=7168 260 → 247; and where it keeps pace RMSNorm: 7168 248 →
    242, 14336 248 → 243. With 128 KB large clusters gain, whose blocks wait for each other across multiprocessors:
    N=65536 255 with 96 KB, 244 so, 247 with 160 KB; and of those that keep pace LayerNorm with db (1024 244 → 243.5,
    4096 249 → 244, 8192 248.5 → 243), both with 24 columns a thread of 16-bit types (RMSNorm 1536 242.8 → 241.6, 12288
    243.2 → 241.6, two blocks of four warps took 247.3 at 1536; LayerNorm with larger blocks, too, 384 247.7 → 243.9,
    768 243.8 → 242.2, 1536 244.8 → 242.8, 12288 243.6 → 242.6) and RMSNorm in clusters of four (32768 246.7 → 242.8);
    but 512 243.3 → 250.6, 4096 241.3 → 243.2, LayerNorm 512 243.5 → 250.4, 7168 244.4 → 248.4 (144 KB). Off 16 bytes
    RMSNorm has 112 KB, too: 100 MB, 7001 38.8 us with 96 KB, 36.2 so, 12289 41.1 and 37.5. Float32, RMSNorm with 128
    KB: 1 GB, 512 240.9 → 242.4, 2048 243.2 → 241.7, others within 0.5%. Not timed: LayerNorm without db.
    """
    norm, x, _, sums_db, vector = kind
    if cluster >= 8:
        return STAGED_LARGE_RING_BYTES
    if not vector:
        return STAGED_RING_BYTES
    if norm == "rmsnorm":
        large = per_thread == 32 and cluster == 4 and ITEMSIZE[x] == 2 and not sums_db
    else:
        large = sums_db and (per_thread == 32 or (per_thread == 16 and ITEMSIZE[x] == 4))
    large |= _has_short_steps(kind, per_thread) and blocks == 1
    return STAGED_LARGE_RING_BYTES if keeps_pace and large else STAGED_RING_BYTES


def _lead(split: _Split, stages: int, blocks: int, step_bytes: int, device: Device) -> int:
    """In quarters of a step, given the blocks of a multiprocessor and the bytes of a step.

    Blocks of one warp, which rows that lie apart have, keep no pace where memory is fast. An H200, gaps of 64, 100 MB,
    768 44.4 → 38.9 us, 1024 41.5 → 38.2, 300 MB 106.2 → 86.9, 97.0 → 86.3, LayerNorm 107.0 → 90.0, 99.3 → 91.4,
    float32, 700 MB, LayerNorm 516 231.9 → 219.8, 1024 212.8 → 184.3; but of two warps 2048 83.1 → 82.9, LayerNorm 84.8
    → 86.4, with gaps of 8 97.3 → 106.1 (not there).
    """
    norm = split.kind[0]
    lead = _usual_lead(split, stages, blocks, step_bytes)
    if split.group == WARP and split.cluster == 1 and not split.several and not device.has_slow_memory:
        return 0
    if not lead or not _keeps_closer(split, device):
        return lead
    return min(lead - SLOW_LESS_LEAD[norm], SLOW_MOST_LEAD[norm])


def _keeps_closer(split: _Split, device: Device) -> bool:
    """Whether pace is kept as it gains where memory is slow (SLOW_LESS_LEAD)."""
    _, x, dy, _, _ = split.kind
    timed = ITEMSIZE[x] == ITEMSIZE[dy] == 2 and not split.gaps and (split.several or split.group > WARP)
    return device.has_slow_memory and timed


def _usual_lead(split: _Split, stages: int, blocks: int, step_bytes: int) -> int:
    """The same where memory is fast, or rows have gaps.

    RMSNorm's rows of a warp that 24 columns a thread do not fill keep no pace where eight blocks share a
    multiprocessor, which is so of rows with gaps alone. 16-bit types, an H100, 1 GB, N=640 432 → 373 us, 704 392 → 370,
    576 377 → 375, 100 MB 53.0 → 50.8, 52.4 → 50.7, 54.0 → 51.6; but 832 359 → 369, 1152 353 → 364, 1408 351 → 361, 1920
    344 → 356.
    """
    (norm, x, *_), per_thread, group, cluster, slab, *_ = split
    crowded = norm == "rmsnorm" and ITEMSIZE[x] == 2 and blocks > MOST_BLOCKS_A_COUNTER[norm]
    if crowded and per_thread == 24 and group == WARP and slab < per_thread * group:
        return 0
    if per_thread == STAGED_FILLING_COLUMNS:
        return LEAD_FILLING if ITEMSIZE[x] == 2 else LEAD_FILLING_FLOAT32[group]
    if ITEMSIZE[x] == 2:
        if norm == "rmsnorm" and per_thread == columns_per_thread(x):
            return LEAD_SHORT_ROWS
        if norm == "layernorm" and per_thread == 24:
            return LEAD_LAYERNORM_24_COLUMNS
        if norm == "layernorm" and cluster >= 4:
            return LEAD_LAYERNORM_CLUSTERS
    if norm == "rmsnorm":
        more = MOST_LEAD_OF_MORE_STAGES if cluster <= 2 else MOST_LEAD_OF_MORE_STAGES_CLUSTERS
        most = MOST_LEAD_OF_STAGES.get(stages, more)
    else:
        most = MOST_LEAD if ITEMSIZE[x] == 2 or cluster > 1 else MOST_LEAD_ALONE_FLOAT32_LAYERNORM
    return min(most, round(4 * LEAD_BYTES / (blocks * step_bytes)))


def may_fill_lanes(kind: Kind, cluster: int, device: Device) -> bool:
    """Whether there are kernels with STAGED_FILLING_COLUMNS: where they gain on compute capability 9.0."""
    norm, x, dy, sums_db, vector = kind
    gains = norm == "layernorm" and sums_db and vector and x == dy and device.has_large_shared_memory
    return gains and cluster <= STAGED_FILLING_CLUSTER[ITEMSIZE[x]]


def _fills_lanes(columns: int, cluster: int, slab: int, held: tuple[int, int], x: str) -> bool:
    """Whether STAGED_FILLING_COLUMNS take the place of 32; `held` is what staged_threads() chose."""
    per_thread, group = held
    covered = STAGED_FILLING_COLUMNS * group
    if per_thread != 32 or group < STAGED_FILLING_LEAST_THREADS[ITEMSIZE[x]] or slab > covered:
        return False
    return columns == covered * cluster or (ITEMSIZE[x] == 2 and cluster != 2)


def _is_too_long(kind: Kind, slab: int, held: tuple[int, int], cluster: int, device: Device) -> bool:
    """Whether a block's part of a row goes to more blocks though it has room; `held` is what staged_threads() chose."""
    norm, _, _, sums_db, vector = kind
    per_thread, group = held
    if norm != "layernorm" or cluster > STAGED_MOST_COLUMNS_CLUSTER:
        return False
    if cluster == 1 and slab == per_thread * group and device.has_slow_memory and vector and sums_db:
        return False
    return slab > STAGED_MOST_COLUMNS_LAYERNORM.get(per_thread, slab)


def _threads_at_once(kind: Kind, per_thread: int, device: Device) -> int:
    """Threads on a multiprocessor, no more than kThreadsAtOnce of backward_staged.cu."""
    _, x, _, sums_db, vector = kind
    usual, few_registers = columns_per_thread(x), ITEMSIZE[x] < 4 or not sums_db
    if vector:
        return 512 if per_thread <= usual and device.compute_capability < (12, 0) else STAGED_MAX_THREADS
    if per_thread < usual or (per_thread == usual and device.compute_capability < (10, 0)):
        return 512
    return 384 if 2 * per_thread <= 3 * usual and few_registers else STAGED_MAX_THREADS


def _takes_many_warps(split: _Split, device: Device) -> bool:
    """MANY_WARPS: kManySingles of backward_staged.cu, where that gains."""
    norm, x, dy, sums_db, vector = split.kind
    few_registers = norm == "rmsnorm" and ITEMSIZE[x] == ITEMSIZE[dy] == 2 and not sums_db and not vector
    return few_registers and device.is_fast_9_0 and split.group == WARP and split.per_thread == 32


def _takes_a_stage_more(split: _Split, device: Device) -> bool:
    """Of whole warps with 32 or 36 single columns of 16 bits a thread, where memory is fast, four stages though three
    have _ring_bytes(); RMSNorm where a row takes eight warps of a block.

    An H100 with 92 multiprocessors, 70 and 700 MB: RMSNorm 8191 38.7 → 36.8, 271 → 250 us, 9001 38.7 → 37.3, 263 →
    255, in pairs 16385 340 → 331; LayerNorm 1001 41.1 → 39.5, 292 → 289, 2047 39.3 → 38.3, 262 → 256, 4001 39.7 → 38.1,
    264 → 250, 8191 40.9 → 38.4, 274 → 248, 16385 368 → 359; but RMSNorm 2047 257 → 262, 4095 257 → 263, clusters of
    eight, 65537, 527 → 544, 591 → 603, 24 columns, LayerNorm, 3001, 256 → 272, 40, RMSNorm, 10001, 256 → 262. Where
    memory is slow it loses: 1 GB, 8191 348 → 357, LayerNorm 1001 350 → 366, 4095 354 → 362.
    """
    norm, x, dy, _, vector = split.kind
    timed = not vector and ITEMSIZE[x] == ITEMSIZE[dy] == 2 and split.per_thread in (32, 36) and split.cluster < 8
    return timed and device.is_fast_9_0 and (norm == "layernorm" or split.group == STAGED_MAX_THREADS)


def part_of_warp_lanes(x: str, vector: bool, choice: Choice, device: Device) -> PartLanes:
    """Columns a thread, beside columns_per_thread(), of rows that take a part of a warp."""
    return of_choice(STAGED_PART_OF_WARP_LANES[vector].get(ITEMSIZE[x], {}), choice, device)


def _block_threads(kind: Kind, per_thread: int, keeps_pace: bool) -> int:
    """Of a block with several groups: as many as there may be, for fewer partial rows of dw and db, and one ring.

    RMSNorm, N=4096, 25 MB, where walkers met: 17.4 us with four warps, 16.9 with eight; LayerNorm 19.5 and 18.6. But
    half as many where all would wait for each other's copies (staged.cuh: a team is then a whole block), unless pace is
    kept by _has_short_steps(): eight gain with the larger ring of _ring_bytes(), RMSNorm, 1 GB, N=384 244.3 → 243.9 us,
    768 243.5 → 242.2, 1536 244.1 → 241.6, 3072 243.3 → 242.5 (with the smaller one 247.4, 243.0, 242.8, 244.0). Without
    pace 3072 lost at 100 MB, 35.9 → 37.8, LayerNorm at 1 GB, 246.7 → 248.9. Not timed in float32. With
    STAGED_FILLING_COLUMNS eight gain in any case: 25 MB, 1792, beside 32 columns, 16.9 → 21.1 us with four, 17.0 → 16.1
    with eight. Of little data: _staged_blocks().
    """
    _, x, _, _, vector = kind
    teams = vector and per_thread * compute_itemsize(x) >= 128
    may_wait = keeps_pace and _has_short_steps(kind, per_thread)
    filling = per_thread == STAGED_FILLING_COLUMNS and ITEMSIZE[x] == 2
    many = teams or may_wait or filling or per_thread == columns_per_thread(x)
    return STAGED_MAX_THREADS if many else STAGED_MAX_THREADS // 2


def widening_definitions(x: str) -> tuple[str, ...]:
    return f"COMPUTE_TYPE={compute_name(x)}", argument_bytes(WIDENING_ARGUMENTS)


def backward_definitions(
    norm: str, x: str, dy: str, want_db: bool, vector: bool, reserved: tuple[str, ...] = reserved_definitions()
) -> tuple[str, ...]:
    return (
        f"LAYER_NORM={int(norm == 'layernorm')}",
        f"X_TYPE={x}",
        f"DY_TYPE={dy}",
        f"WANT_DB={int(want_db)}",
        f"VECTOR={int(vector)}",
        *reserved,
        argument_bytes(BACKWARD_ARGUMENTS),
    )
