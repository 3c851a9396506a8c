"""Which kernel a backward problem takes, and the shape of its blocks."""

from __future__ import annotations

import functools
from itertools import product
from typing import NamedTuple

from ...problem import NormProblem
from .column_blocks import has_column_blocks
from .common import (
    ANY_WARPS,
    AS_GOOD_AS_FULL,
    CLUSTERS,
    ITEMSIZE,
    LONG_LEAST_STEPS,
    ODD,
    ODD_BY_ELEMENT,
    ODD_IN_WORDS,
    SINGLE,
    SMALL_BLOCK,
    STAGED_MAX_THREADS,
    STAGED_MOST_STAGES,
    STEP_COUNTERS,
    WARP,
    Access,
    BackwardConfig,
    Choice,
    Columns,
    Device,
    Kind,
    PartLanes,
    access_of,
    argument_bytes,
    asks_for_gaps,
    columns_per_thread,
    compute_itemsize,
    compute_name,
    counts_to_try,
    divide_up,
    for_dx_alone,
    groups_in_block,
    has_whole_warps,
    in_whole_warps,
    is_short,
    kernels_sum_db,
    leaves_lines,
    may_leave_lines,
    most_teams,
    name_of,
    odd_slack_bytes,
    odd_span,
    of_choice,
    part_bytes,
    part_definitions,
    part_lanes,
    place_bytes,
    reserved_definitions,
    reserved_of,
    rows_share_copies,
    short_row,
    slabs,
    splits,
    staged_choice,
    staged_definitions,
    staged_static_bytes,
    staged_threads,
    vector_width,
)
from .walkers import KEPT_BYTES, takes_at_least, usual_clusters
from .wide import wide_config

# Steps of a ring: the one at work, the next (its sums are needed early), and at least one on its way.
STAGED_LEAST_STAGES = 3

# In a long launch the least stages take no more on a multiprocessor, where fewer groups or blocks do with less
# (float32, 1 GB, N=1024: 251 → 242 us). Not off 16 bytes, with mixed types, and with more columns a thread than so
# many (LayerNorm, 1 GB, 2768, with 24, with 44 and half the groups, and so: 259.3, 304.7, 243 us).
STAGED_MOST_RING_BYTES, STAGED_MOST_RING_COLUMNS = 128 << 10, 40

# In flight on a multiprocessor: see _ring_bytes().
STAGED_RING_BYTES, STAGED_LARGE_RING_BYTES = 112 << 10, 128 << 10

# In vectors, by bytes of x's type (1 GB, LayerNorm, N=384: 265 → 249 us).
STAGED_PART_OF_WARP_LANES: dict[int, PartLanes] = {2: {24: (1, 16)}}

# Of 16-bit types, by the elements of an access, where there are several: NARROW_VECTORS of common.py (1 GB, LayerNorm,
# N=76, with eight lanes of 12 columns and four of 20: 341 → 260 us).
NARROW_PART_OF_WARP_LANES: dict[int, PartLanes] = {
    4: {12: (4, 32), 20: (2, 16)},
    2: {12: (4, 32), 20: (4, 16)},
}

# And of odd rows (an H100 with 92 multiprocessors, 700 MB, 161, with sixteen lanes of 12 columns and eight of 24: 371 →
# 279 us).
ODD_PART_OF_WARP_LANES: PartLanes = {12: (4, 32), 20: (8, 16), 24: (8, 16)}

# Rows of a warp or less with gaps between them: several are copied at once, with the gaps, where strides are on average
# at most so many times as long as rows, by whether they come in vectors; else they take the direct route (an H100, 300
# MB, LayerNorm, N=512 with gaps of 64: 148 → 119 us).
MOST_COPIED_GAPS = {True: {"rmsnorm": 1.17, "layernorm": 1.5}, False: {"rmsnorm": 2.5, "layernorm": 2.5}}

# Columns a thread, in place of 32, of LayerNorm with db, x and dy of one type: from so many threads a row on and in
# clusters of up to so many blocks, by bytes of x's type. Of 16 bits where they cover a block's columns, in accesses of
# 8 bytes, and where they fill its lanes with pace; in float32 where they fill the lanes of all blocks, with pace (1 GB,
# 7168: 247.5 → 240.2 us, float32 251.5 → 242.9). RMSNorm's of 16 bits, in one block, on compute capability
# 9.0 where memory is fast, from so many threads on, if no more than such a part of these lanes is used (1 GB, 3080:
# 258.2 → 240.5 us).
STAGED_FILLING_COLUMNS = 28
STAGED_FILLING_LEAST_THREADS = {2: 32, 4: 64}
STAGED_FILLING_CLUSTER = {2: 4, 4: 2, 8: 0}
STAGED_FILLING_LEAST_THREADS_RMSNORM, STAGED_FILLING_PART_RMSNORM = 64, 13 / 14

# More columns a thread of x and dy of one 16-bit type in vectors, LayerNorm with db, on compute capability 9.0
# where memory is fast, by norm and blocks of a cluster, and for how many warps (1 GB, LayerNorm, 1288: 276.9 → 242.5
# us, 20544 299.4 → 243.4; in place of gangs, RMSNorm, 82944: 268.8 → 239.1, 99840 267.4 → 241.1, 167936 271.2 → 244.9).
# LayerNorm's in clusters of sixteen only where such a part of their lanes is used, as gangs of shorter rows do as well.
STAGED_MORE_COLUMNS: dict[str, dict[int, Columns]] = {
    "rmsnorm": {8: dict.fromkeys((44, 48, 52, 56), (8,)), 16: dict.fromkeys((40, 44, 48, 52, 56), (8,))},
    "layernorm": {1: {44: ANY_WARPS}, 2: {44: (8,)}, 4: {44: (8,)}, 8: {44: (8,)}, 16: {44: (8,)}},
}
STAGED_MORE_LEAST_PART_LAYERNORM = {16: 0.91}

# LayerNorm's parts of a row that take 40 columns a thread are shared by twice as many blocks, by whether they come in
# vectors and memory is fast, by blocks of a cluster (1 GB, 9216: 247.7 → 243.9 us; but 17024, in four blocks and in
# two, 258.6, 248.6; RMSNorm lost so). But where memory is slow lanes that all have 40, in one block, gain by column
# blocks (an H100, 10240, 75 MB: 42.4 → 39.6).
STAGED_SHARED_COLUMNS_LAYERNORM = {
    True: {1: range(8449, 9601)},
    False: {1: range(8449, 10241), 2: range(8449, 10241)},
}

# Walkers keep pace (struct Pace of staged.cuh) in launches with so many steps of each and more (RMSNorm, 1 GB, 4096:
# 246 → 242 us). LayerNorm from 12 on lost at some lengths.
PACE_LEAST_STEPS = {"rmsnorm": 12, "layernorm": 24}
PACED_NARROW_LEAST_COLUMNS = 32  # a thread, of several elements an access: LayerNorm, and odd rows of both norms

# And where a block has at least such a part of the columns for which its lanes have room, but perhaps the last of a
# cluster: with less of them a step takes as long, so that memory is waited for less (inferred), and who waits loses. In
# vectors, by norm and bytes of x's type, by columns a thread, of up to so many threads that share a row (1 GB,
# LayerNorm, 4088: 249.7 → 241.7 us, 7680: 251.0 → 240.2, but 3056: 243.4 → 247.0; RMSNorm, 21600, 0.88 of it, 273.7 →
# 253.0 without). LayerNorm keeps none with more threads, or other columns; RMSNorm does. The first table was timed
# where memory is fast, on compute capability 9.0, and holds below 12.0; the other elsewhere. Both are of one type.
Parts = dict[tuple[str, int], dict[int, tuple[tuple[int, float], ...]]]
ALWAYS, FULL, NEVER = 0.0, 1.0, 2.0
PACED_LEAST_PART: Parts = {
    ("rmsnorm", 2): {
        24: ((16, ALWAYS), (32, 0.8), (512, 0.895), (4096, 0.985)),
        32: ((512, ALWAYS), (1024, 0.83), (2048, 0.86), (3584, NEVER), (4096, 0.95)),
        40: ((1024, ALWAYS), (2048, 0.9), (4096, NEVER)),
    },
    ("rmsnorm", 4): {
        32: ((32, ALWAYS), (64, 0.9), (128, 0.8), (1024, ALWAYS), (1280, 0.88), (2048, ALWAYS), (2560, NEVER)),
        40: ((256, ALWAYS), (512, 0.92)),
    },
    ("layernorm", 2): {
        16: ((4096, ALWAYS),),
        24: ((4, NEVER), (16, FULL), (32, 0.88), (128, FULL), (256, 0.965), (512, FULL)),
        28: ((32, 0.87), (256, 0.925), (512, FULL)),
        32: ((256, 0.87), (512, 0.855), (1024, 0.87), (2048, 0.965)),
        40: ((32, ALWAYS), (256, 0.85), (2048, ALWAYS)),
        44: ((2048, ALWAYS),),
    },
    ("layernorm", 4): {
        16: ((4096, ALWAYS),),
        24: ((128, 0.9), (1024, 0.95)),
        28: ((512, ALWAYS),),
        32: (
            *((32, 0.8), (64, 0.94), (128, 0.87), (256, 0.8), (512, 0.82)),
            *((1024, 0.93), (1280, 0.97), (1792, AS_GOOD_AS_FULL), (2560, NEVER), (4096, AS_GOOD_AS_FULL)),
        ),
        40: ((128, ALWAYS), (256, 0.8), (512, 0.98)),
    },
}
SLOW_PACED_LEAST_PART: Parts = {
    ("layernorm", 2): {
        16: ((4096, ALWAYS),),
        24: ((4, NEVER), (512, AS_GOOD_AS_FULL)),
        28: ((512, AS_GOOD_AS_FULL),),
        32: ((2048, AS_GOOD_AS_FULL),),
        40: ((2048, ALWAYS),),
    },
    ("layernorm", 4): {
        16: ((4096, ALWAYS),),
        28: ((512, ALWAYS),),
        32: ((4096, AS_GOOD_AS_FULL),),
        40: ((128, ALWAYS), (512, AS_GOOD_AS_FULL)),
    },
}

# Of x and dy of two types, whose kernels sum db in any case: where a multiprocessor's threads have such a part of the
# columns for which they find room, by whether the types differ in size; in clusters of sixteen, all (1 GB, x in float32
# and dy in bfloat16, 4096, RMSNorm: 257.7 → 246.5 us, LayerNorm: 260.0 → 248.3, but 4608, by 160 threads, LayerNorm:
# 252.3 → 276.8; 98304, RMSNorm, in clusters of sixteen, 3/4: 250.4 → 255.7; two types of 16 bits, RMSNorm, 7168, 7/8:
# 252.7 → 239.0, but 3072, 3/4: 245.9 → 264.1). Timed where memory is fast, dy no wider than the arithmetic.
TWO_TYPES_PACED_PART = {True: 3 / 4, False: 7 / 8}

# Of odd rows of several warps: those with so many columns a thread, if few of their lanes are idle, and those with
# PACED_NARROW_LEAST_COLUMNS of so many warps (1 GB, 7001, RMSNorm: 254.2 → 241.4 us, LayerNorm, which has 28 columns:
# 247.3 → 262.0; 12289, with idle lanes: 246.5 → 253.0, 265.1 → 281.7).
PACED_ODD_LEAST_COLUMNS, PACED_ODD_LEAST_WARPS = {"rmsnorm": 28, "layernorm": 32}, {"rmsnorm": 8, "layernorm": 16}

# How far ahead of the average a walker may be, backward (_lead() chooses), in quarters of a step: as many as make so
# many bytes, of a step in all blocks of a multiprocessor, but no more than these (RMSNorm, 1 GB, 1024, with four, six,
# seven and nine: 248.5, 239.7, 238.1, 241.1 us).
LEAD_BYTES, MOST_LEAD, MOST_LEAD_ALONE_FLOAT32_LAYERNORM = 56 << 10, 7, 5
MOST_LEAD_OF_STAGES = {3: 7, 4: 6}  # RMSNorm
MOST_LEAD_OF_MORE_STAGES, MOST_LEAD_OF_MORE_STAGES_CLUSTERS = 5, 9

# Of whatever bytes, 16-bit types that gain from more (1 GB, RMSNorm, 128, with seven and nine: 244.8, 242.5 us).
LEAD_SHORT_ROWS = 9  # RMSNorm
LEAD_LAYERNORM_24_COLUMNS, LEAD_LAYERNORM_CLUSTERS = 9, 8

# With 28 columns a thread; in float32 by threads of a block that share a row (1 GB, 7168, with seven, eight and ten:
# 244.8, 244.3, 244.7 us).
LEAD_FILLING, LEAD_FILLING_FLOAT32 = 8, {64: 7, 128: 7, 256: 5}

# Where memory is slow, 16-bit types: less by so much, and no more than so much (an H100, RMSNorm, 1 GB, 1024, less by
# none, two and four: 339.6, 335.0, 352.0 us). Not in float32, nor in gangs, which lost; nor where rows with gaps take a
# warp each or share copies.
SLOW_LESS_LEAD, SLOW_MOST_LEAD = {"rmsnorm": 2, "layernorm": 3}, {"rmsnorm": 5, "layernorm": 4}

# So both norms gain in shorter launches, too (an H100, 100 MB, LayerNorm, 1024: 46.0 → 44.9 us).
SLOW_PACE_LEAST_STEPS = 6

# Rows that no cluster of eight holds go to gangs (gang.cuh), where memory is slow in place of clusters of sixteen,
# longer ones everywhere in place of two sweeps over memory (an H100, 1 GB, LayerNorm, 262144: 376 → 345 us, 524288: 621
# → 359).
MOST_CLUSTER_BESIDE_GANGS = 8

# Where memory is fast, clusters of sixteen take rows of so many bytes and more for each of their blocks (1 GB, clusters
# and gangs, 98304: 276.7, 263.0 us, 131072: 241.7, 248.7): there the blocks of a gang lack time, not bytes.
FAST_LARGE_CLUSTER_LEAST_BYTES = 14 << 10

# A block's columns of x and dy together, at most: 32 columns a thread for 256 threads, in float32 for 128. They begin
# at whole lines of memory: else, 1 GB, an H100, RMSNorm, 262144 in gangs of 33 blocks, 339 → 359 us.
GANG_STEP_BYTES, GANG_COLUMNS_PER_THREAD = 32 << 10, 32

# Where gangs of the fewest blocks would leave more of the multiprocessors without work, they have more blocks, with
# fewer columns each (an H100, 1 GB, LayerNorm, 400000: 418.6 → 406.2 us).
GANG_LEAST_PART = 0.9

# Of the steps of a ring one is at work, two wait for their sums, one is on its way (an H100, 1 GB, 131072: 337.5 us;
# with one more on its way 338.0, with three that wait 342.1).
GANG_STAGES = 4

# Pace, quarters of a step, by whether memory is slow and by bytes of x's type (an H100, 131072, with five and none:
# 338.0, 367.4 us; an H200, 262144: 265.4, 250.1).
GANG_LEAD = {False: {2: 0, 4: 0}, True: {2: 5, 4: 6}}
DIRECT_MAX_THREADS = {True: (256, 512), False: (256, 384)}  # of the direct route's variants: in vectors, off 16 bytes
ANY_W = "ANY_W=1"  # backward_split.cu
SPLIT_THREADS = 256

# Where more blocks than these share a multiprocessor, they count their steps in STEP_COUNTERS places, not in one (an
# H100, RMSNorm, 1 GB, eight blocks, N=1024 with gaps of 512: 568 → 359 us).
MOST_BLOCKS_A_COUNTER = {"rmsnorm": 2, "layernorm": 1}
STATIC_SHARED_BYTES = 1024  # more than the direct and split kernels declare
BACKWARD_ARGUMENTS = "12P4q8i7h?x"  # struct BackwardArguments in backward.cuh

# On a multiprocessor, not eight, of RMSNorm's rows of one warp off 16 bytes, 32 columns of 16 bits a thread, where
# memory is fast, in launches of so many steps and more (an H100 with 92 multiprocessors, 700 MB, 1001: 270 → 256 us).
MANY_WARPS, MANY_WARPS_LEAST_STEPS = 12, 12

WIDENING_ARGUMENTS = "2P2i"  # struct WideningArguments in widen_w.cu


def backward_config(
    problem: NormProblem, alignment: int, device: Device, odd: Access = ODD_IN_WORDS, start: int = 0
) -> BackwardConfig:
    """Choose the backward kernels, where every row of x, dy and dx starts at a multiple of `alignment` bytes: of 16, or
    of a lower power of two; `odd` is what odd rows' starts allow, `start` that of leaves_lines()."""
    x, dy = problem.x_dtype.name, name_of(problem.dy_dtype)
    vector = vector_width(x, dy) if alignment == 16 and problem.columns % vector_width(x, dy) == 0 else 1
    access = access_of(problem, vector > 1, alignment, device)
    definitions = backward_definitions(problem.norm, x, dy, kernels_sum_db(problem), vector > 1, reserved_of(problem))
    per_thread = columns_per_thread(x)
    outer_bytes = _column_sums_bytes(problem, per_thread)

    chosen = wide_config(problem, vector > 1, definitions, device, start)
    if chosen is None and device.has_clusters:
        chosen = _staged(problem, vector > 1, access, definitions, device, odd, start)
    if chosen is not None:
        if problem.want_dw or problem.want_db:
            return chosen
        return chosen._replace(definitions=for_dx_alone(chosen.definitions, paced=True))
    if problem.columns <= WARP * per_thread:
        choice = staged_choice(x, dy, vector > 1, 1, device)
        parts = part_of_warp_lanes(x, vector > 1, access, choice, device)
        held = short_row(x, problem.columns, parts, access)
        access = ODD_BY_ELEMENT if access in ODD else access
        return _direct(problem, definitions, SMALL_BLOCK, *held, access)
    threads = in_whole_warps(divide_up(problem.columns, per_thread))
    fits = outer_bytes * threads + STATIC_SHARED_BYTES <= device.shared_bytes
    if fits and threads <= DIRECT_MAX_THREADS[vector > 1][-1]:
        return _direct(problem, definitions, threads, per_thread, threads)
    slab = SPLIT_THREADS * per_thread
    return BackwardConfig(
        route="split",
        definitions=(*definitions, *split_definitions(per_thread, _takes_any_w(problem))),
        threads=SPLIT_THREADS,
        group_threads=SPLIT_THREADS,
        slab_columns=slab,
        slabs=divide_up(problem.columns, slab),
        shared_bytes=outer_bytes * SPLIT_THREADS,
    )


def split_definitions(per_thread: int, any_w: bool) -> tuple[str, ...]:
    return f"COLUMNS_PER_THREAD={per_thread}", *((ANY_W,) if any_w else ())


def converts_w(problem: NormProblem) -> bool:
    """Whether dx needs w, which is of neither x's type nor the arithmetic's."""
    w = problem.w_dtype
    return problem.want_dx and w is not None and w not in (problem.x_dtype, problem.compute_dtype)


def _takes_any_w(problem: NormProblem) -> bool:
    """Whether w, converted first, would take more than a stream keeps."""
    return converts_w(problem) and problem.columns * problem.compute_dtype.itemsize > KEPT_BYTES


def _direct(
    problem: NormProblem,
    definitions: tuple[str, ...],
    threads: int,
    per_thread: int,
    group: int,
    access: Access = SINGLE,
) -> BackwardConfig:
    part, vector = part_lanes(problem.x_dtype.name, (per_thread, group)), "VECTOR=1" in definitions
    return BackwardConfig(
        route="direct",
        definitions=(*definitions, *direct_definitions(per_thread, threads, vector, part, access)),
        threads=threads,
        group_threads=group,
        slab_columns=problem.columns,
        slabs=1,
        shared_bytes=_column_sums_bytes(problem, per_thread) * threads,
    )


def direct_definitions(
    per_thread: int, threads: int, vector: bool, part: int = 0, access: Access = SINGLE
) -> tuple[str, ...]:
    max_threads = next(most for most in DIRECT_MAX_THREADS[vector] if threads <= most)
    of_block = f"COLUMNS_PER_THREAD={per_thread}", f"MAX_THREADS={max_threads}"
    return *of_block, *part_definitions(part), *access.definitions


def _column_sums_bytes(problem: NormProblem, per_thread: int) -> int:
    """Shared memory that each thread needs for the second level of dw and db."""
    return per_thread * compute_itemsize(problem.x_dtype.name) * (2 if kernels_sum_db(problem) else 1)


def _ahead_bytes(x: str, slab: int) -> int:
    """Shared memory for a block's columns of w on their way: ahead_bytes of backward_staged.cu."""
    return part_bytes(compute_name(x), True, slab)


def _staged(
    problem: NormProblem,
    vector: bool,
    access: Access,
    definitions: tuple[str, ...],
    device: Device,
    odd: Access,
    start: int,
) -> BackwardConfig | None:
    """The smallest cluster whose blocks have room for a ring of enough rows, else a gang; None where there is neither.

    At N=8192, 16384 and 65536 no larger cluster than the smallest was over 1% faster.
    """
    name, dy_name = problem.x_dtype.name, name_of(problem.dy_dtype)
    width = vector_width(name, dy_name) if vector else 1
    small, strides = is_short(problem), (problem.x_row_stride, problem.dy_row_stride)
    several = rows_share_copies(problem, vector, MOST_COPIED_GAPS, *strides)
    if small and not several:
        return None
    gangs = not small and may_form_gangs(name, dy_name, device)
    gang_of = functools.partial(_gang, problem, width, access, definitions, device, start)
    kind = (problem.norm, name, dy_name, kernels_sum_db(problem), vector)
    most = 1 if small else device.largest_cluster
    for cluster, slab in splits(problem.columns, most, width, name, dy_name, device):
        if gangs and _leaves_to_gangs(cluster, slab * ITEMSIZE[name], device) and (gang := gang_of()):
            return gang
        choice = backward_choice(kind, cluster, device)
        parts = part_of_warp_lanes(name, vector, access, choice, device)
        held = short_row(name, slab, parts, access) if small else staged_threads(slab, choice, access)
        if held is None or _goes_elsewhere(kind, slab, held, cluster, device):
            continue
        if may_fill_lanes(kind, cluster, device) and _fills_lanes(problem.columns, cluster, slab, held, kind):
            held = STAGED_FILLING_COLUMNS, held[1]
        gaps = several and asks_for_gaps(problem, held, cluster, *strides)
        part = float(_fills_pairs(slab, held)) if access in ODD else slab / (held[0] * held[1])
        paced = may_keep_pace(kind, access, held, cluster, part, device)
        split = _Split(kind, *held, cluster, slab, several and cluster == 1, gaps, paced, access, odd, start)
        if config := _staged_blocks(problem, split, definitions, device):
            return config
    return gang_of() if gangs else None


def _gang(
    problem: NormProblem, width: int, access: Access, definitions: tuple[str, ...], device: Device, start: int
) -> BackwardConfig | None:
    """As many blocks as the row needs, one on a multiprocessor, or as there are; None where these are too few."""
    x, vector = problem.x_dtype.name, width > 1
    access = SINGLE if access in ODD else access
    most_columns = GANG_STEP_BYTES // (2 * ITEMSIZE[x])
    blocks, threads = divide_up(problem.columns, most_columns), most_columns // GANG_COLUMNS_PER_THREAD
    most_blocks = min(device.multiprocessors, threads)
    if blocks > most_blocks:
        return None
    gangs = device.multiprocessors // blocks
    if gangs * blocks < GANG_LEAST_PART * device.multiprocessors:
        blocks = min(most_blocks, device.multiprocessors // gangs)
    slab = slabs(problem.columns, blocks, width, x, x, device)[0]
    blocks = divide_up(problem.columns, slab)
    strides = (stride * ITEMSIZE[x] for stride in (problem.x_row_stride, problem.dy_row_stride))
    off_lines = vector and leaves_lines(start, *strides)
    outer_bytes = _column_sums_bytes(problem, GANG_COLUMNS_PER_THREAD) * threads
    step_bytes = 2 * part_bytes(x, vector, slab, off_lines * most_teams(x, GANG_COLUMNS_PER_THREAD, 1))
    room = device.shared_bytes - staged_static_bytes(x, 1) - outer_bytes
    if GANG_STAGES * step_bytes > room:
        return None
    return BackwardConfig(
        route="staged",
        definitions=(*definitions, *gang_definitions(access, off_lines)),
        threads=threads,
        group_threads=threads,
        slab_columns=slab,
        slabs=blocks,
        gang=True,
        stages=GANG_STAGES,
        shared_bytes=max(outer_bytes + step_bytes * GANG_STAGES, device.shared_bytes // 2),
        alone_shared_bytes=max(_ahead_bytes(x, slab) + step_bytes * GANG_STAGES, device.shared_bytes // 2),
        lead=GANG_LEAD[device.has_slow_memory][ITEMSIZE[x]],
        paced_steps=PACE_LEAST_STEPS[problem.norm],
    )


def may_form_gangs(x: str, dy: str, device: Device) -> bool:
    """Whether there are gangs beside clusters of over eight. Mixed types were not tried."""
    return x == dy and ITEMSIZE[x] <= 4 and device.has_large_shared_memory


def _leaves_to_gangs(cluster: int, slab_bytes: int, device: Device) -> bool:
    """Whether gangs take rows that such a cluster would hold, of so many bytes for each block."""
    large = cluster > MOST_CLUSTER_BESIDE_GANGS
    return large and (device.has_slow_memory or slab_bytes < FAST_LARGE_CLUSTER_LEAST_BYTES)


def gang_definitions(access: Access, off_lines: bool) -> tuple[str, ...]:
    of_block = GANG_COLUMNS_PER_THREAD, 1
    staged = staged_definitions(*of_block, part=0, paced=True, access=access, off_lines=off_lines)
    return (*staged, "GANG=1")


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
    access: Access  # where rows do not come in vectors
    odd: Access  # what odd rows' starts allow
    start: int  # of leaves_lines()


def _staged_blocks(
    problem: NormProblem, split: _Split, definitions: tuple[str, ...], device: Device
) -> BackwardConfig | None:
    """The blocks; larger ones than usual where beside these column blocks pay.

    With rows of two warps and more, of 16-bit types, in any case (25 MB, LayerNorm, 1536: 17.5 → 16.1 us); else only
    where with usual blocks column blocks do not pay.
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
    kind, per_thread, group, cluster, slab, several, gaps, paced, access, odd, start = split
    _, name, dy_name, _, vector = kind

    def most_threads(keeps_pace: bool) -> int:
        return STAGED_MAX_THREADS if largest else _block_threads(kind, per_thread, keeps_pace)

    least_steps = _pace_least_steps(split, device)
    most_groups = groups_in_block(most_threads(paced), group, problem.rows) if several else 1
    at_least = functools.partial(takes_at_least, problem.rows)
    at_once = _threads_at_once(kind, per_thread, device)
    if _takes_many_warps(split, device) and at_least(MANY_WARPS_LEAST_STEPS, most_groups, device.multiprocessors):
        at_once = MANY_WARPS * WARP
    limited = vector and name == dy_name and per_thread <= STAGED_MOST_RING_COLUMNS
    limited = limited and at_least(LONG_LEAST_STEPS, most_groups, device.multiprocessors)
    strides = (name, problem.x_row_stride), (dy_name, problem.dy_row_stride)
    leaves = leaves_lines(start, *(stride * ITEMSIZE[part] for part, stride in strides))
    leaves = leaves and may_leave_lines(name, dy_name, (per_thread, group), vector, device)
    pairs = [(g, b) for g in counts_to_try(most_groups) for b in counts_to_try(at_once // (g * group))]
    for off_lines, (groups, blocks) in product((True, False) if leaves else (False,), pairs):
        threads = groups * group
        outer_bytes = _column_sums_bytes(problem, per_thread) * threads
        parts = [(part, (groups - 1) * stride + slab) for part, stride in strides]
        step_bytes = place_bytes(vector, *parts)
        teams = most_teams(name, per_thread, cluster) if off_lines else 0
        ring_step_bytes = place_bytes(vector, *parts, teams=teams)
        long = at_least(least_steps, groups, usual_clusters(cluster, device) * blocks)
        keeps_pace = paced and long
        too_large = limited and blocks * STAGED_LEAST_STAGES * step_bytes > STAGED_MOST_RING_BYTES
        too_many = groups > 1 and threads > most_threads(keeps_pace)
        if (too_large or too_many) and (groups, blocks) != pairs[-1]:
            continue
        slack = odd_slack_bytes(access)
        room = device.shared_bytes // blocks - staged_static_bytes(name, cluster) - outer_bytes - slack
        stages = min(room // ring_step_bytes, STAGED_MOST_STAGES)
        if stages < STAGED_LEAST_STAGES:
            continue
        wanted_bytes = _ring_bytes(kind, per_thread, cluster, groups, blocks, keeps_pace)
        least = STAGED_LEAST_STAGES + _takes_a_stage_more(split, device)
        stages = min(stages, max(least, wanted_bytes // (blocks * step_bytes)))
        part = part_lanes(name, (per_thread, group))
        least_columns = problem.columns - (cluster - 1) * slab
        short = not part and access not in ODD and has_short_rows(name, vector, per_thread, least_columns)
        access = odd if access in ODD else access
        staged = staged_definitions(per_thread, cluster, part, paced, short, gaps, access=access, off_lines=off_lines)
        ring_bytes = ring_step_bytes * stages + slack
        least_bytes = device.shared_bytes // (blocks + 1)  # so that no more blocks fit
        return BackwardConfig(
            route="staged",
            definitions=(*definitions, *staged),
            threads=threads,
            group_threads=group,
            slab_columns=slab,
            slabs=cluster,
            cluster=cluster,
            stages=stages,
            shared_bytes=max(outer_bytes + ring_bytes, least_bytes),
            alone_shared_bytes=max(_ahead_bytes(name, slab) + ring_bytes, least_bytes),
            lead=_lead(split, stages, blocks, step_bytes, device) if paced else 0,
            paced_steps=least_steps,
            step_counters=STEP_COUNTERS if blocks > MOST_BLOCKS_A_COUNTER[problem.norm] else 1,
        )
    return None


def may_keep_pace(kind: Kind, access: Access, held: tuple[int, int], cluster: int, part: float, device: Device) -> bool:
    """Whether walkers keep pace in long launches; not where a row is shorter than a thread's columns.

    `held` is what short_row() or staged_threads() chose; `part` of the columns for which its lanes have room is what
    every block, but perhaps the last of a cluster, has of a row; of odd rows one if it is about as much
    (_fills_pairs()), else nought. LayerNorm's loop with db is nearly as slow as memory, so that it loses where fewer
    multiprocessors walk (24 columns a thread, 1 GB, clusters of four 24576 251.1 → 263.5). Off 16 bytes in accesses of
    several elements longer rows do, LayerNorm's with many columns (1004: 258.5 → 244.4, 4100: 261.9 → 245.1, but 700:
    249.2 → 260.4), or where memory is slow and rows of a warp are odd (an H100, 641: 357 → 338; longer ones:
    PACED_ODD_LEAST_COLUMNS). Of these also what was not timed: on compute capability 10.0, in clusters of sixteen,
    without db, for dx alone. Else what was not timed keeps no pace.
    """
    norm, x, dy, sums_db, vector = kind
    per_thread, group = held
    if access in ODD and group > WARP:
        many = per_thread >= PACED_NARROW_LEAST_COLUMNS and group // WARP * cluster >= PACED_ODD_LEAST_WARPS[norm]
        return many or (part == FULL and per_thread >= PACED_ODD_LEAST_COLUMNS[norm])
    if access != SINGLE:
        fast_enough = norm == "rmsnorm" or per_thread >= PACED_NARROW_LEAST_COLUMNS
        return has_whole_warps(x, held) and (fast_enough or (access in ODD and device.has_slow_memory))
    if not vector or (group == 1 and part < FULL):
        return False
    # Where memory is slow two types of 16 bits go as one does, untimed; on 12.0 they keep no pace.
    two_sizes = ITEMSIZE[x] != ITEMSIZE[dy]
    if two_sizes or (x != dy and not device.has_slow_memory):
        used = part * (STAGED_MAX_THREADS // group * group) / STAGED_MAX_THREADS
        timed = device.has_fast_memory and ITEMSIZE[dy] <= compute_itemsize(x)
        least = AS_GOOD_AS_FULL if cluster == CLUSTERS[-1] else TWO_TYPES_PACED_PART[two_sizes]
        return timed and used >= least
    if sums_db and (norm == "rmsnorm" or ITEMSIZE[x] > 4):
        if cluster == 1 and per_thread in (16, 40) and group >= WARP:
            return True
        # RMSNorm gains as without db, but for 24 columns (1 GB, 16384: 247.2 → 240.1 us, but 768: 248.1 → 260.0).
        if not device.has_fast_memory or ITEMSIZE[x] > 4 or (ITEMSIZE[x] == 2 and per_thread == 24):
            return False
    if norm == "layernorm" and not sums_db:
        return True
    return part >= _paced_least_part(norm, x, dy, per_thread, cluster * group, device)


def _paced_least_part(norm: str, x: str, dy: str, per_thread: int, threads: int, device: Device) -> float:
    """PACED_LEAST_PART, of so many threads that share a row."""
    timed = x == dy and device.has_fast_memory
    tables = PACED_LEAST_PART if timed else SLOW_PACED_LEAST_PART
    limits = tables.get((norm, ITEMSIZE[x]), {}).get(per_thread, ())
    return next((part for most, part in limits if threads <= most), ALWAYS if norm == "rmsnorm" else NEVER)


def _fills_pairs(slab: int, held: tuple[int, int]) -> bool:
    """Whether the warps of a block have all of their threads' pairs but, perhaps, the last ones."""
    per_thread, group = held
    return odd_span(slab, max(1, group // WARP)) > WARP * (per_thread - 2)


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

    Kernels for both took NVRTC a quarter longer: single columns, N=4095, 0.90 s of one core, not 0.75, LayerNorm 1.15,
    not 0.84.
    """
    return not vector and per_thread > columns_per_thread(x) and least_columns < WARP * per_thread


def _has_short_steps(kind: Kind, per_thread: int) -> bool:
    """24 columns a thread of 16-bit types, RMSNorm or LayerNorm with db: larger blocks and rings pay with pace."""
    norm, x, dy, sums_db, _ = kind
    return ITEMSIZE[x] == ITEMSIZE[dy] == 2 and per_thread == 24 and sums_db == (norm == "layernorm")


def _ring_bytes(kind: Kind, per_thread: int, cluster: int, groups: int, blocks: int, keeps_pace: bool) -> int:
    """What the `blocks` of so many `groups` on a multiprocessor are to have in flight, if that makes more than the
    least stages.

    More bytes lose: under the load some multiprocessors get ahead, by up to 15% at 160 KB, and in the end wait for the
    others (RMSNorm, N=4096, 1 GB, without pace 247 us with 96 KB, 255 with 128). Who waits for others across
    multiprocessors gains from more (65536 255 → 244), and so do slow loops that keep pace (LayerNorm, 4096 249 → 244),
    and without db LayerNorm's rows of a whole block and longer (dx alone, an H100, 8192 344.0 → 333.9, others ±0.2%; an
    H200, 32768 241.1 → 237.3, 14336 and 24576 −0.9%).
    """
    norm, x, _, sums_db, vector = kind
    if cluster >= 8:
        return STAGED_LARGE_RING_BYTES
    if not vector:
        return STAGED_RING_BYTES
    if not sums_db:
        gains = cluster == 4 if norm == "rmsnorm" else groups == blocks == 1
        large = per_thread == 32 and ITEMSIZE[x] == 2 and gains
    else:
        large = norm == "layernorm" and (per_thread == 32 or (per_thread == 16 and ITEMSIZE[x] == 4))
    large |= _has_short_steps(kind, per_thread) and blocks == 1
    return STAGED_LARGE_RING_BYTES if keeps_pace and large else STAGED_RING_BYTES


def _lead(split: _Split, stages: int, blocks: int, step_bytes: int, device: Device) -> int:
    """In quarters of a step, given the blocks of a multiprocessor and the bytes of a step.

    Blocks of one warp, which rows that lie apart have, keep no pace where memory is fast (gaps of 64, 300 MB, 1024:
    97.0 → 86.3 us).
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
    multiprocessor, which is so of rows with gaps alone (an H100, 1 GB, N=640: 432 → 373 us).
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


def backward_choice(kind: Kind, cluster: int, device: Device) -> Choice:
    """As staged_choice() of common.py: columns a thread to choose from."""
    norm, x, dy, sums_db, vector = kind
    preferred, *others = staged_choice(x, dy, vector, cluster, device)
    timed = device.is_fast_9_0 and vector and x == dy and ITEMSIZE[x] == 2 and sums_db == (norm == "layernorm")
    more = STAGED_MORE_COLUMNS[norm].get(cluster, {}) if timed else {}
    return ({**preferred, **more}, *others)


def may_fill_lanes(kind: Kind, cluster: int, device: Device) -> bool:
    """Whether there are kernels with STAGED_FILLING_COLUMNS: where they gain on compute capability 9.0."""
    norm, x, dy, sums_db, vector = kind
    if not vector or x != dy or not device.has_large_shared_memory:
        return False
    if norm == "rmsnorm":
        return device.is_fast_9_0 and ITEMSIZE[x] == 2 and cluster == 1
    return sums_db and cluster <= STAGED_FILLING_CLUSTER[ITEMSIZE[x]]


def _fills_lanes(columns: int, cluster: int, slab: int, held: tuple[int, int], kind: Kind) -> bool:
    """Whether STAGED_FILLING_COLUMNS take the place of 32; `held` is what staged_threads() chose."""
    norm, x, *_ = kind
    per_thread, group = held
    covered = STAGED_FILLING_COLUMNS * group
    if norm == "rmsnorm":
        return (
            per_thread == 32
            and group >= STAGED_FILLING_LEAST_THREADS_RMSNORM
            and slab <= STAGED_FILLING_PART_RMSNORM * covered
        )
    if per_thread != 32 or group < STAGED_FILLING_LEAST_THREADS[ITEMSIZE[x]] or slab > covered:
        return False
    return columns == covered * cluster or (ITEMSIZE[x] == 2 and cluster != 2)


def _goes_elsewhere(kind: Kind, slab: int, held: tuple[int, int], cluster: int, device: Device) -> bool:
    """Whether a block's part of a row goes to more blocks, or to gangs, though it has room; `held` is what
    staged_threads() chose."""
    norm, _, _, sums_db, vector = kind
    per_thread, group = held
    if norm != "layernorm":
        return False
    if per_thread in STAGED_MORE_COLUMNS[norm].get(cluster, {}):
        return slab < STAGED_MORE_LEAST_PART_LAYERNORM.get(cluster, 0.0) * per_thread * group
    if cluster == 1 and slab == per_thread * group and device.has_slow_memory and vector and sums_db:
        return False
    shared = STAGED_SHARED_COLUMNS_LAYERNORM[vector and device.has_fast_memory]
    return per_thread == 40 and slab in shared.get(cluster, ())


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
    """Of whole warps off 16 bytes, 28 and more columns of 16 bits a thread, where memory is fast, four stages though
    three have _ring_bytes(); RMSNorm with 28, or where a row takes eight warps of a block.

    1 GB: 7105 265 → 242 us, LayerNorm 274 → 248, 65537 277 → 251, 39001 253 → 242; an H100 with 92 multiprocessors, 700
    MB: 8191 271 → 250, LayerNorm 274 → 248. But RMSNorm, in four warps, 4095 247 → 258, 24 columns 1401 249 → 258,
    LayerNorm 701 251 → 263.
    """
    norm, x, dy, _, vector = split.kind
    timed = not vector and ITEMSIZE[x] == ITEMSIZE[dy] == 2 and split.per_thread >= 28
    gains = norm == "layernorm" or split.per_thread == 28 or split.group == STAGED_MAX_THREADS
    return timed and gains and device.is_fast_9_0


def part_of_warp_lanes(x: str, vector: bool, access: Access, choice: Choice, device: Device) -> PartLanes:
    """Columns a thread, beside columns_per_thread(), of rows that take a part of a warp."""
    if access in ODD:
        return of_choice(ODD_PART_OF_WARP_LANES, choice, device)
    of_16_bits = access != SINGLE and ITEMSIZE[x] == 2
    usual = STAGED_PART_OF_WARP_LANES.get(ITEMSIZE[x], {}) if vector else {}
    return of_choice(NARROW_PART_OF_WARP_LANES[access.elements] if of_16_bits else usual, choice, device)


def _block_threads(kind: Kind, per_thread: int, keeps_pace: bool) -> int:
    """Of a block with several groups: as many as there may be, for fewer partial rows of dw and db, and one ring.

    RMSNorm, N=4096, 25 MB: 17.4 us with four warps, 16.9 with eight. But half as many where all would wait for each
    other's copies (staged.cuh: a team is then a whole block), unless _has_short_steps() keeps pace (in vectors with the
    larger ring of _ring_bytes()), or with STAGED_FILLING_COLUMNS. Of little data: _staged_blocks().
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
