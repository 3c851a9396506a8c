"""Which kernel a forward problem takes, and the shape of its blocks."""

from __future__ import annotations

from itertools import product

from ...problem import NormProblem
from .common import (
    ANY_WARPS,
    AS_GOOD_AS_FULL,
    CLUSTERS,
    ITEMSIZE,
    ODD,
    ODD_BY_ELEMENT,
    ODD_IN_WORDS,
    PACE_FORWARD_LEAST_STEPS,
    SINGLE,
    SMALL_BLOCK,
    STAGED_MAX_THREADS,
    STAGED_MOST_STAGES,
    WARP,
    Access,
    Choice,
    Columns,
    Device,
    ForwardConfig,
    PartLanes,
    access_of,
    argument_bytes,
    asks_for_gaps,
    columns_per_thread,
    compute_itemsize,
    counts_to_try,
    divide_up,
    groups_in_block,
    has_whole_warps,
    in_whole_warps,
    is_short,
    leaves_lines,
    may_leave_lines,
    most_teams,
    odd_slack_bytes,
    of_choice,
    part_bytes,
    part_definitions,
    part_lanes,
    reserved_definitions,
    reserved_of,
    rows_share_copies,
    several_columns,
    short_row,
    splits,
    staged_choice,
    staged_definitions,
    staged_static_bytes,
    staged_threads,
    takes_part,
    vector_width,
)
from .walkers import takes_at_least, usual_clusters
from .wide import forward_wide_config

# In vectors or off 16 bytes, by bytes of x's type. In vectors, 1 GB, LayerNorm: N=384 223 → 185 us, N=192 255 →
# 183; with 32, N=256 194 → 177, and since such rows draw 512 179 → 171. Not one lane, nor two with 32, as lanes so far
# apart meet in the same banks of shared memory (N=32 239 → 177, RMSNorm 236 → 171, float32 386 → 183, 342 → 176; 24
# 232 → 204, 223 → 181; 64, 67 MB, 23.4 → 22.5, 22.8 → 21.1).
FORWARD_PART_OF_WARP_LANES: dict[bool, dict[int, PartLanes]] = {
    True: {2: {24: (2, 16), 28: (8, 16), 32: (4, 16), 40: (4, 8)}, 4: {24: (2, 16), 32: (2, 8)}},
    False: {4: {12: (8, 32), 20: (16, 16)}},
}

# NARROW_PART_OF_WARP_LANES of backward.py (1 GB, LayerNorm, 180, with sixteen lanes of 12 columns and eight of 24: 267,
# 186 us).
FORWARD_NARROW_PART_OF_WARP_LANES: dict[int, PartLanes] = {
    4: {12: (4, 16), 20: (2, 16), 24: (8, 16)},
    2: {12: (4, 16), 20: (8, 16), 24: (8, 16)},
}

# And of odd rows: as there (an H100 with 92 multiprocessors, 700 MB, 129, with sixteen lanes and eight: 365, 236 us).
FORWARD_ODD_PART_OF_WARP_LANES: PartLanes = {12: (4, 16), 20: (8, 16), 24: (8, 16)}

# Single columns: twice as many threads on a multiprocessor, with 24 columns a thread half as many more, where as many
# lanes or more hold a row (an H100, 1 GB, LayerNorm, N=129: 787 → 482 us), and of several elements an access where any
# do (1 GB, N=20: 348 → 241).
FORWARD_FEW_LANES = 4

# MOST_COPIED_GAPS of backward.py, for 16-bit types (an H100, 300 MB, N=512 with gaps of 64: 83.0 → 76.5 us; 256 with
# 128: 86.9 → 88.6, not there).
FORWARD_MOST_COPIED_GAPS = {True: {"rmsnorm": 1.3, "layernorm": 1.3}, False: {"rmsnorm": 1.75, "layernorm": 2.0}}

# Where rows lie apart, so that a block of one warp has one a step, no more blocks on a multiprocessor (an H100,
# LayerNorm, 25 MB, 640 with gaps of 64, with sixteen and so: 15.4, 13.3 us).
FORWARD_APART_WARPS = 8

# Steps that the forward pass has in flight at least; more where each walker has few steps (100 MB, LayerNorm, 4096:
# 23.6 → 22.6 us).
FORWARD_STAGED_LEAST_STAGES, FORWARD_STAGED_MORE_STAGES, FORWARD_SHORT_STEPS = 2, 3, 24

# And of LayerNorm's blocks that are no clusters, by columns a thread, in whole warps and in parts (1 GB, 2560: 170.0 →
# 168.6 us, 384: 186 → 176; off 16 bytes, with 36, 667 MB, 1025 130.5 → 123.9, 4100 130.6 → 126.8; but with 24, 32 and
# 48, in whole warps, +1%). In clusters, and in blocks of eight warps, with so many of both norms (1 GB, off 16 bytes,
# RMSNorm, 32772: 194 → 176, 8191: 184 → 175, LayerNorm, 16388: 194 → 180; but RMSNorm, 4095, in four warps: 172 → 175,
# and RMSNorm's clusters with 32 columns, with leads of ten quarters ±0.5%, of six +1.3 to +3.5%).
FORWARD_MORE_STAGES_COLUMNS, FORWARD_MORE_STAGES_PART_COLUMNS = (36, 40, 64), (24, 28)
FORWARD_MORE_STAGES_CLUSTER_COLUMNS, FORWARD_MORE_STAGES_BLOCK_COLUMNS = (36, 40, 48), 36

# Where each walker has many steps, of all steps this part is drawn by whoever is done first, and this one by blocks
# alone on their multiprocessor (1 GB, RMSNorm, 4096, with none and a quarter: 171, 168 us).
DRAWN_PARTS = 1 / 4, 1 / 8

# And this one of rows of a warp or less, where memory is fast, of 16-bit types and of float32, whose steps take about
# as long for both norms (667 MB, RMSNorm, with 1/4, 1/2 and 3/4: 128 167.2, 166.1, 164.6 us, float32 171.1, 169.5,
# 167.5; LayerNorm 167.9, 170.0, 171.2, float32 174.2, 171.1, 168.7, 256 168.7, 169.6, 169.3, 448 169.0, 166.8, 166.1);
# less of steps of up to so many bytes, as blocks off 16 bytes have (RMSNorm, 129 186.2, 194.2, 202.1, 260 174.4, 184.0,
# 193.5, 24 176.3, 180.7, 184.5; but of 8 KB, float32, 257, 177.2, 173.1, 169.7).
DRAWN_PARTS_SHORT: dict[int, dict[str, float]] = {
    2: {"rmsnorm": 3 / 4, "layernorm": 1 / 2},
    4: {"rmsnorm": 3 / 4, "layernorm": 3 / 4},
    8: {"rmsnorm": 1 / 2, "layernorm": 1 / 2},
}
SMALL_STEP_BYTES, DRAWN_PART_SMALL_STEPS = 6 << 10, 1 / 4

# More where _draws_more() says so (1 GB, RMSNorm, 1280, with 1/4, 1/2 and 3/4: 165.2, 164.0, 163.0 us; but with 24
# columns, 768, with 1/4 and 1/2: 167.7, 170.9).
MORE_DRAWN_PARTS = {"rmsnorm": (3 / 4, 3 / 8), "layernorm": (1 / 2, 1 / 4)}

# Rows that lie apart, so that a step is one row: as one counter hands out no more than a number in some 2 ns, less is
# drawn of short steps, at most this part of those under so many bytes of x (an H200, gaps of 64, 1 GB, RMSNorm, 1024,
# with 3/4 and 1/8: 261, 178 us; an H100, 640, with 1/2 and 1/8: 334, 251).
APART_DRAWN_PARTS: dict[str, tuple[tuple[int, float], ...]] = {
    "rmsnorm": ((4 << 10, 1 / 8), (8 << 10, 1 / 4)),
    "layernorm": ((2 << 10, 0), (3 << 10, 1 / 8), (8 << 10, 1 / 4)),
}
SLOW_APART_DRAWN_PARTS: tuple[tuple[int, float], ...] = ((2 << 10, 1 / 8), (3 << 10, 1 / 4), (4 << 10, 3 / 8))

# From so many steps a walker on; the latter of blocks alone, and off 16 bytes (150 MB, RMSNorm, 1024, from sixteen
# on and from twelve on: 31.2, 30.2 us).
DRAWN_LEAST_STEPS = 12, 16

# Where memory is slow more, and in shorter launches (an H100, 100 MB, RMSNorm, 1024: 28.4 → 27.6 us).
SLOW_DRAWN_PARTS, SLOW_DRAWN_PART_SHORT, SLOW_DRAWN_LEAST_STEPS = (1 / 2, 1 / 4), 1 / 2, 10

# LayerNorm's rows of a warp or less draw by kernels of their own, in vectors (an H100, 1 GB, N=128: 248.3 → 233.8 us;
# off 16 bytes an H200 lost: 667 MB, 129 197.9 → 205.5, 100 206 → 224).
DRAW_SHORT_ROWS_MOST_ITEMSIZE = 4

# Where memory is fast from so many columns on, by bytes of x's type (667 MB, 256 176.2 → 169.2 us, 384 175.1 → 167.0,
# 448 177.3 → 166.8, 128 174.7 → 169.6; float32, 1 GB, 512 178.4 → 169.3, 24: 258.9 → 275.8).
FAST_DRAW_SHORT_ROWS_LEAST_COLUMNS = {2: 24, 4: 48}

# Pace, in clusters, in quarters of a step, by whether memory is slow; with 64 columns a thread by blocks of a cluster,
# too (1 GB, RMSNorm, 131072, with three, five and six: 172.6, 166.7, 167.1 us; an H100, 32768, with ten, eight and six:
# 230.6, 228.2, 225.7).
LEAD_FORWARD = {False: 10, True: 6}
LEAD_FORWARD_MANY = {
    False: {"rmsnorm": {8: 5, 16: 5}, "layernorm": {2: 5, 4: 6, 8: 6, 16: 0}},
    True: {"rmsnorm": {8: 4, 16: 4}, "layernorm": {2: 5, 4: 5, 8: 4, 16: 5}},
}

# And with so many columns a thread, of 16-bit types, which with 40 and 48 in clusters have FORWARD_STAGED_MORE_STAGES
# in any case, by clusters of two and larger ones (1 GB, RMSNorm, 20480, with two stages, without pace and with six
# quarters, with three and four, six, eight, ten: 172.1, 167.4, 164.6, 166.0, 169.8, 170.8 us; LayerNorm, 40960, with
# two and without, with three and without, with six, eight, ten: 179.5, 174.9, 173.2, 171.3, 170.6; an H100, RMSNorm,
# 20480, before and with four, six: 234.7, 227.0, 229.2).
PACED_FORWARD_COLUMNS = 40, 48, 56
LEAD_FORWARD_SEVERAL = {
    False: {"rmsnorm": (6, 6), "layernorm": (6, 10)},
    True: {"rmsnorm": (4, 4), "layernorm": (4, 4)},
}

# LayerNorm's only in clusters of up to so many blocks, by whether memory is slow (1 GB, 81920, with pace and without:
# 178.9, 171.1 us, 98304: 176.0, 168.4, of sixteen, 667 MB, 163840: 133.5, 125.9; an H100: 226.6, 234.8, 227.2, 237.5
# and 163840 228.1, 238.1; for 10.0, inferred).
PACED_FORWARD_MOST_BLOCKS_LAYERNORM = {False: 4, True: CLUSTERS[-1]}

# With 32 columns a thread RMSNorm keeps pace in clusters of two, and in larger ones where lanes are filled
# (PACED_LEAST_PART of backward.py), by bytes of x's type where memory is fast (1 GB, 25600: 193.0 → 198.7 us, 30720
# 172.4 → 173.3, 32512 173.5 → 167.7, float32 30720 175.5 → 170.9; of two blocks 14336: 170.3 → 166.5).
PACED_FORWARD_LEAST_PART = {2: 0.96, 4: 0.93}

# From so many steps of a walker on, of 16-bit types where memory is fast: RMSNorm's with PACED_FORWARD_COLUMNS, its
# others, and LayerNorm's where lanes are filled so far; else from PACE_FORWARD_LEAST_STEPS on (100 MB of x and y,
# RMSNorm, 19456: 31.6 → 30.3 us; 200 MB, RMSNorm, 16384: 56.2 → 54.3, LayerNorm, 65536: 58.5 → 54.9, but 20992, 0.85
# of it: 59.2 → 60.7).
PACED_FORWARD_STEPS, PACED_FORWARD_STEPS_FILLED, PACED_FORWARD_FILLED_LAYERNORM = 12, 24, 0.93
FORWARD_STAGED_RING_BYTES = 48 << 10  # on a multiprocessor

# Where memory is slow, RMSNorm in vectors, if each walker has so many steps at least and fewer than so many (an H100,
# 100 MB, N=128, with 48 and 112 KB: 29.3, 28.3 us; but 25 MB, 512: 11.2, 11.7).
SLOW_FORWARD_RING_BYTES, SLOW_FORWARD_RING_STEPS = 112 << 10, (10, 48)

# Off 16 bytes, 16-bit types: where these columns a thread hold a block's part of a row on eight warps, of which a
# multiprocessor has registers for one block, twice as many blocks of four warps share the row, of which it has them for
# three, if no more than FORWARD_HALVED_MOST_CLUSTER blocks would hold it otherwise; not RMSNorm's with 32 in one block
# (1 GB, LayerNorm, 6209: 241 → 185 us, 30001: 220 → 186, 49153: 274 → 238, RMSNorm 6209: 189 → 178, but 8001: 176 →
# 182). Not timed where memory is slow.
FORWARD_HALVED_COLUMNS, FORWARD_HALVED_MOST_CLUSTER = (28, 32), 8

# Columns a thread in the forward pass of 16-bit types, in vectors, and for how many warps. LayerNorm, whose sums within
# a warp cost more, gains from more (1 GB, 65536, with 32 and 64: 210, 182 us; RMSNorm 174, 178), and lanes without a
# column cost most of what others do.
FORWARD_COLUMNS_PER_THREAD: dict[str, Columns] = {
    "rmsnorm": {24: (1, 2, 4), 32: ANY_WARPS, 36: ANY_WARPS, 40: ANY_WARPS, 48: (4, 8), 56: (4, 8)},
    "layernorm": {24: ANY_WARPS, 28: (1,), 32: (1, 2, 4), 36: (8,), 40: ANY_WARPS, 48: (8,), 56: ANY_WARPS, 64: (4, 8)},
}

# And in clusters, on eight warps of each block.
FORWARD_CLUSTER_COLUMNS = {"rmsnorm": (32, 40, 48, 56), "layernorm": (36, 40, 48, 56, 64)}

# RMSNorm's in clusters of eight and sixteen that have no room for the row otherwise.
FORWARD_MANY_COLUMNS_PER_THREAD = 64

# Of rows that no cluster holds, or, longer than a block's, where there are none: threads of a block, which has a part
# of a row. Before, one block read such a row two or three times (LayerNorm, float32, 262144, one row: 70.8 → 10.4 us,
# 667 MB of x and y: 368 → 270).
FORWARD_SPLIT_THREADS = 256
FORWARD_ARGUMENTS = "8P4qd9i2h"  # struct ForwardArguments in forward.cuh


def forward_choice(norm: str, x: str, vector: bool, cluster: int, device: Device) -> Choice:
    """As staged_choice() of common.py: columns a thread to choose from."""
    if not vector and device.has_large_shared_memory:
        return (several_columns(x, vector, cluster),)
    if ITEMSIZE[x] != 2 or not device.has_large_shared_memory:
        return staged_choice(x, x, vector, cluster, device)
    # Compiled for 10.0, LayerNorm keeps float16 columns widened, and spills with 64 of them, in clusters of 16 with 56.
    spills = norm == "layernorm" and x == "float16" and device.compute_capability >= (10, 0)
    spilling = 56 if cluster == CLUSTERS[-1] else FORWARD_MANY_COLUMNS_PER_THREAD
    many: Choice = () if spills else ({FORWARD_MANY_COLUMNS_PER_THREAD: ANY_WARPS},)
    in_clusters = dict.fromkeys(FORWARD_CLUSTER_COLUMNS[norm], ANY_WARPS[-1:])
    several = FORWARD_COLUMNS_PER_THREAD[norm] if cluster == 1 else in_clusters
    several = {n: warps for n, warps in several.items() if not spills or n < spilling}
    return (several, *(many if cluster >= 8 and norm == "rmsnorm" else ()))


def _keeps_b_in_shared(norm: str, x: str, vector: bool, held: tuple[int, int], cluster: int, device: Device) -> bool:
    """kBInShared of forward_staged.cu. `held` is what short_row() or staged_threads() chose."""
    few = columns_per_thread(x) < held[0] <= 32 and not takes_part(x, held)
    usual = norm == "layernorm" and ITEMSIZE[x] == 2 and vector and cluster == 1
    return usual and few and device.has_large_shared_memory


def _forward_threads_at_once(
    norm: str, x: str, vector: bool, access: Access, held: tuple[int, int], b_in_shared: bool, device: Device
) -> int:
    """kThreadsAtOnce of forward_staged.cu: threads on a multiprocessor that leave each the registers that it needs.

    `held` is what short_row() or staged_threads() chose. Of single columns by what was timed (an H100, 1 GB, LayerNorm,
    N=6001: 311 → 243 us; RMSNorm, 2047: 233.3 → 236.2, not there). RMSNorm in accesses of several elements as in
    vectors (1 GB, 4098: 179.1 → 170.0).
    """
    per_thread, group = held
    if vector or (access != SINGLE and norm == "rmsnorm" and ITEMSIZE[x] == 2):
        bytes_of_column = (1 if b_in_shared else 2) * compute_itemsize(x) + 2 * ITEMSIZE[x]
        registers = per_thread * bytes_of_column // 4 + (78 if norm == "layernorm" else 62)
        return 512 if registers <= 128 else 384 if registers <= 170 else STAGED_MAX_THREADS
    usual_of_more_bytes = ITEMSIZE[x] > 2 and per_thread == columns_per_thread(x)
    few_lanes = group < FORWARD_FEW_LANES and access == SINGLE
    if ITEMSIZE[x] == 8 or usual_of_more_bytes or few_lanes or device.compute_capability >= (10, 0):
        return STAGED_MAX_THREADS
    more = norm == "layernorm" and ITEMSIZE[x] == 2 and not takes_part(x, held)
    if per_thread <= (24 if more else 20):
        return 512
    return 384 if per_thread <= (32 if more else 24) else STAGED_MAX_THREADS


def _takes_more_blocks(norm: str, x: str, vector: bool, held: tuple[int, int], cluster: int, device: Device) -> bool:
    """Whether more blocks share a row than it takes to hold it (FORWARD_HALVED_COLUMNS), if clusters of so many may be.
    `held` is what staged_threads() chose."""
    per_thread, group = held
    eight_warps = group == STAGED_MAX_THREADS and per_thread in FORWARD_HALVED_COLUMNS
    gains = norm == "layernorm" or per_thread == FORWARD_HALVED_COLUMNS[0] or cluster > 1
    timed = not vector and ITEMSIZE[x] == 2 and device.has_large_shared_memory and device.compute_capability < (10, 0)
    allowed = cluster <= FORWARD_HALVED_MOST_CLUSTER and 2 * cluster <= device.largest_cluster
    return eight_warps and gains and timed and allowed


def forward_part_of_warp_lanes(x: str, vector: bool, access: Access, choice: Choice, device: Device) -> PartLanes:
    """As part_of_warp_lanes() of backward.py."""
    if access in ODD:
        return of_choice(FORWARD_ODD_PART_OF_WARP_LANES, choice, device)
    usual = FORWARD_PART_OF_WARP_LANES[vector].get(ITEMSIZE[x], {})
    of_16_bits = access != SINGLE and ITEMSIZE[x] == 2
    return of_choice(FORWARD_NARROW_PART_OF_WARP_LANES[access.elements] if of_16_bits else usual, choice, device)


def may_draw_short_rows(norm: str, x: str, vector: bool) -> bool:
    """Whether there are kernels in which LayerNorm's rows of a warp or less draw steps (DRAW_SHORT_ROWS)."""
    return norm == "layernorm" and vector and ITEMSIZE[x] <= DRAW_SHORT_ROWS_MOST_ITEMSIZE


def _draws_short_rows(problem: NormProblem, vector: int, held: tuple[int, int], gaps: bool, device: Device) -> bool:
    """Whether LayerNorm's rows of a warp or less draw steps. `held` is what short_row() or staged_threads() chose."""
    x = problem.x_dtype.name
    kernel_draws = not has_whole_warps(x, held) and may_draw_short_rows(problem.norm, x, vector > 1)
    least_columns = FAST_DRAW_SHORT_ROWS_LEAST_COLUMNS.get(ITEMSIZE[x], problem.columns + 1)
    gains = device.has_slow_memory or (device.has_large_shared_memory and problem.columns >= least_columns)
    return kernel_draws and gains and not gaps


def _draws_more(problem: NormProblem, vector: int, held: tuple[int, int]) -> bool:
    """As timed on an H200. `held` is what short_row() or staged_threads() chose."""
    few = held[0] == 24 or (problem.norm == "layernorm" and held[0] == 48)
    return vector > 1 and problem.x_dtype.itemsize <= 4 and problem.columns == held[0] * held[1] and not few


def _drawn_part(
    problem: NormProblem, vector: int, held: tuple[int, int], groups: int, alone: bool, apart: bool, device: Device
) -> float:
    """Of all steps, of `groups` rows each, where a kernel draws. `alone`: one block on a multiprocessor; `apart`: rows
    lie apart."""
    slow, norm = device.has_slow_memory, problem.norm
    if not (has_whole_warps(problem.x_dtype.name, held) or alone or held[0] == 24):
        part = _drawn_part_short(problem, groups, device)
    elif slow:
        part = SLOW_DRAWN_PARTS[alone]
    else:
        part = (MORE_DRAWN_PARTS[norm] if _draws_more(problem, vector, held) else DRAWN_PARTS)[alone]
    row_bytes, limits = problem.columns * problem.x_dtype.itemsize, APART_DRAWN_PARTS[norm]
    most = (most for below, most in (SLOW_APART_DRAWN_PARTS if slow else limits) if apart and row_bytes < below)
    return min([part, *most])


def _drawn_part_short(problem: NormProblem, groups: int, device: Device) -> float:
    itemsize = problem.x_dtype.itemsize
    if device.has_slow_memory:
        return SLOW_DRAWN_PART_SHORT
    if groups * problem.columns * itemsize <= SMALL_STEP_BYTES:
        return DRAWN_PART_SMALL_STEPS
    return DRAWN_PARTS_SHORT[itemsize][problem.norm]


def forward_keeps_pace(
    norm: str, x: str, held: tuple[int, int], cluster: int, vector: bool, part: float, device: Device
) -> bool:
    """Clusters alone, for these do not draw. `held` and `part` are as for may_keep_pace() of backward.py."""
    few_blocks = norm == "rmsnorm" or cluster <= PACED_FORWARD_MOST_BLOCKS_LAYERNORM[device.has_slow_memory]
    many = held[0] == FORWARD_MANY_COLUMNS_PER_THREAD or (few_blocks and _has_paced_columns(x, held[0]))
    timed = device.has_fast_memory
    least_part = PACED_FORWARD_LEAST_PART.get(ITEMSIZE[x], AS_GOOD_AS_FULL) if timed else AS_GOOD_AS_FULL
    gains = held[0] == 32 and norm == "rmsnorm" and (part >= least_part or cluster == 2)
    return vector and cluster > 1 and (many or gains)


def _has_paced_columns(x: str, per_thread: int) -> bool:
    return ITEMSIZE[x] == 2 and per_thread in PACED_FORWARD_COLUMNS


def _forward_least_stages(norm: str, x: str, held: tuple[int, int], cluster: int, few_steps: bool) -> int:
    """`held` is what short_row() or staged_threads() chose; `few_steps` is of each walker."""
    per_thread, group = held
    more = norm == "layernorm" and per_thread in FORWARD_MORE_STAGES_PART_COLUMNS
    if has_whole_warps(x, held):
        large_block = per_thread == FORWARD_MORE_STAGES_BLOCK_COLUMNS and group == STAGED_MAX_THREADS
        of_clusters = cluster > 1 and per_thread in FORWARD_MORE_STAGES_CLUSTER_COLUMNS
        slow = norm == "layernorm" and cluster == 1 and per_thread in FORWARD_MORE_STAGES_COLUMNS
        more = few_steps or (ITEMSIZE[x] == 2 and (slow or of_clusters or large_block))
    return FORWARD_STAGED_MORE_STAGES if more else FORWARD_STAGED_LEAST_STAGES


def _wanted_stages(
    problem: NormProblem, vector: int, groups: int, walkers: int, bytes_of_steps: int, device: Device
) -> int:
    """As many as the blocks on a multiprocessor, whose steps are of so many bytes together, are to have in flight."""
    stages, steps = FORWARD_STAGED_RING_BYTES // bytes_of_steps, divide_up(problem.rows, groups) // walkers
    least, below = SLOW_FORWARD_RING_STEPS
    if device.has_slow_memory and problem.norm == "rmsnorm" and vector > 1 and least <= steps < below:
        # With more than the steps that are not drawn, nothing would be.
        return max(stages, min(SLOW_FORWARD_RING_BYTES // bytes_of_steps, steps // 2))
    return stages


def _forward_lead(norm: str, per_thread: int, cluster: int, device: Device) -> int:
    slow = device.has_slow_memory
    if per_thread == FORWARD_MANY_COLUMNS_PER_THREAD:
        return LEAD_FORWARD_MANY[slow][norm][cluster]
    return LEAD_FORWARD_SEVERAL[slow][norm][cluster > 2] if per_thread in PACED_FORWARD_COLUMNS else LEAD_FORWARD[slow]


def _forward_paced_steps(norm: str, x: str, per_thread: int, part: float, device: Device) -> int:
    """Of a walker, from which on it keeps pace."""
    timed = ITEMSIZE[x] == 2 and device.is_fast_9_0
    if not timed or (norm == "layernorm" and part < PACED_FORWARD_FILLED_LAYERNORM):
        return PACE_FORWARD_LEAST_STEPS
    few = norm == "rmsnorm" and _has_paced_columns(x, per_thread)
    return PACED_FORWARD_STEPS if few else PACED_FORWARD_STEPS_FILLED


def forward_config(
    problem: NormProblem, alignment: int, device: Device, odd: Access = ODD_IN_WORDS, start: int = 0
) -> ForwardConfig:
    """Choose the forward kernel; every row of x and y starts at a multiple of `alignment` bytes; `odd` and `start`: all
    as in the backward pass."""
    x = problem.x_dtype.name
    vector = vector_width(x) if alignment == 16 and problem.columns % vector_width(x) == 0 else 1
    access = access_of(problem, vector > 1, alignment, device)
    definitions = forward_definitions(problem.norm, x, vector > 1, reserved_of(problem))
    if wide := forward_wide_config(problem, vector > 1, definitions, device, start):
        return wide
    if device.has_clusters and (staged := _forward_staged(problem, vector, access, definitions, device, odd, start)):
        return staged
    per_thread = columns_per_thread(x)
    if problem.columns <= WARP * per_thread:
        choice = forward_choice(problem.norm, x, vector > 1, 1, device)
        parts = forward_part_of_warp_lanes(x, vector > 1, access, choice, device)
        held = short_row(x, problem.columns, parts, access)
        access = ODD_BY_ELEMENT if access in ODD else access
        definitions = (*definitions, *direct_forward_definitions(held[0], part_lanes(x, held), access))
        return ForwardConfig("forward.cu", "forward_direct", definitions, SMALL_BLOCK, held[1])
    threads = in_whole_warps(divide_up(problem.columns, per_thread))
    if threads <= forward_max_threads(vector > 1):
        definitions = (*definitions, *direct_forward_definitions(per_thread))
        return ForwardConfig("forward.cu", "forward_direct", definitions, threads, threads)
    slab = FORWARD_SPLIT_THREADS * per_thread
    return ForwardConfig(
        "forward_split.cu",
        "forward_split_apply",
        (*definitions, *direct_forward_definitions(per_thread, access=SINGLE if access in ODD else access)),
        FORWARD_SPLIT_THREADS,
        FORWARD_SPLIT_THREADS,
        slab_columns=slab,
        slabs=divide_up(problem.columns, slab),
    )


def direct_forward_definitions(per_thread: int, part: int = 0, access: Access = SINGLE) -> tuple[str, ...]:
    return f"COLUMNS_PER_THREAD={per_thread}", *part_definitions(part), *access.definitions


def forward_max_threads(vector: bool) -> int:
    """kMaxThreads of forward.cu (the direct route), without PART_OF_WARP."""
    return 512 if vector else 256


def _forward_staged(
    problem: NormProblem,
    vector: int,
    access: Access,
    definitions: tuple[str, ...],
    device: Device,
    odd: Access,
    start: int,
) -> ForwardConfig | None:
    """The smallest cluster whose blocks have room for a ring; None where not even the largest has, or for large gaps.

    A place in the ring is free again as soon as its row is in registers.
    """
    name = problem.x_dtype.name
    stride, small = problem.x_row_stride, is_short(problem)
    several = rows_share_copies(problem, vector > 1, FORWARD_MOST_COPIED_GAPS, stride)
    if small and not several:
        return None
    for cluster, slab in splits(problem.columns, 1 if small else device.largest_cluster, vector, name, name, device):
        choice = forward_choice(problem.norm, name, vector > 1, cluster, device)
        parts = forward_part_of_warp_lanes(name, vector > 1, access, choice, device)
        held = short_row(name, slab, parts, access) if small else staged_threads(slab, choice, access)
        if held is None or _takes_more_blocks(problem.norm, name, vector > 1, held, cluster, device):
            continue
        per_thread, group = held
        gaps = several and asks_for_gaps(problem, held, cluster, stride)
        b_in_shared = _keeps_b_in_shared(problem.norm, name, vector > 1, held, cluster, device)
        at_once = _forward_threads_at_once(problem.norm, name, vector > 1, access, held, b_in_shared, device)
        if cluster == 1 and group == WARP and not several:
            at_once = min(at_once, FORWARD_APART_WARPS * WARP)
        block_threads = 8 * WARP if per_thread == columns_per_thread(name) else 4 * WARP
        groups = groups_in_block(block_threads, group, problem.rows) if cluster == 1 and several else 1
        threads = groups * group
        elements = (groups - 1) * stride + slab
        step_bytes = part_bytes(name, vector > 1, elements)
        leaves = leaves_lines(start, stride * ITEMSIZE[name])
        leaves = leaves and may_leave_lines(name, name, held, vector > 1, device)
        b_bytes = threads * per_thread * compute_itemsize(name) if b_in_shared else 0
        static_bytes = staged_static_bytes(name, cluster) + b_bytes
        slack = odd_slack_bytes(access)
        w_bytes = divide_up(slab * compute_itemsize(name), 16) * 16  # copied behind the ring, where there is room
        for off_lines, blocks in product((True, False) if leaves else (False,), counts_to_try(at_once // threads)):
            teams = most_teams(name, per_thread, cluster) if off_lines else 0
            ring_step_bytes = part_bytes(name, vector > 1, elements, teams)
            room = device.shared_bytes // blocks - static_bytes - slack
            stages = min(room // ring_step_bytes, STAGED_MOST_STAGES)
            if stages >= FORWARD_STAGED_LEAST_STAGES:
                walkers = usual_clusters(cluster, device) * blocks
                few_steps = not takes_at_least(problem.rows, FORWARD_SHORT_STEPS, groups, walkers)
                wanted = _wanted_stages(problem, vector, groups, walkers, blocks * step_bytes, device)
                wanted = max(_forward_least_stages(problem.norm, name, held, cluster, few_steps), wanted)
                stages = min(stages, wanted)
                shared_bytes = b_bytes + min(ring_step_bytes * stages + w_bytes, room) + slack
                filled = slab / (per_thread * group)
                paced = forward_keeps_pace(problem.norm, name, held, cluster, vector > 1, filled, device)
                draws_short = _draws_short_rows(problem, vector, held, gaps, device)
                part = part_lanes(name, held)
                access = odd if access in ODD else access
                staged = staged_definitions(
                    per_thread,
                    cluster,
                    part,
                    paced,
                    gaps=gaps,
                    draws=draws_short,
                    access=access,
                    off_lines=off_lines,
                )
                least_drawn = DRAWN_LEAST_STEPS[blocks == 1 or vector == 1]
                # kDraws of forward_staged.cu
                draws = cluster == 1 and (has_whole_warps(name, held) or problem.norm == "rmsnorm" or draws_short)
                drawn = _drawn_part(problem, vector, held, groups, blocks == 1, not several, device) if draws else 0.0
                return ForwardConfig(
                    "forward_staged.cu",
                    "forward_staged",
                    (*definitions, *staged),
                    threads,
                    group,
                    slab_columns=slab,
                    cluster=cluster,
                    stages=stages,
                    shared_bytes=max(shared_bytes, min(b_bytes + room + slack, device.shared_bytes // (blocks + 1))),
                    drawn_part=drawn,
                    drawn_steps=SLOW_DRAWN_LEAST_STEPS if device.has_slow_memory else least_drawn,
                    lead=_forward_lead(problem.norm, per_thread, cluster, device) if paced else 0,
                    paced_steps=_forward_paced_steps(problem.norm, name, per_thread, filled, device),
                )
    return None


def forward_definitions(
    norm: str, x: str, vector: bool, reserved: tuple[str, ...] = reserved_definitions()
) -> tuple[str, ...]:
    return (
        f"LAYER_NORM={int(norm == 'layernorm')}",
        f"X_TYPE={x}",
        f"VECTOR={int(vector)}",
        *reserved,
        argument_bytes(FORWARD_ARGUMENTS),
    )
