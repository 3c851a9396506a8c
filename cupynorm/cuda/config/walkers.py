"""How many row walkers run, and what they do: steps, the final reduction, pace. (Column blocks: column_blocks.py.)"""

from __future__ import annotations

from ...problem import NormProblem
from .column_blocks import column_blocks_grid
from .common import (
    STEP_COUNTERS,
    WARP,
    BackwardConfig,
    Device,
    ForwardConfig,
    Grid,
    compute_itemsize,
    data_bytes,
    divide_up,
    rows_lie_apart,
    starts_alternate,
)

# One walker on a multiprocessor then beats two: LayerNorm, 1017x4096, where walkers met, 19.7 us, 21.0 with two.
FEW_ROWS_A_WALKER = 4

# Of blocks of one to three warps that have one row a step, as rows lie apart: at most so many on a multiprocessor, by
# threads, and of about the least steps each, where such have fewer than the most steps (where memory is slow by whether
# in vectors); in any case where it is slow and walkers of one warp keep no pace over vectors. Else as many as may be
# (an H100, 25 MB, 1024, with one, four and eight: 35.0, 19.7, 22.9 us).
APART_WALKERS, APART_LEAST_STEPS = {WARP: 4, 2 * WARP: 3, 3 * WARP: 3}, 4
FAST_APART_MOST_STEPS, APART_MOST_STEPS = 12, {False: 16, True: 48}

# With fewer steps a walker there are as few walkers as take no more steps each, if these are such a part or more: where
# 132 take 15 or 16, 128 take 16 (100 MB, N=4096: 36.2 → 35.6 us). Not off 16 bytes, nor beside column blocks, nor
# forward where several blocks share a multiprocessor: there fewer lost.
EVEN_BELOW_STEPS, EVEN_LEAST_WALKERS = 48, 3 / 4
WORKSPACE_BYTES = 64 << 20  # at most: partial rows take half, and what takes more goes in several launches
KEPT_BYTES = 16 << 20  # of workspace, for each stream; a call that needs more allocates its own
KEPT_STREAMS = 8  # for which a thread keeps workspace on a device
# Of the forward split route: blocks that a multiprocessor holds (kBlocksAtOnce of forward_split.cu; in float64, say,
# two: there waves are not whole), waves of these, at least and at most, and rows that a block is to have.
FORWARD_SPLIT_AT_ONCE, FORWARD_SPLIT_WAVES, FORWARD_SPLIT_ROWS = 3, (2, 11), 8
KEPT_COUNTER_BYTES = 64 << 10  # of these, for meetings of up to 8000 blocks
KEPT_EXCHANGE_BYTES = 32 << 10  # and for what gangs of up to 255 blocks in all exchange
KEPT_WIDE_BYTES = 134 << 10  # and for what all blocks do that share each row
STEP_COUNTERS_BYTES = STEP_COUNTERS * 128

# Where x, dy and dx together take at least the first and at most the second, x and dy are read so that they leave the
# L2 cache first, but not beside column blocks (50 MB, 16384: 24.2 → 23.2 us; 1 GB 3 to 13% longer).
READ_ONCE_BYTES = (16 << 20, 50 << 20)
ONE_WALKER_STEPS = 4  # so few steps take one block less time than several and their final reduction, if there is one
REDUCTION_RUN = 4  # kReductionRun of reduction.cuh
REDUCTION_BATCH = 10  # kReductionBatch of reduction.cuh


def grid(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> Grid:
    """`blocks_at_once` is how many blocks (clusters, gangs) the device holds at the same time."""
    if found := column_blocks_grid(config, problem, blocks_at_once, device):
        return found._replace(walkers=_starting_alike(config, problem.rows, found.walkers))
    return Grid(partial_rows(config, problem, blocks_at_once, device))


def partial_rows(config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Device) -> int:
    """How many row walkers (blocks, clusters, gangs, or blocks of one slab) run, each with a partial row of dw and db.

    `blocks_at_once` is how many blocks (clusters, gangs) the device holds at the same time.
    """
    walkers = divide_up(blocks_at_once, config.slabs) if config.route == "split" else blocks_at_once
    if rows_lie_apart(config, problem) and config.threads in APART_WALKERS:
        walkers = min(walkers, _apart_walkers(config, problem.rows, walkers, device))
    elif problem.rows <= FEW_ROWS_A_WALKER * walkers:
        walkers = min(walkers, device.multiprocessors)
    bytes_a_row = problem.columns * compute_itemsize(problem.x_dtype.name) * (2 if problem.want_db else 1)
    steps = divide_up(problem.rows, config.groups)
    one_takes_all = steps <= ONE_WALKER_STEPS and (problem.want_dw or problem.want_db)
    walkers = min(walkers, max(1, WORKSPACE_BYTES // 2 // bytes_a_row), 1 if one_takes_all else steps)
    walkers = _starting_alike(config, problem.rows, max(1, walkers))
    return _evenly(steps, walkers) if config.route == "staged" and "VECTOR=1" in config.definitions else walkers


def _starting_alike(config: BackwardConfig | ForwardConfig, rows: int, walkers: int, more: bool = False) -> int:
    """So many, or where starts_alternate() an even number, one fewer or one `more`: then all rows of a walker start at
    the same half of a word."""
    several = 0 < walkers < divide_up(rows, config.groups)
    return max(2, (walkers + more) // 2 * 2) if several and starts_alternate(config) else walkers


def _apart_walkers(config: BackwardConfig, rows: int, walkers: int, device: Device) -> int:
    most = APART_WALKERS[config.threads] * device.multiprocessors
    vector = "VECTOR=1" in config.definitions
    always = device.has_slow_memory and vector and config.threads == WARP and not config.lead
    most_steps = APART_MOST_STEPS[vector] if device.has_slow_memory else FAST_APART_MOST_STEPS
    if rows >= most_steps * most and not always:
        return walkers
    on_each = max(1, round(rows / (APART_LEAST_STEPS * device.multiprocessors)))
    return min(most, on_each * device.multiprocessors)


def _evenly(steps: int, walkers: int) -> int:
    """As few walkers as take no more steps each than so many do, where steps are few and few walkers are left out."""
    each = divide_up(steps, walkers)
    fewer = divide_up(steps, each)
    return fewer if each < EVEN_BELOW_STEPS and fewer >= EVEN_LEAST_WALKERS * walkers else walkers


def forward_walkers(config: ForwardConfig, rows: int, blocks_at_once: int, device: Device) -> int:
    """Of a forward launch; `blocks_at_once` is how many blocks (clusters) the device holds at the same time."""
    steps = divide_up(rows, config.groups)
    walkers = _starting_alike(config, rows, min(blocks_at_once, steps))
    alone = config.kernel == "forward_staged" and blocks_at_once * config.cluster <= device.multiprocessors
    fewer = _starting_alike(config, rows, _evenly(steps, walkers), more=True) if alone else walkers
    drawn = forward_steps(config, rows, fewer)[2]  # then whoever is done first takes more
    return walkers if drawn else fewer


def reads_once(problem: NormProblem) -> bool:
    """Whether reads of x and dy, of staged and wide kernels, say that these need not stay in the L2 cache; dx always
    counts."""
    least, most = READ_ONCE_BYTES
    return least <= data_bytes(problem) <= most


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
    """Blocks that walk rows in the first sweep of the split route, which has no partial rows to pay: 8 for a
    multiprocessor."""
    return max(1, min(problem.rows, divide_up(8 * device.multiprocessors, config.slabs)))


def forward_split_walkers(config: ForwardConfig, problem: NormProblem, device: Device) -> int:
    """The same of both sweeps of the forward pass: FORWARD_SPLIT_ROWS for each block, by whole waves of blocks."""
    at_once = FORWARD_SPLIT_AT_ONCE * device.multiprocessors
    least, most = FORWARD_SPLIT_WAVES
    waves = min(max(least, round(problem.rows * config.slabs / (FORWARD_SPLIT_ROWS * at_once))), most)
    return max(1, min(problem.rows, waves * at_once // config.slabs))


def slab_sums_bytes(config: BackwardConfig | ForwardConfig, problem: NormProblem) -> int:
    """Of the split routes, a pair of sums for each row and slab."""
    return problem.rows * config.slabs * 2 * problem.compute_dtype.itemsize


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
