"""Launch choices: a pure function of the problem and the device, needing no GPU.

What fixes the order of a row's sums (route, vector width, threads and blocks that share a row) depends on the row, its
layout and what is summed alone, never on how many rows come with it: so a row's dx and y have the same bits in any
company.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..problem import FLOAT_NAMES, NormProblem

WARP = 32
CLUSTERS = (1, 2, 4, 8, 16)
# Steps of a ring: the one at work, the next (its sums are needed early), and at least one on its way.
STAGED_LEAST_STAGES = 3
# In a long launch the least stages take no more on a multiprocessor, where fewer groups or blocks do with less: 1 GB,
# float32, RMSNorm N=1024 251 → 242 us, 4096 251 → 245, LayerNorm 1536 254 → 248. At 25 and 100 MB it lost up to 7%. Not
# off 16 bytes and with mixed types, where it was not measured.
STAGED_MOST_RING_BYTES = 128 << 10
STAGED_MOST_TEAMS = 4  # kMaxTeams
STAGED_MAX_THREADS = 256  # kMaxThreads of staged.cuh: what leaves a thread the registers that it needs
STAGED_MOST_STAGES = 8  # kMaxStages of staged.cuh
# In flight on a multiprocessor: see _ring_bytes().
STAGED_RING_BYTES, STAGED_LARGE_RING_BYTES = 112 << 10, 128 << 10
# Columns a thread where a row takes whole warps, by type of the arithmetic. Several, so that rows of any length fill
# the lanes of 1, 2, 4 or 8 warps; in vectors, or single columns: for these, whose lanes without a column take as long
# as the others, six in place of two. 1 GB, an H100: LayerNorm N=513 520 → 367 us, 601 447 → 356, 700 386 → 358,
# RMSNorm 513 453 → 367, 601 390 → 355, 700 348 → 357, from 850 on −4 to +3% (with fewer warps than now); on an H200
# 24 beside 32 and 40 made LayerNorm 6100 298.0 → 262.3, 24001 354.9 → 306.6.
STAGED_COLUMNS_PER_THREAD: dict[bool, dict[str, tuple[int, ...]]] = {
    True: {"float32": (24, 32, 40), "float64": (16,)},
    False: {"float32": (20, 24, 28, 32, 36, 40), "float64": (16,)},
}
STAGED_COLUMNS_OF_BLOCKS_ALONE = (20,)  # of clusters each block has more of a row than that
# Of short rows, beside columns_per_thread(), where these cover least beyond the row: how many columns a thread, and
# on how many lanes at least and at most, in vectors or single columns, by bytes of x's type. In vectors, 1 GB,
# LayerNorm: N=384 forward 223 → 185 us, backward 265 → 249, N=192 255 → 183, 273 → 254. With 32, forward, LayerNorm
# N=256 194 → 177 us, but 512 177 → 185; backward, with the registers it needs, LayerNorm N=256 254 → 249, but at 100
# MB 38 → 42, and 128 258 → 272. Backward in float32 LayerNorm loses 5% with 24. Single columns, 1 GB, an H100,
# backward: RMSNorm 65 656 → 573, 129 533 → 476, 257 498 → 389, 350 376 → 371, LayerNorm 681 → 592, 579 → 520, 560 →
# 392, 415 → 377; with fewer lanes 12 lost at 25 MB (9 to 20 up to 28%; RMSNorm 33, which has it, loses 7%), though at
# 1 GB it gained 2 to 17%; 20 and 24 lost or gained less (33 with 20 549 → 1063, 129 497); in float32 24 lost 6 to
# 18%, and 12 gained nothing. Forward: FORWARD_FEW_LANES.
PartLanes = dict[int, tuple[int, int]]
STAGED_PART_OF_WARP_LANES: dict[bool, dict[int, PartLanes]] = {
    True: {2: {24: (1, 16)}},
    False: {2: {12: (4, 32), 20: (16, 16)}},
}
FORWARD_PART_OF_WARP_LANES: dict[bool, dict[int, PartLanes]] = {
    True: {2: {24: (1, 16), 32: (1, 8)}, 4: {24: (1, 16), 32: (1, 8)}},
    False: {2: {12: (4, 16), 20: (16, 16), 24: (16, 16)}, 4: {12: (8, 32), 20: (16, 16)}},
}
# Forward, single columns of 16-bit types, twice as many threads on a multiprocessor, with 24 columns a thread half as
# many more, where as many lanes or more hold a row; with the columns above, 1 GB, an H100: RMSNorm 65 664 → 433 us,
# 129 662 → 398, 257 625 → 278, 450 367 → 255, LayerNorm 764 → 513, 787 → 482, 711 → 357, 411 → 293; with fewer lanes
# 9 to 20 lost 10 to 20% (5 gained, 925 → 632, LayerNorm 999 → 738).
FORWARD_FEW_LANES = 4
# Rows of a warp or less with gaps between them: several are copied at once, with the gaps, where strides are on
# average at most so many times as long as rows, by whether they come in vectors; else they take the direct route. 300
# MB, an H100, direct and so, in vectors: RMSNorm N=512 with gaps of 8 columns 121.4 → 112.8 us, of 64 119.7 → 119.0,
# of 128 117.8 → 126.1 (not there), 384 with 64 131.9 → 121.2; LayerNorm 512 148.6 → 113.2, 148.0 → 119.0, 146.4 →
# 125.7, with 256 146.0 → 139.9, 64 with 64 152.8 → 178.1 (not there); forward RMSNorm 512 with 64 83.0 → 76.5, 256
# with 64 88.2 → 81.5, with 128 86.9 → 88.6 (not there), LayerNorm 85.7 → 80.5, 91.0 → 86.2, 89.6 → 93.5 (not there),
# 384 with 64 81.4 → 83.8. Single columns: RMSNorm 512 with 1 218.4 → 116.6, with 513 221.9 → 175.2, 129 with 1 313.7
# → 167.4, LayerNorm 228.2 → 119.0, 230.3 → 178.9, 343.0 → 183.4; forward RMSNorm 512 with 1 91.2 → 77.3, with 257
# 92.7 → 88.7, with 513 92.3 → 103.3 (not there), 129 with 1 124.3 → 125.9, LayerNorm 107.4 → 85.1, 107.5 → 94.1,
# 107.7 → 110.2, 148.1 → 149.2.
MOST_COPIED_GAPS = {True: {"rmsnorm": 1.17, "layernorm": 1.5}, False: {"rmsnorm": 2.5, "layernorm": 2.5}}
FORWARD_MOST_COPIED_GAPS = {True: {"rmsnorm": 1.3, "layernorm": 1.3}, False: {"rmsnorm": 1.75, "layernorm": 2.0}}
# Of larger types, both passes. Float32: 512 with 8 121.1 → 111.4 us, LayerNorm 123.1 → 112.3, forward 79.2 → 73.5, 79.9
# → 76.5, 256 with 64 118.7 → 125.4, 121.0 → 126.7, 79.2 → 81.0, 80.7 → 83.8 (not there); single columns, with 1, 512
# 135.3 → 114.5, 138.1 → 115.9, 78.4 → 74.1, 80.8 → 79.9, 300 167.2 → 116.0, 183.3 → 116.6, 84.9 → 75.0, 87.0 → 78.8;
# larger gaps of these and float64 were not timed.
MOST_COPIED_GAPS_LARGE = {True: 1.17, False: 1.25}
STAGED_USUAL_COLUMNS_PER_THREAD = {"float32": (32,), "float64": (16,)}
# Of 16-bit types, where the largest cluster has no room for the row otherwise (1 GB, N=262144: RMSNorm 555 us in two
# sweeps, 263 so). Level two of dw and db then lies in memory, and of w, beside both, three vectors a thread in shared
# memory (backward.cuh: kManyColumns, Weights::kInShared).
STAGED_MANY_COLUMNS_PER_THREAD = 64
STAGED_SHARED_W_BYTES = 3 * 8 * 4
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
# columns a thread in eight blocks 357.
STAGED_MOST_COLUMNS_LAYERNORM, STAGED_MOST_COLUMNS_CLUSTER = {40: 8448}, 2
# Steps that the forward pass has in flight at least; more where each walker has few steps. 100 MB, LayerNorm with two
# and three, N=2560 24.3 → 23.4 us, 4096 23.6 → 22.6, 12288 24.6 → 23.4, 20480 25.2 → 23.7; 200 MB 0.5 to 3% less; 400
# MB −2 to +1.5%; RMSNorm as long, 131072 23.2 → 22.6; float32, 100 MB, 1 to 4% less in both.
FORWARD_STAGED_LEAST_STAGES, FORWARD_STAGED_MORE_STAGES, FORWARD_SHORT_STEPS = 2, 3, 24
# And of LayerNorm's blocks that are no clusters, by columns a thread: 1 GB, with two and three, 2560 170.0 → 168.6 us,
# 5120 170.5 → 168.6, 10240 170.5 → 169.8, 8192 172.3 → 171.2, 16384 172.4 → 171.6, though 1280 168.5 → 169.6; of parts
# of warps 384 186 → 176. With the others it lost: 24 1536 169.4 → 171.1, 32 4096 167.5 → 169.1, 48 12288 169.3 → 170.6.
FORWARD_MORE_STAGES_COLUMNS, FORWARD_MORE_STAGES_PART_COLUMNS = (40, 64), (24,)
# Forward, where each walker has many steps: of all steps this part is drawn by whoever is done first. 1 GB: RMSNorm
# N=256 182 → 172 us with a half, 174 with a quarter, N=4096 171 → 168 with a quarter, LayerNorm 179 → 174; of blocks
# alone on their multiprocessor, RMSNorm N=7168 177 → 168 with an eighth, 172 with a quarter. N=384, with 24 columns a
# thread, takes 169 us with a quarter and 171 with a half.
DRAWN_PART, DRAWN_PART_SHORT, DRAWN_PART_ALONE = 1 / 4, 1 / 2, 1 / 8
DRAWN_LEAST_STEPS = 16
# In launches with so many steps a walker and more, walkers keep pace: so many quarters of a step less than the average
# may one have before it. RMSNorm, 1 GB, N=4096: 246 us without, 242 so. With fewer steps RMSNorm gains as well, 150 and
# 200 MB 2% on average, 100 MB 0.9%, float32, 200 MB, 1024 59.2 → 57.1; LayerNorm with half as many, 200 MB, 4096 61.9 →
# 60.5, 8192 61.0 → 59.6 (with a quarter, at 100 MB, some lengths lost).
PACE_LEAST_STEPS = {"rmsnorm": 12, "layernorm": 24}
PACE_FORWARD_LEAST_STEPS = LONG_LEAST_STEPS = 48
PACED_PART_LEAST_THREADS = 8  # of a row: see _keeps_pace()
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
# 244.0, 242.5, 243.5 us, 256 244.0, 243.4, 242.3, 243.8, 512 243.6, 242.2, 241.2, 242.1; in clusters of sixteen, with
# six to nine, 131072 240.7, 240.1, 239.7, 241.4 (262144 250.7 with four, 251.6 with eight). LayerNorm with 24 columns a
# thread, seven (of an older tree), eight, nine, ten and twelve: 1536 244.9, 244.7, 244.5, 244.4, 243.7, 3072 245.5,
# 243.4, 243.2, 243.2, 243.3, 6144 247.3, 244.1, 243.9, 245.4, 247.1, 12288 248.6, 246.0, 244.6, 244.9, 245.2; in
# clusters of four and eight, 20480 246.6 (six), 244.7, 245.9, 246.8, 247.8, 32768 247.0, 248.4, 249.2, 248.8, 248.9,
# 65536 247.6, 247.5, 247.2, 247.0, 247.2.
LEAD_SHORT_ROWS, LEAD_LARGEST_CLUSTERS = 9, 8  # RMSNorm
LEAD_LAYERNORM_24_COLUMNS, LEAD_LAYERNORM_CLUSTERS = 9, 8
# With 28 columns a thread, LayerNorm, 1 GB, with seven, eight, nine and ten: 7168 244.8, 244.3, 244.2, 244.7 us, 14336
# 241.3, 241.4, 242.9, 244.3. In float32, by threads of a block that share a row, with five, seven and nine: 64, 1792
# 241.9, 240.3, 241.8; 128, 3584 241.3, 239.4, 240.7; 256, 7168 242.9, 246.5, 249.1, 14336 242.8, 246.1, 248.6.
LEAD_FILLING, LEAD_FILLING_FLOAT32 = 8, {64: 7, 128: 7, 256: 5}
# Forward, in clusters, RMSNorm, 1 GB, with nine, ten, eleven and twelve: N=14336 166.8, 166.7, 166.9, 167.7 us, 32768
# 165.4, 165.5, 165.7, 166.4, 65536 166.5, 166.1, 166.6, 167.1. Of 64 columns a thread, by blocks of a cluster, each
# with three to six: RMSNorm, N=131072 172.6, 167.5, 166.7, 167.1 us; LayerNorm, 32768 182.4, 172.1, 167.7, 168.6; with
# five to seven 65536 169.7, 168.0, 171.7, 131072 169.4, 168.9, 169.9, and slower with more; 262144 170.5 without, with
# eight to twenty 173.7 to 174.0 (compiled for pace all the same: else 172.4, beside 169.5).
LEAD_FORWARD = 10
LEAD_FORWARD_MANY = {"rmsnorm": {8: 5, 16: 5}, "layernorm": {2: 5, 4: 6, 8: 6, 16: 0}}
FORWARD_STAGED_RING_BYTES = 48 << 10  # on a multiprocessor
# Columns a thread in the forward pass of 16-bit types. LayerNorm, whose sums within a warp cost more, gains from more:
# at N=65536 and 1 GB 210 us with 32, 182 with 64. RMSNorm there takes 174 with 32 and 178 with 64, but gains from 48:
# N=12288, in one block, not in two of 24, 176 → 170 us, 43008, in four, not in eight, 195 → 174 (98304, which takes
# eight in any case, with 64 kept pace: 169 → 171, at 100 MB 24.4 → 23.7). More than 40 only where a row takes four
# warps or more: LayerNorm, N=2048 173.5 us with 64, 168.7 with 32 (_keeps_b_in_shared()), RMSNorm 1536 169.2 with 48,
# 167.8 with 24.
FORWARD_COLUMNS_PER_THREAD = {"rmsnorm": (24, 32, 40, 48), "layernorm": (24, 32, 40, 48, 64)}
FORWARD_MORE_COLUMNS, FORWARD_MORE_COLUMNS_LEAST_WARPS = 40, 4
SPLIT_THREADS = 256
DIRECT_MAX_THREADS = {True: (256, 512), False: (256, 384)}  # of the direct route's variants: vectors, single columns
# One walker on a multiprocessor then beats two: LayerNorm, 1017x4096, where walkers met, 19.7 us, 21.0 with two.
FEW_ROWS_A_WALKER = 4
# With fewer steps a walker there are as few walkers as take no more steps each, if these are such a part or more:
# where 132 take 15 or 16, 128 take 16. 100 MB, RMSNorm, N=4096 36.2 → 35.6 us, 16384 36.2 → 35.8; 25 MB, 768, with 227
# of 264, 16.8 → 16.3, LayerNorm 1280, with 102 of 132, 19.5 → 18.9; forward, LayerNorm, 100 MB, N=65536 26.5 → 25.5,
# RMSNorm 8192 24.0 → 23.6. Not off 16 bytes, where fewer multiprocessors lost (4096 36.0 → 37.3), nor beside column
# blocks (LayerNorm, 25 MB, 1536 18.0 → 19.2, but 2560 16.8 → 16.0), nor forward where several blocks share a
# multiprocessor (LayerNorm 512 23.9 → 24.5).
EVEN_BELOW_STEPS, EVEN_LEAST_WALKERS = 48, 3 / 4
SMALL_BLOCK = 256  # threads of a block whose groups are warps or parts of warps
WORKSPACE_BYTES = 64 << 20
KEPT_BYTES = 16 << 20  # of workspace, for each stream; a call that needs more allocates its own
KEPT_COUNTER_BYTES = 64 << 10  # of these, for meetings of up to 8000 blocks
STEP_COUNTERS = 4  # kStepCounters of counters.cuh
STEP_COUNTERS_BYTES = STEP_COUNTERS * 128
# Where more blocks share a multiprocessor, they count their steps in so many places, not in one (Pace of staged.cuh).
# RMSNorm, rows with gaps of 512 columns, from 1536 on of 64, a row a block, 1 GB, an H100: eight blocks, N=640 789 →
# 434 us, with gaps of 8 839 → 466 (since without pace: _lead()), 768 702 → 361, 1024 568 → 359, four, 1536 410 → 345,
# 2048 362 → 344, but two 3072 338 → 345, 4096 339 → 344. Without pace 369, 364, 363, 359, 356; 100 MB, 1024 58.9 us,
# so 50.2, without pace 48.9.
MOST_BLOCKS_A_COUNTER = {"rmsnorm": 2, "layernorm": 1}
# Where x, dy and dx together take at least the first and at most the second, x and dy are read so that they leave the
# L2 cache first, but not beside column blocks. RMSNorm, 25 MB, N=1024 15.8 → 15.3 us; 50 MB, N=16384 24.2 → 23.2. With
# 10 MB it gained nothing, with 75 MB little, and with 1 GB it took 3 to 13% longer.
READ_ONCE_BYTES = (16 << 20, 50 << 20)
# Where x, dy and dx take at most so many bytes, and column blocks (column_blocks.cuh) at most so many rows for each of
# their threads, these sum dw and db, and row walkers find dx alone. By whether db is summed; rows also by the sectors
# of memory that a slice of columns is wide: one, two, or more. RMSNorm, 64x1024 9.6 → 6.8 us, 1628x2560 17.7 → 14.8;
# LayerNorm, 64x4096 12.7 → 7.9, 407x10240 21.8 → 15.8. Beyond these limits some lengths lost: RMSNorm, 36 MB, N=131072
# 9%, 3800x512, with 30 rows of a sector, 4%; LayerNorm, 3255x1280, with 51 of two, 6%, without db, 31 MB, N=65536 14%.
# Some lose within them: RMSNorm 65536 4 to 5% from 28 MB on, LayerNorm 32768 4% from 34 MB on, without db 65536 7% at
# 25 MB.
COLUMN_BLOCKS_BYTES = {
    False: {"rmsnorm": 32 << 20, "layernorm": 24 << 20},
    True: {"rmsnorm": 36 << 20, "layernorm": 36 << 20},
}
COLUMN_BLOCK_ROWS = {False: (28, 52, 76), True: (44, 48, 72)}
COLUMN_BLOCK_ROWS_ALONE = (20, 22, 40)  # without dx: 25 MB, N=1024, with 32 rows of a sector, 15.2 → 17.0 us
COLUMN_BLOCK_LARGE_ROW = 4 / 3  # what a row of a larger type counts: float32, 25 MB, N=65536, 64 rows, 17.9 → 20.1 us
SECTOR_BYTES = 32
# So many column blocks, and as many times more as there may be blocks on a multiprocessor. On a small device fewer, so
# that at least so many walkers are left for each cluster of them; without dx, in small clusters, twice as many:
# LayerNorm, 814x5120 17.8 → 14.4 us.
COLUMN_BLOCKS = 64
COLUMN_BLOCKS_WALKERS = 3 / 4
# Half as many where more walkers have something to do, by the blocks of a cluster, with at most so many rows of a
# thread, without and with db: 25 MB, LayerNorm, N=4096 16.1 → 15.6 us, 32768 19.2 → 17.0; RMSNorm, 12 MB, 4096 10.7 →
# 10.3, 25 MB 15.0 → 15.4, but 32768 17.6 → 15.6. Larger clusters lost (LayerNorm, 25 MB, N=131072 21.2 → 26.1), as did
# larger types and slices of two sectors; off 16 bytes LayerNorm, 61x8191, by 15%.
HALF_COLUMN_BLOCKS_ROWS = {1: (50, 64), 2: (50, 64), 4: (64, 64)}
# From so many columns on one row alone gains: LayerNorm 7.6 → 6.9 us, of 1024 6.2 → 6.6; where dw and db have another
# type than their sums, in any case.
COLUMN_BLOCKS_ONE_ROW = 4096
ONE_WALKER_STEPS = 4  # so few steps take one block less time than several and their final reduction
REDUCTION_RUN = 4  # kReductionRun of reduction.cuh
REDUCTION_BATCH = 10  # kReductionBatch of reduction.cuh
STATIC_SHARED_BYTES = 1024  # more than the direct and split kernels declare

BACKWARD_ARGUMENTS = "12P4q10i4h"  # struct BackwardArguments in backward.cuh
FORWARD_ARGUMENTS = "7P4qd9i2h"  # struct ForwardArguments in forward.cuh

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ELEMENT_CODES = {None: 0, "float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # enum ElementCode in element.cuh


class Device(NamedTuple):
    """What launch choices depend on."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block may have

    @property
    def has_clusters(self) -> bool:
        """Bulk asynchronous copies, clusters and remote stores into shared memory."""
        return self.compute_capability >= (9, 0)

    @property
    def has_large_shared_memory(self) -> bool:
        """As devices for data centres have: 227 KB for a block and not 99 (compute capability 12)."""
        return (9, 0) <= self.compute_capability < (12, 0)

    @property
    def largest_cluster(self) -> int:
        """16 needs a device that allows clusters beyond the portable 8."""
        return {9: 16, 10: 16}.get(self.compute_capability[0], 8) if self.has_clusters else 1


class BackwardConfig(NamedTuple):
    """How one backward problem runs: see the head of the source file for what the words mean."""

    route: str  # "direct", "staged" or "split": backward_<route>.cu
    definitions: tuple[str, ...]
    threads: int
    group_threads: int
    slab_columns: int
    slabs: int
    cluster: int = 1
    stages: int = 0
    shared_bytes: int = 0
    lead: int = 0  # of a walker, in quarters of a step, where pace is kept
    paced_steps: int = PACE_FORWARD_LEAST_STEPS  # of a walker, from which on it is
    step_counters: int = 1

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads


class ForwardConfig(NamedTuple):
    """How one forward problem runs: see the head of the source file for what the words mean."""

    file: str
    kernel: str  # "forward_direct", "forward_swept" or "forward_staged"
    definitions: tuple[str, ...]
    threads: int
    group_threads: int
    slab_columns: int = 0
    cluster: int = 1
    stages: int = 0
    shared_bytes: int = 0
    drawn_part: float = 0.0  # of the steps of a long launch
    lead: int = 0  # of a walker, in quarters of a step, where pace is kept
    paced_steps: int = PACE_FORWARD_LEAST_STEPS  # of a walker, from which on it is
    step_counters: int = 1

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads


def _compute_name(x_name: str) -> str:
    """The type of the arithmetic."""
    return "float64" if x_name == "float64" else "float32"


def compute_itemsize(x_name: str) -> int:
    return ITEMSIZE[_compute_name(x_name)]


def columns_per_thread(x_name: str) -> int:
    """Of the direct and split routes, and of short rows (but see _short_row()): 64 bytes of the arithmetic's type."""
    return 64 // compute_itemsize(x_name)


def vector_width(*names: str) -> int:
    """Elements of a vector access: those of 16 bytes in the smallest type."""
    return 16 // min(ITEMSIZE[name] for name in names)


def backward_config(problem: NormProblem, aligned: bool, device: Device) -> BackwardConfig:
    """Choose the backward kernels; `aligned` says that every row of x, dy and dx starts at a multiple of 16 bytes."""
    x, dy = problem.x_dtype.name, _name(problem.dy_dtype)
    vector = vector_width(x, dy) if aligned and problem.columns % vector_width(x, dy) == 0 else 1
    definitions = _backward_definitions(problem.norm, x, dy, _sums_db(problem), vector > 1, _reserved_of(problem))
    per_thread = columns_per_thread(x)
    outer_bytes = _column_sums_bytes(problem, per_thread)

    if device.has_clusters and (staged := _staged(problem, vector > 1, definitions, device)):
        return staged
    if problem.columns <= WARP * per_thread:
        choice = _staged_choice(x, dy, vector > 1, 1, device)
        parts = _part_of_warp(x, vector > 1, choice, device)
        return _direct(problem, definitions, SMALL_BLOCK, *_short_row(x, problem.columns, parts))
    threads = _whole_warps(_divide_up(problem.columns, per_thread))
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
        slabs=_divide_up(problem.columns, slab),
        shared_bytes=outer_bytes * SPLIT_THREADS,
    )


def _direct(
    problem: NormProblem, definitions: tuple[str, ...], threads: int, per_thread: int, group: int
) -> BackwardConfig:
    part = _takes_part(problem.x_dtype.name, (per_thread, group))
    return BackwardConfig(
        route="direct",
        definitions=(*definitions, *_direct_definitions(per_thread, threads, "VECTOR=1" in definitions, part)),
        threads=threads,
        group_threads=group,
        slab_columns=problem.columns,
        slabs=1,
        shared_bytes=_column_sums_bytes(problem, per_thread) * threads,
    )


def _direct_definitions(per_thread: int, threads: int, vector: bool, part: bool = False) -> tuple[str, ...]:
    max_threads = next(most for most in DIRECT_MAX_THREADS[vector] if threads <= most)
    return f"COLUMNS_PER_THREAD={per_thread}", f"MAX_THREADS={max_threads}", *_part_definitions(part)


def _column_sums_bytes(problem: NormProblem, per_thread: int) -> int:
    """Shared memory that each thread needs for the second level of dw and db, or in place of it for w."""
    if per_thread == STAGED_MANY_COLUMNS_PER_THREAD:
        return STAGED_SHARED_W_BYTES if _sums_db(problem) else 0
    return per_thread * compute_itemsize(problem.x_dtype.name) * (2 if _sums_db(problem) else 1)


def _sums_db(problem: NormProblem) -> bool:
    """Whether the kernels sum db. Where x and dy differ in type, in any case: it halves the number of such kernels."""
    return problem.want_db or problem.x_dtype != problem.dy_dtype


def _staged(problem: NormProblem, vector: bool, definitions: tuple[str, ...], device: Device) -> BackwardConfig | None:
    """The smallest cluster whose blocks have room for a ring of enough rows; None where not even the largest has.

    At N=8192, 16384 and 65536 no larger cluster than the smallest was over 1% faster.
    """
    name, dy_name = problem.x_dtype.name, _name(problem.dy_dtype)
    width = vector_width(name, dy_name) if vector else 1
    small, strides = _is_short(problem), (problem.x_row_stride, problem.dy_row_stride)
    several = _rows_follow(problem, vector, MOST_COPIED_GAPS, *strides)
    gaps = small and _have_gaps(problem, *strides)
    if small and not several:
        return None
    for cluster in CLUSTERS:
        slab = _slab(problem.columns, cluster, width)
        if cluster > (1 if small else device.largest_cluster) or (cluster - 1) * slab >= problem.columns:
            continue
        choice = _staged_choice(name, dy_name, vector, cluster, device)
        parts = _part_of_warp(name, vector, choice, device)
        held = _short_row(name, slab, parts) if small else _staged_threads(slab, choice)
        if held is None or _is_too_long(problem.norm, slab, held[0], cluster):
            continue
        kind = (problem.norm, name, dy_name, _sums_db(problem), vector)
        if _may_fill_lanes(kind, cluster, device) and _fills_lanes(problem.columns, cluster, slab, held, name):
            held = STAGED_FILLING_COLUMNS, held[1]
        paced = _keeps_pace(kind, held, cluster, full=slab == held[0] * held[1])
        split = _Split(kind, *held, cluster, slab, several and cluster == 1, gaps, paced)
        if config := _staged_blocks(problem, split, definitions, device):
            return config
    return None


def _rows_follow(problem: NormProblem, vector: bool, gaps: dict[bool, dict[str, float]], *strides: int) -> bool:
    """Whether a block may have several rows: they follow one another, or take a warp or less and the gaps are small."""
    if not _is_short(problem):
        return not _have_gaps(problem, *strides)
    most = gaps[vector][problem.norm] if problem.x_dtype.itemsize == 2 else MOST_COPIED_GAPS_LARGE[vector]
    return min(strides) >= problem.columns and sum(strides) <= most * len(strides) * problem.columns


def _is_short(problem: NormProblem) -> bool:
    """Whether a warp or less holds a row."""
    return problem.columns <= WARP * columns_per_thread(problem.x_dtype.name)


def _have_gaps(problem: NormProblem, *strides: int) -> bool:
    return any(stride != problem.columns for stride in strides)


Kind = tuple[str, str, str, bool, bool]  # norm, types of x and dy, whether db is summed, whether in vectors


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
    """The blocks; larger ones than usual where only beside these column blocks have so few rows that they pay.

    RMSNorm, N=1536, 25 MB 17.6 → 15.3 us, 18 MB 15.4 → 12.7, 768, 12 MB 12.9 → 11.2, 384, 6 MB 11.8 → 9.8; LayerNorm,
    3072, 31 MB 19.9 → 17.9, float32, 1536, 25 MB 17.6 → 15.3; but of a warp or less 384, 12 MB 13.8 → 16.1, 768, 25 MB
    17.9 → 19.0. Where column blocks pay with usual blocks, too, or with neither, larger ones lost up to 8%. Not timed:
    shorter rows of RMSNorm, LayerNorm without db, calls without dx.
    """
    config = _staged_config(problem, split, definitions, device)
    least_group = WARP // 2 if problem.norm == "rmsnorm" else 2 * WARP
    timed = problem.want_dx and (problem.norm == "rmsnorm" or problem.want_db) and split.group >= least_group
    usual = not timed or split.cluster > 1 or not split.kind[-1]
    if config is None or usual or config.threads == STAGED_MAX_THREADS:
        return config
    larger = _staged_config(problem, split, definitions, device, largest=True)
    if _has_column_blocks(config, problem, device) or larger is None or not _has_column_blocks(larger, problem, device):
        return config
    return larger


def _staged_config(
    problem: NormProblem, split: _Split, definitions: tuple[str, ...], device: Device, largest: bool = False
) -> BackwardConfig | None:
    """Of what has room, the largest block that pays, or the `largest`, and then as many as there may be; else None."""
    kind, per_thread, group, cluster, slab, several, gaps, paced = split
    _, name, dy_name, _, vector = kind

    def most_threads(keeps_pace: bool) -> int:
        return STAGED_MAX_THREADS if largest else _block_threads(kind, per_thread, keeps_pace)

    least_steps = LONG_LEAST_STEPS if _is_paced_part(kind, per_thread, group) else PACE_LEAST_STEPS[problem.norm]
    most_groups = _groups(most_threads(paced), group, problem.rows) if several else 1
    at_once = _threads_at_once(kind, per_thread, device)
    at_least = functools.partial(_takes_at_least, problem.rows)
    limited = vector and name == dy_name and at_least(LONG_LEAST_STEPS, most_groups, device.multiprocessors)
    pairs = [(g, b) for g in _counts_to_try(most_groups) for b in _counts_to_try(at_once // (g * group))]
    for groups, blocks in pairs:
        threads = groups * group
        outer_bytes = _column_sums_bytes(problem, per_thread) * threads
        parts = (name, problem.x_row_stride), (dy_name, problem.dy_row_stride)
        step_bytes = sum(_part_bytes(part, vector, (groups - 1) * stride + slab) for part, stride in parts)
        long = at_least(least_steps, groups, _usual_clusters(cluster, device) * blocks)
        keeps_pace = paced and long and (problem.want_dw or problem.want_db)  # where they meet
        too_large = limited and blocks * STAGED_LEAST_STAGES * step_bytes > STAGED_MOST_RING_BYTES
        too_many = groups > 1 and threads > most_threads(keeps_pace)
        if (too_large or too_many) and (groups, blocks) != pairs[-1]:
            continue
        room = device.shared_bytes // blocks - _staged_static_bytes(name, cluster) - outer_bytes
        stages = min(room // step_bytes, STAGED_MOST_STAGES)
        if stages < STAGED_LEAST_STAGES:
            continue
        ring_bytes = _ring_bytes(kind, per_thread, cluster, blocks, keeps_pace)
        stages = min(stages, max(STAGED_LEAST_STAGES, ring_bytes // (blocks * step_bytes)))
        part = _takes_part(name, (per_thread, group))
        short = not part and _has_short_rows(name, vector, per_thread, problem.columns - (cluster - 1) * slab)
        staged = _staged_definitions(per_thread, cluster, part, paced, short, gaps)
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
            lead=_lead(split, stages, blocks, step_bytes) if paced else 0,
            paced_steps=least_steps,
            step_counters=STEP_COUNTERS if blocks > MOST_BLOCKS_A_COUNTER[problem.norm] else 1,
        )
    return None


def _keeps_pace(kind: Kind, held: tuple[int, int], cluster: int, full: bool) -> bool:
    """Whether walkers keep pace in long launches; not where a row is shorter than a thread's columns (8: 345 → 371 us).

    `held` is what _short_row() or _staged_threads() chose; `full` says that the lanes of every block, but perhaps the
    last of a cluster, all hold as many columns. With db LayerNorm, at 1 GB, gains with 16 columns a thread (64 252 →
    249 us, 128 252.6 → 248.2, 256 250.8 → 247.3, 448 255 → 248; 192 and 320 as long), 24 (768 252.5 → 243.3, 1536 246.6
    → 244.5, 3072 245.8 → 243.2, 6144 246.7 → 243.9, 12288 246.6 → 244.6; with _ring_bytes() of 128 KB also 192 251.0 →
    246.7, 384 247.7 → 243.9), 28 (STAGED_FILLING_COLUMNS), 32 (see _ring_bytes(); in clusters of four and eight 32768
    252.4 → 248.4, 65536 250.4 → 247.5) and 40 (5120 255 → 248, in clusters 10240 252 → 247, 20480 250 → 247, 81920
    248.5 → 247.0). Its loop is then nearly as slow as memory, so that it loses where columns of a step are missing or
    fewer multiprocessors walk: not full (24 640 260 → 276, of an older tree, 28 6400 247.0 → 269.9, 32 7168 246.2 →
    255.1, 14336 as long), in clusters from four blocks on with 24 (24576 251.1 → 263.5, 98304 271.1 → 285.5) and 28
    (28672 246.8 → 248.5), of sixteen with 32 and 40 (131072 247.5 → 259.2, 163840 258.6 → 262.1); nor with 24 where
    four lanes or fewer hold a row (24 277 → 295, 96 254.6 → 255.1).
    In float32 it gains with 16 (256 252.6 → 246.8), 32 (1024 248.8 → 243.0, 16384 252.3 → 246.6, in clusters of
    eight 32768 255.4 → 247.6) and 40 (10240 249.3 → 244.5), but with 32 not in clusters of sixteen (65536 247.5 →
    266.4) nor where not full (14336 249.4 → 272.9), nor for all lengths with 24 (768 249.6 → 244.6, 3072 248.6 →
    253.7). With 64 it would spill. Not timed, so without pace: with db types of two sizes, float32 with 40 columns
    in clusters where not full, and with 32 columns or in clusters float64, and RMSNorm, which sums db where the
    types of x and dy differ.
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
        gains = per_thread in (32, 40) and full and cluster <= 8
        return gains or per_thread in (16, STAGED_FILLING_COLUMNS) or (per_thread == 40 and cluster == 1)
    if norm == "layernorm" and ITEMSIZE[x] == 2:
        if per_thread in (24, STAGED_FILLING_COLUMNS):
            return full and cluster <= 2 and group >= PACED_PART_LEAST_THREADS
        return per_thread == 16 or (cluster <= 8 and (per_thread == 40 or (per_thread == 32 and full)))
    return cluster == 1 and per_thread in (16, 40) and group >= WARP


def _is_paced_part(kind: Kind, per_thread: int, group: int) -> bool:
    """LayerNorm's rows of parts of a warp that keep pace, but from LONG_LEAST_STEPS on: 200 MB, 192 62.7 → 64.3 us."""
    return kind[0] == "layernorm" and per_thread == 24 and group < WARP


def _has_short_rows(x: str, vector: bool, per_thread: int, least_columns: int) -> bool:
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


def _lead(split: _Split, stages: int, blocks: int, step_bytes: int) -> int:
    """In quarters of a step, given the blocks of a multiprocessor and the bytes of a step.

    RMSNorm's rows with gaps keep no pace where they are of a warp that 24 columns a thread do not fill, eight blocks on
    a multiprocessor. An H100, 1 GB, N=640 432 → 373 us, 704 392 → 370, 576 377 → 375, 100 MB 53.0 → 50.8, 52.4 → 50.7,
    54.0 → 51.6; but 832 359 → 369, 1152 353 → 364, 1408 351 → 361, 1920 344 → 356.
    """
    (norm, x, *_), per_thread, group, cluster, slab, *_ = split
    crowded = norm == "rmsnorm" and blocks > MOST_BLOCKS_A_COUNTER[norm] and per_thread == 24 and group == WARP
    if crowded and slab < per_thread * group:
        return 0
    if per_thread == STAGED_FILLING_COLUMNS:
        return LEAD_FILLING if ITEMSIZE[x] == 2 else LEAD_FILLING_FLOAT32[group]
    if ITEMSIZE[x] == 2:
        if norm == "rmsnorm" and per_thread == columns_per_thread(x):
            return LEAD_SHORT_ROWS
        if norm == "rmsnorm" and cluster == CLUSTERS[-1] and per_thread < STAGED_MANY_COLUMNS_PER_THREAD:
            return LEAD_LARGEST_CLUSTERS
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


def _slab(columns: int, cluster: int, width: int) -> int:
    """Columns of a block: whole vectors, and in a cluster so that each block's columns of w start at 16 bytes."""
    unit = max(width, 8) if cluster > 1 else width
    return _divide_up(_divide_up(columns, cluster), unit) * unit


Choice = tuple[tuple[int, ...], ...]  # columns a thread, those to be preferred first


def _staged_choice(x: str, dy: str, vector: bool, cluster: int, device: Device) -> Choice:
    """Columns a thread to choose from; rare combinations, of which there are many, have no choice."""
    if not vector and not device.has_large_shared_memory:  # with 32, and db, kernels spill
        return ((columns_per_thread(x),),)
    largest = 8 if not vector else 16 if ITEMSIZE[x] == 2 else 4
    usual = x != dy or cluster > largest or not device.has_large_shared_memory
    choice = _usual_columns(x) if usual else _several_columns(x, vector, cluster)
    many = vector and x == dy and ITEMSIZE[x] == 2 and cluster == 16
    return (choice, (STAGED_MANY_COLUMNS_PER_THREAD,)) if many else (choice,)


def _may_fill_lanes(kind: Kind, cluster: int, device: Device) -> bool:
    """Whether there are kernels with STAGED_FILLING_COLUMNS: where they gain on compute capability 9.0."""
    norm, x, dy, sums_db, vector = kind
    gains = norm == "layernorm" and sums_db and vector and x == dy and device.has_large_shared_memory
    return gains and cluster <= STAGED_FILLING_CLUSTER[ITEMSIZE[x]]


def _fills_lanes(columns: int, cluster: int, slab: int, held: tuple[int, int], x: str) -> bool:
    """Whether STAGED_FILLING_COLUMNS take the place of 32; `held` is what _staged_threads() chose."""
    per_thread, group = held
    covered = STAGED_FILLING_COLUMNS * group
    if per_thread != 32 or group < STAGED_FILLING_LEAST_THREADS[ITEMSIZE[x]] or slab > covered:
        return False
    return columns == covered * cluster or (ITEMSIZE[x] == 2 and cluster != 2)


def _is_too_long(norm: str, slab: int, per_thread: int, cluster: int) -> bool:
    """Whether a block's part of a row goes to more blocks though it has room."""
    few = norm == "layernorm" and cluster <= STAGED_MOST_COLUMNS_CLUSTER
    return few and slab > STAGED_MOST_COLUMNS_LAYERNORM.get(per_thread, slab)


def _forward_choice(norm: str, x: str, vector: bool, cluster: int, device: Device) -> Choice:
    """The same for the forward pass."""
    if not vector and device.has_large_shared_memory:
        return (_several_columns(x, vector, cluster),)
    if ITEMSIZE[x] != 2 or not device.has_large_shared_memory:
        return _staged_choice(x, x, vector, cluster, device)
    # Compiled for 10.0, LayerNorm keeps float16 columns widened, and spills.
    spills = norm == "layernorm" and x == "float16" and device.compute_capability >= (10, 0)
    many: Choice = () if spills else ((STAGED_MANY_COLUMNS_PER_THREAD,),)
    choice = FORWARD_COLUMNS_PER_THREAD[norm][: -1 if spills else None]
    return (choice, *(many if cluster >= 8 and norm == "rmsnorm" else ()))


def _several_columns(x: str, vector: bool, cluster: int) -> tuple[int, ...]:
    several = STAGED_COLUMNS_PER_THREAD[vector][_compute_name(x)]
    return tuple(n for n in several if cluster == 1 or n not in STAGED_COLUMNS_OF_BLOCKS_ALONE)


def _usual_columns(x: str) -> tuple[int, ...]:
    return STAGED_USUAL_COLUMNS_PER_THREAD[_compute_name(x)]


def _keeps_b_in_shared(norm: str, x: str, vector: bool, held: tuple[int, int], cluster: int, device: Device) -> bool:
    """kBInShared of forward_staged.cu. `held` is what _short_row() or _staged_threads() chose."""
    few = columns_per_thread(x) < held[0] <= 32 and not _takes_part(x, held)
    usual = norm == "layernorm" and ITEMSIZE[x] == 2 and vector and cluster == 1
    return usual and few and device.has_large_shared_memory


def _threads_at_once(kind: Kind, per_thread: int, device: Device) -> int:
    """Threads on a multiprocessor, no more than kThreadsAtOnce of backward_staged.cu."""
    _, x, _, sums_db, vector = kind
    usual, few_registers = columns_per_thread(x), ITEMSIZE[x] < 4 or not sums_db
    if vector:
        return 512 if per_thread <= usual and device.compute_capability < (12, 0) else STAGED_MAX_THREADS
    if per_thread < usual or (per_thread == usual and device.compute_capability < (10, 0)):
        return 512
    return 384 if 2 * per_thread <= 3 * usual and few_registers else STAGED_MAX_THREADS


def _forward_threads_at_once(
    norm: str, x: str, vector: bool, held: tuple[int, int], b_in_shared: bool, device: Device
) -> int:
    """kThreadsAtOnce of forward_staged.cu: threads on a multiprocessor that leave each the registers that it needs.

    `held` is what _short_row() or _staged_threads() chose. Single columns, 1 GB, an H100: LayerNorm N=6001 with 384 of
    24 columns 311 us, so 243, 2601 290 and 266, though RMSNorm 24001 237 and 249; 2047 and 4095 with 256 of 32 280, so
    244, but in blocks of eight warps 8191 279 and 291; RMSNorm 2047 233.3 and 236.2 (not there). Float32 of 16 columns
    N=97 262 with 256, 294 with 512, LayerNorm 262 and 311.
    """
    per_thread, group = held
    if vector:
        bytes_of_column = (1 if b_in_shared else 2) * compute_itemsize(x) + 2 * ITEMSIZE[x]
        registers = per_thread * bytes_of_column // 4 + (78 if norm == "layernorm" else 62)
        return 512 if registers <= 128 else 384 if registers <= 170 else STAGED_MAX_THREADS
    usual_of_more_bytes = ITEMSIZE[x] > 2 and per_thread == columns_per_thread(x)
    if ITEMSIZE[x] == 8 or usual_of_more_bytes or group < FORWARD_FEW_LANES or device.compute_capability >= (10, 0):
        return STAGED_MAX_THREADS
    more = norm == "layernorm" and ITEMSIZE[x] == 2 and not _takes_part(x, held)
    if per_thread <= (24 if more else 20):
        return 512
    return 384 if per_thread <= (32 if more else 24) else STAGED_MAX_THREADS


def _staged_threads(slab: int, choice: Choice) -> tuple[int, int] | None:
    """Columns a thread, and threads that share a row: the fewest warps that hold a block's columns of it, if any do."""
    for preferred in choice:
        if len(preferred) > 1:
            for warps, per_thread in product((1, 2, 4, 8), preferred):
                least_warps = FORWARD_MORE_COLUMNS_LEAST_WARPS if per_thread > FORWARD_MORE_COLUMNS else 1
                if least_warps <= warps and slab <= warps * WARP * per_thread:
                    return per_thread, warps * WARP
        elif (threads := _whole_warps(_divide_up(slab, preferred[0]))) <= STAGED_MAX_THREADS:
            return preferred[0], threads
    return None


def _short_row(x: str, columns: int, parts: PartLanes) -> tuple[int, int]:
    """The same for a row of one warp or less: on all routes, for the bits of its sums depend on it."""
    options = {columns_per_thread(x): (1, WARP), **parts}
    held = ((n, _lanes(columns, n)) for n, (_, most) in options.items() if n * most >= columns)
    return min((h for h in held if h[1] >= options[h[0]][0]), key=lambda held: (held[0] * held[1], -held[0]))


def _part_of_warp(x: str, vector: bool, choice: Choice, device: Device) -> PartLanes:
    """Columns a thread, beside columns_per_thread(), of rows that take a part of a warp."""
    return _of_choice(STAGED_PART_OF_WARP_LANES[vector].get(ITEMSIZE[x], {}), choice, device)


def _forward_part_of_warp(x: str, vector: bool, choice: Choice, device: Device) -> PartLanes:
    """The same for the forward pass."""
    return _of_choice(FORWARD_PART_OF_WARP_LANES[vector].get(ITEMSIZE[x], {}), choice, device)


def _of_choice(parts: PartLanes, choice: Choice, device: Device) -> PartLanes:
    """Nothing where there is no choice."""
    return parts if device.has_clusters and len(choice[0]) > 1 else {}


def _takes_part(x: str, held: tuple[int, int]) -> bool:
    """Whether kernels would not expect so many columns a thread for so few lanes: PART_OF_WARP of columns.cuh."""
    per_thread, group = held
    usual = columns_per_thread(x)
    return per_thread < usual or (group < WARP and per_thread > usual)


def _has_whole_warps(x: str, held: tuple[int, int]) -> bool:
    """kWholeWarps of columns.cuh."""
    return held[0] > columns_per_thread(x) and not _takes_part(x, held)


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


def _groups(block_threads: int, group: int, rows: int) -> int:
    """Of a block: whole warps, beyond that no more than rows; one where a group has no power of two of threads.

    Sums of groups without a row would be added up, too: RMSNorm, 1x4096, 7.6 us with two groups, 6.7 with one.
    """
    if group & (group - 1):
        return 1
    wanted = max(_power_of_two_at_least(rows, block_threads), WARP // group)
    return min(max(1, block_threads // group), wanted)


def _counts_to_try(most: int) -> tuple[int, ...]:
    """Of blocks on a multiprocessor, or of groups in a block: as many as there should be, then powers of two, … one."""
    most = max(1, most)
    return most, *(1 << power for power in reversed(range((most - 1).bit_length())))


def _staged_static_bytes(x_name: str, cluster: int) -> int:
    """What a block takes beside its dynamic shared memory: the system's kilobyte, BlockState, what meet() declares, or
    in the forward pass numbers of steps, and PaceState."""
    barriers = 8 + 16 + 32 * STAGED_MOST_STAGES * STAGED_MOST_TEAMS
    warps = STAGED_MAX_THREADS // WARP * (32 + 8 * cluster * compute_itemsize(x_name))
    return 1024 + _divide_up(barriers + warps + 64 + 48, 128) * 128


def _lanes(columns: int, per_thread: int) -> int:
    """Neighbouring threads of a warp that share a row."""
    return _power_of_two_at_least(_divide_up(columns, per_thread), WARP)


class Grid(NamedTuple):
    """The blocks of a backward launch."""

    walkers: int  # blocks, clusters, or blocks of one slab, that walk along the rows
    column_blocks: int = 0  # behind them, blocks that sum dw and db (column_blocks.cuh); 0: the walkers do
    row_threads: int = 0  # of a column block, that share a column


class _ColumnBlocks(NamedTuple):
    blocks: int  # in whole clusters
    row_threads: int
    rows: float  # of each thread, as they count
    sectors: int  # that a slice is wide


def grid(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> Grid:
    """`blocks_at_once` is how many blocks (clusters) the device holds at the same time."""
    return _column_blocks_grid(config, problem, blocks_at_once, device) or Grid(
        partial_rows(config, problem, blocks_at_once, device)
    )


def _column_blocks_grid(
    config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device
) -> Grid | None:
    """None where column blocks are not worth it."""
    least_rows = 1 if problem.narrows_sums or problem.columns >= COLUMN_BLOCKS_ONE_ROW else 2
    if config.route != "staged" or problem.rows < least_rows or not (problem.want_dw or problem.want_db):
        return None
    if _data_bytes(problem) > COLUMN_BLOCKS_BYTES[_sums_db(problem)][problem.norm]:
        return None
    steps = _divide_up(problem.rows, config.groups)
    # Blocks on a multiprocessor, of 256 threads in all, where there is a step for each. Column blocks that are few
    # enough have one for themselves: LayerNorm, 2600x640, 12.8 → 11.9 us; but not blocks of a warp or two: 480x1024
    # with gaps, 9.1 → 12.1.
    together = 1
    if steps * config.cluster > device.multiprocessors:
        together = _divide_up(blocks_at_once * config.cluster, device.multiprocessors)
        together = max(1, min(together, STAGED_MAX_THREADS // config.threads))

    if not problem.want_dx:
        found = _column_blocks(config, problem, COLUMN_BLOCKS * together * (2 if config.cluster <= 2 else 1))
        return found and Grid(0, found.blocks, found.row_threads)

    def walkers_beside(found: _ColumnBlocks, most: int) -> int:
        spread = found.blocks <= most and config.threads >= 4 * WARP
        room = device.multiprocessors * (1 if spread else together) // config.cluster
        return min(steps, min(blocks_at_once, room) - found.blocks // config.cluster)

    for most in (COLUMN_BLOCKS, COLUMN_BLOCKS // 2, COLUMN_BLOCKS // 4):
        found = _column_blocks(config, problem, most * together)
        if found is None:
            return None
        walkers = walkers_beside(found, most)
        if walkers < steps and together == 1 and (half := _half_as_many_column_blocks(config, problem, most // 2)):
            found, walkers = half, walkers_beside(half, most)
        if walkers >= min(steps, COLUMN_BLOCKS_WALKERS * (found.blocks // config.cluster)):
            return Grid(walkers, found.blocks, found.row_threads)
    return None


def _has_column_blocks(config: BackwardConfig, problem: NormProblem, device: Device) -> bool:
    """Before it is known how many blocks the device holds at the same time: with as many as there may be."""
    blocks_at_once = device.multiprocessors * (STAGED_MAX_THREADS // config.threads)
    return _column_blocks_grid(config, problem, blocks_at_once, device) is not None


def _half_as_many_column_blocks(config: BackwardConfig, problem: NormProblem, most: int) -> _ColumnBlocks | None:
    x, dy = problem.x_dtype.itemsize, ITEMSIZE[_name(problem.dy_dtype)]
    most_rows = HALF_COLUMN_BLOCKS_ROWS.get(config.cluster)
    if most_rows is None or x != 2 or dy != 2 or "VECTOR=1" not in config.definitions:
        return None
    found = _column_blocks(config, problem, most)
    if found is None or found.sectors <= 2 or found.blocks < most or found.rows > most_rows[_sums_db(problem)]:
        return None
    return found


def _column_blocks(config: BackwardConfig, problem: NormProblem, most: int) -> _ColumnBlocks | None:
    """At most so many; None where their threads would have too many rows."""
    x, dy = problem.x_dtype.itemsize, ITEMSIZE[_name(problem.dy_dtype)]
    itemsize = min(x, dy)
    vector = 16 // itemsize if "VECTOR=1" in config.definitions else 1
    column_threads = SECTOR_BYTES // (itemsize * vector)
    while _divide_up(problem.columns, column_threads * vector) > most:
        if config.threads % (2 * column_threads):
            break
        column_threads *= 2
    slices = _divide_up(problem.columns, column_threads * vector)
    row_threads = config.threads // column_threads
    found = _ColumnBlocks(
        blocks=_divide_up(min(slices, most), config.cluster) * config.cluster,
        row_threads=row_threads,
        rows=_divide_up(problem.rows, row_threads) * _divide_up(slices, most) * _counts_as_rows(x, dy),
        sectors=column_threads * vector * itemsize // SECTOR_BYTES,
    )
    most_rows = COLUMN_BLOCK_ROWS[_sums_db(problem)] if problem.want_dx else COLUMN_BLOCK_ROWS_ALONE
    return found if found.rows <= most_rows[min(found.sectors, 3) - 1] else None


def _counts_as_rows(x_itemsize: int, dy_itemsize: int) -> float:
    """What a row of these types counts; where they differ in size, as many as vectors of the smaller are its mean."""
    if x_itemsize == dy_itemsize:
        return 1 if x_itemsize == 2 else COLUMN_BLOCK_LARGE_ROW
    return _divide_up(x_itemsize + dy_itemsize, 2 * min(x_itemsize, dy_itemsize))


def partial_rows(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> int:
    """How many row walkers (blocks, clusters, or blocks of one slab) run, each with a partial row of dw and db.

    `blocks_at_once` is how many blocks (clusters) the device holds at the same time.
    """
    walkers = _divide_up(blocks_at_once, config.slabs) if config.route == "split" else blocks_at_once
    if problem.rows <= FEW_ROWS_A_WALKER * walkers:
        walkers = min(walkers, device.multiprocessors)
    bytes_a_row = problem.columns * compute_itemsize(problem.x_dtype.name) * (2 if problem.want_db else 1)
    steps = _divide_up(problem.rows, config.groups)
    walkers = min(walkers, max(1, WORKSPACE_BYTES // 2 // bytes_a_row), 1 if steps <= ONE_WALKER_STEPS else steps)
    walkers = max(1, walkers)
    return _evenly(steps, walkers) if config.route == "staged" and "VECTOR=1" in config.definitions else walkers


def _evenly(steps: int, walkers: int) -> int:
    """As few walkers as take no more steps each than so many do, where steps are few and few walkers are left out."""
    each = _divide_up(steps, walkers)
    fewer = _divide_up(steps, each)
    return fewer if each < EVEN_BELOW_STEPS and fewer >= EVEN_LEAST_WALKERS * walkers else walkers


def forward_walkers(config: ForwardConfig, rows: int, blocks_at_once: int, device: Device) -> int:
    """Of a forward launch; `blocks_at_once` is how many blocks (clusters) the device holds at the same time."""
    steps = _divide_up(rows, config.groups)
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
    itemsizes = 2 * problem.x_dtype.itemsize + ITEMSIZE[_name(problem.dy_dtype)]
    return problem.rows * problem.columns * itemsizes


def pace(config: BackwardConfig | ForwardConfig, rows: int, walkers: int) -> tuple[int, int]:
    """How many quarters of a step ahead of the average a walker may be (0: as it likes), and counters of steps."""
    long = _takes_at_least(rows, config.paced_steps, config.groups, walkers)
    return config.lead if long else 0, config.step_counters


def _takes_at_least(rows: int, steps: int, groups: int, walkers: int) -> bool:
    """So many steps of each walker."""
    return _divide_up(rows, groups) >= steps * walkers


def least_steps(groups: int, rows: int, walkers: int) -> int:
    """Of each walker, of `groups` rows; some may have one more."""
    return _divide_up(rows, groups) // walkers if walkers else 0


def _drawn_part(norm: str, x: str, held: tuple[int, int], cluster: int, blocks: int) -> float:
    """`held` is what _short_row() or _staged_threads() chose, `blocks` how many share a multiprocessor."""
    whole_warps = _has_whole_warps(x, held)
    if cluster > 1 or not (whole_warps or norm == "rmsnorm"):  # kDraws of forward_staged.cu
        return 0.0
    if blocks == 1:
        return DRAWN_PART_ALONE
    return DRAWN_PART if whole_warps or held[0] == 24 else DRAWN_PART_SHORT


def _forward_keeps_pace(norm: str, held: tuple[int, int], cluster: int, vector: bool, full: bool) -> bool:
    """Clusters alone, for these do not draw; with 24 or 40 columns a thread they took up to 3% more (48: not timed).

    `held` and `full` are as for _keeps_pace(). RMSNorm, not full, 1 GB, in clusters from four blocks on, 25600 198.7 us
    with pace, 193.0 without, 28672 178.7 and 175.1, 57344 182.4 and 175.8; of two 14336 166.5 and 170.3.
    """
    many = held[0] == STAGED_MANY_COLUMNS_PER_THREAD
    gains = held[0] == 32 and norm == "rmsnorm" and (full or cluster == 2)
    return vector and cluster > 1 and (many or gains)


def _forward_least_stages(norm: str, x: str, held: tuple[int, int], cluster: int, short: bool) -> int:
    """`held` is what _short_row() or _staged_threads() chose; `short` says that each walker has few steps."""
    more = norm == "layernorm" and held[0] in FORWARD_MORE_STAGES_PART_COLUMNS
    if _has_whole_warps(x, held):
        slow = norm == "layernorm" and ITEMSIZE[x] == 2 and cluster == 1 and held[0] in FORWARD_MORE_STAGES_COLUMNS
        more = short or slow
    return FORWARD_STAGED_MORE_STAGES if more else FORWARD_STAGED_LEAST_STAGES


def _forward_lead(norm: str, per_thread: int, cluster: int) -> int:
    return LEAD_FORWARD_MANY[norm][cluster] if per_thread == STAGED_MANY_COLUMNS_PER_THREAD else LEAD_FORWARD


def forward_steps(config: ForwardConfig, rows: int, walkers: int) -> tuple[int, int, int]:
    """At least so many steps of each walker, the rows that the walkers take in these, and the steps that are drawn."""
    all_steps = _divide_up(rows, config.groups)
    steps = int(all_steps * (1 - config.drawn_part)) // walkers
    # What the ring begins with is not drawn.
    if not config.drawn_part or all_steps < DRAWN_LEAST_STEPS * walkers or steps < config.stages:
        return least_steps(config.groups, rows, walkers), rows, 0
    return steps, steps * walkers * config.groups, all_steps - steps * walkers


# Clusters that an H100 or H200 with 132 multiprocessors holds at once, one block on each, by cluster size.
_CLUSTERS_OF_132 = {2: 66, 4: 30, 8: 15, 16: 7}


def _usual_clusters(cluster: int, device: Device) -> int:
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
    usual = _usual_clusters(cluster, device)
    return usual * max(1, round(reported / usual))


def sums_walkers(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """Blocks that walk rows in the first sweep of the split route: 8 for a multiprocessor, no partial rows to pay."""
    return max(1, min(problem.rows, _divide_up(8 * device.multiprocessors, config.slabs)))


def partial_row_stride(columns: int) -> int:
    """Elements from one partial row to the next: partial_row_stride of reduction.cuh."""
    return _divide_up(columns, 4) * 4


def meeting_bytes(blocks: int) -> int:
    """struct Meeting of reduction.cuh, for a launch of so many blocks."""
    return STEP_COUNTERS_BYTES + 8 * (3 + blocks)


def reduction_row_threads(threads: int, blocks: int, partial_rows: int, problem: NormProblem) -> int:
    """Threads that share a column in the final reduction, of blocks with so many threads.

    What a block waits for memory is to be short: its share of the slices, times the batches of partial rows in each.
    """
    threads = 1 << (threads.bit_length() - 1)
    outputs = int(problem.want_dw) + int(problem.want_db)

    def waits(row_threads: int) -> int:
        slices = outputs * _divide_up(problem.columns, threads // row_threads * REDUCTION_RUN)
        batches = _divide_up(partial_rows, row_threads * REDUCTION_BATCH)
        return _divide_up(slices, blocks) * (batches + (row_threads > 1))

    return min((1 << power for power in range(threads.bit_length() - 1)), key=waits)


def forward_config(problem: NormProblem, aligned: bool, device: Device) -> ForwardConfig:
    """Choose the forward kernel; `aligned` says that every row of x and y starts at a multiple of 16 bytes."""
    x = problem.x_dtype.name
    vector = vector_width(x) if aligned and problem.columns % vector_width(x) == 0 else 1
    definitions = _forward_definitions(problem.norm, x, vector > 1, _reserved_of(problem))
    if device.has_clusters and (staged := _forward_staged(problem, vector, definitions, device)):
        return staged
    per_thread = columns_per_thread(x)
    if problem.columns <= WARP * per_thread:
        choice = _forward_choice(problem.norm, x, vector > 1, 1, device)
        held = _short_row(x, problem.columns, _forward_part_of_warp(x, vector > 1, choice, device))
        definitions = (*definitions, *_direct_forward_definitions(held[0], _takes_part(x, held)))
        return ForwardConfig("forward.cu", "forward_direct", definitions, SMALL_BLOCK, held[1])
    definitions = (*definitions, *_direct_forward_definitions(per_thread))
    threads = _whole_warps(_divide_up(problem.columns, per_thread))
    max_threads = forward_max_threads(vector > 1)
    if threads <= max_threads:
        return ForwardConfig("forward.cu", "forward_direct", definitions, threads, threads)
    return ForwardConfig("forward.cu", "forward_swept", definitions, max_threads, max_threads)


def _direct_forward_definitions(per_thread: int, part: bool = False) -> tuple[str, ...]:
    return f"COLUMNS_PER_THREAD={per_thread}", *_part_definitions(part)


def forward_max_threads(vector: bool) -> int:
    """kMaxThreads of forward.cu, without PART_OF_WARP."""
    return 512 if vector else 256


def _forward_staged(
    problem: NormProblem, vector: int, definitions: tuple[str, ...], device: Device
) -> ForwardConfig | None:
    """As for the backward pass. A place in the ring is free again as soon as its row is in registers."""
    name = problem.x_dtype.name
    stride, small = problem.x_row_stride, _is_short(problem)
    several = _rows_follow(problem, vector > 1, FORWARD_MOST_COPIED_GAPS, stride)
    gaps = small and _have_gaps(problem, stride)
    if small and not several:
        return None
    for cluster in CLUSTERS:
        slab = _slab(problem.columns, cluster, vector)
        if cluster > (1 if small else device.largest_cluster) or (cluster - 1) * slab >= problem.columns:
            continue
        choice = _forward_choice(problem.norm, name, vector > 1, cluster, device)
        parts = _forward_part_of_warp(name, vector > 1, choice, device)
        held = _short_row(name, slab, parts) if small else _staged_threads(slab, choice)
        if held is None:
            continue
        per_thread, group = held
        b_in_shared = _keeps_b_in_shared(problem.norm, name, vector > 1, held, cluster, device)
        at_once = _forward_threads_at_once(problem.norm, name, vector > 1, held, b_in_shared, device)
        block_threads = 8 * WARP if per_thread == columns_per_thread(name) else 4 * WARP
        groups = _groups(block_threads, group, problem.rows) if cluster == 1 and several else 1
        threads = groups * group
        step_bytes = _part_bytes(name, vector > 1, (groups - 1) * stride + slab)
        b_bytes = threads * per_thread * compute_itemsize(name) if b_in_shared else 0
        static_bytes = _staged_static_bytes(name, cluster) + b_bytes
        w_bytes = _divide_up(slab * compute_itemsize(name), 16) * 16  # copied behind the ring, where there is room
        for blocks in _counts_to_try(at_once // threads):
            room = device.shared_bytes // blocks - static_bytes
            stages = min(room // step_bytes, STAGED_MOST_STAGES)
            if stages >= FORWARD_STAGED_LEAST_STAGES:
                wanted = FORWARD_STAGED_RING_BYTES // (blocks * step_bytes)
                walkers = _usual_clusters(cluster, device) * blocks
                short = not _takes_at_least(problem.rows, FORWARD_SHORT_STEPS, groups, walkers)
                stages = min(stages, max(_forward_least_stages(problem.norm, name, held, cluster, short), wanted))
                shared_bytes = b_bytes + min(step_bytes * stages + w_bytes, room)
                paced = _forward_keeps_pace(problem.norm, held, cluster, vector > 1, full=slab == per_thread * group)
                staged = _staged_definitions(per_thread, cluster, _takes_part(name, held), paced, gaps=gaps)
                return ForwardConfig(
                    "forward_staged.cu",
                    "forward_staged",
                    (*definitions, *staged),
                    threads,
                    group,
                    slab_columns=slab,
                    cluster=cluster,
                    stages=stages,
                    shared_bytes=max(shared_bytes, min(b_bytes + room, device.shared_bytes // (blocks + 1))),
                    drawn_part=_drawn_part(problem.norm, name, held, cluster, blocks),
                    lead=_forward_lead(problem.norm, per_thread, cluster) if paced else 0,
                )
    return None


def _part_bytes(name: str, vector: bool, elements: int) -> int:
    """RingPart::part_bytes of staged.cuh."""
    return _divide_up(elements * ITEMSIZE[name] + (0 if vector else 128), 128) * 128


def triad_definitions(x_name: str, streaming: bool) -> tuple[str, ...]:
    return (f"ELEMENT={x_name}", f"STREAMING={int(streaming)}")


class Variant(NamedTuple):
    """One compilation: a source file, its kernels, its definitions."""

    file: str
    kernels: tuple[str, ...]
    definitions: tuple[str, ...]


def variants(compute_capability: tuple[int, int]) -> Iterator[Variant]:
    """Every compilation that the functions above can ask for on a device of this compute capability."""
    device = Device(compute_capability, multiprocessors=1, shared_bytes=0)
    for norm, x, dy, want_db, vector in product(
        ("rmsnorm", "layernorm"), FLOAT_NAMES, FLOAT_NAMES, (False, True), (False, True)
    ):
        # RMSNorm has no db; where types differ, kernels sum it in any case.
        if want_db < (x != dy) or want_db > (norm == "layernorm" or x != dy):
            continue
        definitions = _backward_definitions(norm, x, dy, want_db, vector)
        for threads in DIRECT_MAX_THREADS[vector][: 1 if device.has_clusters else None]:
            direct = (*definitions, *_direct_definitions(columns_per_thread(x), threads, vector))
            yield Variant("backward_direct.cu", ("backward_direct",), direct)
        split = (*definitions, f"COLUMNS_PER_THREAD={columns_per_thread(x)}")
        yield Variant("backward_split.cu", ("backward_split_sums", "backward_split_apply"), split)
        kind = (norm, x, dy, want_db, vector)

        def choices(cluster: int, device: Device, kind: Kind = kind) -> Choice:
            filling: Choice = ((STAGED_FILLING_COLUMNS,),) if _may_fill_lanes(kind, cluster, device) else ()
            return (*_staged_choice(kind[1], kind[2], kind[4], cluster, device), *filling)

        parts = _part_of_warp(x, vector, choices(1, device), device)
        for per_thread in parts:
            direct = (*definitions, *_direct_definitions(per_thread, SMALL_BLOCK, vector, True))
            yield Variant("backward_direct.cu", ("backward_direct",), direct)
        paced_of = functools.partial(_keeps_pace, kind)
        short_of = functools.partial(_has_short_rows, x, vector)
        yield from _staged_variants("backward_staged", definitions, x, device, choices, parts, paced_of, short_of)
    for norm, x, vector in product(("rmsnorm", "layernorm"), FLOAT_NAMES, (False, True)):
        definitions = _forward_definitions(norm, x, vector)
        routes = (*definitions, *_direct_forward_definitions(columns_per_thread(x)))
        yield Variant("forward.cu", ("forward_direct", "forward_swept"), routes)
        choices = functools.partial(_forward_choice, norm, x, vector)
        parts = _forward_part_of_warp(x, vector, choices(1, device), device)
        for per_thread in parts:
            direct = (*definitions, *_direct_forward_definitions(per_thread, True))
            yield Variant("forward.cu", ("forward_direct",), direct)

        def paced(held: tuple[int, int], cluster: int, full: bool, norm: str = norm, vector: bool = vector) -> bool:
            return _forward_keeps_pace(norm, held, cluster, vector, full)

        yield from _staged_variants("forward_staged", definitions, x, device, choices, parts, paced, lambda *_: False)
    for x, streaming in product(FLOAT_NAMES, (False, True)):
        yield Variant("triad.cu", ("triad",), triad_definitions(x, streaming))


def _staged_variants(
    kernel: str,
    definitions: tuple[str, ...],
    x: str,
    device: Device,
    choice_of: Callable[[int, Device], Choice],
    part_of_warp: Iterable[int],
    paced_of: Callable[[tuple[int, int], int, bool], bool],
    short_of: Callable[[int, int], bool],
) -> Iterator[Variant]:
    """One for every pair of columns a thread and blocks a cluster, two where only some rows keep pace, are short, or
    have gaps between them."""
    if not device.has_clusters:
        return
    clusters = [cluster for cluster in CLUSTERS if cluster <= device.largest_cluster]
    pairs = {(n, cluster) for cluster in clusters for preferred in choice_of(cluster, device) for n in preferred}
    parts = {(n, 1, True) for n in part_of_warp}
    wholes = {(*pair, False) for pair in pairs | {(columns_per_thread(x), 1)}}
    for per_thread, cluster, part in sorted(wholes | parts):
        warp_or_less = part or per_thread <= columns_per_thread(x)
        groups = (1, WARP // 2, WARP) if part else (1, WARP) if warp_or_less else (WARP, 2 * WARP)
        paces = sorted({paced_of((per_thread, g), cluster, full) for g, full in product(groups, (False, True))})
        fills_warp = WARP * per_thread  # as the blocks of clusters all do
        least_columns = (1, fills_warp) if cluster == 1 and not part else (fills_warp,)
        shorts = sorted({short_of(per_thread, n) for n in least_columns})
        gaps = (False, True) if warp_or_less and cluster == 1 else (False,)
        for paced, short, gap in product(paces, shorts, gaps):
            staged = (*definitions, *_staged_definitions(per_thread, cluster, part, paced, short, gap))
            yield Variant(f"{kernel}.cu", (kernel,), staged)


def _staged_definitions(
    per_thread: int, cluster: int, part: bool, paced: bool, short: bool = False, gaps: bool = False
) -> tuple[str, ...]:
    switches = {"PACED=1": paced, "SHORT_ROWS=1": short, "ROW_GAPS=1": gaps}
    others = (definition for definition, on in switches.items() if on)
    return f"COLUMNS_PER_THREAD={per_thread}", f"CLUSTER={cluster}", *_part_definitions(part), *others


def _part_definitions(part: bool) -> tuple[str, ...]:
    return ("PART_OF_WARP=1",) if part else ()


def _reserved(
    weight_offset: bool = False, per_head: bool = False, add_residual: bool = False, accumulate: bool = False
) -> tuple[str, ...]:
    return (
        f"WEIGHT_OFFSET={int(weight_offset)}",
        f"PER_HEAD={int(per_head)}",
        f"ADD_RESIDUAL={int(add_residual)}",
        f"ACCUMULATE={int(accumulate)}",
    )


def _reserved_of(problem: NormProblem) -> tuple[str, ...]:
    add_residual = problem.residual or problem.dresidual_out
    return _reserved(problem.weight_offset != 0.0, problem.heads > 1, add_residual, problem.accumulate)


def _backward_definitions(
    norm: str, x: str, dy: str, want_db: bool, vector: bool, reserved: tuple[str, ...] = _reserved()
) -> tuple[str, ...]:
    return (
        f"LAYER_NORM={int(norm == 'layernorm')}",
        f"X_TYPE={x}",
        f"DY_TYPE={dy}",
        f"WANT_DB={int(want_db)}",
        f"VECTOR={int(vector)}",
        *reserved,
        _argument_bytes(BACKWARD_ARGUMENTS),
    )


def _forward_definitions(norm: str, x: str, vector: bool, reserved: tuple[str, ...] = _reserved()) -> tuple[str, ...]:
    return (
        f"LAYER_NORM={int(norm == 'layernorm')}",
        f"X_TYPE={x}",
        f"VECTOR={int(vector)}",
        *reserved,
        _argument_bytes(FORWARD_ARGUMENTS),
    )


def _argument_bytes(layout: str) -> str:
    import struct

    return f"ARGUMENT_BYTES={struct.calcsize(layout)}"


def _name(dtype: np.dtype[Any] | None) -> str:
    assert dtype is not None
    return dtype.name


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _whole_warps(threads: int) -> int:
    return _divide_up(threads, WARP) * WARP


def _power_of_two_at_least(n: int, most: int) -> int:
    return min(most, 1 << (n - 1).bit_length())
